"""Every error this project raises on purpose: two lines, what is wrong and what to do about it.

>>> str(SkinnyError("the plan is empty", "measure a cell"))
'the plan is empty\\n  fix: measure a cell'
"""

from __future__ import annotations

import logging
import warnings


def warn(text: str) -> None:
    """Warn once per place in Python's usual way; where the user turned warnings into errors, log instead of raising:
    a broken file never stops a host."""
    try:
        warnings.warn(f"skinny: {text}", RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        logging.getLogger("skinny").warning("skinny: %s", text)


class SkinnyError(Exception):
    """Base class. `what` says what is wrong, `fix` says what to do; `str()` prints both."""

    def __init__(self, what: str, fix: str) -> None:
        super().__init__(what, fix)
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.what}\n  fix: {self.fix}"


class SettingsError(SkinnyError, ValueError):
    """The environment variable `SKINNY` cannot be understood."""


class UnknownDeviceError(SkinnyError, LookupError):
    """A product name or key slug that `devices.toml` does not list."""


class ModelConfigError(SkinnyError, ValueError):
    """A model config lacks a key, or its numbers cannot be split over the ranks."""


class ConfigError(SkinnyError, ValueError):
    """A kernel config has an unknown key, a missing key or a value outside what the kernel defines."""


class UnknownKernelError(SkinnyError, LookupError):
    """No kernel folder of this name."""


class KernelUnavailableError(SkinnyError, RuntimeError):
    """A kernel was asked for by name, and its DSL is absent or broken; carries the original error text."""


class KernelRefusedError(SkinnyError, ValueError):
    """A kernel was asked for by name, and these operands are outside its contract."""


class CompileForbiddenError(SkinnyError, RuntimeError):
    """A kernel would have to be compiled at a moment when that is not allowed (graph capture)."""


class PlanError(SkinnyError, ValueError):
    """A plan file is not usable. `file` and `line` (1-based, 0 = unknown) say where."""

    def __init__(self, what: str, fix: str, *, file: str = "", line: int = 0) -> None:
        place = f"{file}:{line}: " if file and line else f"{file}: " if file else ""
        super().__init__(f"{place}{what}", fix)
        self.file = file
        self.line = line


class PlanSyntaxError(PlanError):
    """Not TOML."""


class PlanSchemaError(PlanError):
    """TOML, but a value has the wrong type, is missing, or is outside its range."""


class UnknownKeyError(PlanError):
    """A key that the schema does not define (usually a misspelt one)."""


class NegativeTimeError(PlanError):
    """A measured time that is not positive."""


class DuplicateCellError(PlanError):
    """Two cells for the same Problem and M, or two cells with one id."""


class ConfigRefusedError(PlanError):
    """A cell whose config the kernel's own predicates refuse."""


class EvidenceError(PlanError):
    """A `win` or `refused` cell without the measurement that decided it, or a `reported` one without its source."""


class PlanDeviceError(PlanError):
    """The device table of a plan does not agree with the product it names."""

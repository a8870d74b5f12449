"""`install`, `uninstall`, `status`: offer a model's linear layers to skinny, take them back, say what is true now."""

from __future__ import annotations

from torch import nn

from skinny_core import device, dispatch, env, warmup
from skinny_core.errors import SettingsError, SkinnyError
from skinny_core.family import ModelPackage, discover
from skinny_core.rules import Reason
from skinny_transformers import seam
from skinny_transformers.layers import linears
from skinny_transformers.report import Report


class UnknownPackageError(SkinnyError, LookupError):
    """A model package was asked for by name, and no installed one has it."""


def install(
    model: nn.Module, *, package: ModelPackage | str | None = None, family: str | None = None, warm: bool = True
) -> Report:
    """Offer the calls of every `nn.Linear` of `model` to skinny. Installing twice is installing once.

    package: the model package, or its name, whose plans apply; default: the installed one that answers for the
    model's architecture. family: look plans up under this name instead (a model that nobody packaged, tuned by its
    owner). warm: compile the planned kernels for this model's shapes on the devices it is on now; calls on another
    device, and all calls with False, go to the original until `install` or `skinny_core.warmup.warm` has run for
    them. A model with nothing on a CUDA device initialises none. Raises `UnknownPackageError`; never raises because of
    a plan file. Whatever it raises, the model is as it was."""
    chosen = _package(model, package)
    name = family or (chosen.name if chosen else _model_type(model))
    found = tuple(linears(model))
    off = _switched_off()
    if off:
        return Report(name, tuple(f.report(False, Reason.DISABLED) for f in found), (off,))

    ours = [f for f in found if f.unsuitable()[0] is None]
    used = sorted({index for f in ours if (index := f.cuda_index()) is not None})
    key = device.current_key(used[0]) if used else None
    activation = dispatch.activate(chosen, family=name, key=key, probe=bool(used))
    compiled: list[str] = []
    for index in used if warm else ():
        problems = {problem for f in ours if f.cuda_index() == index and (problem := f.problem()) is not None}
        compiled += warmup.warm(name, sorted(problems), index=index)
    # Last, because nothing after it can fail: a model is never half installed.
    for f in ours:
        seam.attach(f.layer, name, f.parent, f.name)  # type: ignore[arg-type]
    return Report(name, tuple(f.state() for f in found), tuple(activation.notes), tuple(compiled))


def uninstall(model: nn.Module) -> Report:
    """Take every layer of `model` back: its calls are those of the untouched model again. Other models stay
    installed."""
    name = _installed_family(model)
    for layer in model.modules():
        seam.detach(layer)
    return Report(name, tuple(f.state() for f in linears(model)))


def status(model: nn.Module) -> Report:
    """What is installed now, and what would send a layer's calls to the original at this moment. Changes nothing."""
    return Report(_installed_family(model), tuple(f.state() for f in linears(model)))


def _switched_off() -> str:
    """Why nothing may be installed, or "". A malformed SKINNY switches off, as it does everywhere, and says so."""
    try:
        return "" if env.settings().enabled else "SKINNY=off"
    except SettingsError as error:
        return f"switched off: {error}"


def _package(model: nn.Module, wanted: ModelPackage | str | None) -> ModelPackage | None:
    if isinstance(wanted, ModelPackage):
        return wanted
    packages = discover().packages
    if wanted is not None:
        for package in packages:
            if package.name == wanted:
                return package
        known = ", ".join(p.name for p in packages) or "none"
        raise UnknownPackageError(
            f"no model package {wanted!r} is installed (found: {known})", f"pip install skinny-{wanted}"
        )
    # A model made from a config has no `architectures`; the class names say the same, also below a wrapper such as
    # PeftModel.
    names = {
        *(getattr(getattr(model, "config", None), "architectures", None) or ()),
        *(type(m).__name__ for m in model.modules()),
    }
    return next((p for p in packages if names.intersection(p.architectures)), None)


def _model_type(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "model_type", "") or "")


def _installed_family(model: nn.Module) -> str:
    sites = (layer.__dict__.get(seam.SITE) for layer in model.modules())
    return next((site.family for site in sites if site is not None), "")

"""Plans: measured cells of one model family on one device, as a TOML file that carries its evidence.

`load()` validates everything (schema, duplicates, the kernels' own predicates, evidence) and names file, line and fix.
`dump()` writes beside the target and renames. The JSON schema in `plan.schema.json` is generated from the types here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import secrets
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from skinny_core import device, kernels, toml_text
from skinny_core.device import DeviceKey
from skinny_core.errors import (
    ConfigError,
    ConfigRefusedError,
    DuplicateCellError,
    EvidenceError,
    NegativeTimeError,
    PlanDeviceError,
    PlanError,
    PlanSchemaError,
    PlanSyntaxError,
    UnknownDeviceError,
    UnknownKernelError,
    UnknownKeyError,
)
from skinny_core.problem import MAX_M, DType, Epilogue, KernelConfig, Problem, WeightScheme

SCHEMA = 1
Positive = Annotated[int, Meta(gt=0)]
Status = Literal["win", "refused", "reported"]


class Quantiles(Struct, frozen=True, forbid_unknown_fields=True):
    """Microseconds of one call: 20th, 50th and 80th percentile."""

    p20: float
    p50: float
    p80: float


class Evidence(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """What was measured for one cell.

    candidate, baseline: cold L2. candidate_hot, baseline_hot: one weight, so that what fits stays in L2.
    baseline_name: the call that is replaced. peers: median of others in the same run, cold. rounds: measurements each.
    rel_rmse: error of the candidate against the float64 product. in_model_us: change of a captured decode step when
    this cell is switched on (negative is faster), required for M >= 3. clock_mhz: SM clock seen, lowest and highest.
    source: where a `reported` cell comes from.
    """

    candidate: Quantiles
    baseline: Quantiles
    baseline_name: str
    candidate_hot: Quantiles | None = None
    baseline_hot: Quantiles | None = None
    peers: dict[str, float] = field(default_factory=dict)
    peer_ahead: str = ""
    rounds: int = 0
    rel_rmse: float | None = None
    in_model_us: float | None = None
    clock_mhz: tuple[int, int] | None = None
    source: str = ""

    @property
    def speedup(self) -> float:
        """Median baseline over median candidate, cold."""
        return self.baseline.p50 / self.candidate.p50

    def times(self) -> Iterator[tuple[str, float]]:
        """Every time in the record with its key, for checks."""
        for name in ("candidate", "baseline", "candidate_hot", "baseline_hot"):
            quantiles = getattr(self, name)
            if quantiles is not None:
                yield from ((f"{name}.{q}", getattr(quantiles, q)) for q in ("p20", "p50", "p80"))
        yield from ((f"peers.{name}", time) for name, time in self.peers.items())


class Cell(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One Problem at one M: which kernel, how launched, and why we believe it.

    id: unique in the plan. used_by: "config/projection" names. why: one sentence for a refused cell; of a `reported`
    one, what else was said of it. kernel: one of ours; of a `reported` cell it may be somebody else's ("vllm_cute"),
    with whatever config is known: that never runs.
    """

    id: str
    n: Positive
    k: Positive
    m: Annotated[int, Meta(ge=1, le=MAX_M)]
    weight: WeightScheme = WeightScheme.BF16
    activation: DType = DType.BF16
    output: DType = DType.BF16
    epilogue: Epilogue = Epilogue.NONE
    status: Status
    kernel: str
    config: dict[str, int]
    used_by: tuple[str, ...] = ()
    why: str = ""
    evidence: Evidence

    def problem(self, key: DeviceKey | None) -> Problem:
        """The Problem of this cell on a device."""
        return Problem(
            n=self.n, k=self.k, weight=self.weight, activation=self.activation, output=self.output,
            epilogue=self.epilogue, device=key,
        )  # fmt: skip

    @property
    def kernel_config(self) -> KernelConfig:
        """Kernel and launch parameters, hashable."""
        return KernelConfig.of(self.kernel, self.config)


class DeviceTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The key of the device the plan was measured on."""

    capability: tuple[int, int]
    sm_count: Positive
    l2_bytes: Positive
    memory_class: str

    @property
    def key(self) -> DeviceKey:
        """As a `DeviceKey`."""
        return DeviceKey(self.capability, self.sm_count, self.l2_bytes, self.memory_class)


class Environment(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """The machine and the software of the measurement. Free text; a shipped plan fills in all of
    it.
    """

    gpu: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    dsl: str = ""
    commit: str = ""
    date: str = ""
    command: str = ""


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan file. `digest` seals the cells as they were measured; `skinny plans check` compares it."""

    schema: Literal[1] = 1
    family: str
    product: str
    device: DeviceTable
    environment: Environment = Environment()
    digest: str = ""
    cell: tuple[Cell, ...] = ()

    @property
    def key(self) -> DeviceKey:
        """The device the plan counts for."""
        return self.device.key

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, of every status."""
        return self.cell

    @property
    def only_reported(self) -> bool:
        """Whether every cell is somebody else's: such a plan says nothing about our kernels on its device."""
        return bool(self.cells) and all(cell.status == "reported" for cell in self.cells)

    def seal(self) -> str:
        """SHA-256 (first 16 hex digits) over device and cells, evidence included."""
        text = json.dumps(msgspec.to_builtins((self.family, self.product, self.device, self.cell)), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def load(path: Path | str) -> Plan:
    """Read and validate a plan file; raises a `PlanError` subclass with file, line and fix, or `OSError`."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanSyntaxError(f"not UTF-8 text ({error.reason})", "a plan is a TOML file", file=str(path)) from None
    return parse(text, str(path))


def parse(text: str, file: str = "<text>") -> Plan:
    """Validate the text of a plan file; see `load`."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = int(found.group(1)) if found else text.count("\n") + 1  # "at end of document"
        raise PlanSyntaxError(f"not TOML: {error}", "correct that line", file=file, line=line) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, brackets nested as deep
        raise PlanSyntaxError(f"not TOML that can be read: {error}", "write the file anew", file=file) from None
    if data.get("schema", SCHEMA) != SCHEMA:
        raise PlanSchemaError(
            f"schema {data['schema']!r} is not {SCHEMA}", "use a plan made for this version of skinny-core",
            file=file, line=toml_text.line_of(text, ("schema",)),
        )  # fmt: skip
    try:
        plan = msgspec.convert(data, Plan)
    except msgspec.ValidationError as error:
        raise _schema_error(error, text, file) from None
    for check in (_check_device, _check_times, _check_duplicates, _check_evidence, _check_configs):
        check(plan, text, file)
    return plan


def render(plan: Plan) -> str:
    """The text of a plan file, sealed."""
    sealed = msgspec.structs.replace(plan, digest=plan.seal())
    return toml_text.render(msgspec.to_builtins(sealed), REPORTED_HEADER if plan.only_reported else HEADER)


def dump(plan: Plan, path: Path | str) -> None:
    """Write a plan, sealed, atomically; parent folders are created. Raises `OSError`; the old file survives any
    failure.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = render(plan)
    parse(text, str(path))  # never publish what load() would refuse
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


HEADER = (
    "Measured cells; written by `skinny`. Times are microseconds per call. Change a cell only by measuring it again."
)
REPORTED_HEADER = (
    "Reported by somebody else, measured by nobody here: no cell runs by itself. Times are microseconds per call."
)


def json_schema() -> dict[str, Any]:
    """JSON schema of a plan file, as kept in `plan.schema.json`."""
    return msgspec.json.schema(Plan)


def write_schema(path: Path | str | None = None) -> None:
    """Write `json_schema()` to a file; `python -m skinny_core.plan` renews `plan.schema.json` beside this module."""
    path = Path(path) if path else Path(__file__).with_name("plan.schema.json")
    path.write_text(json.dumps(json_schema(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _schema_error(error: msgspec.ValidationError, text: str, file: str) -> PlanError:
    message = str(error)
    path = toml_text.parse_path(message)
    unknown = re.search(r"unknown field `([^`]+)`", message)
    if unknown:
        line = toml_text.line_of(text, (*path, unknown.group(1)))
        where = ".".join(str(p) for p in path) or "the top level"
        return UnknownKeyError(
            f"unknown key {unknown.group(1)!r} in {where}", "remove it, or correct its spelling (see plan.schema.json)",
            file=file, line=line,
        )  # fmt: skip
    return PlanSchemaError(
        message.replace(" - at `", " at `"), "give a value of that type", file=file, line=toml_text.line_of(text, path)
    )


def _cell_line(text: str, index: int, *keys: str) -> int:
    return toml_text.line_of(text, ("cell", index, *keys))


def _check_device(plan: Plan, text: str, file: str) -> None:
    try:
        known = device.product(plan.product)
    except UnknownDeviceError:
        return  # a device nobody listed yet: the key in the file is what counts
    if known != plan.key:
        raise PlanDeviceError(
            f"product {plan.product!r} is {known.slug}, the file's device table says {plan.key.slug}",
            "correct the product name or the device table", file=file, line=toml_text.line_of(text, ("device",)),
        )  # fmt: skip


def _check_times(plan: Plan, text: str, file: str) -> None:
    for i, cell in enumerate(plan.cells):
        for name, time in cell.evidence.times():
            if not 0 < time < float("inf"):
                raise NegativeTimeError(
                    f"cell {cell.id}: {name} is {time} us", "a measured time is positive: measure again",
                    file=file, line=_cell_line(text, i, "evidence", name.partition(".")[0]),
                )  # fmt: skip
        for name in ("candidate", "baseline", "candidate_hot", "baseline_hot"):
            q = getattr(cell.evidence, name)
            if q is not None and not q.p20 <= q.p50 <= q.p80:
                raise EvidenceError(
                    f"cell {cell.id}: {name}: p20 {q.p20}, p50 {q.p50}, p80 {q.p80}", "percentiles ascend; measure",
                    file=file, line=_cell_line(text, i, "evidence", name),
                )  # fmt: skip
        for name in ("rel_rmse", "in_model_us"):
            value = getattr(cell.evidence, name)
            if value is not None and (not math.isfinite(value) or (name == "rel_rmse" and value < 0)):
                raise EvidenceError(
                    f"cell {cell.id}: {name} is {value}", "measure again", file=file,
                    line=_cell_line(text, i, "evidence", name),
                )  # fmt: skip


def _check_duplicates(plan: Plan, text: str, file: str) -> None:
    seen: dict[object, str] = {}
    for i, cell in enumerate(plan.cells):
        for what, key in (("Problem and M", (cell.problem(None), cell.m)), ("id", cell.id)):
            if key in seen:
                raise DuplicateCellError(
                    f"cell {cell.id}: same {what} as cell {seen[key]}", "keep the one that was measured last",
                    file=file, line=_cell_line(text, i),
                )  # fmt: skip
            seen[key] = cell.id


def _check_evidence(plan: Plan, text: str, file: str) -> None:
    for i, cell in enumerate(plan.cells):
        e = cell.evidence
        if cell.status == "reported":
            missing = "" if e.source else "source"
        elif cell.status == "win":
            needed = {"candidate_hot": e.candidate_hot, "baseline_hot": e.baseline_hot, "rel_rmse": e.rel_rmse}
            if cell.m >= 3:
                needed["in_model_us"] = e.in_model_us
            missing = next((name for name, value in needed.items() if value is None), "")
            missing = missing or ("rounds" if e.rounds < 1 else "")
            _check_win(cell, e, text, file, i)
        else:
            missing = "" if cell.why else "why"
        if missing:
            raise EvidenceError(
                f"cell {cell.id} is {cell.status!r} without {missing}", "measure it, or give another status",
                file=file, line=_cell_line(text, i),
            )  # fmt: skip


RMSE_GATE = {DType.BF16: 2.0e-3, DType.FP16: 2.5e-4, DType.FP32: 5.0e-6}
"""Largest rel-RMSE of a cell that may run, by output dtype; `skinny_core.testing.numerics` says why."""


def _check_win(cell: Cell, e: Evidence, text: str, file: str, index: int) -> None:
    """A `win` is right and faster than what it replaces; the margins of the keep rule belong to who measures."""
    if e.rel_rmse is not None and e.rel_rmse > RMSE_GATE[cell.output]:
        what, fix = f"cell {cell.id} is a win with rel-RMSE {e.rel_rmse}", "a wrong kernel wins nothing: find out why"
    elif e.candidate.p50 >= e.baseline.p50:
        what = f"cell {cell.id} is a win at {e.candidate.p50} us against {e.baseline.p50}"
        fix = 'give it status = "refused"'
    else:
        return
    raise EvidenceError(what, fix, file=file, line=_cell_line(text, index, "evidence"))


def _check_configs(plan: Plan, text: str, file: str) -> None:
    for i, cell in enumerate(plan.cells):
        if cell.status == "reported":
            continue  # somebody else's kernel; checked when it is confirmed
        try:
            why = kernels.refuses(cell.kernel_config, cell.problem(plan.key), cell.m)
        except (ConfigError, UnknownKernelError) as error:
            raise ConfigRefusedError(
                f"cell {cell.id}: {error.what}", error.fix, file=file, line=_cell_line(text, i, "config")
            ) from None
        if why:
            raise ConfigRefusedError(
                f"cell {cell.id}: {cell.kernel_config} refuses: {why}", "measure another config",
                file=file, line=_cell_line(text, i, "config"),
            )  # fmt: skip


if __name__ == "__main__":
    write_schema()

"""Which call runs: a kernel where a measured cell wins for exactly this call, else the host's original one.

`linear()` is the plain Python entry that eager hosts use; `skinny_core.op` wraps it for compiled graphs. Both read M at
run time. Nothing here compiles: a cell whose kernel has not been warmed falls back (`skinny_core.warmup`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.autograd import forward_ad as _forward_ad
from torch.nn.functional import linear as _torch_linear

import skinny_core
from skinny_core import device, env, kernels, rules, table
from skinny_core.device import DeviceKey
from skinny_core.errors import SettingsError
from skinny_core.family import ModelPackage
from skinny_core.plan import Cell, DeviceTable, Plan
from skinny_core.problem import MAX_M, SERVED, DType, Epilogue, Problem, WeightScheme
from skinny_core.rules import Context, Reason, Verdict
from skinny_core.table import Lookup

log = logging.getLogger("skinny")
OP_SCHEMA = (
    "linear(Tensor x, Tensor weight, str family='', *, Tensor? residual=None, ScalarType? out_dtype=None) -> Tensor"
)
M_ABOVE = MAX_M + 1
"""The M under which counters collect every call with more than MAX_M rows."""

CounterKey = tuple[str, int, int, int, str]
_counts: dict[CounterKey, list[int]] = {}


@dataclass(frozen=True, slots=True)
class Activation:
    """A family that may dispatch. wins: cells that can run on `device`. switches: what SKINNY says about which cells
    may run. notes: what was left out, what is offered."""

    family: str
    device: DeviceKey | None
    plans: tuple[tuple[str, str], ...]
    wins: int
    static_weights: bool
    switches: tuple[bool, ...]
    notes: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of the plan data and settings in use, equal on ranks that would choose alike."""
        text = repr((self.family, self.device, self.switches, sorted(digest for _, digest in self.plans)))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def summary(self) -> str:
        """One line for a host's log."""
        where = table.device_name(self.device)
        return f"skinny: {self.family} on {where}: {self.wins} active cells (switch off with SKINNY=off)"


class _Family:
    """One active family: its table, its compiled launchers, its promise about weights."""

    def __init__(self, name: str, package: ModelPackage | None, settings: env.Settings, notes: tuple[str, ...]) -> None:
        self.name = name
        self.package = package
        self.settings = settings
        self.static_weights = False
        self.table = table.build(name, package, settings)
        self.notes = notes + self.table.notes
        self.launchers: dict[tuple[int, Problem, int], kernels.Launcher] = {}
        self.errors: dict[tuple[int, Problem, int], str] = {}

    def choose(self, problem: Problem, m: int, index: int | None) -> tuple[Lookup | None, Verdict]:
        """The cell, and what the plan, the settings and the warm-up say about it."""
        key = None if index is None else device.current_key(index)
        found = self.table.lookup(problem, m, key, self.settings)
        verdict = table.judge(found, problem, m, key, self.settings)
        if not verdict.ok or found is None or index is None:
            return found, verdict
        slot = (index, problem, m)
        return found, rules.decide(problem, Context(kernel_error=self.errors.get(slot), warm=slot in self.launchers))


@dataclass(slots=True)
class _Slot:
    """What happens at one M of a row: a launcher and its counter, or the static reason and its counter."""

    launch: kernels.Launcher | None
    count: list[int]
    reason: Reason | None


@dataclass(slots=True)
class _Row:
    """All M of one (family, weight shape, dtypes, device); index 0 is M = 0, the last one is every M above MAX_M."""

    slots: tuple[_Slot, ...]
    problem: Problem
    static_weights: bool


_PLAIN = (torch.Tensor, torch.nn.Parameter)
RowKey = tuple[str, torch.Size, torch.dtype, int, torch.dtype | None, bool]
_families: dict[str, _Family] = {}
_rows: dict[RowKey, _Row] = {}
_lock = threading.RLock()


def activate(
    package: ModelPackage | None = None,
    *,
    family: str = "",
    key: DeviceKey | None = None,
    static_weights: bool = False,
    probe: bool = True,
) -> Activation:
    """Let a family dispatch in this process; again is once (plan files and SKINNY are read again).

    package: supplies the shipped plans and, unless `family` is given, the family name. key: device for the summary
    (default: the current CUDA device, which initialises CUDA; with `probe=False` none, and nothing is touched).
    static_weights: the caller promises that within a captured graph no kernel writes a weight, so kernels may read
    weights before their dependency wait. Broken plan files and a malformed SKINNY become notes; nothing is raised.
    """
    name = family or (package.name if package else "")
    notes: tuple[str, ...] = ()
    try:
        settings = env.reload()
    except SettingsError as error:
        settings, notes = env.Settings(enabled=False), (f"switched off: {error}",)
    state = _Family(name, package, settings, notes)
    state.static_weights = static_weights
    with _lock:
        previous = _families.get(name)
        if previous is not None:
            state.launchers, state.errors = _still_valid(previous, state), {}
        _families[name] = state
        _forget_rows(name)
    return _describe(state, device.current_key() if key is None and probe else key)


def activate_cells(family: str, key: DeviceKey, cells: tuple[Cell, ...], *, static_weights: bool = False) -> Activation:
    """Let a family dispatch by cells that are in no file, beside its other plans: for tuning, tests and experiments.

    The cells take precedence over plan files until the family is activated again.
    """
    found = Plan(
        family=family,
        product=device.product_name(key) or key.slug,
        device=DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class),
        cell=cells,
    )
    with _lock:
        state = _families.get(family) or _Family(family, None, env.settings(), ())
        state.static_weights = static_weights
        files = tuple(source for source in state.table.sources if source.origin != "memory")
        state.table = table.Table(family, (table.Source(Path("<memory>"), "memory", found), *files), state.table.notes)
        state.launchers, state.errors = {}, {}
        _families[family] = state
        _forget_rows(family)
    return _describe(state, key)


def deactivate(family: str) -> None:
    """Every later call of the family goes to the original implementation."""
    with _lock:
        _families.pop(family, None)
        _forget_rows(family)


def active() -> Mapping[str, Activation]:
    """Active families, described for the current device."""
    key = device.current_key()
    return {name: _describe(state, key) for name, state in list(_families.items())}


def eligibility_digest(package: ModelPackage | None, family: str = "") -> str:
    """Digest for a host's compile key: what decides whether a layer's graph contains the op, and nothing of the plan
    data.
    """
    name, version = (package.name, package.version) if package else ("", "")
    text = repr((skinny_core.__version__, OP_SCHEMA, family or name, version))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def counters() -> dict[CounterKey, int]:
    """Calls so far by (family, N, K, M, outcome); outcome is "kernel:<stem>" or "fallback:<reason>"; M above MAX_M
    counts as `M_ABOVE`."""
    return {key: count[0] for key, count in list(_counts.items()) if count[0]}  # other threads may be adding keys


def reset_counters() -> None:
    """Set every counter to zero."""
    for count in list(_counts.values()):
        count[0] = 0


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    family: str = "",
    *,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ weight.T (+ residual)`.

    x: [..., K]. weight: [N, K], BF16 or FP16. residual: [..., N] of x's dtype. out_dtype: x's dtype or FP32.
    Returns [..., N]; bit for bit what `F.linear` returns wherever no kernel runs, including its errors.
    """
    index = weight.get_device()  # of another kind of device too: without CUDA such an index has no key, so no cell
    row_key = (family, weight.shape, weight.dtype, index, out_dtype, residual is None)
    row = _rows.get(row_key)
    if row is None:
        row = _make_row(row_key)
        if row is None:
            return original(x, weight, residual, out_dtype)
    k = row.problem.k
    m = x.numel() // k
    slot = row.slots[m if m <= MAX_M else M_ABOVE]
    launch = slot.launch
    if launch is None:
        slot.count[0] += 1
        return original(x, weight, residual, out_dtype)
    if (
        type(x) in _PLAIN  # a subclass may mean anything by its elements
        and type(weight) in _PLAIN
        and x.layout is weight.layout is torch.strided
        and not x.is_nested
        and x.dtype is weight.dtype
        and x.get_device() == index
        and (shape := x.shape)[-1] == k
        and weight.stride(1) == 1
        and (w_at := weight.data_ptr())  # 0: no storage of its own, such as a wrapper subclass
        and (x_at := x.data_ptr())
        and not (weight.stride(0) & 7 or w_at & 15 or x_at & 15)
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and _forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cuda")
    ):
        x_stride = k if x.is_contiguous() else row_stride(x, m)
        n = row.problem.n
        if x_stride >= 0 and not x_stride & 7 and (residual is None or _residual_fits(residual, x, n)):
            y = x.new_empty((*shape[:-1], n), dtype=out_dtype)
            prewait = row.static_weights and torch.cuda.is_current_stream_capturing()
            launch(x, weight, y, residual, x_stride, n, n, prewait)
            slot.count[0] += 1
            return y
    _count(family, row.problem, m, _call_reason(x, weight, residual, row.problem, m))
    return original(x, weight, residual, out_dtype)


def declined(family: str, n: int, k: int, m: int, reason: Reason) -> None:
    """Count (and, the first time, log) a call that an adapter gave to the original for a reason only it can see.

    n, k: weight shape `[N, K]`. m: rows of the call, any number.
    """
    _count(family, Problem(n=n, k=k), m, reason)


def original(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, out_dtype: torch.dtype | None
) -> torch.Tensor:
    """The call that a kernel replaces, differentiable. x: [..., K], weight: [N, K], residual: [..., N] or None."""
    if out_dtype is None or out_dtype == x.dtype:
        y = _torch_linear(x, weight)
    elif x.is_cuda and not _is_differentiated(x, weight):  # torch.mm with out_dtype has no derivative
        y = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=out_dtype).view(*x.shape[:-1], weight.shape[0])
    else:
        y = _torch_linear(x.to(out_dtype), weight.to(out_dtype))
    return y if residual is None else y + residual


def _is_differentiated(*tensors: torch.Tensor) -> bool:
    return _forward_ad._current_level >= 0 or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))


def row_stride(x: torch.Tensor, m: int) -> int:
    """Elements between flattened rows of x, or -1 where one stride cannot describe them."""
    if x.stride(-1) != 1:
        return -1
    if m == 1:
        return x.shape[-1]  # the stride of a single row is arbitrary and unused
    stride, span = -1, 0
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if stride < 0:
            stride, span = step, step * size
        elif step != span:
            return -1
        else:
            span *= size
    return stride


def _residual_fits(residual: torch.Tensor, x: torch.Tensor, n: int) -> bool:
    return (
        type(residual) in _PLAIN
        and residual.layout is torch.strided
        and residual.data_ptr() != 0
        and residual.dtype is x.dtype
        and residual.device == x.device
        and residual.shape == (*x.shape[:-1], n)
        and residual.is_contiguous()
        and not (torch.is_grad_enabled() and residual.requires_grad)
    )


def _call_reason(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None, problem: Problem, m: int
) -> Reason:
    """Why this call of a runnable cell does not run: the same rules, over everything the tensors show."""
    odd = next((type(t).__name__ for t in (weight, x) if type(t) not in _PLAIN), None)
    if odd is not None:
        return rules.decide(problem, Context(weight_subclass=odd)).reason or Reason.SUBCLASSED_WEIGHT
    if x.layout is not torch.strided or weight.layout is not torch.strided or x.is_nested:
        return Reason.LAYOUT
    stride = row_stride(x, m)
    needs_grad = x.requires_grad or weight.requires_grad or (residual is not None and residual.requires_grad)
    verdict = rules.decide(
        problem,
        Context(
            weight_subclass=None if weight.data_ptr() else type(weight).__name__,
            gradient=(torch.is_grad_enabled() and needs_grad) or _forward_ad._current_level >= 0,
            autocast=torch.is_autocast_enabled("cuda"),
            on_cuda=x.is_cuda or weight.is_cuda,
            same_device=x.device == weight.device,
            dtypes_ok=x.dtype == weight.dtype,
            layout_ok=stride >= 0
            and x.data_ptr() != 0
            and weight.stride(-1) == 1
            and x.shape[-1] == problem.k
            and (residual is None or _residual_fits(residual.detach(), x, problem.n)),
            aligned=not (stride % 8 or weight.stride(0) % 8 or weight.data_ptr() % 16 or x.data_ptr() % 16),
        ),
    )
    return verdict.reason or Reason.LAYOUT


def _make_row(key: RowKey) -> _Row | None:
    """Decide all M of a row once; None for something that is not a matrix product."""
    family, shape, dtype, index, out_dtype, no_residual = key
    if len(shape) != 2 or shape[1] == 0:
        return None
    element = DType.of(dtype)
    output = element if out_dtype is None else DType.of(out_dtype)
    half = element in (DType.BF16, DType.FP16) and output is not None
    problem = Problem(
        n=shape[0],
        k=shape[1],
        weight=WeightScheme(element.value) if half and element else WeightScheme.BF16,
        activation=element if half and element else DType.BF16,
        output=output or DType.FP32,
        epilogue=Epilogue.NONE if no_residual else Epilogue.RESIDUAL,
    )
    with _lock:
        state = _families.get(family)
        slots = tuple(_make_slot(state, family, problem, m, index, half) for m in range(M_ABOVE + 1))
        row = _Row(slots, problem, bool(state and state.static_weights))
        _rows[key] = row
    if state is not None:
        _log_row(family, row)
    return row


def _log_row(family: str, row: _Row) -> None:
    """Once per weight shape: at which M a kernel runs, and why the others do not."""
    if not log.isEnabledFor(logging.INFO):
        return
    by_outcome: dict[str, list[str]] = {}
    for m, slot in enumerate(row.slots):
        outcome = "kernel" if slot.reason is None else slot.reason.value
        by_outcome.setdefault(outcome, []).append(f">{MAX_M}" if m == M_ABOVE else str(m))
    said = "; ".join(f"{outcome} at M = {','.join(ms)}" for outcome, ms in by_outcome.items())
    log.info("skinny: %s %s: %s", family, row.problem, said)


def _make_slot(state: _Family | None, family: str, problem: Problem, m: int, index: int, half: bool) -> _Slot:
    early = rules.decide(
        problem,
        Context(
            enabled=state is not None and state.settings.enabled,
            batch_invariant=state is not None and state.settings.batch_invariant,
            on_cuda=index >= 0,
            dtypes_ok=half,
            m=m,
        ),
    )
    if state is None or not early.ok:
        reason = early.reason or Reason.DISABLED
        return _Slot(None, _counter(family, problem, m, f"fallback:{reason.value}"), reason)
    found, verdict = state.choose(problem, m, index)
    if not verdict.ok or found is None:
        reason = verdict.reason or Reason.OFF_TABLE
        return _Slot(None, _counter(family, problem, m, f"fallback:{reason.value}"), reason)
    launch = state.launchers[index, problem, m]
    return _Slot(launch, _counter(family, problem, m, f"kernel:{found.cell.kernel}"), None)


def _counter(family: str, problem: Problem, m: int, outcome: str) -> list[int]:
    return _counts.setdefault((family, problem.n, problem.k, m, outcome), [0])


def _count(family: str, problem: Problem, m: int, reason: Reason) -> None:
    count = _counter(family, problem, min(m, M_ABOVE), f"fallback:{reason.value}")
    if count[0] == 0:
        log.info("skinny: %s %s M=%d: original call: %s", family, problem, m, reason.meaning)
    count[0] += 1


def _forget_rows(family: str) -> None:
    for key in [key for key in _rows if key[0] == family]:
        _rows.pop(key, None)


def _still_valid(previous: _Family, state: _Family) -> dict[tuple[int, Problem, int], kernels.Launcher]:
    """Launchers whose cell is the same in the new table."""
    kept = {}
    for (index, problem, m), launch in previous.launchers.items():
        key = device.current_key(index)
        old = previous.table.lookup(problem, m, key, previous.settings)
        new = state.table.lookup(problem, m, key, state.settings)
        same = old is not None and new is not None and old.cell.kernel_config == new.cell.kernel_config
        if same and state.static_weights == previous.static_weights and state.settings.pdl == previous.settings.pdl:
            kept[index, problem, m] = launch
    return kept


def _describe(state: _Family, key: DeviceKey | None) -> Activation:
    near = key.capability if key is not None and state.settings.neighbour else None
    used = [s for s in state.table.sources if s.plan.key == key or s.plan.key.capability == near]
    wins = 0
    for source in used:
        for cell in source.plan.cells:
            found = state.table.lookup(cell.problem(None), cell.m, key, state.settings)
            if found is not None and found.cell is cell and cell.epilogue in SERVED:
                wins += table.judge(found, cell.problem(None), cell.m, key, state.settings).ok
    offered = table.offer(state.table, key)
    notes = state.notes + ((offered,) if offered and not state.settings.neighbour else ())
    plans = tuple((str(s.path), s.plan.seal()) for s in used)
    s = state.settings
    switches = (s.enabled, s.neighbour, s.reported, s.batch_invariant)
    return Activation(state.name, key, plans, wins, state.static_weights, switches, notes)


def ready(family: str) -> frozenset[tuple[int, Problem, int]]:
    """(CUDA device index, Problem, M) of every cell of a family whose kernel is compiled and can be launched."""
    state = _families.get(family)
    return frozenset(state.launchers) if state else frozenset()


def family_state(family: str) -> _Family | None:
    """The state of an active family, for the warm-up."""
    return _families.get(family)


def install_launchers(state: _Family, found: Mapping[tuple[int, Problem, int], kernels.Launcher | str]) -> None:
    """Take over what a warm-up compiled for `state`, or the error text of what it could not."""
    with _lock:
        if _families.get(state.name) is not state:
            return  # deactivated, or activated with other cells, meanwhile
        for slot, item in found.items():
            if isinstance(item, str):
                state.errors[slot] = item
            else:
                state.launchers[slot] = item
        _forget_rows(state.name)


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # another thread of the parent may have held it

"""What would run for each projection of a model at each M, and why: computed from plans alone, no GPU and no host
needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from skinny_core import env, table
from skinny_core.device import DeviceKey
from skinny_core.family import ModelPackage
from skinny_core.problem import MAX_M, DType, Problem, WeightScheme


@dataclass(frozen=True, slots=True)
class Line:
    """One projection at one M.

    runs: whether a kernel runs. reason: value of `Reason` where it does not. status, config: of the cell found, also of
    one that does not run; "" without one. baseline_us, ours_us: cold medians of the cell. reported_us, source: instead
    of ours_us for a `reported` cell, which is somebody else's number (baseline_us then is, too). saving_us: predicted
    saving per token step (calls x difference; 0 where nothing runs).
    """

    projection: str
    part_of: str
    n: int
    k: int
    m: int
    calls: int
    runs: bool
    reason: str
    detail: str
    cell: str
    status: str
    config: str
    baseline_us: float | None
    ours_us: float | None
    reported_us: float | None
    source: str
    saving_us: float
    peer_ahead: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """All lines of a model at one TP size on one device, and what was noted while reading plans."""

    model: str
    family: str
    device: str
    tp: int
    lines: tuple[Line, ...]
    plans: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]

    def saving_us(self, m: int) -> float:
        """Predicted saving of one decode step at M = m in microseconds, in a host that fuses QKV and gate/up: the sum
        over all calls."""
        return sum(line.saving_us for line in self.lines if line.m == m and not line.part_of)

    def to_json(self) -> str:
        """Everything, as a JSON object."""
        return json.dumps(asdict(self), indent=1)

    def text(self) -> str:
        """Everything, as plain text: one line per projection and M."""
        rows = [f"{self.model} ({self.family}) on {self.device}, TP {self.tp}"]
        for line in self.lines:
            what = f"{line.config}  {_gain(line)}" if line.runs else f"original call: {line.reason}"
            rows.append(f"  {line.projection:<8} ({line.n},{line.k}) M={line.m:<2} {what}")
        rows += [f"  note: {note}" for note in self.notes]
        return "\n".join(rows)


def explain(
    model: str,
    package: ModelPackage,
    config: Mapping[str, Any],
    *,
    tp: int = 1,
    key: DeviceKey | None,
    ms: Iterable[int] = range(1, MAX_M + 1),
    dtype: DType = DType.BF16,
    settings: env.Settings | None = None,
) -> Explanation:
    """Explain a model. config: HF-style mapping. key: the device, None for "no CUDA device".

    Raises `ModelConfigError` for a config that has no such projections, `SettingsError` for a malformed SKINNY.
    """
    settings = env.settings() if settings is None else settings
    cells = table.build(package.name, package, settings)
    lines = []
    for projection in package.projections(config, tp):
        problem = Problem(
            n=projection.n, k=projection.k, weight=WeightScheme(dtype.value), activation=dtype, output=dtype
        )
        for m in ms:
            found = cells.lookup(problem, m, key, settings)
            verdict = table.judge(found, problem, m, key, settings)
            evidence = found.cell.evidence if found else None
            candidate_us = evidence.candidate.p50 if evidence else None
            reported = found is not None and found.cell.status == "reported"
            saved = (
                (evidence.baseline.p50 - evidence.candidate.p50) * projection.calls if evidence and verdict.ok else 0.0
            )
            lines.append(
                Line(
                    projection=projection.name,
                    part_of=projection.part_of,
                    n=projection.n,
                    k=projection.k,
                    m=m,
                    calls=projection.calls,
                    runs=verdict.ok,
                    reason=verdict.reason.value if verdict.reason else "",
                    detail=verdict.detail or (found.cell.why if found else ""),
                    cell=found.cell.id if found else "",
                    status=found.cell.status if found else "",
                    config=str(found.cell.kernel_config) if found else "",
                    baseline_us=evidence.baseline.p50 if evidence else None,
                    ours_us=None if reported else candidate_us,
                    reported_us=candidate_us if reported else None,
                    source=evidence.source if evidence else "",
                    saving_us=round(saved, 2),
                    peer_ahead=evidence.peer_ahead if evidence else "",
                )
            )
    offered = table.offer(cells, key)
    return Explanation(
        model=model,
        family=package.name,
        device=table.device_name(key),
        tp=tp,
        lines=tuple(lines),
        plans=tuple((str(s.path), s.plan.seal()) for s in cells.sources),
        notes=cells.notes + ((offered,) if offered else ()),
    )


def _gain(line: Line) -> str:
    candidate_us = line.ours_us or line.reported_us
    if line.baseline_us is None or candidate_us is None:
        return ""
    said = "" if line.reported_us is None else ", reported"
    return f"{line.baseline_us:.2f} -> {candidate_us:.2f} us ({line.baseline_us / candidate_us:.2f}x{said})"

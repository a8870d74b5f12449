"""What became of the seed's claims: `python benchmarks/seed_cells.py [--check]`.

The seed is vLLM's pull request for `SM90_SKINNY_GEMM_PLANS`, measured by its author on an H200 NVL
(`benchmarks/reported/seed_h200_nvl.csv`). Each of its cells is put beside our race on an H200 SXM
(`results/h200/limit.csv`: cuBLAS, vLLM's kernel, ours; cold) and beside the plans that are shipped for that device
(cold, hot, in-model). Writes `results/h200/seed.csv` and `seed.md`; a cell without a measurement says "not measured".
`--check` writes nothing and exits with 1 if a file differs.
"""

from __future__ import annotations

import csv
import io
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from skinny_core import family, plan
from skinny_core.device import product
from skinny_core.family import ModelPackage
from skinny_core.plan import Cell, Plan
from skinny_core.problem import Problem
from skinny_lab.bench import generated_files, reported, rows

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "benchmarks" / "reported" / "seed_h200_nvl.csv"
RESULTS = ROOT / "benchmarks" / "results" / "h200"
OURS_ON = "h200"
CLAIM = 1.05
"""What the seed asks of a cell that it lists: at least 5 % faster than cuBLAS, cold."""
MOE = "qwen3-30b-a3b"
"""The model whose cells are in the seed's text instead of its table."""
UNKNOWN = "not measured"
Shape = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Line:
    """One cell of the seed. Times in microseconds per call, cold unless they say hot; *_x: cuBLAS over it.

    nvl_*: the seed's own numbers; nvl_x as printed there; nvl_model_*: of the projection's calls in a decode step of 4
    requests. sxm_*: our race, `theirs` is the seed's kernel. plan_*: the
    evidence of the shipped plans; of several plans with the cell the worst in-model change (per decode step; negative
    is faster). plan_status: of each family where they differ. claim: does the seed's claim hold on the SXM? "" for a
    cell that the seed left to cuBLAS. race: are we at least 5 % faster than cuBLAS there, cold?
    """

    projection: str
    models: str
    n: int
    k: int
    m: int
    kept: str
    nvl_cublas_us: float | None
    nvl_theirs_us: float | None
    nvl_x: float | None
    nvl_model_cublas_us: float | None
    nvl_model_theirs_us: float | None
    sxm_cublas_us: float | None
    sxm_theirs_us: float | None
    sxm_theirs_x: float | None
    sxm_ours_us: float | None
    sxm_ours_x: float | None
    plan_cold_x: float | None
    plan_hot_x: float | None
    plan_in_model_us: float | None
    plan_status: str
    claim: str
    race: str
    note: str

    @property
    def is_moe(self) -> bool:
        """Whether it is one of the cells in the seed's text."""
        return self.models == MOE

    @property
    def wins(self) -> bool:
        """Whether every family that has the shape ships a `win` for it."""
        return self.plan_status == "win"

    @property
    def name(self) -> str:
        """ "qwen3-8b, llama-3.1-8b o (4096, 4096)"."""
        return f"{', '.join(self.models.split())} {self.projection} ({self.n}, {self.k})"


def main() -> int:
    """Write, or with --check compare; returns the exit status."""
    return generated_files.run(__doc__, generated, ROOT)


def generated() -> dict[Path, str]:
    """Both files with the text they should have."""
    report, race = reported.read(REPORT), rows.read_csv(RESULTS / "limit.csv")
    packages = family.discover().packages
    shipped = [plan.load(file) for package in packages for file in package.plan_files()]
    found = compare(report, race, packages, shipped)
    return {RESULTS / "seed.csv": table(found), RESULTS / "seed.md": markdown(found, report, race, shipped)}


def ours_in(shipped: Iterable[Plan]) -> dict[str, dict[Shape, Cell]]:
    """Measured plain BF16 cells for our device, by family and (N, K, M)."""
    found: dict[str, dict[Shape, Cell]] = {}
    for loaded in shipped:
        for cell in loaded.cells:
            plain = cell.problem(None) == Problem(n=cell.n, k=cell.k)
            if loaded.key == product(OURS_ON) and cell.status != "reported" and plain:
                found.setdefault(loaded.family, {}).setdefault((cell.n, cell.k, cell.m), cell)
    return found


def compare(
    report: reported.Report, race: Iterable[rows.Row], packages: Sequence[ModelPackage], shipped: Iterable[Plan]
) -> list[Line]:
    """A line per cell of the report, in its order."""
    raced = {(row.n, row.k, row.m, row.provider): row.p50 for row in race if row.state == "cold"}
    ours = ours_in(shipped)
    lines = []
    for cell in report.cells:
        at = (cell.n, cell.k, cell.m)
        base, theirs, mine = (raced.get((*at, name)) for name in (report.baseline, report.kernel, rows.OURS))
        families = [p.name for p in packages if set(cell.names) & set(p.configs)]
        cells = {name: ours.get(name, {}).get(at) for name in families}
        known = [c for c in cells.values() if c is not None]
        states = {name: c.status if c else UNKNOWN for name, c in cells.items()}
        said = set(states.values()) or {UNKNOWN}
        status = said.pop() if len(said) == 1 else ", ".join(f"{name} {state}" for name, state in states.items())
        theirs_x, ours_x = _ratio(base, theirs), _ratio(base, mine)
        first = known[0].evidence if known else None
        hot = (first.baseline_hot, first.candidate_hot) if first else (None, None)
        in_model = [c.evidence.in_model_us for c in known if c.evidence.in_model_us is not None]
        lines.append(
            Line(
                cell.projection, cell.models, *at, cell.kept, cell.cublas_us, cell.plan_us, cell.speedup,
                cell.in_model_cublas_us, cell.in_model_plan_us, base, theirs, theirs_x, mine, ours_x,
                _ratio(first.baseline.p50, first.candidate.p50) if first else None,
                _ratio(hot[0].p50, hot[1].p50) if hot[0] and hot[1] else None,
                max(in_model) if in_model else None,
                status,
                _verdict(theirs_x, "holds", "does not hold") if cell.is_kept else "",
                _verdict(ours_x, "wins", "does not win"),
                cell.note,
            )
        )  # fmt: skip
    return lines


def _ratio(base: float | None, other: float | None) -> float | None:
    return None if base is None or other is None else round(base / other, 4)


def _verdict(speedup: float | None, yes: str, no: str) -> str:
    return UNKNOWN if speedup is None else yes if speedup >= CLAIM else no


def table(found: Sequence[Line]) -> str:
    """The CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(Line)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(line) for line in found)
    return text.getvalue()


def markdown(
    found: Sequence[Line], report: reported.Report, race: Sequence[rows.Row], shipped: Iterable[Plan]
) -> str:  # fmt: skip
    """The page."""
    kept, left = [line for line in found if line.kept == "yes"], [line for line in found if line.kept != "yes"]
    printed = [line.nvl_x for line in kept if line.nvl_x is not None]
    low = [line for line in kept if line.nvl_x is not None and line.nvl_x < CLAIM]
    machines = sorted({f"{row.device}, driver {row.driver}, torch {row.torch}, {row.date}" for row in race})
    plans = sorted(
        f"{p.family} ({p.environment.date or 'no date'}, digest {p.digest})"
        for p in shipped
        if p.key == product(OURS_ON) and not p.only_reported
    )
    failed = [line for line in kept if line.claim == "does not hold"]
    lines = [
        "# The seed's cells on an H200 SXM",
        "",
        "Made by `python benchmarks/seed_cells.py`. NVL: numbers of somebody else, not ours, as published in"
        f" {report.source}. SXM: our race (limit.csv: {'; '.join(machines)}), medians, cold L2, the seed's kernel"
        " (vLLM's CuTe kernel) with the config that was fastest on the SXM; the seed's text names no configs. Hot,"
        f" in-model and status: the plans shipped for `{OURS_ON}`: {'; '.join(plans) or 'none'}.",
        "",
        f"The seed lists {len(kept)} cells, {sum(not line.is_moe for line in kept)} in its table and"
        f" {sum(line.is_moe for line in kept)} of {MOE} in its text, at {min(printed):.2f}x to {max(printed):.2f}x as"
        f" printed. Its claim for each is at least {CLAIM:.2f}x, cold.",
        *(
            f"{line.name} M = {line.m} is printed as {line.nvl_x:.2f}x: below the claim where it was measured, too."
            for line in low
        ),
        "",
        *_summary(kept, left),
        "",
        f"## Where the claim does not hold on the SXM: {len(failed)} cells",
        "",
        *([_in_short(failed), "", *(_why(line) for line in failed)] if failed else ["None."]),
        "",
        f"## The {sum(not line.is_moe for line in kept)} cells of the table",
        "",
        *_cells([line for line in kept if not line.is_moe]),
        "",
        f"## The {sum(line.is_moe for line in kept)} cells of {MOE}",
        "",
        *_cells([line for line in kept if line.is_moe]),
        "",
        "## Cells that the seed left to cuBLAS",
        "",
        "NVL: what its text tells of them, times were not published."
        " At M = 8 and 16 its kernel loses on every shape of the table (0.4 to 0.9x).",
        "",
        *_cells(left, kept=False),
    ]
    return "\n".join(lines) + "\n"


def _summary(kept: Sequence[Line], left: Sequence[Line]) -> list[str]:
    lines = [
        "| cells | M | number | NVL, theirs | SXM, theirs | SXM, ours | claim holds on the SXM | ours wins the race |"
        " `win` in the plan | refused | not measured |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for title, group in (("listed", kept), ("left to cuBLAS", left)):
        for m in sorted({line.m for line in group}):
            at = [line for line in group if line.m == m]
            claims = sum(line.claim == "holds" for line in at)
            theirs = _mean(at, lambda line: line.nvl_x if line.kept == "yes" else None)
            lines.append(
                f"| {title} | {m} | {len(at)} | {theirs} |"
                f" {_mean(at, lambda line: line.sxm_theirs_x)} | {_mean(at, lambda line: line.sxm_ours_x)} |"
                f" {f'{claims} of {len(at)}' if title == 'listed' else ''} |"
                f" {sum(line.race == 'wins' for line in at)} | {sum(line.wins for line in at)} |"
                f" {sum('refused' in line.plan_status for line in at)} |"
                f" {sum(UNKNOWN in line.plan_status for line in at)} |"
            )
    return [*lines, "", "Speed-ups are over cuBLAS on the same board, geometric means, cold."]


def _mean(at: Sequence[Line], value: Callable[[Line], float | None]) -> str:
    values = [found for line in at if (found := value(line)) is not None]
    return f"{statistics.geometric_mean(values):.3f}x" if values else ""


def _why(line: Line) -> str:
    """One list item: both cuBLAS times and what each of the two calls gains by the other board."""
    base, theirs = _gains(line)
    ours = f"{line.sxm_ours_x:.3f}x" if line.sxm_ours_x is not None else UNKNOWN
    return (
        f"- {line.name} M = {line.m}: {line.nvl_x:.2f}x there, {line.sxm_theirs_x:.3f}x here. cuBLAS"
        f" {line.nvl_cublas_us} us on the NVL, {line.sxm_cublas_us:.2f} us on the SXM: {_change(base)}; their kernel"
        f" {line.nvl_theirs_us} and {line.sxm_theirs_us:.2f} us: {_change(theirs)}. Ours {ours}."
    )


def _gains(line: Line) -> tuple[float, float]:
    """How much faster cuBLAS and their kernel are on the SXM than on the NVL."""
    assert line.nvl_cublas_us is not None  # "does not hold" needs all of these
    assert line.nvl_theirs_us is not None
    assert line.sxm_cublas_us is not None
    assert line.sxm_theirs_us is not None
    return line.nvl_cublas_us / line.sxm_cublas_us, line.nvl_theirs_us / line.sxm_theirs_us


def _in_short(failed: Sequence[Line]) -> str:
    """What the cells without the claim have in common."""
    gains = [_gains(line) for line in failed]
    base = [cublas for cublas, _ in gains]
    return (
        f"cuBLAS is {_change(min(base))} to {_change(max(base))} on the SXM in them, and gains more than their kernel"
        f" in {sum(cublas > theirs for cublas, theirs in gains)} of {len(gains)}; their kernel itself is slower on the"
        f" SXM than the seed has it on the NVL in {sum(theirs < 1 for _, theirs in gains)}."
    )


def _change(ratio: float) -> str:
    return f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"


def _cells(found: Sequence[Line], *, kept: bool = True) -> list[str]:
    return [
        "| projection | M | NVL cuBLAS -> theirs | in their model, us per step | SXM cuBLAS -> theirs |"
        " SXM cuBLAS -> ours | plan: cold | hot |"
        f" in our model, us per step | status | {'claim on the SXM | ' if kept else ''}ours in the race |",
        f"|---|---:|---|---|---|---|---:|---:|---:|---|{'---|' if kept else ''}---|",
        *(
            f"| {line.name} | {line.m} | {_step(line.nvl_cublas_us, line.nvl_theirs_us, line.nvl_x, 2)} |"
            f" {_in_model(line)} |"
            f" {_step(line.sxm_cublas_us, line.sxm_theirs_us, line.sxm_theirs_x, 3)} |"
            f" {_step(line.sxm_cublas_us, line.sxm_ours_us, line.sxm_ours_x, 3)} |"
            f" {_number(line.plan_cold_x, '.3f', 'x')} | {_number(line.plan_hot_x, '.3f', 'x')} |"
            f" {_number(line.plan_in_model_us, '+.1f')} | {line.plan_status} |"
            f"{f' {line.claim} |' if kept else ''} {line.race} |"
            for line in found
        ),
    ]


def _step(base: float | None, other: float | None, speedup: float | None, digits: int) -> str:
    ratio = _number(speedup, f".{digits}f", "x")
    if base is None or other is None:
        return ratio
    return f"{base} -> {other} ({ratio})" if digits == 2 else f"{base:.2f} -> {other:.2f} ({ratio})"


def _in_model(line: Line) -> str:
    if line.nvl_model_cublas_us is None or line.nvl_model_theirs_us is None:
        return ""
    return f"{line.nvl_model_cublas_us:.0f} -> {line.nvl_model_theirs_us:.0f}"


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


if __name__ == "__main__":
    sys.exit(main())

"""Generate `results/<device>/summary.json` and the table in README from the rows: `python benchmarks/report.py
[--check]`.

`--check` writes nothing and exits with 1 if a generated file differs from what the rows give.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from skinny_lab.bench import rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DERIVED = ("seed.csv",)
"""Tables made from the rows, with other columns: `seed_cells.py`."""
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def main() -> int:
    """Write, or with --check compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in generated().items() if not path.is_file() or path.read_text() != text]
    for path in stale:
        print(f"{'stale' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            rows.write_text(path, generated()[path])
    return 1 if check and stale else 0


def generated() -> dict[Path, str]:
    """Every generated file with the text it should have."""
    files: dict[Path, str] = {}
    sections = []
    for folder in sorted(p for p in RESULTS.iterdir() if p.is_dir()):
        summary = rows.summarise(read(folder))
        files[folder / "summary.json"] = json.dumps(summary, indent=1) + "\n"
        sections.append(section(summary, folder.name))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    files[ROOT / "README.md"] = f"{before}{BEGIN}\n{''.join(sections)}{END}{after}"
    return files


def read(folder: Path) -> list[rows.Row]:
    """All rows of one device."""
    return [row for path in sorted(folder.glob("*.csv")) if path.name not in DERIVED for row in rows.read_csv(path)]


def section(summary: dict[str, Any], name: str) -> str:
    """Markdown of one device: kernels by M, then time per token by model and concurrency."""
    where = f"[benchmarks/results/{name}](benchmarks/results/{name})"
    lines = [
        f"Measured on one {summary['device']} ({summary['date']}, commit `{summary['commit'][:12]}`; rows in {where}):",
        "",
        f"| M | vs cuBLAS | vs best peer ({', '.join(summary['peers']) or 'none'}) | fraction of the memory's limit |",
        "|---:|---:|---:|---:|",
    ]
    for m in summary["vs_cublas"]:
        cells = [f"{summary['vs_cublas'][m]:.3f}x"]
        cells += [f"{summary['vs_best_peer'][m]:.3f}x" if m in summary["vs_best_peer"] else ""]
        cells += [f"{summary['limit_fraction'][m]:.2f}"]
        lines.append(f"| {m} | {' | '.join(cells)} |")
    counts = summary["cells"]
    lines += [
        "",
        f"Geometric means over all measured shapes, cold L2: {counts['win']} cells run, {counts['refused']} "
        f"are listed as refused. Limit: weight bytes at {summary['limit_tbps']:.2f} TB/s.",
        "",
        f"Time per output token of a real vLLM engine (commit `{summary['tpot_commit']}`, median of engine steps):",
        "",
        "| model | concurrency | stock, ms | with skinny | change | processes per arm |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for model, at in summary["tpot"].items():
        for concurrency, t in at.items():
            change = t["skinny_ms"] / t["stock_ms"] - 1
            lines.append(
                f"| {model} | {concurrency} | {t['stock_ms']:.3f} | {t['skinny_ms']:.3f} | {100 * change:+.1f} % |"
                f" {t['runs']} |"
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""Make the model packages' plans of `reported` cells from the reports: `python benchmarks/reported_plans.py [--check]`.

One `models/<m>/src/.../plans/<device>.toml` per report in `benchmarks/reported/` and package that it speaks about.
`--check` writes nothing and exits with 1 if a file differs from what the report gives.
"""

from __future__ import annotations

import sys
from pathlib import Path

from skinny_core import family, plan
from skinny_lab.bench import generated_files, reported

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "benchmarks" / "reported"


def main() -> int:
    """Write, or with --check compare; returns the exit status."""
    return generated_files.run(__doc__, generated, ROOT)


def generated() -> dict[Path, str]:
    """Every plan file with the text it should have. Raises ValueError where it would replace cells of our own."""
    packages = family.discover().packages
    files: dict[Path, str] = {}
    for path in sorted(REPORTS.glob("*.csv")):
        for name, found in reported.plans(reported.read(path), packages).items():
            target = ROOT / "models" / name / "src" / f"skinny_{name}" / "plans" / f"{found.product}.toml"
            if target.is_file() and not plan.load(target).only_reported:
                raise ValueError(f"{target} has measured cells: they say more than {path.name}; remove the report")
            files[target] = plan.render(found)
    return files


if __name__ == "__main__":
    sys.exit(main())

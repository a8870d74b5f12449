"""What one order of summation for every M costs: `python benchmarks/one_order.py [CSV]`.

A row's bits depend on the config and K, so a weight whose cells all run one config gives a token the same bits in a
batch of any size up to 16. For every shape the config is taken that is best over M 1-16 (geometric mean), and compared
with the best of each M and with cuBLAS. CSV: a row per shape and config, a column of microseconds per M.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path

ROWS = Path(__file__).parent / "results" / "h200" / "sweeps" / "2026-11-30-limit-configs.csv"
MS = range(1, 17)
OURS, BASELINE = ("bf16_simt", "bf16_mma"), "cublas"


def study(path: Path) -> dict[str, dict[int, tuple[float, float]]]:
    """Shape -> M -> (time over the best config of that M, cuBLAS's time over ours)."""
    times: dict[str, dict[str, dict[int, float]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found = {m: float(row[str(m)]) for m in MS if row[str(m)]}
            times.setdefault(row["what"], {})[row["config"]] = found
    result = {}
    for what, configs in times.items():
        ours = {name: found for name, found in configs.items() if name.startswith(OURS)}
        able = [found for found in ours.values() if len(found) == len(MS)]
        one = min(able, key=lambda found: statistics.geometric_mean(found.values()))
        best = {m: min(found[m] for found in ours.values() if m in found) for m in MS}
        result[what] = {m: (one[m] / best[m], configs[BASELINE][m] / one[m]) for m in MS}
    return result


def main() -> None:
    """Print a line per M, and the mean over all."""
    found = study(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
    print(" M   costs  vs cuBLAS  least")
    for m in MS:
        costs, gains = zip(*(cells[m] for cells in found.values()), strict=True)
        means = statistics.geometric_mean(costs), statistics.geometric_mean(gains)
        print(f"{m:2d}  {100 * (means[0] - 1):5.1f} %  {means[1]:8.3f}x  {min(gains):.2f}x")
    every = [cost for cells in found.values() for cost, _ in cells.values()]
    print(f"all {100 * (statistics.geometric_mean(every) - 1):4.1f} %")


if __name__ == "__main__":
    main()

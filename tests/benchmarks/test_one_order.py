"""`one_order.py`: one config per shape against the best of every M, by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

COMMAND = Path(__file__).resolve().parents[2] / "benchmarks" / "one_order.py"


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_order", COMMAND)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "one_order", module)
    spec.loader.exec_module(module)
    return module


def test_the_best_single_config_is_compared_with_the_best_of_every_m(one_order: ModuleType, tmp_path: Path) -> None:
    def row(what: str, config: str, *times: object) -> str:
        return ",".join(map(str, (what, config, *times)))

    rows = [
        row("what", "config", *range(1, 17)),
        row("a", "cublas", *[20] * 16),
        row("a", '"bf16_simt(rows=1)"', 8, *[""] * 15),  # fastest, at one M only: no single order
        row("a", '"bf16_mma(warps=8)"', *[10] * 16),
        row("a", '"bf16_mma(warps=4)"', 9, *[12] * 15),
        row("a", '"bf16_stream(block_n=16)"', *[1] * 16),  # another kernel, of which nothing is said
    ]
    path = tmp_path / "configs.csv"
    path.write_text("\n".join(rows) + "\n")
    cells = one_order.study(path)["a"]
    assert cells[1] == (10 / 8, 20 / 10)
    assert all(cells[m] == (1.0, 2.0) for m in range(2, 17))


def test_the_committed_rows_give_what_the_notes_say(one_order: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    sys.argv[1:] = []
    one_order.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["1", "3.8", "%", "1.175x", "1.04x"]
    assert lines[-1].split() == ["all", "1.4", "%"]
    assert min(float(line.split()[-1].rstrip("x")) for line in lines[1:-1]) == 1.01

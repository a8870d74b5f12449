"""What the prefetch compiles to, and what that reads: SASS without a GPU, PTX run on the CPU."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
import pytest

from skinny_core.device import product
from skinny_core.kernels import Binary, triton_objects
from skinny_core.prefetch import build
from skinny_core.prefetch.config import ReadConfig, Spec
from skinny_core.prefetch.host import Extent
from skinny_core.testing.ptx import Machine, Memory, MemoryFault
from skinny_core.testing.sass import SassReport, inspect

pytestmark = pytest.mark.triton("compiler")


@functools.cache
def _binary(spec: Spec, capability: int = 90) -> Binary:
    return triton_objects.binary(build.SOURCE, spec, capability)


def _loop_and_rest(report: SassReport) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The instructions from the first load to the branch that ends the loop, and those behind it."""
    start = next(i for i, op in enumerate(report.opcodes) if op.startswith("LDG"))
    end = report.opcodes.index("BRA", start)
    return report.opcodes[start:end], report.opcodes[end:]


@pytest.mark.parametrize("capability", [90, 100, 120])
@pytest.mark.parametrize("spec", [Spec(512, 8, False), Spec(256, 4, False), Spec(512, 8, True)])
def test_all_loads_are_wide_there_and_leave_together(spec: Spec, capability: int) -> None:
    binary = _binary(spec, capability)
    report = inspect(binary.cubin, ptx=binary.ptx)
    assert report.decoded
    assert (report.stack_bytes, report.local_bytes, dict(report.spills)) == (0, 0, {})
    assert report.registers <= 64
    assert binary.shared_bytes == 0
    # One batch in the loop, one for what is left behind it; nothing narrower, nothing removed.
    assert dict(report.loads) == {"LDG.128": 2 * spec.loads}
    assert all("NA" in op for op in report.opcodes if op.startswith("LDG")), "past L1"
    loop, rest = _loop_and_rest(report)
    assert sum(op.startswith("LDG") for op in loop) == spec.loads
    assert sum(op.startswith("LDG") for op in rest) == spec.loads
    assert any(op.startswith("STG") for op in rest), "what keeps the loads alive"
    if not spec.padded:
        # An instruction that needs the first result would wait for it before the last load leaves.
        assert all(op.startswith("LDG") for op in loop[: spec.loads]), loop


def test_the_result_is_stored_under_a_run_time_condition_only() -> None:
    ptx = _binary(Spec(512, 8, False)).ptx
    stores = [line for line in ptx.splitlines() if "st.global" in line]
    assert stores
    assert all(line.strip().startswith("@") for line in stores)
    assert "griddepcontrol" not in ptx, "an ordinary launch: it is ordered by events alone"
    assert ".nc" not in ptx, "the non-coherent path may return what was there before an update"


class _Seen(Memory):
    """Memory that notes which bytes of its first region were loaded, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = np.zeros(0, np.int64)

    def load(self, addresses: list[int], lanes: list[int], item: int, count: int, waited: Any) -> Any:
        base = self.regions[0].base
        if not len(self.counts):
            self.counts = np.zeros(len(self.regions[0].data), np.int64)
        for address in addresses:
            self.counts[address - base : address - base + item * count] += 1
        return super().load(addresses, lanes, item, count, waited)


def _run(config: ReadConfig, weight: np.ndarray, size: int, *, sink: int = 0, never: int = 0) -> np.ndarray:
    """How often each byte from the first to the last of `weight` is loaded; the weight is read-only and fenced."""
    memory = _Seen()
    address = memory.add("w", weight, read_only=True)
    extent = Extent(size, weight.shape[1] * weight.itemsize, weight.strides[0])
    spec = config.spec(padded=extent.padded)
    vectors = extent.bytes // 16
    arguments = [address, sink, vectors, extent.row_bytes // 16, extent.stride, never]
    machine = Machine(_binary(spec).ptx)
    arguments += [0] * (len(machine.program.params) - len(arguments))  # Triton's own scratch pointers, unused
    machine.run(config.grid(vectors), config.threads, arguments, memory)
    return memory.counts


SMALL = ReadConfig(blocks=3, threads=64, loads=2)
BATCH = 16 * SMALL.batch


@pytest.mark.parametrize(
    "size",
    [16, 48, BATCH - 16, BATCH, BATCH + 16, 3 * BATCH, 5 * BATCH + 32, 7 * BATCH - 16],
)
def test_exactly_the_promised_bytes_are_read(size: int) -> None:
    """Every byte below `size` at least once, none behind it; only vectors of the last batch more often."""
    weight = np.arange(16 * BATCH, dtype=np.uint8).reshape(8, -1)
    counts = _run(SMALL, weight, size)
    assert (counts[:size] >= 1).all()
    assert not counts[size:].any()
    assert (counts[: size - 16] == 1).all()


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("left", [0, 16])
def test_pads_are_not_read(rows: int, left: int) -> None:
    """Rows of 208 bytes, 256 apart; the machine faults on a load between rows."""
    weight = np.zeros((41, 256), np.uint8)[:, :208]
    size = rows * 208 + left
    counts = _run(SMALL, weight, size)
    inside = np.zeros((41, 256), bool)
    inside[:, :208] = np.arange(41 * 208).reshape(41, 208) < size
    assert ((counts > 0) == inside.reshape(-1)[: len(counts)]).all()


def test_the_default_covers_a_weight_without_gaps() -> None:
    """As launched on an H200, at an eighth of the size: more than one turn of the loop, and a rest."""
    config = ReadConfig(blocks=4, threads=512, loads=8)
    weight = np.zeros((37, 16384), np.uint8)
    counts = _run(config, weight, weight.size)
    assert (counts[:-16] == 1).all()
    assert (counts[-16:] >= 1).all()


def test_asked_for_it_would_store_which_is_why_the_loads_stay() -> None:
    """One vector of ones per thread gives the word 1 ^ 1 ^ 1 ^ (1 + 1) in every byte; its store would go nowhere."""
    config = ReadConfig(blocks=1, threads=64, loads=1)
    weight = np.ones((1, 1024), np.uint8)
    for never in (0, 0x03030302):
        _run(config, weight, 1024, sink=0x100, never=never)
    with pytest.raises(MemoryFault, match="store outside"):
        _run(config, weight, 1024, sink=0x100, never=0x03030303)


def test_the_archive_in_the_cache_is_what_was_compiled(tmp_path: Any, skinny: Any) -> None:
    skinny(f"cache={tmp_path}")
    triton_objects.load.cache_clear()
    spec = Spec(64, 2, False)
    path = triton_objects.stored(build.SOURCE, spec, product("h200"))
    assert triton_objects.is_stored(build.SOURCE, spec, product("h200"))
    restored = triton_objects.load(build.SOURCE, spec, product("h200"), 0)
    assert restored.asm["cubin"] == triton_objects.compile_for(build.SOURCE, spec, 90)[".cubin"]
    assert restored.metadata.num_warps == 2
    assert json.loads(path.with_suffix(".json").read_text())["bytes"] == path.stat().st_size
    triton_objects.load.cache_clear()

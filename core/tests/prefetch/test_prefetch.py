"""Arguments, clipping, errors, and the order of events of the prefetch. The device is a recorder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from skinny_core import device, prefetch
from skinny_core.device import DeviceKey, product
from skinny_core.errors import CompileForbiddenError, ConfigError, KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import triton_objects
from skinny_core.prefetch import host
from skinny_core.prefetch.config import ReadConfig, Spec, clipped

H200 = product("h200")
Log = list[Any]


def _weight(n: int = 64, k: int = 256, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(n, k, dtype=dtype)


@pytest.mark.parametrize(
    ("wanted", "found"), [(None, 4096), (0, 0), (1, 16), (16, 16), (17, 32), (4095, 4096), (4096, 4096), (10**9, 4096)]
)
def test_clipping(wanted: int | None, found: int) -> None:
    assert clipped(4096, wanted) == found


@pytest.mark.parametrize(
    ("vectors", "blocks"), [(1, 1), (4095, 1), (4096, 1), (8191, 1), (8192, 2), (4096 * 64, 64), (4096 * 999, 64)]
)
def test_no_block_without_a_whole_batch(vectors: int, blocks: int) -> None:
    assert ReadConfig(blocks=64, threads=512, loads=8).grid(vectors) == blocks


@pytest.mark.parametrize("wrong", [{"blocks": 0}, {"threads": 96}, {"threads": 2048}, {"loads": 3}, {"loads": 16}])
def test_configs_that_are_none(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="l2_prefetch"):
        ReadConfig(**wrong)


@pytest.mark.parametrize(
    ("weight", "wanted", "extent"),
    [
        (_weight(), None, (32768, 512, 512)),
        (_weight(), 1000, (1008, 512, 512)),
        (_weight(dtype=torch.float8_e4m3fn), None, (16384, 256, 256)),
        (_weight()[:, :248], None, (64 * 496, 496, 512)),
        (_weight()[8:, 8:], 5000, (5008, 496, 512)),
        (_weight(1, 256).as_strided((1, 256), (3, 1)), None, (512, 512, 512)),
        (_weight(0, 256), None, (0, 0, 0)),
        (_weight(), 0, (0, 512, 512)),
    ],
)
def test_what_is_read(weight: torch.Tensor, wanted: int | None, extent: tuple[int, int, int]) -> None:
    found = host.check(weight, wanted)
    assert (found.bytes, found.row_bytes, found.stride) == extent
    assert found.padded == (extent[1] != extent[2])


def test_one_padded_row_is_read_like_a_contiguous_one() -> None:
    padded = _weight()[:, :248]
    assert not host.check(padded, 496).padded
    assert host.check(padded, 497).padded


@pytest.mark.parametrize(
    ("weight", "wanted", "says"),
    [
        (torch.zeros(4096, dtype=torch.bfloat16), None, r"weight \(4096,\)"),
        (_weight().to_sparse(), None, "sparse"),
        (_weight().t(), None, "strides"),
        (_weight().view(-1)[1:-255].view(63, 256), None, "16 bytes"),
        (_weight()[:, :252], None, "16 bytes"),
        (torch.zeros(8, 260, dtype=torch.bfloat16)[:, :256], None, "16 bytes"),
        (_weight(), -1, "-1 bytes"),
        (torch.empty(64, 256, device="meta"), None, "without memory"),
    ],
)
def test_refused(weight: torch.Tensor, wanted: int | None, says: str) -> None:
    with pytest.raises(KernelRefusedError, match=says) as raised:
        prefetch.into_l2(weight, wanted)
    assert "do without the prefetch" in raised.value.fix


def test_a_cpu_tensor_and_a_machine_without_a_device() -> None:
    with pytest.raises(KernelUnavailableError, match="CUDA tensor, got one on cpu"):
        prefetch.into_l2(_weight())


class _Compiled:
    """Stands for Triton's CompiledKernel: notes loads and launches."""

    def __init__(self, spec: Spec, log: Log) -> None:
        self.spec, self.log = spec, log

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        def run(*arguments: Any, stream: int) -> None:
            self.log.append((grid[0], arguments, stream))

        return run


class _Stream:
    """A stream that only notes who waits for whom; `cuda_stream` is its number."""

    def __init__(self, name: str, number: int, log: Log) -> None:
        self.name, self.cuda_stream, self.log = name, number, log

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, h200: DeviceKey) -> Iterator[Log]:
    """CPU tensors count as CUDA ones; what would reach the device is in the list that is returned."""
    log: Log = []
    streams = [_Stream("main", 7, log)]

    @contextmanager
    def entered(stream: _Stream) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    @contextmanager
    def on(index: int) -> Iterator[None]:
        yield

    monkeypatch.setattr(triton_objects, "load", lambda source, spec, key, index: _Compiled(spec, log))
    monkeypatch.setattr(triton_objects, "require", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: _Stream("side", 8, log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: streams[-1])
    host._ready.clear()
    yield log
    host._ready.clear()


def test_arguments_of_a_launch(gpu: Log) -> None:
    config = ReadConfig(blocks=5, threads=64, loads=2)
    weight = _weight(64, 256)[:, :248]
    assert prefetch.into_l2(weight, 5000, config=config) == 5008
    ((grid, arguments, stream),) = gpu
    assert (grid, stream) == (2, 7)
    # address, sink, vectors, vectors of a row, bytes between rows, never; then what is compiled in
    assert arguments[:6] == (weight.data_ptr(), 0, 313, 31, 512, 0)
    assert arguments[6:9] == (2, 64, True)


def test_arguments_are_in_the_order_of_the_kernel() -> None:
    text = Path(host.__file__).with_name("kernel.py").read_text(encoding="utf-8")
    signature = text[text.index("def l2_prefetch(") :].partition("):")[0]
    names = [line.strip().partition(":")[0].partition(",")[0] for line in signature.splitlines()[1:] if line.strip()]
    assert names == ["w", "sink", "vectors", "row_vectors", "stride", "never", *Spec(64, 2, True).constants]


def test_nothing_is_launched_for_no_bytes(gpu: Log) -> None:
    assert prefetch.into_l2(_weight(), 0) == 0
    assert prefetch.into_l2(_weight(0, 256)) == 0
    assert prefetch.SideStream().start(_weight(), 0) == 0
    assert gpu == []


def test_a_kernel_is_loaded_once_and_never_inside_a_capture(gpu: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Spec] = []
    load = triton_objects.load
    monkeypatch.setattr(triton_objects, "load", lambda *a: loaded.append(a[1]) or load(*a))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for call in (prefetch.warm, lambda: prefetch.into_l2(_weight()), prefetch.SideStream):
        with pytest.raises(CompileForbiddenError, match="graph capture"):
            call()
    assert loaded == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    prefetch.warm()
    assert [spec.padded for spec in loaded] == [False, True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    prefetch.into_l2(_weight())
    prefetch.into_l2(_weight()[:, :248])
    assert len(loaded) == 2
    with pytest.raises(CompileForbiddenError):
        prefetch.into_l2(_weight(), config=ReadConfig(loads=4))


def test_without_a_key_there_is_no_kernel(gpu: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current_key", lambda index=None: None)
    with pytest.raises(KernelUnavailableError, match="needs a CUDA device"):
        prefetch.warm(0)


def test_fork_and_join(gpu: Log) -> None:
    side = prefetch.SideStream(torch.device("cuda", 0))
    weight = _weight()
    assert side.join() is False
    assert side.start(weight, 100) == 112
    assert side.start(weight) == 32768
    assert side.join() is True
    assert side.join() is False
    shown = [entry if isinstance(entry, str) else f"{entry[1][2]} vectors on {entry[2]}" for entry in gpu]
    assert shown == [
        "side waits for main",
        "7 vectors on 8",
        "side waits for main",
        "2048 vectors on 8",
        "main waits for side",
    ]


def test_a_refused_weight_forks_nothing(gpu: Log) -> None:
    side = prefetch.SideStream(0)
    with pytest.raises(KernelRefusedError):
        side.start(_weight().t())
    side.index = 1
    with pytest.raises(KernelRefusedError, match="device 1 cannot take"):
        side.start(_weight())
    assert side.join() is False
    assert gpu == []


@pytest.mark.triton("compiler")
def test_prepare_fills_the_disk_cache(tmp_path: Path, skinny: Callable[[str], None]) -> None:
    skinny(f"cache={tmp_path}")
    config = ReadConfig(threads=64, loads=2)
    assert not prefetch.prepared(H200, config=config)
    prefetch.prepare(H200, config=config)
    assert prefetch.prepared(H200, config=config)
    assert prefetch.prepared(H200, config=ReadConfig(blocks=132, threads=64, loads=2)), "blocks are not compiled in"
    assert len(list((tmp_path / "kernels").glob("*.o"))) == 2


def test_without_triton_or_under_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_availability", lambda: (False, "ImportError: no triton"))
    with pytest.raises(KernelUnavailableError, match="needs Triton: ImportError: no triton"):
        prefetch.prepare(H200)
    monkeypatch.setattr(host, "_availability", lambda: (True, ""))  # nor may Triton be imported with the variable set
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(KernelUnavailableError, match="TRITON_INTERPRET"):
        prefetch.prepare(H200)

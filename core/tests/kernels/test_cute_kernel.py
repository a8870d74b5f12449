"""What kernels in CuTe DSL share on the host: refusals before any import, forms and their files, launch arguments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skinny_core import device
from skinny_core.errors import KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import bf16_mma, bf16_simt, cute_kernel, cute_objects
from skinny_core.kernels.bf16_mma.config import MmaConfig
from skinny_core.kernels.bf16_mma.host import KERNEL as MMA
from skinny_core.kernels.bf16_simt.config import SimtConfig
from skinny_core.kernels.bf16_simt.host import KERNEL as SIMT
from skinny_core.kernels.cute_kernel import Call, CuteKernel, CuteLauncher
from skinny_core.problem import Epilogue, Problem

H200 = device.product("h200")
PROBLEM = Problem(n=64, k=1024)
# kernel, its package, a config of an ordinary launch, one of a programmatic one
REAL = {
    "bf16_mma": (MMA, bf16_mma, MmaConfig(4, 2, 2, 2), MmaConfig(4, 2, 2, 2, pdl=1)),
    "bf16_simt": (SIMT, bf16_simt, SimtConfig(128, 1, 1), SimtConfig(128, 1, 1, pdl=1)),
}


@dataclass(frozen=True)
class Config:
    """pdl: as of the real kernels."""

    pdl: int = 1

    @classmethod
    def from_params(cls, params: dict[str, int]) -> Config:
        return cls(**params)

    def to_params(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class Spec:
    """The two fields that every spec has."""

    pdl: bool
    prewait: bool = False


class Tiny(CuteKernel):
    """A kernel that refuses M above 8."""

    def spec(
        self, config: Config, problem: Problem, m: int, *, pdl: bool, capability: tuple[int, int] = (9, 0)
    ) -> Spec:
        return Spec(pdl and bool(config.pdl))

    def name(self, spec: Spec) -> str:
        return "tiny"

    def call(self, spec: Spec, problem: Problem, m: int, sm_count: int) -> Call:
        return Call((m, problem.n), (sm_count,))

    def refuses(self, config: Config, problem: Problem, m: int) -> str | None:
        return "M above 8" if m > 8 else None

    def shared_bytes(self, spec: Spec, m: int) -> int:
        return 16 * m

    def candidates(self, problem: Problem, m: int) -> tuple[Config, ...]:
        return (Config(),)


SOURCE = cute_objects.Source("tiny", ())
TINY = Tiny(SOURCE, Config)
OLD = replace(H200, capability=(8, 0))
"""A device without programmatic dependent launch."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Spec]:
    """Specs whose machine code was asked for, on an H200 with everything installed."""
    specs: list[Spec] = []
    monkeypatch.setattr(cute_objects, "availability", lambda source: (True, ""))
    monkeypatch.setattr(cute_objects, "load", lambda source, spec, name, index: specs.append(spec) or f"{spec.prewait}")
    monkeypatch.setattr(cute_objects, "stored", lambda source, spec, name, key: specs.append(spec))
    monkeypatch.setattr(cute_objects, "binary", lambda source, spec, arch, shared: specs.append(spec) or shared)
    monkeypatch.setattr(cute_kernel.device, "current_key", lambda index=None: H200)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 100 + index, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    return specs


@pytest.mark.parametrize("stem", REAL)
def test_a_refusal_is_raised_before_the_dsl_is_imported(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skinny: Callable[[str], None]
) -> None:
    kernel, package, config, _ = REAL[stem]
    skinny(f"cache={tmp_path}")
    monkeypatch.setitem(sys.modules, "cutlass", None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, f"skinny_core.kernels.{stem}.kernel", raising=False)
    monkeypatch.delattr(package, "kernel", raising=False)
    for call in (
        lambda: kernel.compile(config, PROBLEM, 40, index=0, prewait=True),
        lambda: kernel.prepare(config, PROBLEM, 40, H200, prewait=True),
        lambda: kernel.prepared(config, PROBLEM, 40, H200, prewait=True),
    ):
        with pytest.raises(KernelRefusedError, match="M = 40"):
            call()
    assert not list(tmp_path.rglob("*"))


def test_without_the_dsl_or_a_device_the_kernel_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_objects, "availability", lambda source: (False, "ImportError: no cutlass"))
    with pytest.raises(KernelUnavailableError, match="ImportError: no cutlass"):
        TINY.compile(Config(), PROBLEM, 1, index=0, prewait=False)
    monkeypatch.setattr(cute_objects, "availability", lambda source: (True, ""))
    monkeypatch.setattr(cute_kernel.device, "current_key", lambda index=None: None)
    with pytest.raises(KernelUnavailableError, match="CUDA device"):
        TINY.compile(Config(), PROBLEM, 1, index=0, prewait=False)


@pytest.mark.parametrize("stem", REAL)
@pytest.mark.parametrize("pdl", [0, 1])
def test_prepare_puts_every_form_into_the_cache(
    stem: str, pdl: int, tmp_path: Path, skinny: Callable[[str], None]
) -> None:
    """Two where the weight may be read early, else one."""
    kernel, _, *configs = REAL[stem]
    config = configs[pdl]
    ok, error = kernel.availability()
    if not ok:
        pytest.skip(error)
    skinny(f"cache={tmp_path}")
    assert not kernel.prepared(config, PROBLEM, 1, H200, prewait=False)
    kernel.prepare(config, PROBLEM, 1, H200, prewait=False)
    assert kernel.prepared(config, PROBLEM, 1, H200, prewait=False)
    assert kernel.prepared(config, PROBLEM, 1, H200, prewait=True) is not bool(pdl)
    kernel.prepare(config, PROBLEM, 1, H200, prewait=True)
    assert kernel.prepared(config, PROBLEM, 1, H200, prewait=True)
    assert len(list(tmp_path.rglob("*.o"))) == 1 + pdl == len(kernel.codes(config, PROBLEM, 1, H200, prewait=True))
    assert not kernel.prepared(configs[1 - pdl], PROBLEM, 1, H200, prewait=False)
    assert not kernel.prepared(config, PROBLEM, 16, H200, prewait=False)


@pytest.mark.parametrize(
    ("config", "key", "prewait", "forms"),
    [
        (Config(1), H200, True, [Spec(True), Spec(True, True)]),
        (Config(1), H200, False, [Spec(True)]),
        (Config(0), H200, True, [Spec(False)]),
        (Config(0), H200, False, [Spec(False)]),
        (Config(1), OLD, True, [Spec(False)]),
    ],
)
def test_the_early_form_exists_only_with_programmatic_launch(
    config: Config, key: device.DeviceKey, prewait: bool, forms: list[Spec], made: list[Spec]
) -> None:
    TINY.prepare(config, PROBLEM, 1, key, prewait=prewait)
    assert made == forms
    assert TINY.codes(config, PROBLEM, 1, key, prewait=prewait) == {("tiny", spec) for spec in forms}


def test_the_setting_switches_programmatic_launch_off(made: list[Spec], skinny: Callable[[str], None]) -> None:
    skinny("pdl=off")
    TINY.prepare(Config(1), PROBLEM, 1, H200, prewait=True)
    TINY.cross_compile(Config(1), PROBLEM, 1, "sm_90a")
    assert made == [Spec(False)] * 2


def test_cross_compile_makes_the_form_that_is_asked_for(made: list[Spec]) -> None:
    assert TINY.cross_compile(Config(1), PROBLEM, 2, "sm_90a") == 32  # type: ignore[comparison-overlap]
    TINY.cross_compile(Config(1), PROBLEM, 2, "sm_90a", prewait=False)
    TINY.cross_compile(Config(0), PROBLEM, 2, "sm_90a")
    assert made == [Spec(True, True), Spec(True), Spec(False)]


def test_params_go_through_the_config_type() -> None:
    assert TINY.params_of(TINY.config_from({"pdl": 0})) == {"pdl": 0}
    assert (TINY.stem, TINY.source) == ("tiny", SOURCE)


@pytest.mark.parametrize(
    ("config", "promised", "late"), [(Config(1), True, "True"), (Config(1), False, "False"), (Config(0), True, "False")]
)
def test_compile_gives_a_launcher_with_both_forms(config: Config, promised: bool, late: str, made: list[Spec]) -> None:
    """Without a promise, or without programmatic launch, both are the form that waits first."""
    launcher: Any = TINY.compile(config, PROBLEM, 2, index=0, prewait=promised)
    assert (launcher._wait_first, launcher._wait_late) == ("False", late)
    assert (launcher._sizes, launcher._last) == ((2, 64), (H200.sm_count,))


def _launcher(m: int = 2) -> tuple[CuteLauncher, list[tuple[Any, ...]]]:
    calls: list[tuple[Any, ...]] = []
    first, late = (lambda *arguments, form=form: calls.append((form, *arguments)) for form in ("first", "late"))
    return CuteLauncher("tiny", first, late, Call((m, 64), (7,)), PROBLEM, m, 0), calls


def _tensors(m: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bf16 = torch.bfloat16
    return torch.zeros(m, 1024, dtype=bf16), torch.zeros(64, 1032, dtype=bf16)[:, :1024], torch.zeros(m, 64, dtype=bf16)


@pytest.mark.parametrize("prewait", [False, True])
def test_a_launch_passes_addresses_sizes_strides_and_the_stream(prewait: bool, made: list[Spec]) -> None:
    launch, calls = _launcher()
    x, w, y = _tensors()
    launch(x, w, y, None, 1024, 64, 0, prewait)
    launch(x, w, y, y, 1024, 70, 80, prewait)
    at = x.data_ptr(), w.data_ptr(), y.data_ptr()
    form = "late" if prewait else "first"
    assert calls[0] == (form, *at, 0, 2, 64, 1024, 1032, 64, 0, 7, 100)
    assert calls[1] == (form, *at, y.data_ptr(), 2, 64, 1024, 1032, 70, 80, 7, 100)


def test_the_row_stride_of_one_row_does_not_matter(made: list[Spec]) -> None:
    launch, calls = _launcher(1)
    x, w, y = _tensors(1)
    launch(x, w, y, None, 3, 64, 0, False)
    assert calls[0][7] == 0


@pytest.mark.parametrize("wrong", ["M", "address of x", "address of w", "stride of x", "stride of w"])
def test_a_launch_refuses_what_would_be_undefined(wrong: str, made: list[Spec]) -> None:
    launch, calls = _launcher()
    x, w, y = _tensors()
    stride = 1024
    if wrong == "M":
        x = torch.zeros(3, 1024, dtype=x.dtype)
    elif wrong == "address of x":
        x = torch.zeros(2 * 1024 + 1, dtype=x.dtype)[1:].view(2, 1024)
    elif wrong == "address of w":
        w = torch.zeros(64 * 1024 + 1, dtype=w.dtype)[1:].view(64, 1024)
    elif wrong == "stride of x":
        stride = 1028
    else:
        w = torch.zeros(64, 1028, dtype=w.dtype)[:, :1024]
    with pytest.raises(KernelRefusedError, match="tiny cannot take"):
        launch(x, w, y, None, stride, 64, 0, False)
    assert not calls


def test_every_real_kernel_is_one_of_these() -> None:
    """And says itself what a launch passes: the outputs of a gated product are half of N."""
    for kernel, _, config, _ in REAL.values():
        assert isinstance(kernel, CuteKernel)
        spec = kernel.spec(config, PROBLEM, 1, pdl=True)
        assert not spec.pdl
        assert kernel.call(spec, PROBLEM, 1, 132).sizes[-1] == 64
    gated = replace(PROBLEM, epilogue=Epilogue.SILU_MUL)
    assert MMA.call(MMA.spec(MmaConfig(4, 2, 2, 2), gated, 1, pdl=True), gated, 1, 132).sizes == (1, 32)

"""The predicates of `bf16_stream`: what a plan may ask for, and why a config is refused. No Triton here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from skinny_core.device import DeviceKey
from skinny_core.errors import ConfigError, KernelRefusedError
from skinny_core.kernels.bf16_stream.config import SHARED_BYTES, StreamConfig
from skinny_core.kernels.bf16_stream.host import KERNEL
from skinny_core.problem import DType, Problem, WeightScheme

PARAMS = {"block_n": 64, "block_k": 128, "num_warps": 4, "num_stages": 6}
PROBLEM = Problem(n=4096, k=4096)


def _device(capability: tuple[int, int]) -> DeviceKey:
    return DeviceKey(capability, 132, 60 << 20, "141gb")


def test_params_round_trip() -> None:
    config = KERNEL.config_from(PARAMS)
    assert KERNEL.params_of(config) == PARAMS
    assert str(config) == "bf16_stream(64x128, warps=4, stages=6)"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"block_m": 16}, "unknown key 'block_m'"),
        ({"block_n": 48}, "block_n = 48 is not a power of two"),
        ({"num_warps": 3}, "num_warps = 3 is not a power of two"),
        ({"block_n": 512}, "block_n = 512 is out of range"),
        ({"block_k": 16}, "block_k = 16 is out of range"),
        ({"num_stages": 1}, "num_stages = 1 is out of range"),
        ({"num_stages": 2.0}, "num_stages = 2.0 is not an integer"),
        ({"num_warps": True}, "num_warps = True is not an integer"),
    ],
)
def test_config_errors_name_the_key(change: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        KERNEL.config_from(PARAMS | change)


def test_missing_key() -> None:
    with pytest.raises(ConfigError, match="missing key 'num_stages'"):
        KERNEL.config_from({k: v for k, v in PARAMS.items() if k != "num_stages"})


@pytest.mark.parametrize(
    ("problem", "m", "says"),
    [
        (PROBLEM, 0, "M = 0"),
        (PROBLEM, 17, "M = 17"),
        (replace(PROBLEM, n=0), 1, "N = 0"),
        (replace(PROBLEM, n=1 << 31), 1, "N = 2147483648"),
        (replace(PROBLEM, k=0), 1, "K = 0"),
        (replace(PROBLEM, k=4100), 1, "K = 4100"),
        (replace(PROBLEM, weight=WeightScheme.FP16), 1, "fp16 weight with bf16 activation"),
        (replace(PROBLEM, activation=DType.FP32), 1, "bf16 weight with fp32 activation"),
        (replace(PROBLEM, output=DType.FP16), 1, "fp16 output"),
        (replace(PROBLEM, device=_device((8, 9))), 1, "capability 8.9"),
    ],
)
def test_refusals_say_which_number(problem: Problem, m: int, says: str) -> None:
    reason = KERNEL.refuses(KERNEL.config_from(PARAMS), problem, m)
    assert reason is not None
    assert says in reason
    assert KERNEL.candidates(problem, m) == ()
    with pytest.raises(KernelRefusedError, match="bf16_stream"):
        KERNEL.compile(KERNEL.config_from(PARAMS), problem, m, index=0, prewait=False)


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("k", [8, 4096, 12288, 25600])
@pytest.mark.parametrize("n", [1, 4096, 151936])
def test_accepts(n: int, k: int, m: int) -> None:
    assert KERNEL.refuses(KERNEL.config_from(PARAMS), Problem(n=n, k=k), m) is None


@pytest.mark.parametrize(
    ("change", "capability", "fits"),
    [
        ({}, (9, 0), True),
        ({"num_stages": 11}, (9, 0), True),
        ({"num_stages": 12}, (9, 0), False),
        ({"num_stages": 4}, (12, 0), True),
        ({"num_stages": 5}, (12, 0), False),
    ],
)
def test_shared_memory_bound(change: dict[str, int], capability: tuple[int, int], fits: bool) -> None:
    config = KERNEL.config_from(PARAMS | change)
    reason = KERNEL.refuses(config, replace(PROBLEM, device=_device(capability)), 1)
    assert (reason is None) is fits, reason
    assert fits or "shared memory" in str(reason)


def test_refuses_tiles_with_narrow_loads() -> None:
    config = StreamConfig(block_n=128, block_k=64, num_warps=8, num_stages=6)
    assert "less than 16 bytes" in str(KERNEL.refuses(config, PROBLEM, 1))


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (151936, 4096), (2560, 9728), (1, 8), (60, 40)])
def test_candidates_are_legal_and_distinct(n: int, k: int, capability: tuple[int, int]) -> None:
    problem = Problem(n=n, k=k, device=_device(capability))
    configs = KERNEL.candidates(problem, 4)
    assert configs
    assert len(set(configs)) == len(configs)
    for config in configs:
        assert KERNEL.refuses(config, problem, 4) is None
        assert KERNEL.config_from(KERNEL.params_of(config)) == config


def test_host_imports_no_triton() -> None:
    code = "import sys; from skinny_core.kernels.bf16_stream import host; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"

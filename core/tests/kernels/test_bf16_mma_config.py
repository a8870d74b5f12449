"""The predicates of `bf16_mma`: what a plan may ask for, why a config is refused; every element is read once."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core import device, kernels
from skinny_core.errors import ConfigError, KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import bf16_mma, cute_objects
from skinny_core.kernels.bf16_mma import config as predicates
from skinny_core.kernels.bf16_mma import host
from skinny_core.kernels.bf16_mma.config import ALLOWED, STATIC_SHARED, MmaConfig, Spec, refuses
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import MAX_M, DType, Epilogue, KernelConfig, Problem, WeightScheme

PARAMS = {"warps": 8, "tiles": 4, "unroll": 4, "run": 1, "blocks_per_sm": 0, "l2": 0}
PROBLEM = Problem(n=4096, k=4096)
CONFIGS = st.builds(MmaConfig, **{name: st.sampled_from(values) for name, values in ALLOWED.items()})
SPEC = Spec(MmaConfig(**PARAMS), 1, "bf16", "bf16", residual=False, pdl=True, prewait=False)


def test_params_round_trip() -> None:
    assert KERNEL.params_of(KERNEL.config_from(PARAMS)) == PARAMS
    assert KERNEL.config_from({"warps": 8, "tiles": 4, "unroll": 4}) == KERNEL.config_from(PARAMS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"warp": 1}, "unknown config key 'warp'"),
        ({"warps": 17}, "warps is 17"),
        ({"warps": True}, "warps is True"),
        ({"tiles": 0}, "tiles is 0"),
        ({"tiles": 2.0}, "tiles is 2.0"),
        ({"unroll": 3}, "unroll is 3"),
        ({"run": -1}, "run is -1"),
        ({"blocks_per_sm": 7}, "blocks_per_sm is 7"),
        ({"l2": 64}, "l2 is 64"),
    ],
)
def test_config_errors_name_the_key_and_what_is_allowed(change: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KERNEL.config_from(PARAMS | change)
    assert says in caught.value.what
    assert caught.value.fix.startswith("use")


@pytest.mark.parametrize("missing", ["warps", "tiles", "unroll"])
def test_missing_key(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{missing}' is missing"):
        KERNEL.config_from({k: v for k, v in PARAMS.items() if k != missing})


@pytest.mark.parametrize(
    ("problem", "config", "m", "says"),
    [
        (replace(PROBLEM, weight=WeightScheme.FP16), {}, 1, "weight fp16 with activation bf16"),
        (replace(PROBLEM, activation=DType.FP32), {}, 1, "activation fp32"),
        (replace(PROBLEM, output=DType.FP16), {}, 1, "output fp16"),
        (replace(PROBLEM, epilogue=Epilogue.SILU_MUL), {}, 1, "epilogue silu_mul"),
        (PROBLEM, {}, 0, "M = 0"),
        (PROBLEM, {}, 17, "M = 17"),
        (replace(PROBLEM, k=4100), {}, 1, "K = 4100"),
        (replace(PROBLEM, k=0), {}, 1, "K = 0"),
        (replace(PROBLEM, k=2**31), {}, 1, "K = 2147483648"),
        (replace(PROBLEM, n=0), {}, 1, "N = 0"),
        (replace(PROBLEM, n=2**31), {}, 1, "N = 2147483648"),
        (PROBLEM, {"run": 8}, 1, "run = 8: must divide unroll = 4"),
        (PROBLEM, {"warps": 16, "tiles": 8, "unroll": 1}, 16, "partial sums of 73728 bytes"),
        (PROBLEM, {"warps": 1, "tiles": 4, "unroll": 1}, 9, "16 outputs per thread: at most 8"),
        (PROBLEM, {"tiles": 8, "unroll": 8}, 1, "about 362 registers: 8 warps have 255 each"),
        (PROBLEM, {"warps": 16, "tiles": 6}, 1, "about 172 registers: 16 warps have 128 each"),
        (PROBLEM, {"warps": 10, "tiles": 3, "unroll": 8}, 16, "about 201 registers: 10 warps have 168 each"),
        (PROBLEM, {"blocks_per_sm": 2}, 16, "2 blocks per SM: about 1 fit"),
        (replace(PROBLEM, k=1016), {"blocks_per_sm": 1}, 1, "K of at least one round of 1024"),
        (replace(PROBLEM, k=1016), {}, 1, None),
        (replace(PROBLEM, n=1, k=8), {}, 16, None),
        (replace(PROBLEM, epilogue=Epilogue.BIAS, output=DType.FP32), {}, 16, None),
    ],
)
def test_refusals_say_which_number(problem: Problem, config: dict[str, int], m: int, says: str | None) -> None:
    made = KERNEL.config_from(PARAMS | config)
    why = KERNEL.refuses(made, problem, m)
    if says is None:
        assert why is None
        return
    assert says in (why or "")
    with pytest.raises(KernelRefusedError, match="bf16_mma cannot run"):
        KERNEL.compile(made, problem, m, index=0, prewait=False)


@given(
    config=CONFIGS, m=st.integers(-1, 20), n=st.integers(-1, 2**32), k=st.integers(-8, 2**32),
    activation=st.sampled_from(DType), weight=st.sampled_from(WeightScheme), output=st.sampled_from(DType),
)  # fmt: skip
def test_a_refusal_is_a_sentence_and_acceptance_means_it_fits(
    config: MmaConfig, m: int, n: int, k: int, activation: DType, weight: WeightScheme, output: DType
) -> None:
    problem = Problem(n=n, k=k - k % 8, activation=activation, weight=weight, output=output)
    why = refuses(config, problem, m)
    if why is not None:
        assert why == str(why).strip() != ""
        return
    assert 1 <= m <= MAX_M
    assert weight.value == activation.value != "fp32"
    tiles = predicates.m_tiles(m)
    spec = replace(SPEC, config=config, m_tiles=tiles)
    assert spec.shared_bytes <= STATIC_SHARED
    assert spec.pitch % 16 == 8, "a warp's pairs fall into different banks"
    assert config.threads * spec.outputs >= config.rows * m, "every output has a thread"
    assert config.threads <= spec.resident_threads <= 1024
    assert predicates.registers(config, tiles) <= predicates.register_limit(spec.resident_threads // 32)
    assert predicates.registers(config, tiles) * config.threads * max(1, config.blocks_per_sm) <= 65536
    assert n + 132 * 16 * config.rows < 2**31, "row numbers are 32-bit, those of a group that is never reached too"
    assert problem.k + 2 * config.round < 2**31, "element numbers within a row are 32-bit"


@given(config=CONFIGS.filter(lambda c: c.unroll % c.run == 0), pieces=st.integers(1, 4000))
def test_every_piece_of_a_row_is_read_once_and_nothing_behind_it(config: MmaConfig, pieces: int) -> None:
    """(element, whether compared with K first) of every 16-byte piece, in the rounds that kernel.py walks."""
    k, full = 8 * pieces, 8 * pieces // config.round
    firsts = [warp * config.run * 32 + lane * 8 for warp in range(config.warps) for lane in range(4)]
    steps = [config.distance(u) for u in range(config.unroll)]
    assert [config.distance(u + config.unroll) for u in range(config.unroll)] == [d + config.round for d in steps]
    unchecked = [s * config.round + first + step for s in range(full) for first in firsts for step in steps]
    left = k - full * config.round
    tail = [full * config.round + first + step for first in firsts for step in steps if left - first > step]
    assert Counter(unchecked + tail) == Counter(range(0, k, 8))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 9, 16])
@pytest.mark.parametrize(
    ("n", "k"),
    [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (5120, 25600), (2560, 9728), (64, 8)],
)
def test_candidates_are_accepted_distinct_and_not_too_many(n: int, k: int, m: int) -> None:
    problem = Problem(n=n, k=k, epilogue=Epilogue.RESIDUAL, output=DType.FP32)
    found = KERNEL.candidates(problem, m)
    assert 10 <= len(set(found)) == len(found) <= 16
    assert all(refuses(config, problem, m) is None for config in found)
    assert all(KERNEL.config_from(KERNEL.params_of(config)) == config for config in found)
    assert len({config.tiles for config in found}) >= 4
    assert any(config.run > 1 for config in found)


@pytest.mark.parametrize(("n", "rows"), [(4096, 32), (5120, 40), (6144, 48)])
def test_candidates_for_a_small_weight_begin_with_even_work(n: int, rows: int) -> None:
    """128 blocks on 132 SMs, one each, or a divisor of their rows: no SM has more than 3 % above the mean."""
    first = KERNEL.candidates(Problem(n=n, k=4096), 8)[0]
    assert rows % first.rows == 0
    groups = -(-n // first.rows)
    assert -(-groups // 132) * 132 * first.rows / n < 1.04


def test_candidates_count_the_sms_of_the_device() -> None:
    h200 = Problem(n=5120, k=5120, device=device.product("h200"))
    assert KERNEL.candidates(h200, 8) == KERNEL.candidates(replace(h200, device=None), 8)
    halved = replace(h200, device=replace(device.product("h200"), sm_count=66))
    assert KERNEL.candidates(halved, 8) != KERNEL.candidates(h200, 8)


def test_one_binary_for_every_shape_and_half_of_m() -> None:
    def spec(m: int, n: int = 4096, k: int = 4096) -> Spec:
        return host._spec(SPEC.config, Problem(n=n, k=k), m, pdl=True)

    assert spec(1) == spec(8) == spec(3, 151936, 25600) != spec(9) == spec(16)


def test_the_registry() -> None:
    assert "bf16_mma" in kernels.stems()
    assert kernels.get("bf16_mma") is KERNEL
    assert kernels.refuses(KernelConfig.of("bf16_mma", PARAMS), PROBLEM, 1) is None


@pytest.mark.parametrize("absent", ["cutlass", "cutlass.cute.nvgpu.warp", "tvm_ffi", "cuda.bindings.driver"])
def test_an_absent_dsl_is_a_reason_with_the_original_error(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", exc_type=ImportError)
    pytest.importorskip("tvm_ffi", exc_type=ImportError)
    monkeypatch.setitem(sys.modules, absent, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "skinny_core.kernels.bf16_mma.kernel", raising=False)
    monkeypatch.delattr(bf16_mma, "kernel", raising=False)
    cute_objects.availability.cache_clear()
    try:
        ok, error = KERNEL.availability()
        assert (ok, absent in error) == (False, True), error
        with pytest.raises(KernelUnavailableError, match=r"skinny-core\[cute\]") as caught:
            KERNEL.compile(KERNEL.config_from(PARAMS), PROBLEM, 1, index=0, prewait=False)
        assert error in caught.value.what
    finally:
        cute_objects.availability.cache_clear()
        sys.modules.pop("skinny_core.kernels.bf16_mma.kernel", None)


@pytest.mark.parametrize(
    "change",
    [{"m_tiles": 2}, {"dtype": "fp16"}, {"output": "fp32"}, {"residual": True}, {"pdl": False}, {"prewait": True}],
)
def test_the_cache_key_holds_everything_the_code_depends_on(change: dict[str, object]) -> None:
    h200, h100 = device.product("h200"), device.product("h100-sxm")
    key = cute_objects._cache_key(host.SOURCE, SPEC, h200)
    assert cute_objects._cache_key(host.SOURCE, replace(SPEC, **change), h200) != key  # type: ignore[arg-type]
    for name, other in (("warps", 4), ("tiles", 2), ("unroll", 2), ("run", 2), ("blocks_per_sm", 1), ("l2", 256)):
        changed = replace(SPEC, config=replace(SPEC.config, **{name: other}))
        assert cute_objects._cache_key(host.SOURCE, changed, h200) != key
    assert cute_objects._cache_key(host.SOURCE, SPEC, h100) != key
    assert "nvidia-cutlass-dsl=" in key


def test_the_cache_key_holds_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cute_objects.cache, "source_digest", lambda *names: seen.extend(names) or "digest")
    assert host.SOURCE.digest() == "digest"
    folder = f"kernels/{host.STEM}"
    assert set(seen) == {*(f"{folder}/{name}.py" for name in ("kernel", "config", "host")), "kernels/cute_objects.py"}

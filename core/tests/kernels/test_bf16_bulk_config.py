"""The predicates of `bf16_bulk` and how it deals a problem out: nothing lost, nothing uneven, everything fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core import kernels
from skinny_core.device import DeviceKey
from skinny_core.errors import ConfigError, KernelRefusedError
from skinny_core.kernels import cute_objects
from skinny_core.kernels.bf16_bulk import config as predicates
from skinny_core.kernels.bf16_bulk import host
from skinny_core.kernels.bf16_bulk.config import ALLOWED, MAX_STAGES, MIN_STAGES, BulkConfig, Shape, refuses
from skinny_core.kernels.bf16_bulk.host import KERNEL
from skinny_core.problem import DType, Epilogue, Problem, WeightScheme

PARAMS = {
    "rows": 32, "cols": 512, "warps": 8, "blocks_per_sm": 1, "resident": 0, "interleaved": 0,
    "evict_first": 0, "trigger": 0,
}  # fmt: skip
PROBLEM = Problem(n=4096, k=4096)
CONFIGS = st.builds(BulkConfig, **{name: st.sampled_from(values) for name, values in ALLOWED.items()})
H200 = DeviceKey((9, 0), 132, 62914560, "141gb")


def test_params_round_trip() -> None:
    assert KERNEL.params_of(KERNEL.config_from(PARAMS)) == PARAMS
    assert KERNEL.config_from({"rows": 32, "cols": 512, "warps": 8}) == KERNEL.config_from(PARAMS)
    assert kernels.get("bf16_bulk") is KERNEL


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"row": 1}, "unknown config key 'row'"),
        ({"rows": 8}, "rows is 8"),
        ({"cols": 500}, "cols is 500"),
        ({"warps": True}, "warps is True"),
        ({"blocks_per_sm": 0}, "blocks_per_sm is 0"),
        ({"resident": 2}, "resident is 2"),
    ],
)
def test_config_errors_name_the_key_and_what_is_allowed(change: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KERNEL.config_from(PARAMS | change)
    assert says in caught.value.what
    assert caught.value.fix.startswith("use")


@pytest.mark.parametrize("missing", ["rows", "cols", "warps"])
def test_missing_key(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{missing}' is missing"):
        KERNEL.config_from({k: v for k, v in PARAMS.items() if k != missing})


@pytest.mark.parametrize(
    ("problem", "config", "m", "says"),
    [
        (replace(PROBLEM, weight=WeightScheme.FP16), {}, 1, "weight fp16 with activation bf16"),
        (replace(PROBLEM, output=DType.FP16), {}, 1, "output fp16"),
        (PROBLEM, {}, 0, "M = 0"),
        (PROBLEM, {}, 33, "M = 33"),
        (replace(PROBLEM, k=4100), {}, 1, "K = 4100"),
        (replace(PROBLEM, k=-8), {}, 1, "K = -8"),
        (replace(PROBLEM, n=0), {}, 1, "N = 0"),
        (replace(PROBLEM, n=2**31), {}, 1, "N = 2147483648"),
        (replace(PROBLEM, n=4097, epilogue=Epilogue.SILU_MUL), {}, 1, "two rows for each output"),
        (PROBLEM, {"cols": 256, "warps": 16}, 1, "multiple of 32 for each of 16 warps"),
        (replace(PROBLEM, k=264), {}, 1, "K = 264 has fewer"),
        (PROBLEM, {"cols": 2048, "rows": 16, "blocks_per_sm": 2}, 1, "registers wanted"),
        (replace(PROBLEM, n=151936), {"cols": 1024, "rows": 64}, 1, "1 stages fit"),
        (PROBLEM, {"resident": 1}, 16, "2 stages fit"),
        (replace(PROBLEM, device=DeviceKey((8, 9), 128, 75497472, "24gb")), {}, 1, "capability 8.9: not compiled for"),
    ],
)
def test_refusals_say_which_number(problem: Problem, config: dict[str, int], m: int, says: str) -> None:
    made = KERNEL.config_from(PARAMS | config)
    assert says in (KERNEL.refuses(made, problem, m) or "")
    with pytest.raises(KernelRefusedError, match="bf16_bulk cannot run"):
        KERNEL.compile(made, problem, m, index=0, prewait=False)


@given(
    config=CONFIGS, m=st.integers(1, 32), n=st.integers(1, 400000), k=st.integers(1, 4000).map(lambda v: 8 * v),
    epilogue=st.sampled_from(Epilogue), sms=st.integers(1, 200),
)  # fmt: skip
def test_what_is_accepted_fits_and_covers_every_output_once(
    config: BulkConfig, m: int, n: int, k: int, epilogue: Epilogue, sms: int
) -> None:
    device = replace(H200, sm_count=sms)
    problem = Problem(n=n, k=k, epilogue=epilogue, device=device)
    if refuses(config, problem, m) is not None:
        return
    shared = config.shared_bytes((9, 0))
    shape = Shape.of(config, problem, m, shared, sms)
    parts = n // shape.outputs
    assert shape.group * parts <= config.rows, "a stage has rows for a whole group"
    assert MIN_STAGES <= shape.stages <= MAX_STAGES
    tiles = predicates.m_tiles(m)
    ring = 2 * shape.stages * parts * shape.group * (config.cols + predicates.PAD)
    assert predicates.fixed_bytes(config, tiles) + 2 * shape.x_elements + ring <= shared
    assert config.blocks_per_sm * (shared + 1024) <= 228 << 10
    if config.resident:
        assert shape.x_elements >= m * predicates.x_row(k)
    # As the kernel deals them out.
    own, longer = shape.arguments[:2]
    edges = [block * own + min(block, longer) for block in range(shape.grid + 1)]
    assert (edges[0], edges[-1]) == (0, shape.outputs)
    sizes = {b - a for a, b in itertools.pairwise(edges)}
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert parts * shape.outputs * k < 2**63


SMALL = DeviceKey((12, 0), 170, 100663296, "32gb")
SLICE = DeviceKey((9, 0), 16, 15728640, "18gb")
UNKNOWN = DeviceKey((8, 9), 128, 75497472, "24gb")


@pytest.mark.parametrize(
    ("key", "config", "problem", "m", "says"),
    [
        (SMALL, BulkConfig(16, 512, 4, 2, 1), PROBLEM, 4, "stages fit in shared memory"),
        (SLICE, BulkConfig(32, 2048, 2, 2, 1), Problem(n=1024, k=4096), 1, "stages fit in shared memory"),
        (UNKNOWN, BulkConfig(32, 512, 8), PROBLEM, 1, "not compiled for"),
    ],
)
def test_a_config_is_judged_on_the_device_that_runs_it(
    key: DeviceKey, config: BulkConfig, problem: Problem, m: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no stage there is no barrier to wait at: accepted for an H200, it would hang elsewhere."""
    if key is not SLICE:
        assert refuses(config, problem, m) is None, "accepted where no device is named"
    for elsewhere in (problem, replace(problem, device=H200)):
        with pytest.raises(KernelRefusedError, match=says):
            KERNEL.prepare(config, elsewhere, m, key, prewait=True)
        with pytest.raises(KernelRefusedError, match=says):
            KERNEL.prepared(config, elsewhere, m, key, prewait=True)
        monkeypatch.setattr(host.device, "current_key", lambda index=None: key)
        if KERNEL.availability()[0]:
            with pytest.raises(KernelRefusedError, match="cannot run"):
                KERNEL.compile(config, elsewhere, m, index=0, prewait=True)


@given(k=st.integers(1, 10**5).map(lambda v: 8 * v))
def test_rows_of_pieces_fall_into_different_banks(k: int) -> None:
    """Two rows that one quarter of a warp reads together are half a bank cycle (64 of 128 bytes) apart."""
    assert 2 * predicates.x_row(k) % 128 == 64
    assert predicates.x_row(k) >= k
    assert all(2 * (cols + predicates.PAD) % 128 == 64 for cols in ALLOWED["cols"])


@pytest.mark.parametrize("m", [1, 4, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2560, 9728), (151936, 2560), (5120, 25600), (2048, 768)])
def test_candidates(n: int, k: int, m: int) -> None:
    problem = Problem(n=n, k=k, device=H200)
    found = KERNEL.candidates(problem, m)
    assert len(found) >= 8
    assert len(set(found)) == len(found)
    assert all(refuses(config, problem, m) is None for config in found)
    assert all(KERNEL.config_from(KERNEL.params_of(config)) == config for config in found)


def test_the_cache_key_holds_everything_the_code_depends_on() -> None:
    spec = host._spec(BulkConfig(**PARAMS), PROBLEM, 8, (9, 0), pdl=True)
    key = cute_objects._cache_key(host.SOURCE, spec, H200)
    changes: list[dict[str, object]] = [
        {"m_tiles": 2}, {"dtype": "fp16"}, {"output": "fp32"}, {"epilogue": "add"}, {"shared_bytes": 1024},
        {"pdl": False}, {"prewait": True}, {"config": BulkConfig(16, 512, 8)},
    ]  # fmt: skip
    keys = {cute_objects._cache_key(host.SOURCE, replace(spec, **change), H200) for change in changes}  # type: ignore[arg-type]
    assert len(keys | {key}) == len(changes) + 1
    shapes = [replace(PROBLEM, n=8, k=1024), replace(PROBLEM, device=H200)]
    assert {host._spec(BulkConfig(**PARAMS), p, m, (9, 0), pdl=True) for p in shapes for m in (1, 8)} == {spec}

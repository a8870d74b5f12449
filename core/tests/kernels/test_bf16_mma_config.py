"""The predicates of `bf16_mma`: what a plan may ask for, why a config is refused; every element is read once."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core import device, kernels
from skinny_core.errors import ConfigError, KernelRefusedError, KernelUnavailableError
from skinny_core.kernels import bf16_mma, cute_objects
from skinny_core.kernels.bf16_mma import config as predicates
from skinny_core.kernels.bf16_mma import host
from skinny_core.kernels.bf16_mma.config import ALLOWED, MAX_TOKENS, STATIC_SHARED, MmaConfig, Spec, refuses, spec_of
from skinny_core.kernels.bf16_mma.host import KERNEL
from skinny_core.problem import DType, Epilogue, KernelConfig, Problem, WeightScheme

PARAMS = {"warps": 8, "parts": 2, "loads": 4, "unroll": 2, "ahead": 2, "blocks": 2, "pdl": 0}
PROBLEM = Problem(n=4096, k=4096)
GATED = replace(PROBLEM, epilogue=Epilogue.SILU_MUL)
CONFIGS = st.builds(MmaConfig, **{name: st.sampled_from(values) for name, values in ALLOWED.items()})
SPEC = Spec(MmaConfig(**PARAMS), 4096, 1, "bf16", "bf16", "none", pdl=False, prewait=False)


def test_params_round_trip() -> None:
    assert KERNEL.params_of(KERNEL.config_from(PARAMS)) == PARAMS
    short = {"warps": 8, "parts": 2, "loads": 4, "unroll": 2}
    assert KERNEL.config_from(short) == KERNEL.config_from(PARAMS | {"ahead": 1, "blocks": 1})


def test_every_key_has_allowed_values() -> None:
    assert list(ALLOWED) == [field.name for field in fields(MmaConfig)] == list(PARAMS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"warp": 1}, "unknown config key 'warp'"),
        ({"tiles": 4}, "unknown config key 'tiles'"),
        ({"warps": 33}, "warps is 33"),
        ({"warps": True}, "warps is True"),
        ({"parts": 3}, "parts is 3"),
        ({"parts": 16}, "parts is 16"),
        ({"loads": 0}, "loads is 0"),
        ({"loads": 2.0}, "loads is 2.0"),
        ({"unroll": 3}, "unroll is 3"),
        ({"ahead": -1}, "ahead is -1"),
        ({"blocks": 9}, "blocks is 9"),
        ({"pdl": 2}, "pdl is 2"),
        ({"pdl": True}, "pdl is True"),
    ],
)
def test_config_errors_name_the_key_and_what_is_allowed(change: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KERNEL.config_from(PARAMS | change)
    assert says in caught.value.what
    assert caught.value.fix.startswith("use")


@pytest.mark.parametrize("missing", ["warps", "parts", "loads", "unroll"])
def test_missing_key(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{missing}' is missing"):
        KERNEL.config_from({k: v for k, v in PARAMS.items() if k != missing})


@pytest.mark.parametrize(
    ("problem", "config", "m", "says"),
    [
        (replace(PROBLEM, weight=WeightScheme.FP16), {}, 1, "weight fp16 with activation bf16"),
        (replace(PROBLEM, activation=DType.FP32), {}, 1, "activation fp32"),
        (replace(PROBLEM, output=DType.FP16), {}, 1, "output fp16"),
        (replace(GATED, n=4097), {}, 1, "N = 4097: a gated product has two rows for each output"),
        (GATED, {"loads": 3}, 1, "loads = 3: a gated product needs as many for up as for gate"),
        (GATED, {"loads": 1}, 1, "loads = 1: a gated product"),
        (PROBLEM, {}, 0, "M = 0"),
        (PROBLEM, {"loads": 1}, 33, "M = 33: needs 1 to 32"),
        (replace(PROBLEM, k=4100), {}, 1, "K = 4100"),
        (replace(PROBLEM, k=0), {}, 1, "K = 0"),
        (replace(PROBLEM, k=2**31), {}, 1, "K = 2147483648"),
        (replace(PROBLEM, n=0), {}, 1, "N = 0"),
        (replace(PROBLEM, n=2**31), {}, 1, "N = 2147483648"),
        (PROBLEM, {"ahead": 4}, 1, "ahead = 4: must divide unroll = 2"),
        (PROBLEM, {"unroll": 1}, 1, "ahead = 2: must divide unroll = 1"),
        (PROBLEM, {"warps": 16, "blocks": 3}, 1, "3 blocks of 512 threads: at most 1024 threads together"),
        (PROBLEM, {"warps": 16, "parts": 1, "blocks": 1}, 24, "partial sums of 55296 bytes: at most 49152"),
        (PROBLEM, {"warps": 1, "blocks": 1}, 17, "10 outputs per thread: at most 8"),
        (PROBLEM, {"unroll": 8}, 1, "about 186 registers: 2 blocks of 8 warps have 128 each"),
        (PROBLEM, {"warps": 5, "unroll": 8}, 1, "about 186 registers: 2 blocks of 5 warps have 168 each"),
        (replace(PROBLEM, k=9728, output=DType.FP32), {"warps": 2, "parts": 1, "loads": 1}, 1, "304 additions in a"),
        (replace(PROBLEM, k=9728), {"warps": 2, "parts": 1, "loads": 1}, 1, None),
        (replace(PROBLEM, k=8), {}, 1, None),
        (replace(PROBLEM, n=1, k=8), {"blocks": 1}, 16, None),
        (replace(PROBLEM, epilogue=Epilogue.BIAS, output=DType.FP32), {"blocks": 1}, 16, None),
        (replace(GATED, n=2), {}, 4, None),
        (PROBLEM, {"loads": 1, "ahead": 1, "blocks": 1}, 32, None),
    ],
)  # fmt: skip
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
    config=CONFIGS, m=st.integers(-1, 40), n=st.integers(-1, 2**32), k=st.integers(-8, 2**32),
    activation=st.sampled_from(DType), weight=st.sampled_from(WeightScheme), output=st.sampled_from(DType),
)  # fmt: skip
def test_a_refusal_is_a_sentence_and_acceptance_means_it_fits(
    config: MmaConfig, m: int, n: int, k: int, activation: DType, weight: WeightScheme, output: DType
) -> None:
    problem = Problem(n=n, k=k - k % 8, activation=activation, weight=weight, output=output)
    _fits(config, problem, m)


@given(config=CONFIGS, m=st.integers(1, 32), pieces=st.integers(1, 4000), epilogue=st.sampled_from(Epilogue))
def test_acceptance_means_it_fits_for_problems_of_a_model(
    config: MmaConfig, m: int, pieces: int, epilogue: Epilogue
) -> None:
    """The same where most problems are accepted, so that the config decides."""
    _fits(config, Problem(n=4096, k=8 * pieces, epilogue=epilogue), m)


def _fits(config: MmaConfig, problem: Problem, m: int) -> None:
    why = refuses(config, problem, m)
    if why is not None:
        assert why == str(why).strip() != ""
        return
    assert 1 <= m <= MAX_TOKENS
    assert problem.weight.value == problem.activation.value != "fp32"
    spec = spec_of(config, problem, m, pdl=True)
    assert spec.pdl is bool(config.pdl)
    assert m <= spec.columns < m + config.load_rows, "every activation row has a column, and no group is empty"
    assert spec.groups <= 2 * spec.tiles <= spec.groups + 1, "two groups a tile"
    assert config.load_rows * config.parts == 8
    assert spec.block_outputs * spec.output_rows == config.rows, "gate and up share a block evenly"
    assert spec.shared_bytes <= STATIC_SHARED
    assert spec.pitch >= config.rows, "the activation rows of the partial sums do not overlap"
    assert spec.shared_bytes == 4 * spec.pitch * spec.columns * config.warps
    assert config.threads * spec.outputs >= spec.block_outputs * m, "every output has a thread"
    assert config.threads * config.blocks <= 1024
    used = predicates.registers(config, spec.groups, tail=spec.tail)
    assert used <= predicates.register_limit(config) <= 255
    assert used * config.threads * config.blocks <= 65536
    assert problem.n + config.rows < 2**31, "row numbers are 32-bit"
    assert problem.k + 2 * config.unroll * config.stride < 2**31, "element numbers within a row are 32-bit"


def test_registers_are_dealt_out_by_warps_to_four_parts_of_an_sm() -> None:
    """Five warps take as much as eight: one part of the SM holds two of them."""
    shape = MmaConfig(5, 2, 1, 1)
    assert predicates.register_limit(shape) == predicates.register_limit(replace(shape, warps=8)) == 255
    assert predicates.register_limit(replace(shape, blocks=3)) == 128
    assert predicates.register_limit(replace(shape, warps=8, blocks=4)) == 64
    assert predicates.register_limit(replace(shape, warps=10)) == 168


@dataclass(frozen=True)
class _Request:
    """step: its number. checked: whether this lane's piece is compared with K first."""

    step: int
    checked: bool


def _requests(spec: Spec, depth: int) -> Iterator[_Request]:
    """The steps of one operand in the order in which kernel.py requests them, with a ring of `depth` steps; asserts
    that each is multiplied once, from the registers it was loaded to."""
    unroll, ring = spec.config.unroll, {}
    multiplied = 0

    def request(step: int, *, last: bool) -> _Request:
        ring[step % depth] = step
        return _Request(step, last and spec.tail and step == spec.steps - 1)

    def multiply() -> None:
        nonlocal multiplied
        assert ring[multiplied % depth] == multiplied
        multiplied += 1

    for u in range(min(depth, spec.steps)):
        yield request(u, last=True)
    for r in range(spec.rounds):
        for u in range(unroll):
            multiply()
            yield request(r * unroll + u + depth, last=False)
    base = spec.rounds * unroll
    for u in range(base, spec.steps):
        multiply()
        if u + depth < spec.steps:
            yield request(u + depth, last=True)
    assert multiplied == spec.steps


@given(
    config=CONFIGS.filter(lambda c: c.unroll % c.ahead == 0), pieces=st.one_of(st.integers(1, 64), st.integers(1, 4000))
)
def test_every_piece_of_a_row_is_read_once_and_nothing_behind_it(config: MmaConfig, pieces: int) -> None:
    """Both operands, in the steps and rounds that kernel.py walks."""
    spec = replace(SPEC, config=config, k=8 * pieces)
    firsts = [
        warp * config.span + part * 32 + t * 8
        for warp in range(config.warps)
        for part in range(config.parts)
        for t in range(4)
    ]
    assert len(firsts) * 8 == config.stride, "one step of all warps is contiguous"
    for depth in (config.unroll, config.ahead):
        read = Counter()
        for request in _requests(spec, depth):
            at = [first + request.step * config.stride for first in firsts]
            inside = [first for first in at if first < spec.k]
            assert request.checked or len(inside) == len(at), "what is not compared with K lies before it"
            read.update(inside)
        assert read == Counter(range(0, spec.k, 8))


SIZES = [(4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (5120, 25600), (2560, 9728), (64, 8)]


@pytest.mark.parametrize("m", [1, 3, 8, 16])
@pytest.mark.parametrize("epilogue", [Epilogue.RESIDUAL, Epilogue.SILU_MUL])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_candidates_are_accepted_distinct_and_not_too_many(n: int, k: int, epilogue: Epilogue, m: int) -> None:
    problem = Problem(n=n, k=k, epilogue=epilogue, output=DType.FP32)
    found = KERNEL.candidates(problem, m)
    assert 4 <= len(set(found)) == len(found) <= 40
    assert all(refuses(config, problem, m) is None for config in found)
    assert all(KERNEL.config_from(KERNEL.params_of(config)) == config for config in found)
    _check_pdl(found, problem)
    parts = {config.parts for config in found}
    assert 2 in parts, "full lines"
    assert min(parts) > 1, "half lines are slower at any M"
    assert max(parts) == (8 if m <= 2 else 4 if m <= 4 else 2), "as many as cost no product that memory does not hide"


def _check_pdl(found: tuple[MmaConfig, ...], problem: Problem) -> None:
    """Ordinary launches; for a weight below 6 MB, where an early start was seen to pay, each of them with `pdl` too."""
    ordinary = [config for config in found if not config.pdl]
    early = [replace(config, pdl=0) for config in found if config.pdl]
    assert early == (ordinary if 2 * problem.n * problem.k < 6_000_000 else [])


@pytest.mark.parametrize(("n", "small"), [(732, True), (733, False)])
def test_small_weights_race_programmatic_launch_too(n: int, small: bool) -> None:
    assert any(config.pdl for config in KERNEL.candidates(Problem(n=n, k=4096), 1)) is small


def test_one_spec_for_every_n_and_the_m_of_as_many_groups() -> None:
    def spec(m: int, n: int = 4096, k: int = 4096, epilogue: Epilogue = Epilogue.NONE) -> Spec:
        return KERNEL.spec(SPEC.config, Problem(n=n, k=k, epilogue=epilogue), m, pdl=True)

    assert spec(1) == spec(4) == spec(3, 151936) != spec(5) == spec(8)
    assert spec(1) != spec(1, k=4104)
    assert spec(1, epilogue=Epilogue.BIAS) == spec(1, epilogue=Epilogue.RESIDUAL) != spec(1)
    assert KERNEL.name(spec(3)) == "bf16_mma-m4-k4096"


def test_a_launch_passes_m_and_the_outputs() -> None:
    call = KERNEL.call(SPEC, GATED, 3, 132)
    assert (call.sizes, call.last) == ((3, 2048), ())
    assert KERNEL.call(SPEC, PROBLEM, 3, 132).sizes == (3, 4096)


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


CHANGES: list[dict[str, object]] = [
    {"k": 4104}, {"groups": 2}, {"dtype": "fp16"}, {"output": "fp32"}, {"epilogue": "add"}, {"pdl": True},
    {"prewait": True},
]  # fmt: skip
OTHERS = {"warps": 4, "parts": 4, "loads": 2, "unroll": 4, "ahead": 1, "blocks": 1, "pdl": 1}


def test_the_cache_key_holds_everything_the_code_depends_on() -> None:
    h200, h100 = device.product("h200"), device.product("h100-sxm")
    assert {name for change in CHANGES for name in change} | {"config"} == {field.name for field in fields(Spec)}
    assert list(OTHERS) == [field.name for field in fields(MmaConfig)]
    specs = [SPEC, *(replace(SPEC, **change) for change in CHANGES)]  # type: ignore[arg-type]
    specs += [replace(SPEC, config=replace(SPEC.config, **{name: value})) for name, value in OTHERS.items()]
    keys = [cute_objects._cache_key(host.SOURCE, spec, h200) for spec in specs]
    assert len(set(keys)) == len(specs) == 1 + len(CHANGES) + len(OTHERS)
    assert cute_objects._cache_key(host.SOURCE, SPEC, h100) not in keys
    assert "nvidia-cutlass-dsl=" in keys[0]


def test_the_cache_key_holds_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cute_objects.cache, "source_digest", lambda *names: seen.extend(names) or "digest")
    assert host.SOURCE.digest() == "digest"
    folder = f"kernels/{host.STEM}"
    shared = "kernels/contract.py", "kernels/cute_objects.py"
    assert set(seen) == {f"{folder}/kernel.py", f"{folder}/config.py", *shared}, "not what only the host does"


def test_long_rings_are_for_the_device_that_they_were_swept_on() -> None:
    long = {"warps": 4, "parts": 2, "loads": 5, "unroll": 4, "ahead": 2, "blocks": 2}
    config = KERNEL.config_from(long)
    said = {
        name: KERNEL.refuses(config, Problem(n=4096, k=4096, device=device.product(name)), 1)
        for name in ("h200", "b200")
    }
    assert said == {"h200": None, "b200": "20 loads in flight: at most 16 on devices other than capability 9.0"}
    assert KERNEL.refuses(config, Problem(n=4096, k=4096), 1) is None, "a shape alone is for no device"


def test_blocks_limit_the_registers_only_where_they_were_measured() -> None:
    config = MmaConfig(8, 2, 4, 2, 2, 2)
    here, elsewhere = (KERNEL.spec(config, PROBLEM, 16, pdl=False, capability=c) for c in ((9, 0), (10, 0)))
    assert (here.config, elsewhere.config) == (config, replace(config, blocks=1))
    if KERNEL.availability()[0]:
        assert ".maxntid 256," in KERNEL.cross_compile(config, PROBLEM, 16, "sm_100a").ptx
        assert ".maxntid 512," in KERNEL.cross_compile(config, PROBLEM, 16, "sm_90a").ptx

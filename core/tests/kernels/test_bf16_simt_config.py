"""The predicates of `bf16_simt`: what a plan may ask for, why a config is refused; every element is read once."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skinny_core import kernels
from skinny_core.errors import ConfigError, KernelRefusedError, KernelUnavailableError, UnknownKernelError
from skinny_core.kernels import bf16_simt, cute_objects
from skinny_core.kernels.bf16_simt import config as predicates
from skinny_core.kernels.bf16_simt import host
from skinny_core.kernels.bf16_simt.config import ALLOWED, SM_REGISTERS, SimtConfig, Spec, refuses
from skinny_core.kernels.bf16_simt.host import KERNEL
from skinny_core.problem import MAX_M, DType, Epilogue, KernelConfig, Problem, WeightScheme

PARAMS = {"threads": 128, "rows": 2, "chunks": 4, "blocks_per_sm": 0, "l2": 0, "pdl": 0}
PROBLEM = Problem(n=4096, k=4096)
CONFIGS = st.builds(SimtConfig, **{name: st.sampled_from(values) for name, values in ALLOWED.items()})
KS = st.integers(1, 4000).map(lambda pieces: 8 * pieces)


def test_params_round_trip() -> None:
    assert KERNEL.params_of(KERNEL.config_from(PARAMS)) == PARAMS
    assert KERNEL.config_from({"threads": 128, "rows": 2, "chunks": 4}) == KERNEL.config_from(PARAMS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"thread": 1}, "unknown config key 'thread'"),
        ({"threads": 100}, "threads is 100"),
        ({"threads": True}, "threads is True"),
        ({"rows": 3}, "rows is 3"),
        ({"rows": 2.0}, "rows is 2.0"),
        ({"chunks": 0}, "chunks is 0"),
        ({"chunks": -1}, "chunks is -1"),
        ({"blocks_per_sm": 7}, "blocks_per_sm is 7"),
        ({"l2": 64}, "l2 is 64"),
        ({"pdl": 2}, "pdl is 2"),
        ({"pdl": True}, "pdl is True"),
    ],
)
def test_config_errors_name_the_key_and_what_is_allowed(change: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KERNEL.config_from(PARAMS | change)
    assert says in caught.value.what
    assert caught.value.fix.startswith("use")


@pytest.mark.parametrize("missing", ["threads", "rows", "chunks"])
def test_missing_key(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"key '{missing}' is missing"):
        KERNEL.config_from({k: v for k, v in PARAMS.items() if k != missing})


@pytest.mark.parametrize(
    ("problem", "config", "m", "says"),
    [
        (replace(PROBLEM, weight=WeightScheme.FP16), {}, 1, "weight fp16 with activation bf16"),
        (replace(PROBLEM, activation=DType.FP32), {}, 1, "activation fp32"),
        (replace(PROBLEM, output=DType.FP16), {}, 1, "output fp16"),
        (PROBLEM, {}, 0, "M = 0"),
        (PROBLEM, {}, 17, "M = 17"),
        (replace(PROBLEM, k=4100), {}, 1, "K = 4100"),
        (replace(PROBLEM, k=0), {}, 1, "K = 0"),
        (replace(PROBLEM, k=-8), {}, 1, "K = -8"),
        (replace(PROBLEM, k=2**31), {}, 1, "K = 2147483648"),
        (replace(PROBLEM, n=0), {}, 1, "N = 0"),
        (replace(PROBLEM, n=2**31), {}, 1, "N = 2147483648"),
        (PROBLEM, {"rows": 8, "chunks": 1}, 16, "M * rows = 128: at most 32"),
        (replace(PROBLEM, k=512), {"threads": 32, "rows": 8, "chunks": 2}, 4, None),
        (PROBLEM, {"rows": 8}, 1, "144 fragment registers"),
        (PROBLEM, {"threads": 1024, "rows": 4, "chunks": 1}, 8, "1024 threads have 64 each"),
        (PROBLEM, {"chunks": 2, "blocks_per_sm": 8}, 1, "needs a whole row in registers: 4 chunks, config has 2"),
        (PROBLEM, {"threads": 512, "rows": 1, "chunks": 1, "blocks_per_sm": 6}, 1, "do not fit on one SM"),
        (PROBLEM, {"chunks": 5}, 1, "K = 4096 has only 4 with 128 threads"),
    ],
)  # fmt: skip
def test_refusals_say_which_number(problem: Problem, config: dict[str, int], m: int, says: str | None) -> None:
    made = KERNEL.config_from(PARAMS | config)
    why = KERNEL.refuses(made, problem, m)
    if says is None:
        assert why is None
        return
    assert says in (why or "")
    with pytest.raises(KernelRefusedError, match="bf16_simt cannot run"):
        KERNEL.compile(made, problem, m, index=0, prewait=False)


@given(
    config=CONFIGS, m=st.integers(-1, 20), n=st.integers(-1, 2**32), k=st.integers(-8, 2**32),
    activation=st.sampled_from(DType), weight=st.sampled_from(WeightScheme), output=st.sampled_from(DType),
)  # fmt: skip
def test_a_refusal_is_a_sentence_and_acceptance_means_it_fits(
    config: SimtConfig, m: int, n: int, k: int, activation: DType, weight: WeightScheme, output: DType
) -> None:
    problem = Problem(n=n, k=k - k % 8, activation=activation, weight=weight, output=output)
    why = refuses(config, problem, m)
    if why is not None:
        assert why == str(why).strip() != ""
        return
    assert 1 <= m <= MAX_M
    assert weight.value == activation.value != "fp32"
    warps = config.threads // 32
    assert 2 * warps * m * config.rows * 4 <= 48 * 1024, "static shared memory"
    assert m * config.rows <= config.threads, "one thread per output"
    assert predicates.fragment_registers(config, k, m) + m * config.rows < SM_REGISTERS // config.threads
    assert -(-n // config.rows) * config.rows < 2**31, "row numbers are 32-bit"
    assert config.threads * 8 * (config.chunks + 1) + problem.k < 2**31, "element numbers within a row are 32-bit"


def _loads(spec: Spec) -> Iterator[tuple[int, bool]]:
    """(first element, whether read without a comparison) of every 16-byte piece of a row, as kernel.py loads them."""
    step = spec.config.threads * 8
    firsts = range(0, step, 8)

    def load(at: int, chunks: int, full: int) -> Iterator[tuple[int, bool]]:
        for c in range(chunks):
            for first in firsts:
                if c < full or first + at + c * step < spec.k:
                    yield first + at + c * step, c < full

    yield from load(0, spec.chunks, spec.full_chunks)
    if spec.resident:
        return
    for s in range(1, spec.full_stages):
        yield from load(s * spec.chunks * step, spec.chunks, spec.chunks)
    yield from load(spec.full_stages * spec.chunks * step, spec.tail_chunks, spec.tail_full)


@given(config=CONFIGS, k=KS)
def test_every_piece_of_a_row_is_read_once_and_nothing_behind_it(config: SimtConfig, k: int) -> None:
    assume(refuses(replace(config, rows=1), Problem(n=64, k=k), 1) is None)
    spec = Spec(replace(config, rows=1), 1, k, "bf16", "bf16", residual=False, pdl=True, prewait=False)
    assert Counter(at for at, _ in _loads(spec)) == Counter(range(0, k, 8))
    assert all(at < k for at, unchecked in _loads(spec) if unchecked)
    assert spec.resident or spec.full_stages >= 1, "the first fragment of the streaming form is read unchecked"


@pytest.mark.parametrize("m", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(
    ("n", "k"),
    [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288), (151936, 4096), (5120, 25600), (2560, 9728), (64, 8)],
)
def test_candidates_are_accepted_distinct_and_there_are_some(n: int, k: int, m: int) -> None:
    problem = Problem(n=n, k=k, epilogue=Epilogue.RESIDUAL, output=DType.FP32)
    found = KERNEL.candidates(problem, m)
    assert len(set(found)) == len(found)
    assert all(refuses(config, problem, m) is None for config in found)
    assert all(KERNEL.config_from(KERNEL.params_of(config)) == config for config in found)
    assert found or k == 8 or m == 16
    early = [replace(config, pdl=0) for config in found if config.pdl]
    ordinary = [config for config in found if not config.pdl]
    assert early == (ordinary if 2 * n * k < 6_000_000 else []), "from 8 MB on an ordinary launch costs less"


def test_the_registry() -> None:
    assert {"bf16_simt", "bf16_stream"} <= set(kernels.stems())
    assert kernels.get("bf16_simt") is KERNEL
    assert kernels.refuses(KernelConfig.of("bf16_simt", PARAMS), PROBLEM, 1) is None
    with pytest.raises(UnknownKernelError, match=r"unknown kernel '\.\./bf16_simt'") as caught:
        kernels.get("../bf16_simt")
    assert "bf16_simt" in caught.value.fix


@pytest.mark.parametrize("absent", ["cutlass", "tvm_ffi", "cuda.bindings.driver"])
def test_an_absent_dsl_is_a_reason_with_the_original_error(absent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass", exc_type=ImportError)
    pytest.importorskip("tvm_ffi", exc_type=ImportError)
    monkeypatch.setitem(sys.modules, absent, None)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "skinny_core.kernels.bf16_simt.kernel", raising=False)
    monkeypatch.delattr(bf16_simt, "kernel", raising=False)
    cute_objects.availability.cache_clear()
    try:
        ok, error = KERNEL.availability()
        assert (ok, absent in error) == (False, True), error
        with pytest.raises(KernelUnavailableError, match=r"skinny-core\[cute\]") as caught:
            KERNEL.compile(KERNEL.config_from(PARAMS), PROBLEM, 1, index=0, prewait=False)
        assert error in caught.value.what
    finally:
        cute_objects.availability.cache_clear()
        sys.modules.pop("skinny_core.kernels.bf16_simt.kernel", None)


@pytest.mark.parametrize(
    "change",
    [
        {"m": 2},
        {"k": 4104},
        {"dtype": "fp16"},
        {"output": "fp32"},
        {"residual": True},
        {"pdl": False},
        {"prewait": True},
    ],
)
def test_the_cache_key_holds_everything_the_code_depends_on(change: dict[str, object]) -> None:
    from skinny_core.device import product

    spec = Spec(SimtConfig(**PARAMS), 1, 4096, "bf16", "bf16", residual=False, pdl=True, prewait=False)
    h200, h100 = product("h200"), product("h100-sxm")
    key = cute_objects._cache_key(host.SOURCE, spec, h200)
    assert cute_objects._cache_key(host.SOURCE, replace(spec, **change), h200) != key  # type: ignore[arg-type]
    for name, other in {"threads": 64, "rows": 1, "chunks": 2, "blocks_per_sm": 1, "l2": 128, "pdl": 1}.items():
        changed = replace(spec, config=replace(spec.config, **{name: other}))
        assert cute_objects._cache_key(host.SOURCE, changed, h200) != key
    assert cute_objects._cache_key(host.SOURCE, spec, h100) != key
    assert "nvidia-cutlass-dsl=" in key
    assert "apache-tvm-ffi=" in key


def test_the_cache_key_holds_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cute_objects.cache, "source_digest", lambda *names: seen.extend(names) or "digest")
    assert host.SOURCE.digest() == "digest"
    folder = f"kernels/{host.STEM}"
    shared = "kernels/contract.py", "kernels/cute_objects.py"
    assert set(seen) == {f"{folder}/kernel.py", f"{folder}/config.py", *shared}, "not what only the host does"

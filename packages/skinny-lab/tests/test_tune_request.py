"""What `skinny tune` measures: sites of a model, of a file, of a capture; in which order, and what races."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import Result

from skinny_core import device, kernels
from skinny_core.problem import DType, KernelConfig
from skinny_lab.bench.entrants import DEFAULT, Entrant
from skinny_lab.bench.tuning import problem_of
from skinny_lab.explain.target import RequestError
from skinny_lab.tune import order, request
from skinny_lab.tune.request import Site

Skinny = Callable[..., Result]
H200 = device.product("h200")


def test_a_model_has_its_fused_projections_at_that_tp() -> None:
    whole, half = request.from_model("Qwen/Qwen3-8B"), request.from_model("qwen3-8b", 2)
    assert [(s.name, s.n, s.k, s.calls) for s in whole.sites] == [
        ("qwen3-8b/qkv", 6144, 4096, 36), ("qwen3-8b/o", 4096, 4096, 36), ("qwen3-8b/gate_up", 24576, 4096, 36),
        ("qwen3-8b/down", 4096, 12288, 36), ("qwen3-8b/lm_head", 151936, 4096, 1),
    ]  # fmt: skip
    assert (whole.family, whole.stem, half.stem) == ("qwen3", "qwen3-8b", "qwen3-8b-tp2")
    assert [(s.name, s.n, s.k) for s in half.sites][:2] == [
        ("qwen3-8b-tp2/qkv", 3072, 4096), ("qwen3-8b-tp2/o", 4096, 2048)
    ]  # fmt: skip
    assert whole.sites[0].used_by == ("qwen3-8b/qkv",)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mine.csv", "name,n,k\na,64,512\n,1024,512\nagain,64,512\n"),
        ("mine.json", '[{"n": 64, "k": 512, "name": "a"}, [1024, 512]]'),
    ],
)
def test_shapes_of_a_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    found = request.from_shapes(tmp_path / name)
    assert [(s.name, s.n, s.k, s.dtype) for s in found.sites] == [
        ("mine/a", 64, 512, DType.BF16), ("mine/1024x512", 1024, 512, DType.BF16)
    ]  # fmt: skip
    assert found.family == "*", "it counts for every model"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "columns n and k"),
        ("n,k\n64,512\n0,512\n", r"mine:3: n is '0'"),
        ("n,k\n64,\n", r"mine:2: k is ''"),
        ("n,k,name\n64,512,a\n65,512,a\n", "second shape is called 'a'"),
        ("n,k\n", "no shapes"),
        ("[[1]]", "is no shape"),
        ('[{"n": true, "k": 1}]', "n is 'True'"),
        ("[1", "not JSON"),
        ("[[4294967296, 1]]", "n is '4294967296'"),
    ],
)
def test_a_file_that_is_wrong_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "mine").write_text(text)
    with pytest.raises(RequestError, match=says):
        request.from_shapes(tmp_path / "mine")
    with pytest.raises(RequestError, match="cannot be read"):
        request.from_shapes(tmp_path / "gone")


def _capture(tmp_path: Path, *records: dict[str, object]) -> Path:
    plain = {
        "n": 64, "k": 512, "m": 1, "activation": "bf16", "weight": "bf16", "output": "bf16", "bias": False,
        "layer": "model.layers.*.mlp.down_proj", "layers": 2, "calls": 2, "steps": 3, "phase": "decode",
    }  # fmt: skip
    document = {
        "schema": 1, "model": "m", "host": "vllm", "versions": {}, "device": "cpu", "tp": 2, "date": "2026-01-01",
        "command": "", "batches": [1], "prompt_tokens": 4, "new_tokens": 4, "random": True,
        "records": [{**plain, **record} for record in records],
    }  # fmt: skip
    path = tmp_path / "captured.json"
    path.write_text(json.dumps(document))
    return path


def test_a_capture_gives_its_shapes_and_m(tmp_path: Path) -> None:
    path = _capture(
        tmp_path, {}, {"m": 3}, {"layer": "model.layers.*.mlp.up_proj", "calls": 5}, {"m": 17},
        {"layer": "lm_head", "n": 99, "activation": "fp16", "weight": "fp16", "output": "fp16"},
        {"layer": "q", "n": 70, "bias": True}, {"layer": "fc", "n": 71, "weight": "fp32"},
    )  # fmt: skip
    found = request.from_capture(path)
    assert [(s.name, s.n, s.dtype, s.ms, s.calls) for s in found.sites] == [
        ("captured/mlp.down_proj", 64, DType.BF16, (1, 3), 7), ("captured/lm_head", 99, DType.FP16, (1,), 2)
    ]  # fmt: skip
    assert (found.family, found.tp) == ("*", 2)
    assert [note.partition(":")[0] for note in found.notes] == ["q", "fc"]
    with pytest.raises(RequestError, match=r"no product.*bias"):
        request.from_capture(_capture(tmp_path, {"bias": True}))


def test_exactly_one_source_and_a_tp_that_fits(tmp_path: Path) -> None:
    path = _capture(tmp_path, {})
    for model, shapes, captured, tp in (
        (None, None, None, None), ("qwen3-8b", path, None, None), (None, path, path, None), (None, path, None, 2),
        (None, None, path, 4),
    ):  # fmt: skip
        with pytest.raises(RequestError):
            request.find(model, shapes, captured, tp)
    assert request.find(None, None, path, 2).tp == 2


def test_anchors_come_first_and_many_bytes_per_step_before_few() -> None:
    big, often = Site("big", 4096, 4096), Site("often", 2048, 4096, calls=36)
    cells = order.order([big, often], (2, 3, 16, 1, 8, 4, 5))
    assert [m for _, m in cells[::2]] == [1, 2, 4, 8, 16, 3, 5]
    assert [site.name for site, _ in cells[:2]] == ["often", "big"]
    own = Site("own", 64, 512, ms=(5, 2))
    assert order.order([own], None) == [(own, 2), (own, 5)]
    assert len(order.order([big], None)) == 16


def test_other_m_race_what_was_fastest_beside_them() -> None:
    problem = problem_of(4096, 4096)
    both = Entrant("bf16_simt", 1, 4), Entrant("bf16_mma")
    mma = [KernelConfig.of("bf16_mma", _params("bf16_mma", i)) for i in range(5)]
    simt = KernelConfig.of("bf16_simt", _params("bf16_simt", 0))
    finalists = {1: mma[4:], 2: [simt, mma[0]], 4: mma[:4]}
    assert order.beside(3, finalists, both, problem) == [simt, mma[0], mma[1], mma[2]], "three of each, once"
    assert order.beside(3, finalists, both[1:], problem) == mma[:3], "what does not enter does not race"
    assert order.beside(3, finalists, [Entrant("bf16_simt", 1, 2)], problem) == []
    assert order.beside(2, finalists, both, problem) == [], "an anchor races everything"
    assert order.beside(5, {}, both, problem) == []
    wrong = problem_of(4096, 4097)
    assert order.beside(3, finalists, both, wrong) == [], "the predicates hold"


def _params(stem: str, index: int) -> dict[str, int]:
    kernel = kernels.get(stem)
    return kernel.params_of(kernel.candidates(problem_of(4096, 4096), 4)[index])


def test_what_no_kernel_accepts_has_a_reason() -> None:
    found, why = order.accepted(DEFAULT, problem_of(4096, 4096), 1, H200)
    assert len(found) > 20
    found, why = order.accepted(DEFAULT, problem_of(4096, 4097), 1, H200)
    assert found == []
    assert "4097" in why or "K" in why
    old = device.DeviceKey((7, 0), 80, 6 << 20, "32gb")
    found, why = order.accepted([Entrant("bf16_stream")], problem_of(4096, 4096), 1, old)
    assert found == []
    assert "7.0" in why


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "needs one of"),
        (("qwen9",), "no packaged config named 'qwen9'"),
        (("qwen3-8b", "-M", "17"), "rows go from 1 to 16"),
        (("qwen3-8b", "--kernels", "bf16_none"), "unknown kernel"),
        (("qwen3-8b", "--kernels", "bf16_simt:4"), "--kernels"),
        (("qwen3-8b", "--tp", "3"), "does not divide"),
        (("qwen3-8b", "--time-budget", "0"), "--time-budget 0"),
        (("qwen3-8b", "--peer-folder", "/"), "holds no skinny_gemm.py"),
        (("--shapes", "/gone.csv"), "cannot be read"),
        (("--capture", "/gone.json"), "cannot be read"),
        (("qwen3-8b", "--out", "/proc/nope/o.toml"), "cannot be written"),
        (("qwen3-8b", "--out", "/tmp"), "is a folder"),
    ],
)
def test_bad_requests_are_two_lines(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str], says: str
) -> None:
    monkeypatch.setattr(device, "current_key", lambda index=None: H200)
    result = skinny("tune", *arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 2)
    assert says in result.stderr


def test_without_a_gpu_the_command_says_so(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "current_key", lambda index=None: None)
    result = skinny("tune", "qwen3-8b")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 2)
    assert "CUDA device" in result.stderr


def test_help_fits_80_columns(skinny: Skinny) -> None:
    result = skinny("tune", "--help")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80

"""What is promised for each supported vLLM release. Imported by one test file per release, so that two workers share.

The runs are module fixtures: each is one process, several tests read what it reported. All runs of a release share one
vLLM cache folder, and the compiled ones run in the order off, on, on with an edited plan, off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from skinny_core import kernels, plan
from skinny_core.device import product
from skinny_core.testing import stand_in
from tests.hosts.vllm import runner

Run = Callable[..., dict[str, Any]]
HEAD = (1024, 256)
BODY = ((384, 256), (256, 256), (1024, 256), (256, 512))


@pytest.fixture(scope="module")
def run(version: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = runner.prepare(tmp_path_factory.mktemp("vllm") / version)

    def start(script: str, *arguments: str, **options: Any) -> dict[str, Any]:
        return runner.run(script, arguments, version=version, folder=folder, **options)

    return start


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """Two plans of the stand-in kernel: down at M = 1, then edited to M = 2, and the head at M = 1 in both."""
    stand_in.register()
    folder, files = tmp_path_factory.mktemp("plans"), []
    for m in (1, 2):
        cells = (stand_in.cell(256, 512, m), stand_in.cell(*HEAD, 1))
        files.append(folder / f"m{m}.toml")
        plan.dump(stand_in.plan_of(*cells, key=product("h200"), product="h200", family="qwen3"), files[-1])
    yield files
    kernels.unregister(stand_in.STEM)


@pytest.fixture(scope="module")
def layers(run: Run) -> dict[str, Any]:
    return run("layers.py")


@pytest.fixture(scope="module")
def constructed(run: Run) -> dict[str, Any]:
    return run("construct.py", ".", platform="9.0")


@pytest.fixture(scope="module")
def eager(run: Run) -> dict[str, Any]:
    return run("engine.py", "tied", "eager", "processes")


@pytest.fixture(scope="module")
def compiled(run: Run, plans: list[Path]) -> dict[str, dict[str, Any]]:
    """off, on: both compile. again: the plan was edited. off_again: the other order."""
    arguments = ("engine.py", "single", "compiled", "here")
    return {
        "off": run(*arguments, SKINNY="off"),
        "on": run(*arguments, str(plans[0])),
        "again": run(*arguments, str(plans[1])),
        "off_again": run(*arguments, SKINNY="off"),
    }


def calls_by_m(report: dict[str, Any], outcome: str = "") -> dict[tuple[int, int], set[int]]:
    """M of the calls of every weight shape (N, K), of those whose outcome starts with `outcome`."""
    found: dict[tuple[int, int], set[int]] = {}
    for _, n, k, m, what, _ in report["calls"]:
        if what.startswith(outcome):
            found.setdefault((n, k), set()).add(m)
    return found


def tokens(text: dict[str, Any]) -> list[Any]:
    return [[item[0] for item in text[count]] for count in ("1", "2")]


def test_layers(layers: dict[str, Any]) -> None:
    assert {name: text for name, text in layers["checks"].items() if text != "ok"} == {}
    assert len(layers["checks"]) >= 14


def test_construction_on_a_pretended_h200(constructed: dict[str, Any]) -> None:
    assert constructed["capability"] == [9, 0]
    assert {name: text for name, text in constructed["checks"].items() if text != "ok"} == {}
    assert len(constructed["checks"]) >= 6


def test_the_plug_in_is_loaded_in_every_process(eager: dict[str, Any]) -> None:
    assert eager["pid"] != eager["engine"]["pid"]
    assert eager["status"]["state"] == eager["engine"]["status"]["state"] == "ready"
    assert [(m["package"], m["layers"], m["skipped"]) for m in eager["engine"]["status"]["models"]] == [
        ("qwen3", 9, {})
    ]
    line = "active cells for 9 layers"
    assert eager["log"].count(line) == 1
    assert "switch off with SKINNY=off" in next(text for text in eager["log"].splitlines() if line in text)


def test_eager_calls_reach_the_op_with_their_m(eager: dict[str, Any]) -> None:
    found = calls_by_m(eager["engine"])
    assert set(found) == {*BODY, HEAD}
    # Prompts of 4 tokens; two requests decode together, but their prompts may arrive one after the other.
    assert all(ms >= {1, 2} and max(ms) >= 4 for ms in found.values()), found
    assert {call[4] for call in eager["engine"]["calls"]} == {"fallback:not_cuda"}


def test_uninstalling_from_a_running_engine_changes_no_bit(eager: dict[str, Any]) -> None:
    assert eager["removed"] == 9
    assert eager["stock"] == eager["text"]
    assert eager["after"]["calls"] == eager["engine"]["calls"]
    assert eager["after"]["key"] == {}


def test_off_leaves_everything_alone(compiled: dict[str, dict[str, Any]]) -> None:
    for arm in ("off", "off_again"):
        engine = compiled[arm]["engine"]
        assert engine["status"]["state"] == "disabled"
        assert (engine["calls"], engine["key"]) == ([], {})
        assert not re.search(r"skinny-\w+ \d", compiled[arm]["log"]), "the one line of an installation"


def test_arms_never_share_a_graph_in_either_order(compiled: dict[str, dict[str, Any]]) -> None:
    done = {
        arm: tuple(report["engine"]["compiler"][f"num_aot_{what}"] for what in ("compiles", "artifacts_loaded"))
        for arm, report in compiled.items()
    }
    assert done == {"off": (1, 0), "on": (1, 0), "again": (0, 1), "off_again": (0, 1)}
    hashes = {arm: report["engine"]["hash"] for arm, report in compiled.items()}
    assert hashes["off"] == hashes["off_again"] != hashes["on"] == hashes["again"]


def test_compiled_and_cached_models_call_the_op_with_their_m(compiled: dict[str, dict[str, Any]]) -> None:
    for arm in ("on", "again"):
        found = calls_by_m(compiled[arm]["engine"])
        assert set(found) == {*BODY, HEAD}
        assert all(ms == {1, 2, 4, 8} for ms in (found[shape] for shape in BODY if shape != HEAD)), found
        assert compiled[arm]["engine"]["calls"] == compiled["on"]["engine"]["calls"]


def test_the_kernel_runs_in_compiled_and_cached_models_and_follows_an_edited_plan(
    compiled: dict[str, dict[str, Any]],
) -> None:
    for arm, m in (("on", 1), ("again", 2)):
        report = compiled[arm]
        assert report["cells"] == ["1024x256 M=1", f"256x512 M={m}"]
        ran = calls_by_m(report["with_plan"], "kernel:stand_in")
        assert ran == {(256, 512): {m}, HEAD: {1}}
        assert calls_by_m(report["with_plan"], "fallback:off_table")[256, 512] == {1, 2, 4, 8} - {m}
        assert report["with_plan"]["compiler"] == report["engine"]["compiler"], "a plan must not cost a compilation"


def test_every_arm_generates_the_same_tokens(compiled: dict[str, dict[str, Any]]) -> None:
    expected = tokens(compiled["off"]["text"])
    assert all(tokens(report["text"]) == expected for report in compiled.values())
    assert all(tokens(compiled[arm]["planned"]) == expected for arm in ("on", "again"))
    assert compiled["on"]["text"] == compiled["again"]["text"]

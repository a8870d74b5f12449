"""`skinny doctor`: what it finds, and that one broken part hides no other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import Result

from skinny_core import env, family, kernels
from skinny_lab.doctor import collect

Skinny = Callable[..., Result]
KEYS = {
    "schema", "python", "platform", "driver", "settings", "versions", "devices", "kernels", "models", "broken_models",
    "plans", "cache", "hosts", "problems",
}  # fmt: skip


def report(skinny: Skinny) -> dict[str, object]:
    result = skinny("doctor", "--json")
    assert result.exit_code == 0, result.output
    document: dict[str, object] = json.loads(result.stdout)
    return document


def problems_with(document: dict[str, object], text: str) -> list[str]:
    return [what for what, fix in document["problems"] if text in what and fix]  # type: ignore[attr-defined]


def test_json_has_the_documented_keys(skinny: Skinny) -> None:
    document = report(skinny)
    assert set(document) == KEYS
    assert document["schema"] == 1
    documented = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()
    assert [key for key in KEYS if f"`{key}`" not in documented] == []


def test_text_fits_80_columns(skinny: Skinny) -> None:
    result = skinny("doctor")
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "bf16_simt" in result.output


def test_a_malformed_variable_is_a_problem_not_a_crash(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKINNY", "neighbor=on")
    document = report(skinny)
    assert "neighbor" in str(document["settings"])
    assert any("neighbor" in str(problem) for problem in document["problems"])  # type: ignore[attr-defined]


def test_a_broken_user_plan_is_shown_with_its_line(skinny: Skinny) -> None:
    folder = env.user_plan_folder()
    folder.mkdir(parents=True)
    (folder / "mine.toml").write_text('schema = 1\nfamily = "qwen3"\nfamly = "typo"\n')
    document = report(skinny)
    (broken,) = (p for p in document["plans"] if p["origin"] == "user folder")  # type: ignore[attr-defined]
    assert broken["error"]["fix"]
    assert broken["error"]["file"].endswith("mine.toml")
    text = skinny("doctor").output
    assert "ignored" in text
    assert "mine.toml" in text


def test_a_plan_that_is_not_there_is_shown(skinny: Skinny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKINNY", f"plan={tmp_path / 'gone.toml'}")
    (missing,) = (p for p in report(skinny)["plans"] if p["origin"] == "SKINNY")  # type: ignore[attr-defined]
    assert "gone.toml" in str(missing["error"])


def test_a_broken_dsl_shows_the_original_error(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = type(kernels.get("bf16_simt"))
    monkeypatch.setattr(kernel, "availability", lambda self: (False, "ImportError: libfoo.so.9: cannot open"))
    assert "libfoo.so.9: cannot open" in skinny("doctor").output


def test_a_broken_model_package_shows_the_original_error(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "discover", lambda: family.Discovery((), (("qwen9", "SyntaxError: bad"),)))
    document = report(skinny)
    assert document["broken_models"] == {"qwen9": "SyntaxError: bad"}
    assert "qwen9" in str(document["problems"])


def test_a_device_without_a_plan_is_a_problem_that_names_neighbours(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skinny_lab.doctor.report import Device

    device = Device(0, "NVIDIA H20", "sm90-78sm-60mib-96gb", "h20", ("h200", "h100-sxm"))
    monkeypatch.setattr(collect, "_devices", lambda: [device])
    (problem,) = (p for p in report(skinny)["problems"] if "no plan for" in p[0])  # type: ignore[attr-defined]
    assert "h200" in problem[0]
    assert "SKINNY=neighbour=on" in problem[1]
    assert "skinny bench" not in problem[1], "bench times planned cells only"
    (script,) = (word for word in problem[1].replace("`", "").split() if word.endswith(".py"))
    assert (Path(__file__).parents[3] / script).is_file()


def test_a_plan_for_a_device_without_a_product_name_counts(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    from skinny_lab.doctor.report import Device, PlanFile

    device = Device(0, "NVIDIA H900", "sm90-99sm-99mib-99gb", None, ())
    monkeypatch.setattr(collect, "_devices", lambda: [device])
    assert len(problems_with(report(skinny), "no plan for")) == 1
    monkeypatch.setattr(collect, "_plans", lambda found: [PlanFile("mine.toml", "SKINNY", "qwen3", device.key)])
    assert problems_with(report(skinny), "no plan for") == []


def test_a_plan_of_reported_cells_alone_is_no_plan_for_its_device(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skinny_lab.doctor.report import Device, PlanFile

    device = Device(0, "NVIDIA H200 NVL", "sm90-132sm-60mib-141gb-nvl", "h200-nvl", ("h20", "h200"))
    files = [
        PlanFile("h200.toml", "skinny-x", "x", "h200", cells={"win": 1}),
        PlanFile("h200-nvl.toml", "skinny-x", "x", "h200-nvl", cells={"reported": 7}),
        PlanFile("h20.toml", "skinny-x", "x", "h20", cells={"reported": 1}),
    ]
    monkeypatch.setattr(collect, "_devices", lambda: [device])
    monkeypatch.setattr(collect, "_plans", lambda found: files)
    ((what, fix),) = (p for p in report(skinny)["problems"] if "no plan for" in p[0])  # type: ignore[attr-defined]
    assert what.endswith("but 7 cells reported by somebody else; measured neighbours: h200")
    assert "skinny tune" in fix


def test_a_host_that_fails_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> SimpleNamespace:
        raise RuntimeError(f"{name} is broken")

    monkeypatch.setattr(collect, "import_module", fail)
    hosts = collect._hosts()
    assert hosts
    assert all("is broken" in host.text for host in hosts)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses even root")
def test_a_cache_that_not_even_root_can_make_is_a_problem(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKINNY", "cache=/proc/x")
    document = report(skinny)
    assert not document["cache"]["writable"]  # type: ignore[index]
    (said,) = problems_with(document, "/proc/x")
    assert said == "/proc/x is not writable: No such file or directory"


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300, "link"])
def test_what_no_folder_can_be_made_of_is_a_problem(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    monkeypatch.setenv("SKINNY", f"cache={tmp_path / name}")
    assert len(problems_with(report(skinny), "not writable")) == 1


@pytest.mark.parametrize("name", ["old", "old/new/newer", "new/../../escaped"])
def test_trying_the_cache_leaves_nothing_behind(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    inner = tmp_path / "inner"
    (inner / "old").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("SKINNY", f"cache={inner / name}")
    document = report(skinny)
    assert document["cache"]["writable"]  # type: ignore[index]
    assert problems_with(document, "not writable") == []
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("kind", ["syntax", "folder", "schema", "gone"])
def test_a_broken_plan_is_a_problem_that_names_its_place_once(
    skinny: Skinny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "broken.toml"
    if kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.write_text({"syntax": "schema = 1\n[device\n", "schema": "schema = 1\nfamly = 2\n"}[kind])
    monkeypatch.setenv("SKINNY", f"plan={path}")
    document = report(skinny)
    (said,) = problems_with(document, "broken.toml")
    assert said.startswith(f"{path}:2: not TOML" if kind == "syntax" else f"{path}")
    assert said.endswith("; the file is ignored")
    assert said.count("broken.toml") == 1
    (shown,) = (p for p in document["plans"] if p["origin"] == "SKINNY")  # type: ignore[attr-defined]
    assert shown["error"]["file"] == str(path)
    assert "broken.toml" not in shown["error"]["what"]


def test_a_plan_of_an_unknown_user_is_a_problem_not_a_crash(skinny: Skinny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKINNY", "plan=~nosuchuser/x")
    assert len(problems_with(report(skinny), "~nosuchuser/x: cannot be read")) == 1

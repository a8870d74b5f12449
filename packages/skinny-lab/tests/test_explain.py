"""`skinny explain` on a laptop: names and files, what it shows, and that it says what the core says."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from skinny_core import device, env, family, plan
from skinny_core.plan import Cell, DeviceTable, Evidence, Plan, Quantiles
from skinny_lab.explain import target

Skinny = Callable[..., Result]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan with cells for one shape: o_proj of Qwen3-8B wins at M 1 and 4 and is refused at 8."""

    def cell(m: int, status: Any, peer: str = "") -> Cell:
        ours, base = Quantiles(9.0, 9.5, 9.6), Quantiles(13.0, 13.3, 13.4)
        return Cell(
            id=f"o/M{m}", n=4096, k=4096, m=m, status=status, kernel="bf16_simt", why="measured",
            config={"threads": 128, "rows": 1, "chunks": 1},
            evidence=Evidence(
                candidate=ours, baseline=base, candidate_hot=ours, baseline_hot=base, baseline_name="cublas",
                rel_rmse=1.7e-3, rounds=7, in_model_us=-1.0, peer_ahead=peer,
            ),
        )  # fmt: skip

    key = device.product("h200")
    table = DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    cells = (cell(1, "win"), cell(4, "win", "flashinfer"), cell(8, "refused"))
    plan.dump(Plan(family="qwen3", product="h200", device=table, cell=cells), tmp_path / "mine.toml")
    monkeypatch.setenv("SKINNY", f"plan={tmp_path / 'mine.toml'}")
    # The shipped plans change with every measurement; here only the one above speaks.
    (package,) = (p for p in family.discover().packages if p.name == "qwen3")
    alone = dataclasses.replace(package, plan_files=lambda: ())
    found = family.Discovery((alone,))
    monkeypatch.setattr(target, "discover", lambda: found)
    monkeypatch.setattr(target, "for_architecture", lambda name: alone if name in alone.architectures else None)
    env.settings.cache_clear()


def document(skinny: Skinny, *arguments: str) -> dict[str, Any]:
    result = skinny("explain", *arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.usefixtures("measured")
def test_json_has_a_line_per_projection_and_m(skinny: Skinny) -> None:
    found = document(skinny, "qwen3-8b", "--device", "h200")
    assert found["schema"] == 1
    assert (found["family"], found["tp"]) == ("qwen3", 1)
    lines = {(line["projection"], line["m"]): line for line in found["lines"]}
    assert {(p, m) for p in ("qkv", "o", "gate_up", "down", "lm_head") for m in range(1, 17)} <= set(lines)
    o1, o8, o2 = lines["o", 1], lines["o", 8], lines["o", 2]
    assert o1["runs"]
    assert o1["saving_us"] == pytest.approx((13.3 - 9.5) * o1["calls"])
    assert (o8["runs"], o8["reason"], o8["ours_us"]) == (False, "refused", 9.5)
    assert (o2["runs"], o2["reason"], o2["ours_us"]) == (False, "off_table", None)
    fused = sum(line["saving_us"] for line in found["lines"] if line["m"] == 1 and not line["part_of"])
    assert found["saving_us_per_step"]["1"] == pytest.approx(fused)
    assert found["saving_us_per_step"]["8"] == 0


@pytest.mark.usefixtures("measured")
def test_documented_keys(skinny: Skinny) -> None:
    found = document(skinny, "qwen3-8b", "--device", "h200", "-M", "1")
    text = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()
    assert [key for key in (*found, *found["lines"][0]) if f"`{key}`" not in text] == []


@pytest.mark.usefixtures("measured")
def test_text_groups_rows_and_fits_80_columns(skinny: Skinny) -> None:
    output = skinny("explain", "qwen3-8b", "--device", "h200").output
    rows = [" ".join(line.split()) for line in output.splitlines()]
    assert "o 4096 4096 1 bf16_simt 13.30 9.50 1.40x 136.8" in rows
    assert "2-3 host: off_table" in rows
    assert "4 bf16_simt 13.30 9.50 1.40x* 136.8" in rows
    assert "8 host: refused 13.30 9.50 1.40x" in rows
    assert "9-16 host: off_table" in rows
    assert "faster: flashinfer" in " ".join(rows)
    assert max(len(line) for line in output.splitlines()) <= 80


@pytest.mark.usefixtures("measured")
def test_another_device_runs_nothing_and_offers_the_neighbour(skinny: Skinny) -> None:
    result = skinny("explain", "qwen3-8b", "--device", "h20", "-M", "1")
    assert result.exit_code == 0
    assert "host: other_device" in result.output
    assert "Nothing runs here" in result.output
    assert "neighbour=on" in result.output


@pytest.mark.usefixtures("measured")
def test_cells_are_listed_on_request(skinny: Skinny) -> None:
    asked = ("explain", "qwen3-8b", "--device", "h200")
    assert "threads=128" in skinny(*asked, "--cells").output
    assert "threads=128" not in skinny(*asked).output


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "QWEN3-8B"])
def test_a_hub_name_finds_the_packaged_config(skinny: Skinny, name: str) -> None:
    assert document(skinny, name, "--device", "h200", "-M", "1")["model"] == "qwen3-8b"


@pytest.mark.usefixtures("measured")
def test_a_config_file_and_its_folder_say_the_same_as_the_name(skinny: Skinny, tmp_path: Path) -> None:
    config = dict(target.find_model("qwen3-8b").config)
    config.setdefault("architectures", ["Qwen3ForCausalLM"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = document(skinny, "qwen3-8b", "--device", "h200")["lines"]
    assert document(skinny, str(tmp_path / "config.json"), "--device", "h200")["lines"] == named
    assert document(skinny, str(tmp_path), "--device", "h200")["lines"] == named


@pytest.mark.usefixtures("measured")
def test_one_architecture_may_be_written_as_a_string(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": "Qwen3ForCausalLM"}')
    assert target.find_model(str(tmp_path)).package.name == "qwen3"


@pytest.mark.parametrize("name", ["~nosuchuser/config.json", "x" * 300], ids=["user", "long"])
def test_what_cannot_be_a_path_is_an_unknown_model(name: str) -> None:
    with pytest.raises(target.RequestError, match="no file and no packaged config"):
        target.find_model(name)


@pytest.mark.usefixtures("measured")
def test_tensor_parallel_shapes_are_per_rank(skinny: Skinny) -> None:
    lines = document(skinny, "qwen3-8b", "--device", "h200", "--tp", "2", "-M", "1")["lines"]
    assert next((line["n"], line["k"]) for line in lines if line["projection"] == "o") == (4096, 2048)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not a model config"),
        ("[]", "not a model config"),
        ("{}", "architectures"),
        ('{"architectures": ["Foo"]}', "Foo"),
        ('{"architectures": ["Foo", "Bar"]}', "answers for Foo, Bar"),
        ('{"architectures": "Foo"}', "answers for Foo\n"),
        ('{"architectures": []}', "`architectures` is empty"),
        ('{"architectures": null}', "not a list of names"),
        ('{"architectures": [["Foo"]]}', "not a list of names"),
        ('{"architectures": ""}', "not a list of names"),
    ],
    ids=["not-json", "not-an-object", "no-architectures", "unknown", "two", "string", "empty", "null", "nested", "''"],
)
def test_an_unusable_config_is_two_lines(skinny: Skinny, tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "config.json").write_text(content)
    result = skinny("explain", str(tmp_path / "config.json"), "--device", "h200")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2
    assert says in result.stderr


@pytest.mark.parametrize(
    ("text", "rows"), [("1", (1,)), ("1-3", (1, 2, 3)), ("4,1-2", (1, 2, 4)), ("16", (16,)), ("2,2", (2,))]
)
def test_rows(text: str, rows: tuple[int, ...]) -> None:
    assert target.find_rows(text) == rows


@pytest.mark.parametrize("text", ["", "0", "17", "3-1", "1-", "-1", "a", "1,,2", "1.5"])
def test_rows_that_cannot_be_read(text: str) -> None:
    with pytest.raises(target.RequestError):
        target.find_rows(text)


@pytest.mark.parametrize(
    "text", ["²", "1-²", "٣", "9" * 5000, "1-" + "9" * 5000, "1,x" + "9" * 5000], ids=lambda text: text[:4]
)
def test_digits_that_no_row_has_are_a_short_error(text: str) -> None:
    with pytest.raises(target.RequestError) as caught:
        target.find_rows(text)
    assert len(caught.value.what) < 80

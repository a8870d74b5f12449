"""The capture file: what is read is sound, what is broken is named with a fix, nothing is half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from skinny_lab import capture
from skinny_lab.capture import CaptureError, document
from skinny_lab.capture.tally import Tally, pattern, summed

BF16 = ("bf16", "bf16", "bf16")


def made(**changes: Any) -> capture.Capture:
    """Two layers decoding at M = 1 and 3, after a prompt of 13."""
    tally = Tally()
    for rows, sequences in ((13, 1), (1, 1), (1, 1), (3, 3)):
        tally.step(rows, sequences)
        for layer in (0, 1):
            tally.add(f"model.layers.{layer}.mlp.down_proj", 576, 1536, rows, BF16, False)
    values: dict[str, Any] = {
        "model": "m",
        "host": "transformers",
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
        "date": "2026-11-30T12:00:00+00:00",
        "command": "skinny capture transformers m",
        "batches": (1, 3),
        "prompt_tokens": 13,
        "new_tokens": 3,
        "random": False,
        "records": tally.records(),
    }
    return capture.Capture(**{**values, **changes})


@pytest.fixture
def data() -> dict[str, Any]:
    return json.loads(document.encode(made()))


def read(folder: Path, content: object) -> capture.Capture:
    file = folder / "c.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return capture.read(file)


def test_calls_are_counted_per_forward_pass_and_phase() -> None:
    found = [(r.phase, r.m, r.layer, r.layers, r.calls, r.steps) for r in made().records]
    layer = "model.layers.*.mlp.down_proj"
    assert found == [("decode", 1, layer, 2, 2, 2), ("decode", 3, layer, 2, 2, 1), ("prefill", 13, layer, 2, 2, 1)]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.12.mlp.fc1", "model.layers.*.mlp.fc1"),
        ("h.0.experts.11.w2", "h.*.experts.*.w2"),
        ("0", "*"),
        ("block_3.q", "block_3.q"),
        ("lm_head", "lm_head"),
        ("1.2.3", "*.*.*"),
    ],
)
def test_only_whole_numbers_are_replaced(path: str, expected: str) -> None:
    assert pattern(path) == expected


def test_a_call_without_rows_is_no_product() -> None:
    tally = Tally()
    tally.step(1, 1)
    tally.add("x", 8, 8, 0, BF16, False)
    assert tally.records() == ()


def test_layers_are_summed_in_words() -> None:
    assert summed(["a.0.b", "a.1.b", "lm_head"]) == "2 x a.*.b, lm_head"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    capture.write(made(notes=('a note with "quotes"',)), file)
    assert capture.read(file) == made(notes=('a note with "quotes"',))
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]
    rows = [line for line in file.read_text().splitlines() if '"phase"' in line]
    assert len(rows) == 3, "a line per record"


def test_a_tuner_gets_shapes_and_their_m() -> None:
    found = made()
    assert found.shapes() == {(576, 1536): {1, 3, 13}}
    assert found.shapes(phase="decode") == {(576, 1536): {1, 3}}
    assert found.shapes(max_m=2) == {(576, 1536): {1}}
    assert [r.m for r in found.select(max_m=100, phase="prefill")] == [13]


def test_a_file_is_not_overwritten_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text("mine")
    with pytest.raises(CaptureError, match="exists already") as caught:
        capture.write(made(), file)
    assert "--force" in caught.value.fix
    assert file.read_text() == "mine"
    capture.write(made(), file, force=True)
    assert capture.read(file) == made()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.json"
    file.write_text("mine")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(document.os, "fsync", full)
    with pytest.raises(CaptureError, match="No space left"):
        capture.write(made(), file, force=True)
    assert file.read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["c.json"]


@pytest.mark.parametrize("place", ["missing/c.json", "file/c.json", ""])
def test_an_impossible_target_is_said_beforehand(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CaptureError) as caught:
        document.check_target(tmp_path / place, force=True)
    assert str(tmp_path) in caught.value.what
    assert caught.value.fix
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"none\.json: cannot be read: No such file"):
        capture.read(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["", "{", "[1", "\xff", "[" * 100_000])
def test_what_is_not_json_is_named(tmp_path: Path, text: str) -> None:
    with pytest.raises(CaptureError, match=r"c\.json: not JSON"):
        read(tmp_path, text)


@pytest.mark.parametrize("content", [[], 1, "null", {}, {"records": []}])
def test_another_document_is_no_capture(tmp_path: Path, content: object) -> None:
    with pytest.raises(CaptureError, match="not a capture"):
        read(tmp_path, content)


@pytest.mark.parametrize("schema", [0, 2, "1", None, True])
def test_another_schema_is_refused(tmp_path: Path, data: dict[str, Any], schema: object) -> None:
    with pytest.raises(CaptureError, match=r"schema .* is not 1"):
        read(tmp_path, {**data, "schema": schema})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("n", 0),
        ("k", -1),
        ("m", "1"),
        ("m", 1 << 40),
        ("m", True),
        ("layers", 1.5),
        ("calls", 0),
        ("bias", None),
        ("weight", ""),
        ("layer", ""),
        ("phase", "both"),
        ("rows", 3),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tmp_path: Path, data: dict[str, Any], key: str, value: object) -> None:
    data["records"][1][key] = value
    with pytest.raises(CaptureError) as caught:
        read(tmp_path, data)
    assert "records[" in caught.value.what
    assert key in caught.value.what
    assert caught.value.file == str(tmp_path / "c.json")
    assert "$" not in caught.value.what


@pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(capture.Record)])
def test_a_missing_value_is_named(tmp_path: Path, data: dict[str, Any], field: str) -> None:
    del data["records"][0][field]
    with pytest.raises(CaptureError, match=f"`{field}`"):
        read(tmp_path, data)


def test_an_empty_capture_is_refused(tmp_path: Path, data: dict[str, Any]) -> None:
    with pytest.raises(CaptureError, match="records"):
        read(tmp_path, {**data, "records": []})


def test_a_product_that_stands_twice_is_refused(tmp_path: Path, data: dict[str, Any]) -> None:
    data["records"].append({**data["records"][0], "calls": 7})
    with pytest.raises(CaptureError, match=r"records\[3\] and records\[0\]"):
        read(tmp_path, data)

"""A plan file is usable or it is a named error that says file, line and fix; nothing in between, whatever its bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skinny_core import errors, plan
from skinny_core.device import product
from skinny_core.errors import PlanError
from skinny_core.plan import Cell, Plan
from skinny_core.problem import DType, Epilogue, WeightScheme
from skinny_core.testing import stand_in
from skinny_core.testing.stand_in import StandIn, cell, plan_of

H200 = product("h200")
TEXT = """schema = 1
family = "qwen3"
product = "h200"

[device]
capability = [9, 0]
sm_count = 132
l2_bytes = 62914560
memory_class = "141gb"

[environment]
gpu = "NVIDIA H200"

[[cell]]
id = "a"
n = 4096
k = 4096
m = 1
status = "win"
kernel = "bf16_simt"
config = { threads = 128, rows = 2, chunks = 4 }
used_by = ["qwen3-8b/o"]
[cell.evidence]
candidate = { p20 = 9.1, p50 = 9.2, p80 = 9.4 }
baseline = { p20 = 11.1, p50 = 11.2, p80 = 11.4 }
candidate_hot = { p20 = 8.1, p50 = 8.2, p80 = 8.4 }
baseline_hot = { p20 = 8.8, p50 = 8.9, p80 = 9.0 }
baseline_name = "cublas"
rounds = 7
rel_rmse = 1.66e-3
peers = { flashinfer = 9.9 }

[[cell]]
id = "b"
n = 4096
k = 4096
m = 4
status = "refused"
why = "6 % slower cold"
kernel = "bf16_simt"
config = { threads = 128, rows = 2, chunks = 4 }
[cell.evidence]
candidate = { p20 = 12.1, p50 = 12.2, p80 = 12.4 }
baseline = { p20 = 11.1, p50 = 11.2, p80 = 11.4 }
baseline_name = "cublas"

[[cell]]
id = "c"
n = 4096
k = 4096
m = 2
status = "reported"
kernel = "somebody_elses"
config = { tile = 64 }
[cell.evidence]
candidate = { p20 = 9.1, p50 = 9.2, p80 = 9.4 }
baseline = { p20 = 11.1, p50 = 11.2, p80 = 11.4 }
baseline_name = "cublas"
source = "a pull request"
"""


def _change(old: str, new: str, *, cell_id: str = "") -> tuple[str, int]:
    """TEXT with one replacement (in the cell of that id), and the line where it is."""
    start = TEXT.index(f'id = "{cell_id}"') if cell_id else 0
    at = TEXT.index(old, start)
    return TEXT[:at] + new + TEXT[at + len(old) :], TEXT.count("\n", 0, at) + 1


def _error(text: str, file: str = "a.toml") -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan.parse(text, file)
    return caught.value


def test_the_text_below_is_valid() -> None:
    loaded = plan.parse(TEXT)
    assert [c.status for c in loaded.cells] == ["win", "refused", "reported"]
    assert loaded.key == H200
    win = loaded.cells[0]
    assert win.problem(H200).device == H200
    assert str(win.kernel_config) == "bf16_simt(chunks=4, rows=2, threads=128)"
    assert win.evidence.speedup == pytest.approx(11.2 / 9.2)
    assert loaded.cells[1].evidence.speedup < 1


@pytest.mark.parametrize(
    ("old", "new", "cell_id", "kind", "says"),
    [
        ("family =", "famly =", "", errors.UnknownKeyError, "unknown key 'famly' in the top level"),
        ("used_by", "use_by", "a", errors.UnknownKeyError, "unknown key 'use_by' in cell.0"),
        ("why =", "whyever =", "b", errors.UnknownKeyError, "unknown key 'whyever' in cell.1"),
        ("rounds", "round", "a", errors.UnknownKeyError, "unknown key 'round' in cell.0.evidence"),
        ("p80 = 9.4", "p99 = 9.4", "a", errors.UnknownKeyError, "unknown key 'p99' in cell.0.evidence.candidate"),
        ("gpu =", "gpus =", "", errors.UnknownKeyError, "unknown key 'gpus' in environment"),
        ("sm_count", "sms", "", errors.UnknownKeyError, "unknown key 'sms' in device"),
        ("threads =", "thread =", "a", errors.ConfigRefusedError, "unknown config key 'thread'"),
        ("threads = 128", "threads = 100", "a", errors.ConfigRefusedError, "threads is 100"),
        ("chunks = 4", "chunks = 8", "a", errors.ConfigRefusedError, "chunks = 8: K = 4096 has only 4"),
        ("chunks = 4", "chunks = 8", "b", errors.ConfigRefusedError, "cell b"),
        ("bf16_simt", "bf16_smit", "a", errors.ConfigRefusedError, "unknown kernel 'bf16_smit'"),
        ("p50 = 9.2", "p50 = 8.9", "a", errors.EvidenceError, "candidate: p20 9.1, p50 8.9, p80 9.4"),
        ("p20 = 9.1", "p20 = -9.1", "a", errors.NegativeTimeError, "candidate.p20 is -9.1"),
        ("p50 = 11.2", "p50 = 0", "a", errors.NegativeTimeError, "baseline.p50 is 0.0"),
        ("p80 = 8.4", "p80 = nan", "a", errors.NegativeTimeError, "candidate_hot.p80 is nan"),
        ("p80 = 9.0", "p80 = inf", "a", errors.NegativeTimeError, "baseline_hot.p80 is inf"),
        ("9.9", "-9.9", "a", errors.NegativeTimeError, "peers.flashinfer is -9.9"),
        ("p20 = 9.1", "p20 = -1", "c", errors.NegativeTimeError, "cell c"),
        ("rel_rmse = 1.66e-3", "rel_rmse = nan", "a", errors.EvidenceError, "rel_rmse is nan"),
        ("rel_rmse = 1.66e-3", "rel_rmse = -1.0", "a", errors.EvidenceError, "rel_rmse is -1.0"),
        ("n = 4096", 'n = "4096"', "a", errors.PlanSchemaError, "Expected `int`, got `str`"),
        ("n = 4096", "n = 0", "a", errors.PlanSchemaError, "Expected `int` >"),
        ("n = 4096", "n = 1.5", "a", errors.PlanSchemaError, "Expected `int`"),
        ("m = 1", "m = 17", "a", errors.PlanSchemaError, "<= 16"),
        ("m = 1", "m = 0", "a", errors.PlanSchemaError, ">= 1"),
        ("m = 1", "m = true", "a", errors.PlanSchemaError, "got `bool`"),
        ("rows = 2", "rows = 2.0", "a", errors.PlanSchemaError, "Expected `int`"),
        ('"win"', '"won"', "a", errors.PlanSchemaError, "Invalid enum value 'won'"),
        ("used_by", 'activation = "bf8"\nused_by', "a", errors.PlanSchemaError, "Invalid enum value 'bf8'"),
        ("[9, 0]", "[9]", "", errors.PlanSchemaError, "length 2"),
        ("memory_class", "#", "", errors.PlanSchemaError, "missing required field `memory_class`"),
        ("schema = 1", "schema = 2", "", errors.PlanSchemaError, "schema 2 is not 1"),
        ("schema = 1", 'schema = "1"', "", errors.PlanSchemaError, "schema '1' is not 1"),
        ("schema = 1", "schema ? 1", "", errors.PlanSyntaxError, "not TOML"),
        ("n = 4096", "n = 4096\nn = 1", "a", errors.PlanSyntaxError, "not TOML"),
        ("sm_count = 132", "sm_count = 114", "", errors.PlanDeviceError, "product 'h200' is sm90-132sm"),
        ('"h200"', '"h200-nvl"', "", errors.PlanDeviceError, "product 'h200-nvl' is"),
        ("candidate_hot", "#", "a", errors.EvidenceError, "'win' without candidate_hot"),
        ("baseline_hot", "#", "a", errors.EvidenceError, "'win' without baseline_hot"),
        ("rel_rmse", "#", "a", errors.EvidenceError, "'win' without rel_rmse"),
        ("rounds", "#", "a", errors.EvidenceError, "'win' without rounds"),
        ("m = 1", "m = 3", "a", errors.EvidenceError, "'win' without in_model_us"),
        ("why", "#", "b", errors.EvidenceError, "'refused' without why"),
        ("source", "#", "c", errors.EvidenceError, "'reported' without source"),
        ("baseline =", "#", "c", errors.PlanSchemaError, "missing required field `baseline`"),
        ('"b"', '"a"', "b", errors.DuplicateCellError, "same id as cell a"),
        ("m = 4", "m = 1", "b", errors.DuplicateCellError, "cell b: same Problem and M as cell a"),
        ("m = 2", "m = 1", "c", errors.DuplicateCellError, "cell c: same Problem and M as cell a"),
    ],
)
def test_named_errors(old: str, new: str, cell_id: str, kind: type[PlanError], says: str) -> None:
    text, _ = _change(old, new, cell_id=cell_id)
    error = _error(text)
    assert type(error) is kind
    assert says in error.what
    assert error.file == "a.toml"
    assert error.fix
    assert str(error).startswith("a.toml:")


@pytest.mark.parametrize(
    ("old", "new", "cell_id", "offset"),
    [
        ("famil", "famul", "", 0),
        ("used_by", "use_by", "a", 0),
        ("rounds", "round", "a", 0),
        ("p80 = 9.4", "p99 = 9.4", "a", 0),
        ("threads = 128", "threads = 100", "a", 0),
        ("chunks = 4", "chunks = 8", "b", 0),
        ("p20 = 9.1", "p20 = -9.1", "a", 0),
        ("9.9", "nan", "a", 0),
        ("rel_rmse = 1.66e-3", "rel_rmse = nan", "a", 0),
        ("n = 4096", "n = -1", "b", 0),
        ("schema = 1", "schema = 2", "", 0),
        ("schema = 1", "schema ? 1", "", 0),
        ("sm_count = 132", "sm_count = 114", "", -2),  # the device table
        ("source", "#", "c", -12),  # the header of the cell
        ("m = 4", "m = 1", "b", -4),
    ],
)
def test_the_line_is_the_line(old: str, new: str, cell_id: str, offset: int) -> None:
    text, line = _change(old, new, cell_id=cell_id)
    error = _error(text)
    assert error.line == line + offset
    assert f"a.toml:{line + offset}: " in str(error)


def test_a_different_problem_is_no_duplicate() -> None:
    for line in ('output = "fp32"', 'epilogue = "residual"', 'weight = "fp16"\nactivation = "fp16"\noutput = "fp16"'):
        text, _ = _change("m = 4", f"m = 1\n{line}", cell_id="b")
        assert len(plan.parse(text).cells) == 3


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(TEXT.encode() + b"# \xff\n")
    with pytest.raises(errors.PlanSyntaxError, match="not UTF-8") as caught:
        plan.load(tmp_path / "a.toml")
    assert caught.value.file == str(tmp_path / "a.toml")


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plan.load(tmp_path / "a.toml")


@pytest.mark.parametrize("value", ["[" * 100000, "1" * 5000, "{ a = " * 3000])
def test_text_that_breaks_the_parser_is_a_syntax_error(value: str) -> None:
    assert type(_error(f"x = {value}")) is errors.PlanSyntaxError


@pytest.mark.parametrize("value", [str(10**400), "-1", "1979-05-27", "07:32:00", "[[1]]", "-0"])
@pytest.mark.parametrize("key", ["n", "p50", "capability", "config", "why", "peers"])
def test_values_no_type_can_hold(key: str, value: str) -> None:
    text = re.sub(rf"\b{key} = [^,\n}}]*(\}}$)?", f"{key} = {value}" + r"\1", TEXT, count=1, flags=re.MULTILINE)
    assert text != TEXT
    assert isinstance(_error(text), PlanError)


def test_an_unlisted_product_counts_by_its_key() -> None:
    text, _ = _change('"h200"', '"my-own-board"')
    assert plan.parse(text).key == H200


def test_dump_seals_and_load_returns_the_same(tmp_path: Path) -> None:
    loaded = plan.parse(TEXT)
    plan.dump(loaded, tmp_path / "deep" / "er" / "a.toml")
    again = plan.load(tmp_path / "deep" / "er" / "a.toml")
    assert again == msgspec.structs.replace(loaded, digest=loaded.seal())
    assert again.digest == again.seal()
    assert (tmp_path / "deep/er/a.toml").read_text().startswith(f"# {plan.HEADER}\n")


TIMES = st.floats(1e-3, 1e6)
QUANTILES = st.tuples(TIMES, TIMES, TIMES).map(lambda times: plan.Quantiles(*sorted(times)))
TEXTS = st.text(max_size=30)
EVIDENCE = st.builds(
    plan.Evidence, candidate=QUANTILES, baseline=QUANTILES, baseline_name=TEXTS, candidate_hot=QUANTILES,
    baseline_hot=QUANTILES, peers=st.dictionaries(TEXTS, TIMES, max_size=3), peer_ahead=TEXTS,
    rounds=st.integers(1, 99), rel_rmse=st.floats(0, 1), in_model_us=st.floats(-1e3, 1e3),
    clock_mhz=st.none() | st.tuples(st.integers(1), st.integers(1)), source=TEXTS.map("from ".__add__),
)  # fmt: skip


def _honest(cell: Cell) -> Cell:
    """A win is right and faster than what it replaces."""
    e = cell.evidence
    if cell.status != "win":
        return cell
    right = msgspec.structs.replace(e, rel_rmse=min(e.rel_rmse or 0.0, 5.0e-6))
    faster = e.candidate.p50 < e.baseline.p50
    return msgspec.structs.replace(cell, evidence=right, status="win" if faster else "refused")


CELLS = st.builds(
    Cell, id=TEXTS, n=st.integers(1, 2**40), k=st.integers(1, 2**20).map(lambda k: 8 * k), m=st.integers(1, 16),
    weight=st.sampled_from(WeightScheme), activation=st.sampled_from(DType), output=st.sampled_from(DType),
    epilogue=st.sampled_from(Epilogue), status=st.sampled_from(["win", "refused", "reported"]),
    kernel=st.just(stand_in.STEM), config=st.dictionaries(st.just("variant"), st.integers(-(2**63), 2**63 - 1)),
    used_by=st.lists(TEXTS, max_size=2).map(tuple), why=TEXTS.map("lost: ".__add__), evidence=EVIDENCE,
).map(_honest)  # fmt: skip
PLANS = st.builds(
    Plan, family=TEXTS, product=TEXTS,
    device=st.builds(
        plan.DeviceTable, capability=st.tuples(st.integers(0, 99), st.integers(0, 99)), sm_count=st.integers(1, 999),
        l2_bytes=st.integers(1, 2**40), memory_class=TEXTS,
    ),
    environment=st.builds(plan.Environment, gpu=TEXTS, command=TEXTS, date=TEXTS),
    cell=st.lists(CELLS, max_size=3, unique_by=(lambda c: c.id, lambda c: (c.problem(None), c.m))).map(tuple),
)  # fmt: skip
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@QUICK
@given(made=PLANS)
def test_any_plan_survives_a_round_trip(made: Plan, kernel: StandIn, tmp_path: Path) -> None:
    plan.dump(made, tmp_path / "a.toml")
    assert plan.load(tmp_path / "a.toml") == msgspec.structs.replace(made, digest=made.seal())
    assert [f.name for f in tmp_path.iterdir()] == ["a.toml"]


EDITS = st.tuples(
    st.floats(0, 1, exclude_max=True), st.sampled_from(["delete", "insert", "flip", "copy"]),
    st.binary(min_size=1, max_size=4),
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(edits=st.lists(EDITS, min_size=1, max_size=4))
def test_any_mutation_is_a_plan_or_a_plan_error(
    edits: list[tuple[float, str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = bytearray(TEXT.encode())
    for place, edit, some in edits:
        at = int(place * len(data))
        if edit == "delete":
            del data[at : at + some[0]]
        elif edit == "insert":
            data[at:at] = some
        elif edit == "flip":
            data[at] ^= some[0] or 1
        else:
            data[at:at] = data[max(0, at - 4 * some[0]) : at]
    file = tmp_path_factory.getbasetemp() / "mutated.toml"
    file.write_bytes(data)
    found: object
    try:
        found = plan.load(file)
    except PlanError as error:
        found = error
    assert isinstance(found, Plan) or (isinstance(found, PlanError) and found.file == str(file) and found.fix)


def test_a_failing_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, kernel: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.toml"
    first = plan_of(cell(64, 64, 1), key=H200, product="h200")
    plan.dump(first, file)
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        plan.dump(plan_of(cell(64, 64, 2), key=H200, product="h200"), file)
    assert file.read_bytes() == before
    assert [f.name for f in tmp_path.iterdir()] == ["a.toml"]


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path, kernel: StandIn) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        plan.dump(plan_of(key=H200, product="h200"), tmp_path / "file" / "a.toml")


@pytest.mark.skipif("os.geteuid() == 0", reason="root may write anywhere")
def test_a_read_only_folder_is_an_os_error(tmp_path: Path, kernel: StandIn) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            plan.dump(plan_of(key=H200, product="h200"), tmp_path / "a.toml")
    finally:
        tmp_path.chmod(0o700)


def test_dump_refuses_what_load_would_refuse(tmp_path: Path, kernel: StandIn) -> None:
    twice = plan_of(cell(64, 64, 1), cell(64, 64, 1), key=H200, product="h200")
    with pytest.raises(errors.DuplicateCellError):
        plan.dump(twice, tmp_path / "a.toml")
    assert list(tmp_path.iterdir()) == []


def test_the_digest_seals_device_and_cells_and_nothing_else() -> None:
    loaded = plan.parse(TEXT)
    same = msgspec.structs.replace(loaded, digest="x", environment=plan.Environment(gpu="another", date="today"))
    assert same.seal() == loaded.seal()
    assert re.fullmatch(r"[0-9a-f]{16}", loaded.seal())
    for old, new, cell_id in [
        ("9.4", "9.5", "a"), ("6 %", "7 %", "b"), ("tile = 64", "tile = 32", "c"), ("m = 4", "m = 3", "b"),
        ('"qwen3"', '"qwen2"', ""), ("9.9", "9.8", "a"), ('"cublas"', '"cublaslt"', "c"),
    ]:  # fmt: skip
        changed = plan.parse(_change(old, new, cell_id=cell_id)[0])
        assert changed.seal() != loaded.seal(), old
    other = msgspec.structs.replace(loaded.device, memory_class="141gb-nvl")
    assert msgspec.structs.replace(loaded, device=other).seal() != loaded.seal()


def test_equal_text_in_another_layout_has_the_same_digest() -> None:
    text = TEXT.replace("{ threads = 128, rows = 2, chunks = 4 }", "{ chunks = 4, threads = 128, rows = 2 }")
    assert plan.parse(f"# comment\n\n{text}").seal() == plan.parse(TEXT).seal()


def test_the_schema_file_is_the_generated_one(tmp_path: Path) -> None:
    """Regenerate with `python -m skinny_core.plan`."""
    plan.write_schema(tmp_path / "new.json")
    kept = Path(plan.__file__).with_name("plan.schema.json")
    assert kept.read_text(encoding="utf-8") == (tmp_path / "new.json").read_text(encoding="utf-8")
    assert json.loads(kept.read_text(encoding="utf-8"))["$defs"]["Cell"]["additionalProperties"] is False


def test_lines_are_looked_up_for_an_error_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up reads the whole text: one for every cell made a start with 160 cells take a second."""
    shipped = next(Path(__file__).parents[2].glob("models/qwen3/src/*/plans/h200.toml"))
    monkeypatch.setattr(plan.toml_text, "line_of", lambda *_: pytest.fail("nothing is wrong with this plan"))
    assert len(plan.load(shipped).cells) >= 100

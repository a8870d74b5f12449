"""Faults found by attacking the finished core, each pinned by the case that showed it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear as torch_linear

from skinny_core import cache, device, dispatch, env, errors, op, plan
from skinny_core.device import DeviceKey
from skinny_core.kernels import contract, cute_objects, operands
from skinny_core.kernels.bf16_simt import host
from skinny_core.problem import DType, Problem
from skinny_core.testing import numerics
from skinny_core.testing.stand_in import StandIn, cell

N, K = 64, 64
BF16 = torch.bfloat16


@pytest.fixture
def planned(h200: DeviceKey, kernel: StandIn) -> StandIn:
    dispatch.activate_cells("test", h200, (cell(N, K, 2),))
    from skinny_core import warmup

    warmup.warm("test", [(N, K, DType.BF16)])
    return kernel


def _data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, K, dtype=BF16), torch.randn(N, K, dtype=BF16)


def test_a_user_without_a_home_is_no_error() -> None:
    """An arbitrary uid in a container: no HOME, no passwd entry."""
    code = (
        "import os, platformdirs, platformdirs.unix, warnings\n"
        "from skinny_core import cache, dispatch\n"
        "warnings.simplefilter('ignore')\n"
        "os.setuid(1000670)\n"
        "[os.environ.pop(name, None) for name in ('HOME', 'XDG_CACHE_HOME', 'XDG_CONFIG_HOME')]\n"
        "a = dispatch.activate(family='x', probe=False)\n"
        "print(cache.holds('a', 'b'), cache.entries(), *a.notes)\n"
    )
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False (0, 0) user plans not read: no home folder")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_forward_mode_inside_a_compiled_function() -> None:
    x, w, tangent = torch.randn(3, K), torch.randn(N, K), torch.randn(3, K)

    def derivative(linear: object) -> torch.Tensor:
        def f(y: torch.Tensor) -> torch.Tensor:
            return torch.func.jvp(lambda z: linear(z, w) + z[:, :N], (y,), (tangent,))[1]  # type: ignore[operator]

        return torch.compile(f, backend="aot_eager")(x)

    torch.testing.assert_close(derivative(op.linear), derivative(torch_linear))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_and_nested_operands_take_the_original_call(planned: StandIn) -> None:
    x, w = _data()
    sparse = w.float().to_sparse().to(BF16)
    nested = torch.nested.nested_tensor([torch.randn(1, K), torch.randn(1, K)], dtype=BF16)
    for a, b in ((x, sparse), (nested, w)):
        outcomes = []
        for call in (torch_linear, lambda p, q: dispatch.linear(p, q, "test")):
            try:
                outcomes.append(("value", call(a, b)))
            except (RuntimeError, NotImplementedError) as error:
                outcomes.append(("error", str(error)))
        assert outcomes[0][0] == outcomes[1][0]
        if outcomes[0][0] == "error":
            assert outcomes[0][1] == outcomes[1][1]
    assert not planned.launches


class Scaled(torch.Tensor):
    """A subclass with memory of its own, whose linear is not the product of its elements."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple = (), kwargs: object = None) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))  # type: ignore[operator]
            return 3 * out if func is torch_linear else out


@pytest.mark.parametrize("which", [0, 1])
def test_a_subclass_with_memory_keeps_its_meaning(planned: StandIn, which: int) -> None:
    pair = list(_data())
    pair[which] = pair[which].as_subclass(Scaled)
    numerics.assert_bit_equal(torch.Tensor(dispatch.linear(*pair, "test")), torch.Tensor(torch_linear(*pair)))
    assert not planned.launches


def test_a_residual_without_memory_is_never_launched(planned: StandIn, h200: DeviceKey) -> None:
    x, w = _data()
    zero = torch._efficientzerotensor((2, N), dtype=BF16)
    assert not dispatch._residual_fits(zero, x, N)
    with pytest.raises(errors.KernelRefusedError, match="memory of its own"):
        operands.check(
            "k", Problem(n=N, k=K), torch._efficientzerotensor((2, K), dtype=BF16), w, x @ w.T, None, K, N, 0
        )


def test_fp32_output_has_gradients_where_they_are_needed() -> None:
    """CUDA's `mm` with `out_dtype` has none; on every device the differentiable form is taken instead."""
    x, w = torch.randn(2, K, requires_grad=True), torch.randn(N, K)
    assert dispatch._is_differentiated(x, w)
    assert not dispatch._is_differentiated(x.detach(), w)
    with torch.no_grad():
        assert not dispatch._is_differentiated(x, w)


def test_the_op_exists_for_every_backend() -> None:
    for key in ("CUDA", "CPU", "MPS", "XPU", "PrivateUse1"):
        assert torch._C._dispatch_has_computed_kernel_for_dispatch_key("skinny::linear", key), key


def test_a_device_that_cannot_be_read_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", fails)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert device.current_key() is None
    monkeypatch.setattr(device, "current_key", fails)
    assert dispatch.activate(family="cpu-only", probe=False).device is None
    dispatch.deactivate("cpu-only")


def test_rocm_is_not_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert device.current_key() is None


def test_broken_files_never_raise_although_warnings_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.toml").write_text("not = [toml")
    monkeypatch.setenv(env.VARIABLE, f"plan={tmp_path / 'broken.toml'},cache={tmp_path / 'file'}")
    (tmp_path / "file").write_text("no folder")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "broken.toml" in dispatch.activate(family="x", probe=False).notes[0]
        assert cache.obtain("a", "b", lambda path: path.write_bytes(b"x") and None).read_bytes() == b"x"
    dispatch.deactivate("x")
    monkeypatch.delenv(env.VARIABLE)
    env.reload()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(env, "cache_folder", lambda: tmp_path)
    (tmp_path / "kernels").mkdir()
    return tmp_path / "kernels"


def test_a_manifest_too_deep_to_read_is_set_aside(folder: Path) -> None:
    path = cache.obtain("a", "key", lambda p: p.write_bytes(b"one") and None)
    path.with_suffix(".json").write_text("[" * 200_000)
    with pytest.warns(RuntimeWarning, match="set aside"):
        again = cache.obtain("a", "key", lambda p: p.write_bytes(b"two") and None)
    assert again.read_bytes() == b"two"


def test_two_compilers_never_write_one_file(folder: Path) -> None:
    """Two containers on one volume may share process numbers."""
    seen: list[Path] = []

    def write(path: Path) -> None:
        seen.append(path)
        path.write_bytes(b"x")

    cache.obtain("a", "one", write)
    next(folder.glob("*.o")).unlink()
    cache.obtain("a", "one", write)
    assert seen[0] != seen[1]


def test_the_object_is_there_before_its_manifest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest vouches for the object, so a crash between the two leaves an entry that nobody trusts."""
    order: list[str] = []
    replace = Path.replace
    monkeypatch.setattr(
        Path, "replace", lambda self, target: (order.append(Path(target).suffix), replace(self, target))[1]
    )
    cache.obtain("a", "key", lambda p: p.write_bytes(b"one") and None)
    assert order == [".o", ".json"]


def test_machine_code_depends_on_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = host.KERNEL
    spec = kernel.spec(kernel.config_from({"threads": 64, "rows": 2, "chunks": 1}), Problem(n=64, k=512), 1, pdl=True)
    before = cute_objects._cache_key(host.SOURCE, spec, device.product("h200"))
    assert before != cute_objects._cache_key(host.SOURCE, spec, device.product("h100-sxm"))
    monkeypatch.setattr(cache, "source_digest", lambda *names: "another")
    assert before != cute_objects._cache_key(host.SOURCE, spec, device.product("h200"))
    monkeypatch.undo()
    monkeypatch.setattr(cache, "versions", lambda *names: "another")
    assert before != cute_objects._cache_key(host.SOURCE, spec, device.product("h200"))


def test_the_compile_key_depends_on_the_ops_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dispatch.eligibility_digest(None, "x")
    assert before != dispatch.eligibility_digest(None, "y")
    monkeypatch.setattr(dispatch, "OP_SCHEMA", dispatch.OP_SCHEMA + " ")
    assert before != dispatch.eligibility_digest(None, "x")


def test_a_plan_is_renamed_into_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = next(Path(__file__).parents[2].glob("models/qwen3/src/*/plans/h200.toml"))
    found, target = plan.load(shipped), tmp_path / "p.toml"
    target.write_text("old")
    renamed: list[str] = []
    replace = Path.replace

    def watch(self: Path, to: Path) -> Path:
        renamed.append(target.read_text())  # still the old text until this moment
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", watch)
    plan.dump(found, target)
    assert renamed == ["old"]
    assert plan.load(target).cells == found.cells


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r"\nrel_rmse = .*", "\nrel_rmse = 0.5016", "rel-RMSE"),
        (r"\nbaseline = .*", "\nbaseline = { p20 = 1.3, p50 = 1.3, p80 = 1.3 }", "win at"),
    ],
)
def test_a_win_must_be_right_and_faster(old: str, new: str, says: str) -> None:
    """The first cell of the shipped plan is a win."""
    shipped = next(Path(__file__).parents[2].glob("models/qwen3/src/*/plans/h200.toml"))
    text = shipped.read_text()
    assert plan.parse(text).cells[0].status == "win"
    with pytest.raises(errors.EvidenceError, match=says):
        plan.parse(re.sub(old, new, text, count=1))


def test_the_gates_of_plan_and_tests_are_one() -> None:
    assert {d.torch: limit for d, limit in plan.RMSE_GATE.items()} == numerics.TOLERANCE


def test_fork_while_another_thread_holds_the_lock() -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with dispatch._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.alarm(20)  # a deadlock ends as a signal, not as a hang
        try:
            dispatch.linear(torch.randn(1, 8), torch.randn(8, 8), "after-fork")
        finally:
            os._exit(0)
    status = os.waitpid(child, 0)[1]
    release.set()
    thread.join()
    assert status == 0


def test_row_numbers_of_a_persistent_grid_fit_32_bits() -> None:
    """`group + grid` is a 32-bit number in the kernel; the grid has at most 132 x 16 blocks today."""
    assert contract.MAX_ROWS + 4096 * 16 < 2**31


def test_json_schema_is_valid_json() -> None:
    assert json.loads(json.dumps(plan.json_schema()))["$ref"]

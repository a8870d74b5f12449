"""`skinny demo`: a real language model, stock and with skinny; what ran, and why; one real projection through a kernel.

Without a GPU every call falls back (the text must be equal), and the kernel runs in Triton's interpreter in a process
of its own. With one, cells for this model's shapes are raced, installed and run. Exit code 1 if a text differs or a
result is not exact enough."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from skinny_core import device as devices
from skinny_core import dispatch
from skinny_core.explain import Line, explain
from skinny_core.family import ModelPackage, discover
from skinny_core.plan import Plan, dump
from skinny_core.problem import Problem
from skinny_core.rules import Reason
from skinny_core.testing.numerics import TOLERANCE, one_hot_columns_exact, rel_rmse
from skinny_lab import output, smollm2
from skinny_lab.explain.target import RequestError

QUESTION = "Why is memory bandwidth important for language models? Answer in two sentences."
SHOWN = ("qwen3-8b", "h200")
SHOWN_MS = (1, 2, 4, 8, 16)
LAYER = "model.layers.14.mlp.down_proj"
GATE = TOLERANCE[torch.bfloat16]
CHILD_SECONDS = 120
ORDER = ("stock", "skinny", "skinny", "stock", "stock", "skinny")
"""Of the timed runs: rotated, so that a drift of the clocks favours neither."""


def run_demo(console: Console | None = None, *, tokens: int = 40, device: str = "auto") -> int:
    """Run the whole demo. tokens: most that are generated. device: "auto", "cpu", "cuda", "cuda:1".

    Returns 0 when every text was equal and every result within its gate, else 1. Raises `DemoUnavailableError`,
    and `RequestError` for a device that is not there.
    """
    where = _find_device(device)
    console = console or output.console()
    checks: dict[str, bool] = {}
    with _one_thread(where), torch.cuda.device(where if where.type == "cuda" else -1):
        _run(console, where, tokens, checks)
    for name, ok in checks.items():
        console.print(Text.assemble(("   ok      ", "green") if ok else ("   FAILED  ", "bold red"), name))
    return 0 if checks and all(checks.values()) else 1


def _find_device(text: str) -> torch.device:
    """The device of `--device`. Judged before anything is loaded; raises `RequestError`."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if text == "cpu" or (text == "auto" and not count):
        return torch.device("cpu")
    found = re.fullmatch(r"auto|cuda(?::([0-9]{1,3}))?", text)
    if found is None:
        raise RequestError(f"--device {text!r}: the demo cannot run there", "use auto, cpu, cuda or cuda:INDEX")
    if int(found[1] or 0) < count:
        return torch.device("cuda") if found[1] is None else torch.device("cuda", int(found[1]))
    seen = f"torch sees {count or 'no'} CUDA device{'' if count == 1 else 's'}"
    raise RequestError(f"--device {text!r}: {seen}", "use auto or cpu; `skinny doctor` lists the devices")


def _run(console: Console, where: torch.device, tokens: int, checks: dict[str, bool]) -> None:
    with _step(console, "1. A language model"):
        chat = smollm2.load(where)
        weights = sum(m.weight.numel() for m in chat.model.modules() if isinstance(m, nn.Linear))
        _say(console, f"SmolLM2-135M-Instruct ({chat.source})")
        _say(console, f"BF16 on {_place(where)}; each token reads {2 * weights / 1e6:.0f} MB of linear weights")
    with _step(console, "2. The same text, stock and with skinny"):
        x = _generation(console, chat, tokens, checks)
    with _step(console, "3. What skinny would do for this model"):
        _newcomer(console, chat.model, where)
    if where.type == "cuda":
        with _step(console, "4. Cells raced here and now, installed and run"):
            _for_real(console, chat, where, tokens, checks)
    else:
        with _step(console, "4. One real projection through a Triton kernel, in the interpreter"):
            _interpreted(console, chat.model.get_submodule(LAYER).weight, x, checks)
    with _step(console, "5. Measured: Qwen3-8B on an H200"):
        _measured(console, *SHOWN)


@contextmanager
def _one_thread(where: torch.device) -> Iterator[None]:
    """On the CPU one thread: products this small gain nothing from a second one, which waits by spinning (measured on
    two busy cores: 44 s of CPU time for 35 tokens instead of 4)."""
    before = torch.get_num_threads()
    if where.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _step(console: Console, title: str) -> Iterator[None]:
    console.print(Text(f"\n{title}", "bold"))
    start = time.perf_counter()
    yield
    _say(console, f"{time.perf_counter() - start:.1f} s", "dim")


def _say(console: Console, text: str, style: str = "") -> None:
    """A paragraph, indented, wrapped to the console."""
    console.print(Padding(Text(text, style), (0, 3)))


def _place(where: torch.device) -> str:
    if where.type != "cuda":
        return "the CPU (no CUDA device is used)"
    return str(devices.current_key(where.index or 0))


def _generation(console: Console, chat: smollm2.Chat, tokens: int, checks: dict[str, bool]) -> Tensor:
    """Generate twice; returns the activation `[1, K]` that the stock model gave to the demo layer last."""
    import skinny_transformers

    prompt = chat.encode(QUESTION)
    with smollm2.captured(chat.model.get_submodule(LAYER)) as seen:
        stock = chat.generate(prompt, tokens)
    report = skinny_transformers.install(chat.model, family=smollm2.FAMILY)
    dispatch.reset_counters()
    ours = chat.generate(prompt, tokens)
    counted = dispatch.counters()
    skinny_transformers.uninstall(chat.model)

    checks["the text with skinny installed is the stock text, token for token"] = ours == stock
    expected = len(report.installed) * len(stock)
    checks[f"all {expected} calls of the linear layers were seen"] = sum(counted.values()) == expected
    _say(console, f"> {QUESTION}", "dim")
    _say(console, chat.text(stock), "italic")
    if ours != stock:
        _say(console, f"with skinny: {chat.text(ours)}", "red")
    _say(console, f"{len(stock)} tokens, {'equal' if ours == stock else 'NOT EQUAL'}. {report}")
    console.print(_outcomes(counted))
    return seen[0]


def _outcomes(counted: dict[dispatch.CounterKey, int]) -> Padding:
    shown = output.facts("", {})
    by_outcome: Counter[tuple[str, str]] = Counter()
    for (_, _, _, m, outcome), count in counted.items():
        by_outcome["M = 1" if m == 1 else "the prompt", outcome] += count
    for (rows, outcome), count in sorted(by_outcome.items()):
        kind, _, name = outcome.partition(":")
        what = f"kernel {name}" if kind == "kernel" else f"stock call, {name}: {Reason(name).meaning}"
        shown.add_row(f"{count} calls, {rows}", what)
    return Padding(shown, (0, 3))


def _newcomer(console: Console, model: nn.Module, where: torch.device) -> None:
    key = devices.current_key(where.index or 0) if where.type == "cuda" else devices.product(SHOWN[1])
    found = explain("smollm2-135m", smollm2.package(model), {}, key=key, ms=(1,))
    shown = _table(
        "projection", "N", "K", "calls", "MB", "on " + (devices.product_name(key) or key.slug) + ", M = 1 to 16"
    )
    for line in found.lines:
        megabytes = f"{2 * line.n * line.k / 1e6:.1f}"
        what = "kernel" if line.runs else f"stock call: {line.reason}"
        shown.add_row(line.projection, str(line.n), str(line.k), str(line.calls), megabytes, what)
    console.print(Padding(shown, (0, 3)))
    if not any(line.runs for line in found.lines):
        _say(
            console, "Nobody has measured these shapes, so nothing is replaced: a kernel runs where it has won a race."
        )


def _interpreted(console: Console, weight: Tensor, x: Tensor, checks: dict[str, bool]) -> None:
    """Run the kernel on real operands in a child process: Triton decides at import whether it interprets."""
    with tempfile.TemporaryDirectory(prefix="skinny-demo-") as folder:
        file = Path(folder) / "operands.pt"
        torch.save({"weight": weight.detach(), "x": x}, file)
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.run(
            [sys.executable, "-m", "skinny_lab.demo", str(file)],
            env=environment, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False,
        )  # fmt: skip
    if child.returncode != 0:
        _say(console, f"the interpreter process failed:\n{child.stderr.strip()[-2000:]}", "red")
        checks["a real projection ran through the kernel"] = False
        return
    got = json.loads(child.stdout.splitlines()[-1])
    n, k = weight.shape
    stock = rel_rmse(nn.functional.linear(x, weight), x, weight)
    lost = x.clone()
    lost[:, int(x[0].abs().sort().indices[k // 2])] = 0  # the median element: neither the loudest nor a silent one
    shown = output.facts("", {})
    shown.add_row("layer", f"{LAYER}, weight [{n}, {k}], activation of the last generated token")
    shown.add_row("kernel", f"{got['config']}; {got['seconds']:.1f} s")
    shown.add_row("rel-RMSE", f"{got['rel_rmse']:.2e} against float64, gate {GATE:.1e}")
    shown.add_row("", f"{stock:.2e} torch's own call")
    shown.add_row("", f"{rel_rmse(_rounded(lost, weight), x, weight):.2e} if one of the K elements were lost")
    exact = "equal, bit for bit" if got["one_hot"] else "NOT EQUAL"
    shown.add_row("one-hot rows", f"{got['columns']} columns of the weight: {exact}")
    console.print(Padding(shown, (0, 3)))
    checks[f"the kernel's result is within {GATE:.1e} of float64"] = got["rel_rmse"] <= GATE
    checks["one-hot rows return columns of the weight bit for bit"] = got["one_hot"]


def _rounded(x: Tensor, weight: Tensor) -> Tensor:
    return (x.double() @ weight.double().T).to(x.dtype)


def _for_real(console: Console, chat: smollm2.Chat, where: torch.device, tokens: int, checks: dict[str, bool]) -> None:
    """Race a few configs for this model's shapes, install the winners; compare tokens, exactness and speed."""

    import skinny_transformers
    from skinny_lab.bench.model_plan import quick_plan

    shapes = sorted({(m.out_features, m.in_features) for m in chat.model.modules() if isinstance(m, nn.Linear)})
    raced = quick_plan(shapes, (1,), family=smollm2.FAMILY)
    console.print(Padding(_cells(raced), (0, 3)))
    prompt = chat.encode(QUESTION)
    rates: dict[str, list[float]] = {"stock": [], "skinny": []}
    tokens_of: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="skinny-demo-") as folder:
        file = Path(folder) / "smollm2.toml"
        dump(raced, file)
        package = smollm2.package(chat.model, (file,))
        for name in ORDER:
            if name == "skinny":
                skinny_transformers.install(chat.model, package=package)
                dispatch.reset_counters()
            tokens_of[name], rate, how = smollm2.decode_rate(chat.model, prompt, max(tokens, 64))
            rates[name].append(rate)
            if name == "skinny":
                ran = sum(c for key, c in dispatch.counters().items() if key[-1].startswith("kernel:"))
                errors = _errors(chat.model, raced)
                skinny_transformers.uninstall(chat.model)
    wins = sum(cell.status == "win" for cell in raced.cells)
    best = {name: sorted(values)[len(values) // 2] for name, values in rates.items()}
    gain = best["skinny"] / best["stock"]
    _say(console, f"stock {best['stock']:.0f} tokens/s, skinny {best['skinny']:.0f} tokens/s ({gain:.2f}x; {how})")
    _say(console, f"{wins} of {len(raced.cells)} shapes won their race; {ran} kernel calls were launched or captured")
    checks["the decoded tokens with kernels are the stock tokens"] = tokens_of["skinny"] == tokens_of["stock"]
    if wins:
        checks["the kernels really ran"] = ran > 0
        worst = max(errors.values())
        checks[f"largest rel-RMSE of a kernel against float64 is {worst:.2e}, gate {GATE:.1e}"] = worst <= GATE


def _errors(model: nn.Module, raced: Plan) -> dict[str, float]:
    """rel-RMSE of one installed layer per won shape on seeded rows."""
    won = {(cell.n, cell.k) for cell in raced.cells if cell.status == "win"}
    errors = {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and (layer.out_features, layer.in_features) in won:
            won.discard((layer.out_features, layer.in_features))
            draw = torch.Generator().manual_seed(0)
            x = torch.randn(1, layer.in_features, generator=draw).to(layer.weight.device, layer.weight.dtype)
            errors[path] = rel_rmse(layer(x), x, layer.weight)
    return errors


def _cells(raced: Plan) -> Table:
    shown = _table("N", "K", "M", "kernel", "base us", "ours us", "gain", "status")
    for c in raced.cells:
        times = (f"{c.evidence.baseline.p50:.2f}", f"{c.evidence.candidate.p50:.2f}", f"{c.evidence.speedup:.2f}x")
        shown.add_row(str(c.n), str(c.k), str(c.m), c.kernel, *times, c.status)
    return shown


def _measured(console: Console, model: str, product: str) -> None:
    """Winning cells of a packaged model on a product, with their evidence."""
    from skinny_lab.bench.rows import LIMIT_TBPS

    package = _owner(model)
    if package is None:
        _say(console, f"no installed model package has a config named {model}; pip install skinny-qwen3")
        return
    found = explain(model, package, package.configs[model], key=devices.product(product), ms=SHOWN_MS)
    lines = [line for line in found.lines if line.runs and not line.part_of]
    if not lines:
        _say(console, f"the installed {package.name} package ships no measured cell for {product} yet")
        return
    shown = _table("projection", "N", "K", "M", "base us", "ours us", "gain", "TB/s", "of limit")
    for line in lines:
        shown.add_row(*_evidence(line, LIMIT_TBPS))
    console.print(Padding(shown, (0, 3)))
    saved = {m: found.saving_us(m) for m in sorted({line.m for line in lines})}
    _say(console, "Saved per decode step: " + ", ".join(f"{us / 1000:.2f} ms at M={m}" for m, us in saved.items()))
    limit = f"Limit: {LIMIT_TBPS:.2f} TB/s, the highest rate at which any kernel was seen to stream weights there."
    base = "Medians with a cold L2; base is the call that is replaced."
    _say(console, f"{base} {limit} All of it: skinny explain {model} --device {product}", "dim")


def _evidence(line: Line, limit: float) -> tuple[str, ...]:
    base, ours = line.baseline_us or float("nan"), line.ours_us or float("nan")
    rate = 2 * line.n * line.k / ours / 1e6
    times = (f"{base:.2f}", f"{ours:.2f}", f"{base / ours:.2f}x", f"{rate:.2f}", f"{rate / limit:.2f}")
    return (line.projection, str(line.n), str(line.k), str(line.m), *times)


def _owner(model: str) -> ModelPackage | None:
    return next((p for p in discover().packages if model in p.configs), None)


def _table(*columns: str) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        text = name in {"projection", "kernel", "status"} or name.startswith("on ")
        shown.add_column(name, justify="left" if text else "right", no_wrap=True)
    return shown


def interpret(file: str) -> dict[str, object]:
    """The child's work: run `bf16_stream` on the operands of a file and hold it against float64.

    Needs a process started with TRITON_INTERPRET=1; raises `InterpreterError` otherwise.
    """
    from skinny_core import kernels

    operands = torch.load(file, weights_only=True)
    weight, x = operands["weight"], operands["x"]
    n, k = weight.shape
    problem, kernel = Problem(n=n, k=k), kernels.get("bf16_stream")
    config = kernel.candidates(problem, 1)[0]
    launch = kernel.interpret(config, problem, 1)  # type: ignore[attr-defined]

    def linear(rows: Tensor, w: Tensor) -> Tensor:
        y = torch.full((rows.shape[0], n), float("nan"), dtype=rows.dtype)  # what is not written cannot pass
        launch(rows, w, y, None, k, n, n, False)
        return y

    start = time.perf_counter()
    error = rel_rmse(linear(x, weight), x, weight)
    seconds = time.perf_counter() - start
    columns = [0, 1, k // 2 + 1, k - 1]
    try:
        one_hot_columns_exact(linear, weight, columns=columns, rows=len(columns))
        exact = True
    except AssertionError:
        exact = False
    described = ", ".join(f"{name}={value}" for name, value in kernel.params_of(config).items())
    return {
        "config": f"bf16_stream({described})",
        "rel_rmse": error,
        "one_hot": exact,
        "columns": len(columns),
        "seconds": seconds,
    }


if __name__ == "__main__":
    print(json.dumps(interpret(sys.argv[1])))

#!/usr/bin/env python3
"""A model that nobody tuned, end to end: `python3 benchmarks/newcomer.py --out DIR` on a machine with a GPU.

SmolLM2-135M with its real weights (K = 576, 1536; N = 192 to 49152: no packaged plan has one of these shapes). The real
commands `skinny capture` and `skinny tune`, then the plan is installed through skinny_transformers, with nothing but
SKINNY=plan=FILE, and compared with stock: greedy text, tokens per second of eager `generate`, and a decode step
captured as one CUDA graph.

`newcomer.json` is whole after every step, so what was measured survives a later failure. Exit status 1: a check failed.
`--dry-run` needs no GPU: nothing is tuned, a made-up plan of another device is installed, every call must fall back.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from skinny_core import device, env, kernels, plan
from skinny_core.errors import KernelUnavailableError
from skinny_core.problem import Problem
from skinny_lab import capture, demo, smollm2
from skinny_lab.bench import entrants, generation, machine
from skinny_lab.bench.rows import write_text
from skinny_lab.output import one_line
from skinny_lab.tune.command import available

MODEL = "smollm2-135m"
DONE, BUDGET = 0, 3
"""Exit statuses of `skinny tune` that leave a plan to go on with."""
QUESTIONS = (
    demo.QUESTION,
    "Name three rivers of Europe.",
    "Write a haiku about the sea.",
    "What is the capital of Portugal, and what is it known for?",
    "Explain to a child why the sky is blue.",
    "List five uses of a paper clip.",
    "How does a bicycle stay upright?",
    "Translate 'good morning' into French and German.",
    "What does a compiler do?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet?",
    "What is the difference between weather and climate?",
    "Describe a forest in autumn.",
    "Why do cats purr?",
    "What is seven times eight?",
    "Tell me a short story about a robot.",
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is run. ms: captured, tuned, and sizes of the graph's decode step. batches: of `generate`. tokens: new
    ones per sequence. steps: of the graph, compared token by token. rounds, replays: timings per arm, steps in each."""

    ms: tuple[int, ...] = (1, 2, 4, 8, 16)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int = 64
    steps: int = 32
    rounds: int = 15
    replays: int = 24


DRY = Scale(ms=(1, 2), batches=(1, 2), tokens=5, steps=4, rounds=2, replays=2)


class Findings:
    """What is written to newcomer.json, as a whole, after every change. data: its content. ok: nothing failed."""

    def __init__(self, file: Path, *, dry_run: bool) -> None:
        self.file = file
        self.data: dict[str, Any] = {"schema": 1, "dry_run": dry_run, "command": machine.command()}
        self.data |= {"environment": {}, "text": [], "eager": [], "step": [], "checks": {}, "failed": {}}

    @property
    def ok(self) -> bool:
        return not self.data["failed"] and all(self.data["checks"].values())

    def put(self, name: str, value: Any) -> None:
        self.data[name] = value
        self.write()

    def add(self, name: str, value: Any) -> None:
        """Append to a list."""
        self.data[name].append(value)
        self.write()

    def check(self, name: str, held: bool) -> None:
        self.data["checks"][name] = bool(held)

    def fail(self, name: str, why: str) -> None:
        self.data["failed"][name] = why
        self.write()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Whatever goes wrong in here is written down, and the next step is tried."""
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            self.fail(name, one_line(error))
        print(
            f"{name}: {'failed' if name in self.data['failed'] else 'done'}, {time.monotonic() - begun:.1f} s",
            flush=True,
        )

    def write(self) -> None:
        write_text(self.file, json.dumps(self.data, indent=1) + "\n")


def command(arguments: Sequence[str], out: Path, seconds: float) -> dict[str, Any]:
    """Run `skinny ARGUMENTS` into out/ARGUMENT.txt. After `seconds` as if Ctrl-C was pressed, half a minute later for
    good. Returns command, seconds, status, and the end of what was said where the status is not 0."""
    log = out / f"{arguments[0]}.txt"
    begun = time.monotonic()
    settings = {**os.environ, "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "skinny_lab", *arguments], stdout=said, stderr=subprocess.STDOUT, env=settings
        )
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            try:
                status = child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                status = child.wait()
    took = round(time.monotonic() - begun, 1)
    found = {"command": shlex.join(["skinny", *arguments]), "seconds": took, "status": status}
    text = log.read_text(encoding="utf-8", errors="replace")
    print(f"{found['command']}: status {status} after {took} s", flush=True)
    return found | ({"said": text.splitlines()[-20:]} if status else {})


def summary(found: plan.Plan) -> dict[str, Any]:
    """Cells of a plan by status, the wins with their figures, and why the others are refused."""
    wins = [
        {
            "id": c.id, "n": c.n, "k": c.k, "m": c.m, "kernel": str(c.kernel_config),
            "us": c.evidence.candidate.p50, "cublas_us": c.evidence.baseline.p50,
            "speedup": round(c.evidence.speedup, 3), "in_model_us": c.evidence.in_model_us,
        }
        for c in found.cells if c.status == "win"
    ]  # fmt: skip
    refused = {c.id: c.why for c in found.cells if c.status == "refused"}
    return {"cells": dict(Counter(c.status for c in found.cells)), "wins": wins, "refused": refused}


def here(commit: str) -> plan.Environment:
    """The machine of a dry run."""
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    commit = commit or machine.checkout_commit()
    return plan.Environment(gpu=f"none ({platform.machine()})", torch=str(torch.__version__), commit=commit, date=today)


def stub_plan(shapes: Mapping[tuple[int, int], set[int]]) -> plan.Plan:
    """A plan of an H200 whose times are made up: on a machine without a GPU its cells must not run."""
    key = device.product("h200")
    kernel, made_up = kernels.get("bf16_stream"), plan.Quantiles(1.0, 1.0, 1.0)
    slower = plan.Quantiles(2.0, 2.0, 2.0)
    evidence = plan.Evidence(
        candidate=made_up, baseline=slower, candidate_hot=made_up, baseline_hot=slower, baseline_name="made up",
        rounds=1, rel_rmse=0.0,
    )  # fmt: skip
    cells = []
    for (n, k), seen in shapes.items():
        for m in sorted(seen & {1, 2}):
            found = kernel.candidates(Problem(n=n, k=k, device=key), m)
            if found:
                config = dict(kernel.params_of(found[0]))
                cell = plan.Cell(
                    id=f"stub/{n}x{k}/m{m}", n=n, k=k, m=m, status="win", kernel="bf16_stream", config=config,
                    evidence=evidence,
                )  # fmt: skip
                cells.append(cell)
    table = plan.DeviceTable(key.capability, key.sm_count, key.l2_bytes, key.memory_class)
    return plan.Plan(family="*", product="h200", device=table, cell=tuple(cells))


def table(data: Mapping[str, Any]) -> str:
    """What was found, for people."""
    lines = [f"{MODEL} on {data['environment'].get('gpu', 'an unknown machine')}"]
    if data["dry_run"]:
        lines.append("dry run on the CPU, for a few tokens: its times mean nothing")
    for name in ("capture", "tune"):
        ran = data.get(name, {})
        if ran:
            said = ran.get("skipped") or f"status {ran['status']} after {ran['seconds']} s"
            counted = "".join(f", {n} {status}" for status, n in ran.get("cells", {}).items())
            lines.append(f"{name}: {said}" + (f", {ran['records']} records" if "records" in ran else "") + counted)
    rates = {entry["batch"]: entry for entry in data["eager"]}
    if data["text"]:
        lines.append("batch  equal texts  equal tokens  largest gap  stock tok/s  skinny tok/s    gain  kernel calls")
    for t in data["text"]:
        gap = max((f"{d['gap_bf16_steps']:.2f} bf16" for d in t["differences"]), default="none")
        rate = rates.get(t["batch"])
        speeds = ("-", "-", "-")
        if rate:
            per_second = rate["per_second"]
            speeds = (f"{per_second['stock']:.0f}", f"{per_second['skinny']:.0f}", f"{rate['gain']:.3f}x")
        texts_equal = f"{t['rows_equal']} of {t['batch']}"
        lines.append(
            f"{t['batch']:5d}  {texts_equal:>11s}  {100 * t['tokens_equal']:10.1f} %  {gap:>11s}  {speeds[0]:>11s}  "
            f"{speeds[1]:>12s}  {speeds[2]:>6s}  {t['kernels']:12d}"
        )
    if data["step"]:
        graph = "one CUDA graph" if all(s["graph"] for s in data["step"]) else "eager, no GPU"
        lines.append(f"decode step, us ({graph}); saved: measured, and promised by the plan's cold times")
        head = ("    M", f"{'stock (p20-p80)':>23s}", f"{'skinny (p20-p80)':>23s}", "  gain")
        lines.append("  ".join((*head, "saved", "promised", "kernels", "equal tokens")))
    for s in data["step"]:
        arms = [f"{t['p50']:.1f} ({t['p20']:.1f}-{t['p80']:.1f})" for t in (s["us"]["stock"], s["us"]["skinny"])]
        lines.append(
            f"{s['m']:5d}  {arms[0]:>23s}  {arms[1]:>23s}  {s['gain']:.3f}x  {s['saving_us']:5.1f}  "
            f"{s['predicted_saving_us']:8.1f}  {s['kernels']:7d}  {100 * s['tokens_equal']:10.1f} %"
        )
    return "\n".join(lines)


def record(out: Path, found: Findings, scale: Scale) -> Path:
    """`skinny capture`, as typed; the file."""
    file = out / "capture.json"
    file.unlink(missing_ok=True)  # one of an earlier run must not stand in for this one's
    batches = ",".join(map(str, scale.ms))
    ran = command(["capture", "transformers", MODEL, "--batch", batches, "--out", str(file), "--force"], out, 300)
    found.check("skinny capture ended with 0", ran["status"] == DONE)
    if ran["status"] == DONE:
        seen = capture.read(file)
        ran |= {"records": len(seen.records), "notes": seen.notes}
        ran["decode_shapes"] = [[n, k, sorted(ms)] for (n, k), ms in seen.shapes(phase="decode").items()]
    found.put("capture", ran)
    return file


def tune(out: Path, found: Findings, captured: Path, budget: float, peer_folder: Path | None) -> Path:
    """`skinny tune --capture`, as typed; the plan, which is only there where a cell was measured."""
    file = out / "plan.toml"
    file.unlink(missing_ok=True)
    asked = ["tune", "--capture", str(captured), "--out", str(file), "--time-budget", f"{budget:g}", "--force"]
    asked += ["--peer-folder", str(peer_folder)] if peer_folder else []
    # A cell that was begun is ended, and compiling before the first one is not free: more than the budget itself.
    ran = command(asked, out, budget + 120)
    found.check("skinny tune ended with 0 or 3 and wrote a plan", ran["status"] in (DONE, BUDGET) and file.is_file())
    found.put("tune", ran | (summary(plan.load(file)) if file.is_file() else {}))
    return file


def use(file: Path) -> None:
    """SKINNY=plan=FILE for this process, as a user would set it; what it says about the cache stays."""
    kept = [item for item in os.environ.get(env.VARIABLE, "").split(",") if item.strip().startswith(("cache=", "pdl="))]
    os.environ[env.VARIABLE] = ",".join([*kept, f"plan={file}"])
    env.reload()


def texts(chat: Any, found: Findings, scale: Scale, wins: Mapping[tuple[int, int, int], plan.Cell]) -> None:
    """Greedy text, then tokens per second, of `generate` at each batch size, stock and with skinny."""
    model = chat.model
    rows = [chat.encode(question) for question in QUESTIONS[: max(scale.batches)]]
    alone = [generation.greedy(model, *generation.padded([row]), scale.tokens)[0][0] for row in rows]
    reference = generation.reference(model)
    for batch in scale.batches:
        name = f"text at batch {batch}"
        with found.step(name):
            ids, mask = generation.padded(rows[:batch])
            stock = generation.greedy(model, ids, mask, scale.tokens)
            with generation.installed(model, "skinny") as report:
                ours = generation.greedy(model, ids, mask, scale.tokens)
                counted = generation.outcomes()
            exact = generation.exact_logits(reference, ids, mask, stock[0])
            end = chat.tokenizer.eos_token_id
            entry = {"batch": batch} | generation.compare(stock, ours, exact, end)
            # What stock itself does to a text when only the batch size changes: the yardstick for the shares above.
            pairs = list(zip(alone, stock[0], strict=False))
            own = [generation.shares(generation.ended(a, end), generation.ended(b, end))[0] for a, b in pairs]
            entry["stock_against_itself_alone"] = {"rows_equal": own.count(1.0), "tokens_equal": sum(own) / batch}
            entry |= {"installed": str(report), "calls": counted, "wins": _wins_at(wins, batch)}
            entry["kernels"] = generation.kernel_calls(batch)
            needed = len(generation.planned(model, wins, batch)) * (scale.tokens - 1)
            found.check(f"{name}: at least {needed} kernel calls", entry["kernels"] >= needed)
            every = len(report.installed) * scale.tokens
            found.check(f"{name}: all {every} calls of linear layers were seen", sum(counted.values()) == every)
            found.check(f"{name}: equal, or every first difference is a near tie", entry["near_ties_only"])
            apart = f"{entry['apart']:.2e}, allowed {entry['allowed']:.2e}"
            found.check(f"{name}: logits are {apart} from stock's", entry["apart"] <= entry["allowed"])
            found.add("text", entry)
            del exact
        with found.step(f"rate at batch {batch}"):
            found.add("eager", generation.rates(model, ids, mask, scale.tokens, demo.ORDER))


def steps(chat: Any, found: Findings, scale: Scale, wins: Mapping[tuple[int, int, int], plan.Cell]) -> None:
    """A decode step of M sequences, stock and with skinny, as one CUDA graph each."""
    rows = [chat.encode(question)[0] for question in QUESTIONS[: max(scale.ms)]]
    shortest = min(len(row) for row in rows)
    prompts = torch.stack([row[-shortest:] for row in rows])
    reference = generation.reference(chat.model)
    for m in scale.ms:
        name = f"step at M = {m}"
        with found.step(name):
            entry = generation.step_race(chat.model, reference, prompts[:m], scale.steps, scale.rounds, scale.replays)
            needed = len(generation.planned(chat.model, wins, m))
            entry["expected"] = needed
            entry["predicted_saving_us"] = round(generation.predicted_saving(chat.model, wins, m), 2)
            found.check(f"{name}: {needed} kernel calls in the captured step", entry["kernels"] == needed)
            apart = f"{entry['apart']:.2e}, allowed {entry['allowed']:.2e}"
            found.check(f"{name}: logits are {apart} from stock's", entry["apart"] <= entry["allowed"])
            found.add("step", entry)


def must_race_everything() -> None:
    """Raise `KernelUnavailableError` where a kernel that `skinny tune` races cannot be compiled: a run without it says
    nothing about it, and every check would hold (seen on an H200 without the CuTe DSL: 29 cells refused, all well)."""
    _, absent = available(entrants.DEFAULT)
    if absent:
        what = "; ".join(f"{stem}: {why}" for stem, why in absent.items())
        raise KernelUnavailableError(f"skinny tune would leave kernels out: {what}", "pip install 'skinny-core[cute]'")


def _wins_at(wins: Mapping[tuple[int, int, int], plan.Cell], m: int) -> list[str]:
    return [f"{n}x{k} {cell.kernel}" for (n, k, at), cell in wins.items() if at == m]


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run the steps, print the table; 0 where every check held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for newcomer.json, the plan and the logs")
    parser.add_argument("--time-budget", type=float, default=150.0, help="seconds for skinny tune")
    parser.add_argument("--peer-folder", type=Path, default=None, help="folder with vLLM's skinny_gemm.py")
    parser.add_argument("--plan", type=Path, default=None, help="go on with this plan: nothing is captured or tuned")
    parser.add_argument("--commit", default="", help="commit of the sources, where they are not a checkout")
    parser.add_argument("--dry-run", action="store_true", help="without a GPU: everything falls back")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    if "," in str(given.plan or out):
        parser.error("SKINNY cannot name a path with a comma in it")
    if not given.dry_run and not torch.cuda.is_available():  # asks the driver, holds no memory: tune must be alone
        parser.error("needs a CUDA device, or --dry-run")
    if not given.dry_run and given.plan is None:
        try:
            must_race_everything()
        except KernelUnavailableError as error:
            parser.error(str(error))
    scale = DRY if given.dry_run else Scale()
    if given.dry_run:
        torch.set_num_threads(1)  # a second one waits by spinning (demo.py has the figures)
    out.mkdir(parents=True, exist_ok=True)
    found = Findings(out / "newcomer.json", dry_run=given.dry_run)
    if given.plan is not None:
        file = given.plan.resolve()
        found.put("tune", {"skipped": f"--plan {given.plan}"} | summary(plan.load(file)))
    else:
        captured = record(out, found, scale)
        if not captured.is_file():
            return _end(found)
        if given.dry_run:
            file = out / "plan.toml"
            plan.dump(stub_plan(capture.read(captured).shapes(phase="decode")), file)
            found.put("tune", {"skipped": "--dry-run: a made-up plan of another device"})
        else:
            file = tune(out, found, captured, given.time_budget, given.peer_folder)
            if not file.is_file():
                return _end(found)
    # Only now: this process would be "another process on the GPU" for `skinny tune`.
    environment = here(given.commit) if given.dry_run else machine.environment(commit=given.commit)
    found.put("environment", msgspec.to_builtins(environment))
    try:
        use(file)
        chat = smollm2.load("cpu" if given.dry_run else "cuda")
        generation.never_end(chat.model)
        loaded = plan.load(file)
        mine = device.current_key() if not given.dry_run else None
        wins = {(c.n, c.k, c.m): c for c in loaded.cells if c.status == "win" and loaded.key == mine}
        found.put("model", chat.source)
        shapes = {(m.out_features, m.in_features) for m in chat.model.modules() if isinstance(m, nn.Linear)}
        if "decode_shapes" in found.data.get("capture", {}):
            seen = {(n, k): set(ms) for n, k, ms in found.data["capture"]["decode_shapes"]}
            complete = seen == {shape: set(scale.ms) for shape in shapes}
            found.check(f"the capture holds the {len(shapes)} shapes of the model at every M, and no others", complete)
        with found.step("text"):
            texts(chat, found, scale, wins)
        with found.step("decode steps"):
            steps(chat, found, scale, wins)
    except Exception as error:
        found.fail("model", one_line(error))
    return _end(found)


def _end(found: Findings) -> int:
    found.write()
    print(table(found.data), flush=True)
    for name, why in found.data["failed"].items():
        print(f"FAILED {name}: {why}")
    for name, held in found.data["checks"].items():
        if not held:
            print(f"CHECK FAILED {name}")
    print(json.dumps({"checks": len(found.data["checks"]), "held": sum(found.data["checks"].values())}), flush=True)
    return 0 if found.ok else 1


if __name__ == "__main__":
    sys.exit(main())

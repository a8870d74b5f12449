"""A Transformers model's greedy text, its rate, and its decode step as one CUDA graph: stock and with skinny.

Two arms of one model object: "stock" is the untouched model, "skinny" the same one while `skinny_transformers.install`
holds. Ids and masks are [B, T], padded on the left; logits are [B, steps, V] in float32.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skinny_core import dispatch
from skinny_core.errors import SkinnyError
from skinny_core.plan import Cell

PAD = 2
NOISE = 2.0
"""Two BF16 models with independent roundings, each `noise` away from the FP32 one, are about 1.4 * noise apart."""
NEAR = 6.0
"""Four errors of one standard deviation each lie in the gap between two logits of two arms, so it moves by 2 of them;
three times that is a near tie."""
Wins = Mapping[tuple[int, int, int], Cell]
Greedy = tuple[list[list[int]], Tensor]


@contextmanager
def installed(model: nn.Module, arm: str) -> Iterator[Any]:
    """The model as `arm` while the context lasts, counters at zero; yields what `install` reported."""
    import skinny_transformers

    report = skinny_transformers.install(model) if arm == "skinny" else None
    dispatch.reset_counters()
    try:
        yield report
    finally:
        if arm == "skinny":
            skinny_transformers.uninstall(model)


def never_end(model: Any) -> None:
    """`generate` goes on after the end of a turn: rates need equal numbers of steps. `ended` cuts texts there."""
    import transformers

    model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=PAD)


def reference(model: nn.Module) -> nn.Module:
    """An FP32 copy. Not through the model's own `float`: Transformers refuses that for one that was read from GGUF."""
    return nn.Module.float(copy.deepcopy(model))


def padded(rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Ids and mask of prompts `[1, T]` of different lengths."""
    width = max(row.shape[-1] for row in rows)
    ids = torch.cat([nn.functional.pad(row, (width - row.shape[-1], 0), value=PAD) for row in rows])
    mask = torch.cat([nn.functional.pad(torch.ones_like(row), (width - row.shape[-1], 0)) for row in rows])
    return ids, mask


@torch.no_grad()
def greedy(model: Any, ids: Tensor, mask: Tensor, tokens: int) -> Greedy:
    """New ids by row, and the logits they were chosen from."""
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return out.sequences[:, ids.shape[1] :].tolist(), torch.stack(out.logits, 1).float()


@torch.no_grad()
def exact_logits(exact: Any, ids: Tensor, mask: Tensor, new: Sequence[Sequence[int]]) -> Tensor:
    """Logits of `exact`, an FP32 copy of the model that is given the prompt and each row's new ids but the last."""
    tokens = torch.tensor(new, device=ids.device)
    every = torch.cat([ids, tokens[:, :-1]], 1)
    full = torch.cat([mask, torch.ones_like(tokens[:, :-1])], 1)
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    out = exact(
        input_ids=every, attention_mask=full, position_ids=positions, use_cache=False, logits_to_keep=tokens.shape[1]
    )
    return out.logits.float()  # type: ignore[no-any-return]


def ended(ids: Sequence[int], end: int | None) -> list[int]:
    """Ids up to the first end of turn, that one included: what a reader sees."""
    found = list(ids)
    return found[: found.index(end) + 1] if end in found else found


def shares(one: Sequence[int], other: Sequence[int]) -> tuple[float, float]:
    """(tokens equal at their place, tokens before the first difference), each as a share of the longer text."""
    longer = max(len(one), len(other))
    first = first_difference(one, other)
    equal = sum(a == b for a, b in zip(one, other, strict=False))
    return equal / longer, (longer if first is None else first) / longer


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Place of the first difference, None for equal texts."""
    if list(one) == list(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def bf16_step(value: float) -> float:
    """Distance of two neighbouring BF16 numbers at a value: the rounding that every logit went through."""
    return 2.0 ** (math.floor(math.log2(abs(value))) - 7) if value else 2.0**-133


def compare(stock: Greedy, ours: Greedy, exact: Tensor, end: int | None) -> dict[str, Any]:
    """Texts row by row. gap: stock's logit of its own token less that of skinny's, where the texts first differ; also
    in BF16 steps of that logit, and in standard deviations of stock's logits against the FP32 model at that place.

    apart, noise: rel. distance of skinny's logits from stock's, and of both from the FP32 model's, over all places
    whose context is still the same.
    """
    rows, differences = [], []
    sums = dict.fromkeys(("apart", "stock", "skinny", "exact"), 0.0)
    for row, (a, b) in enumerate(zip(stock[0], ours[0], strict=True)):
        mine, theirs = ended(a, end), ended(b, end)
        equal, before = shares(mine, theirs)
        first = first_difference(mine, theirs)
        rows.append({"row": row, "tokens": max(len(mine), len(theirs)), "equal": equal, "before": before})
        same = len(mine) if first is None else first + 1
        s, o, e = (logits[row, :same].double() for logits in (stock[1], ours[1], exact))
        for name, difference in (("apart", s - o), ("stock", s - e), ("skinny", o - e), ("exact", e)):
            sums[name] += float(difference.square().sum())
        if first is None:
            continue
        sigma = float((s[first] - e[first]).square().mean().sqrt())
        gap = float(s[first, a[first]] - s[first, b[first]])
        found = {"row": row, "position": first, "stock": a[first], "skinny": b[first], "gap": gap}
        found["gap_bf16_steps"] = gap / bf16_step(float(s[first, a[first]]))
        found["gap_sigmas"] = gap / sigma if sigma else math.inf
        found["skinny_gap"] = float(o[first, b[first]] - o[first, a[first]])
        differences.append(found)
    relative = {name: math.sqrt(sums[name] / sums["exact"]) for name in ("apart", "stock", "skinny")}
    total = sum(r["tokens"] for r in rows)
    return {
        "rows_equal": sum(r["equal"] == 1.0 for r in rows),
        "tokens_equal": sum(r["tokens"] * r["equal"] for r in rows) / total,
        "tokens_before_a_difference": sum(r["tokens"] * r["before"] for r in rows) / total,
        "near_ties_only": all(d["gap_sigmas"] <= NEAR for d in differences),
        "differences": differences,
        "apart": relative["apart"],
        "allowed": NOISE * relative["stock"],
        "noise_stock": relative["stock"],
        "noise_skinny": relative["skinny"],
        "rows": rows,
    }


def rates(model: Any, ids: Tensor, mask: Tensor, tokens: int, order: Sequence[str]) -> dict[str, Any]:
    """Tokens per second of `generate`, the prompt included, in turn; the caller has run both arms once before."""
    found: dict[str, list[float]] = {"stock": [], "skinny": []}
    for arm in order:
        with installed(model, arm):
            _wait(ids)
            begun = time.perf_counter()
            with torch.no_grad():
                model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
            _wait(ids)
            found[arm].append(ids.shape[0] * tokens / (time.perf_counter() - begun))
    middle = {arm: statistics.median(values) for arm, values in found.items()}
    gain = middle["skinny"] / middle["stock"]
    return {"batch": ids.shape[0], "tokens": tokens, "per_second": middle, "gain": gain, "all": found}


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step that is run again and again. run: one step. rewind: back to the first one. token: `[M, 1]`, chosen
    by the last step. logits: `[M, V]` of the last step. kernels: calls of ours per step."""

    run: Callable[[], None]
    rewind: Callable[[], None]
    token: Tensor
    logits: Tensor
    kernels: int


@torch.no_grad()
def decode_step(model: Any, prompts: Tensor, first: Tensor, room: int) -> Step:
    """Static cache, prompt, then one step of it: captured as one CUDA graph, or eager on the CPU.

    prompts: `[M, T]`. first: `[M, 1]`, what the first step is given. room: most steps without a rewind. Raises where
    the step cannot be captured.
    """
    from transformers import StaticCache

    m, length = prompts.shape
    warm_ups = 3
    cache = StaticCache(config=model.config, max_cache_len=length + max(room, warm_ups))
    out = model(input_ids=prompts, past_key_values=cache, use_cache=True)
    token, position = first.clone(), torch.full_like(first, length)
    logits = torch.empty_like(out.logits[:, -1])

    def step() -> None:
        found = model(input_ids=token, past_key_values=cache, position_ids=position, use_cache=True).logits[:, -1]
        logits.copy_(found)
        token.copy_(found.argmax(-1, keepdim=True))
        position.add_(1)

    def rewind() -> None:
        for layer in cache.layers:  # the place that the next step writes is counted on the device, layer by layer
            layer.cumulative_length.fill_(length)
        token.copy_(first)
        position.fill_(length)

    if not prompts.is_cuda:
        dispatch.reset_counters()
        step()
        found = kernel_calls(m)
        rewind()
        return Step(torch.no_grad()(step), rewind, token, logits, found)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # cuBLAS takes its workspace and lazy things are loaded before the capture
        for _ in range(warm_ups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    rewind()
    graph = torch.cuda.CUDAGraph()
    dispatch.reset_counters()
    with torch.cuda.graph(graph):
        step()
    found = kernel_calls(m)  # nothing runs while capturing, so whatever is counted is in the graph
    rewind()
    return Step(graph.replay, rewind, token, logits, found)


def step_race(model: Any, exact_model: Any, prompts: Tensor, steps: int, rounds: int, replays: int) -> dict[str, Any]:
    """Both arms' decode step: the same tokens? how far apart? microseconds, in turn. exact_model: an FP32 copy."""
    m = prompts.shape[0]
    with torch.no_grad():
        first = model(input_ids=prompts, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)
    arms: dict[str, Step] = {}
    for arm in ("stock", "skinny"):
        with installed(model, arm):
            arms[arm] = decode_step(model, prompts, first, max(steps, replays))
            if not prompts.is_cuda:  # no graph remembers what was installed: compare and time at once
                arms[arm] = _while_installed(model, arm, arms[arm])
    if arms["stock"].kernels:
        raise SkinnyError(f"the stock step ran {arms['stock'].kernels} kernels of ours", "this is a fault here")
    texts: dict[str, Tensor] = {}
    logits: dict[str, Tensor] = {}
    for arm, step in arms.items():
        step.rewind()
        chosen = []
        for index in range(steps):
            step.run()
            chosen.append(step.token.clone())
            if index == 0:
                logits[arm] = step.logits.double()
        texts[arm] = torch.cat(chosen, 1)
    pair = torch.cat([first, first], 1).tolist()
    exact = exact_logits(exact_model, prompts, torch.ones_like(prompts), pair)[:, 1].double()
    size = float(exact.norm())
    equal = (texts["stock"] == texts["skinny"]).double()
    times = _times(arms, prompts, rounds, replays)
    return {
        "m": m, "graph": prompts.is_cuda, "cache": prompts.shape[1] + max(steps, replays), "rounds": rounds,
        "us": times, "gain": times["stock"]["p50"] / times["skinny"]["p50"],
        "saving_us": times["stock"]["p50"] - times["skinny"]["p50"], "kernels": arms["skinny"].kernels,
        "rows_equal": int(equal.amin(1).sum()), "tokens_equal": float(equal.mean()), "steps": steps,
        "apart": float((logits["skinny"] - logits["stock"]).norm()) / size,
        "allowed": NOISE * float((logits["stock"] - exact).norm()) / size,
    }  # fmt: skip


def _while_installed(model: Any, arm: str, step: Step) -> Step:
    def run() -> None:
        with installed(model, arm):
            step.run()

    return Step(run, step.rewind, step.token, step.logits, step.kernels)


def _times(arms: Mapping[str, Step], x: Tensor, rounds: int, replays: int) -> dict[str, dict[str, float]]:
    """Microseconds per step: percentiles over rounds of `replays` steps; the arms change places every round."""
    found: dict[str, list[float]] = {arm: [] for arm in arms}
    for number in range(rounds + 1):
        for arm in list(arms) if number % 2 else reversed(arms):
            arms[arm].rewind()
            per_step = _timed(arms[arm].run, x, replays)
            if number:  # the first round raises the clocks
                found[arm].append(per_step)
    return {
        arm: {f"p{int(100 * q)}": round(_quantile(values, q), 3) for q in (0.2, 0.5, 0.8)}
        for arm, values in found.items()
    }


def _timed(run: Callable[[], None], x: Tensor, replays: int) -> float:
    _wait(x)
    if not x.is_cuda:
        begun = time.perf_counter()
        for _ in range(replays):
            run()
        return (time.perf_counter() - begun) * 1e6 / replays
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3 / replays


def _quantile(values: Sequence[float], q: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(q))


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def kernel_calls(m: int) -> int:
    """Calls of ours with M rows since the counters were set to zero."""
    return sum(n for key, n in dispatch.counters().items() if key[3] == m and key[-1].startswith("kernel:"))


def outcomes() -> dict[str, int]:
    """Calls since the counters were set to zero: "M=2 kernel:bf16_mma", "M=17+ fallback:m_above"."""
    found: Counter[str] = Counter()
    for (_, _, _, m, outcome), count in dispatch.counters().items():
        found[f"M={m}{'+' if m == dispatch.M_ABOVE else ''} {outcome}"] += count
    return dict(sorted(found.items()))


def planned(model: nn.Module, wins: Wins, m: int) -> list[Cell]:
    """The cell of each linear layer that has one at M."""
    layers = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    return [cell for layer in layers if (cell := wins.get((layer.out_features, layer.in_features, m)))]


def predicted_saving(model: nn.Module, wins: Wins, m: int) -> float:
    """Microseconds that the plan's cold times promise per decode step."""
    return sum(cell.evidence.baseline.p50 - cell.evidence.candidate.p50 for cell in planned(model, wins, m))

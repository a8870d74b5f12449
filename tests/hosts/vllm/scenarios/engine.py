"""The real engine on the CPU. Arguments: model folder, "eager" or "compiled", "here" or "processes", and a plan file.

Prints tokens, op calls by shape and M, what the compiler did, and the plug-in's state in every process. With a plan
file (of the stand-in kernel) the same engine then decodes once more with that plan, its tensors passing for CUDA ones.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from checks import report

PROMPT = [1, 2, 3, 4]
TOKENS = 4


def describe(worker: Any) -> dict[str, Any]:
    """State in the process that holds the model."""
    from vllm.compilation.counter import compilation_counter

    import skinny_vllm
    from skinny_core import dispatch

    return {
        "pid": os.getpid(),
        "status": skinny_vllm.status().to_json(),
        "calls": sorted([*key, count] for key, count in dispatch.counters().items()),
        "compiler": {name: value for name, value in vars(compilation_counter).items() if isinstance(value, int)},
        "key": dict(worker.vllm_config.additional_config),
        "hash": worker.vllm_config.compute_hash(),
    }


def forget_calls(worker: Any) -> None:
    """Counters to zero: what warm-up ran does not count."""
    from skinny_core import dispatch

    dispatch.reset_counters()


def remove(worker: Any) -> int:
    """Uninstall from the running model."""
    import skinny_vllm

    return skinny_vllm.uninstall(worker.model_runner.model)


def pretend_cuda(plan: str) -> list[str]:
    """Activate a plan of the stand-in kernel and warm it, in this process; the CPU passes for an H200, device 0."""
    import torch

    from skinny_core import device, dispatch, env, family, warmup
    from skinny_core.problem import DType
    from skinny_core.testing import stand_in

    stand_in.register()
    key = device.product("h200")
    torch.Tensor.get_device = lambda self: 0
    torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    device.current_key = lambda index=None: key
    os.environ["SKINNY"] = f"plan={plan}"
    env.reload()
    package = family.for_architecture("Qwen3ForCausalLM")
    dispatch.activate(package, static_weights=True)
    shapes = sorted({(n, k) for _, n, k, _, _ in dispatch.counters()})
    warmup.warm(package.name, [(n, k, DType.BF16) for n, k in shapes])
    state = dispatch.family_state(package.name)
    return sorted(f"{problem.n}x{problem.k} M={m}" for _, problem, m in state.launchers)


def generate(llm: Any, requests: int) -> list[Any]:
    """Greedy tokens and the log probabilities behind them, for `requests` equal prompts decoded together."""
    from vllm import SamplingParams

    greedy = SamplingParams(max_tokens=TOKENS, temperature=0, detokenize=False, logprobs=2, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * requests, greedy, use_tqdm=False)
    found = []
    for output in (item.outputs[0] for item in outputs):
        rows = [sorted((token, value.logprob) for token, value in row.items()) for row in output.logprobs]
        found.append([list(output.token_ids), rows])
    return found


def main(model: str, mode: str, where: str, plan: str = "") -> None:
    """One engine, decoding with M = 1 and M = 2."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if where == "processes" else "0"
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    from vllm import LLM

    import skinny_vllm

    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=mode == "eager",
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        dtype="bfloat16",
        **({"compilation_config": {"mode": 3}} if mode == "compiled" else {}),
    )
    llm.collective_rpc(forget_calls)
    text = {count: generate(llm, count) for count in (1, 2)}
    engine = llm.collective_rpc(describe)[0]
    facts = {"pid": os.getpid(), "status": skinny_vllm.status().to_json(), "engine": engine, "text": text}
    if mode == "eager" and engine["calls"]:
        removed = llm.collective_rpc(remove)[0]
        stock = {count: generate(llm, count) for count in (1, 2)}
        facts |= {"removed": removed, "stock": stock, "after": llm.collective_rpc(describe)[0]}
    if plan:
        cells = pretend_cuda(plan)
        forget_calls(None)
        facts |= {"cells": cells, "planned": {count: generate(llm, count) for count in (1, 2)}}
        facts["with_plan"] = llm.collective_rpc(describe)[0]
    report(**facts)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The process that runs vLLM for `skinny capture vllm`: a Request on stdin, a capture file as its only argument."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec

from skinny_core.errors import SkinnyError
from skinny_lab.capture import document, request, vllm_layers
from skinny_lab.capture.document import Capture
from skinny_lab.capture.request import Request
from skinny_lab.capture.tally import Tally
from skinny_lab.explain.target import RequestError


def record(asked: Request) -> Capture:
    """Start an engine, generate at each batch size, and return what rank 0 issued.

    Eager, without prefix cache: each token is computed, in steps of exactly as many rows as there are tokens. What runs
    at start-up (memory profile, warm-up) is not recorded.
    """
    from vllm import LLM, SamplingParams

    batches = asked.batches
    options: dict[str, Any] = {"load_format": "dummy"} if asked.random else {}
    room = len(asked.prompt.encode()) if asked.prompt else request.PROMPT_TOKENS
    llm = LLM(
        model=asked.model,
        skip_tokenizer_init=not asked.prompt,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=-(-(room + asked.new_tokens + 16) // 16) * 16,
        max_num_seqs=max(batches),
        tensor_parallel_size=asked.tp,
        **options,
    )
    vocabulary = llm.llm_engine.model_config.get_vocab_size()
    ids = llm.get_tokenizer().encode(asked.prompt) if asked.prompt else request.prompt_ids(vocabulary)
    greedy = SamplingParams(temperature=0, max_tokens=asked.new_tokens, ignore_eos=True, detokenize=False)
    llm.collective_rpc(vllm_layers.attach)
    for batch in batches:
        llm.collective_rpc(vllm_layers.begin, args=(batch,))
        llm.generate([{"prompt_token_ids": list(ids)}] * batch, greedy, use_tqdm=False)
    name, calls, notes = llm.collective_rpc(vllm_layers.detach)[0]
    tally = Tally()
    for rows, sequences, products in calls:
        tally.step(rows, sequences)
        for path, n, k, m, dtypes, bias in products:
            tally.add(path, n, k, m, tuple(dtypes), bias)
    for note in notes:
        tally.note(note)
    captured = asked.capture("vllm", tally, name, len(ids))
    import vllm

    return msgspec.structs.replace(captured, versions={**captured.versions, "vllm": vllm.__version__})


def main(target: str) -> int:
    """Returns 0 with the capture written, 1 with `error.txt` beside it."""
    asked = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    try:
        document.write(record(asked), target)
    except Exception as error:
        import traceback

        traceback.print_exc()
        said = error.what if isinstance(error, SkinnyError) else f"{type(error).__name__}: {_line(error)}"
        named = isinstance(error, RequestError)
        Path(target).with_name("error.txt").write_text(said if named else f"{asked.model}: {said}", encoding="utf-8")
        return 1
    return 0


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

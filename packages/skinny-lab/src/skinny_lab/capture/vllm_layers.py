"""Records the dense products of a vLLM model: the calls of `quant_method.apply` of its unquantised layers.

Why there: every linear layer and head of vLLM calls the method object that hangs on it, with its path known and fused
widths in place (qkv, gate_up, the rank's share, a padded vocabulary). Below it lies, by platform, `F.linear`,
FlashInfer, oneDNN or a custom op; a dispatch mode (`products.py`) would have to know each of them. Not seen: models
that multiply by a weight without a layer, experts, and a head whose `head_dtype` differs from the model's.

The three functions are called in every process that holds a part of the model. Nothing here imports vLLM: a layer is
what has a `quant_method` with `apply` and an `input_size`, or is an embedding called as a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from skinny_lab.capture import request
from skinny_lab.capture.document import dtype_name
from skinny_lab.capture.tally import summed

UNQUANTISED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""vLLM's classes for plain weights, by name; subclasses count (skinny's own, where a plug-in is loaded)."""
_ATTRIBUTE = "skinny_capture"

Product = tuple[str, int, int, int, tuple[str, str, str], bool]


class LayerRecorder:
    """The wrapped layers of one model and what they did. steps: (rows, sequences, products) per forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.sequences = 1
        self.steps: list[tuple[int, int, list[Product]]] = []
        self.called: set[str] = set()
        self.paths: list[str] = []
        self.others: dict[str, list[str]] = {}
        self._undo: list[Callable[[], None]] = []
        for path, layer in layers(model):
            method = layer.quant_method
            if any(base.__name__ in UNQUANTISED for base in type(method).__mro__):
                self._wrap(path, layer)
            else:
                self.others.setdefault(type(method).__name__, []).append(path)
        self._undo.append(model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)

    def _begin(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args)
        tokens = next((t for t in given if isinstance(t, torch.Tensor)), None)
        self.steps.append((0 if tokens is None else tokens.shape[0], self.sequences, []))

    def _wrap(self, path: str, layer: Any) -> None:
        """Give the layer a method object of its own that counts. Its other attributes stay the original's: objects may
        be shared, and an embedding's `embedding` is asked by another name."""
        original = layer.quant_method
        self.paths.append(path)

        def apply(target: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            y = original.apply(target, x, *args, **kwargs)
            if target is layer and isinstance(y, torch.Tensor) and self.steps:
                bias = args[0] if args else kwargs.get("bias")
                weight = getattr(layer, "weight", None)
                names = (x.dtype, getattr(weight, "dtype", x.dtype), y.dtype)
                # Sizes come from what goes in and out: the CPU platform packs weights and leaves an empty one.
                n, k = y.shape[-1], x.shape[-1]
                product = (path, n, k, x.numel() // max(k, 1), tuple(map(dtype_name, names)), bias is not None)
                self.steps[-1][2].append(product)
                self.called.add(path)
            return y

        shadow = object.__new__(type(original))
        shadow.__dict__.update(original.__dict__)
        shadow.__dict__["apply"] = apply
        layer.quant_method = shadow

        def restore() -> None:
            layer.quant_method = original

        self._undo.append(restore)

    def stop(self) -> list[str]:
        """Restore every layer; returns what is to be said about layers that are not among the products."""
        while self._undo:
            self._undo.pop()()
        notes = [f"{name} is not recorded: {summed(paths)}" for name, paths in self.others.items()]
        silent = [path for path in self.paths if path not in self.called]
        if silent:
            notes.append(f"never called through their method: {summed(silent)}")
        return notes


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    """(path, layer) of linear layers and heads, each once. A tied head may *be* the embedding: then it goes by its name
    as a head. Embeddings that are no head, and experts (which have no `weight` of their own), are left out."""
    found: dict[int, tuple[str, Any]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if not hasattr(getattr(module, "quant_method", None), "apply"):
            continue
        embedding = hasattr(module, "num_embeddings")  # of 0.33 it has `input_size`, too
        head = path.rpartition(".")[2] == "lm_head" or type(module).__name__ == "ParallelLMHead"
        if head if embedding else hasattr(module, "input_size"):
            found.setdefault(id(module), (path, module))
    return list(found.values())


def attach(worker: Any) -> None:
    """Begin to record the model of this process."""
    setattr(worker, _ATTRIBUTE, LayerRecorder(worker.get_model()))


def begin(worker: Any, sequences: int) -> None:
    """From now on that many sequences run at once: a step with more tokens holds a prompt."""
    getattr(worker, _ATTRIBUTE).sequences = sequences


def detach(worker: Any) -> tuple[str, list[tuple[int, int, list[Product]]], list[str]]:
    """Stop; (device, steps, notes)."""
    recorder: LayerRecorder = getattr(worker, _ATTRIBUTE)
    notes = recorder.stop()
    delattr(worker, _ATTRIBUTE)
    return request.device_name(torch.device(getattr(worker, "device", None) or "cpu")), recorder.steps, notes

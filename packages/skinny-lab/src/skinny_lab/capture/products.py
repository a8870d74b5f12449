"""Records every product of an activation with a model's weight, as torch issues it.

What records what is *really* issued? Three places were considered (torch 2.13, Transformers 5.17, November 2026).

- Forward hooks on `nn.Linear` know the layer, but report what a module was given, not what it did: they miss weights
  that are no `nn.Linear` (GPT-2's Conv1D, MoE routers, a fused weight multiplied by hand) and count layers that never
  multiply.
- A function mode sees `F.linear`, `matmul`, `@` and `einsum` in all their spellings, before torch folds leading
  dimensions, and nothing that torch's own C++ calls.
- A dispatch mode sees the few operators behind all of them, with the dimensions already folded: `mm` has the N, K and
  M that a GEMM library is called with. It knows no layers.

So: a dispatch mode for the product, hooks on all modules for where we are, and the weight's memory as the link: an
operand that lies in a parameter of the module that is running is that layer's weight. Products of two activations
(attention scores, rotary angles) have no such operand and are no dense projections. The memory is compared in the call,
since offloading puts a weight in its place only for the call. What a compiled region or a foreign kernel does inside is
not seen; a foreign operator that is handed a weight is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from skinny_lab.capture.document import dtype_name
from skinny_lab.capture.tally import Tally, pattern

_aten = torch.ops.aten
PRODUCTS = {_aten.mm: 0, _aten.mv: 0, _aten.addmm: 1, _aten.addmv: 1}
"""Dense products of two matrices, or of a matrix and a vector: index of the first factor among the arguments."""
OTHERS = ("mm", "linear", "conv")
"""Parts of names of aten operators that multiply by a weight in another way (batched, grouped, scaled)."""


class _Recorder(TorchDispatchMode):
    """Looks at each operator's arguments; runs it unchanged."""

    def __init__(self, model: nn.Module, tally: Tally) -> None:
        super().__init__()
        self.tally = tally
        self.running: list[tuple[str, nn.Module]] = []
        self.owners: dict[int, tuple[str, str, nn.Module]] = {}
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2 and (place := _memory(parameter)):
                    self.owners.setdefault(place, (path, name, module))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # In inference mode `linear` and `matmul` arrive whole; the mode then sees the operators inside.
        if func.namespace == "aten" and func._can_decompose() and func.overloadpacket in (_aten.linear, _aten.matmul):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        first = PRODUCTS.get(func.overloadpacket)
        if first is not None:
            self.product(args[first], args[first + 1], result, added=first == 1)
        elif func.overloadpacket is _aten.bmm and _is_broadcast(args[1]):
            self.broadcast(args[0], args[1], result)
        elif func.namespace not in ("aten", "prim") or any(part in func.overloadpacket.__name__ for part in OTHERS):
            self.other(func, args)
        return result

    def owner(self, operand: Tensor) -> tuple[str, str, nn.Module] | None:
        """Path, parameter name and module of the weight that this operand lies in, or None for an activation.

        The innermost running module first: with tied weights only that tells a head from an embedding.
        """
        place = _memory(operand)
        if not place:
            return None
        for path, module in reversed(self.running):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2 and _memory(parameter) == place:
                    return path, name, module
        found = self.owners.get(place)
        if found is not None and _memory(getattr(found[2], found[1], None)) != place:
            return None  # that weight has moved on, and an activation lies where it was
        return found

    def broadcast(self, left: Tensor, right: Tensor, result: Tensor) -> None:
        """A batched product whose second factor is one matrix for all: [B, T, K] times [K, N] is one of B * T rows.

        So torch issues `F.linear` on an activation that does not flatten, such as the last position of each prompt.
        """
        owner = self.owner(right)
        if owner is not None:
            batched = left.shape[0] > 1
            self.product(left.flatten(0, 1), right[0], result)
            if batched:
                self.tally.note(f"{pattern(owner[0])} was issued as a batched product that broadcasts its weight")

    def product(self, left: Tensor, right: Tensor, result: Tensor, *, added: bool = False) -> None:
        """left [A, K] times right [K, B], one of them a weight, or neither. added: a bias, in the same call."""
        weight, x, transposed = right, left, True
        owner = self.owner(weight) if weight.ndim == 2 else None
        if owner is None:
            weight, x, transposed = left, right, False
            owner = self.owner(weight)
        if owner is None:
            return
        path, name, module = owner
        k = weight.shape[0 if transposed else 1]
        n = weight.shape[1 if transposed else 0]
        layer = path if name == "weight" else f"{path}.{name}".lstrip(".")
        if n > 1 and k > 1 and weight.stride(0 if transposed else 1) != 1:
            self.tally.note(f"{pattern(layer)} is stored [K, N]: its rows are not contiguous along K")
        bias = added or isinstance(getattr(module, "bias", None), Tensor)
        dtypes = (dtype_name(x.dtype), dtype_name(weight.dtype), dtype_name(result.dtype))
        self.tally.add(layer or name, n, k, x.numel() // k if k else 0, dtypes, bias)

    def other(self, func: Any, args: tuple[Any, ...]) -> None:
        """Note an operator that multiplies by a weight in a way that is not recorded."""
        for operand in args:
            owner = self.owner(operand) if isinstance(operand, Tensor) and operand.ndim >= 2 else None
            if owner is not None:
                path, name, _ = owner
                self.tally.note(f"{func.overloadpacket} on {pattern(path)} ({name}) is not recorded")
                return


def _memory(tensor: Any) -> int:
    """Address of the storage that a tensor lies in; 0 where it has none (meta, a wrapper around other tensors)."""
    try:
        return tensor.untyped_storage().data_ptr() if isinstance(tensor, Tensor) else 0
    except (RuntimeError, NotImplementedError):
        return 0


def _is_broadcast(batch: Tensor) -> bool:
    """Whether a batch of matrices [B, K, N] is one matrix B times."""
    return batch.shape[0] == 1 or (batch.shape[0] > 1 and batch.stride(0) == 0)


@contextmanager
def recording(model: nn.Module, tally: Tally) -> Iterator[None]:
    """Record the products of `model` in this thread while the context lasts; then no hook is left.

    A call of `model` itself is a forward pass; its `input_ids` or `inputs_embeds` is [sequences, tokens, ...]. Results
    are what they are without it: operators run unchanged.
    """
    recorder = _Recorder(model, tally)

    def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = next((t for t in (kwargs.get("input_ids"), kwargs.get("inputs_embeds"), *args) if t is not None), None)
        if isinstance(tokens, Tensor) and tokens.ndim >= 2:
            tally.step(tokens.shape[0] * tokens.shape[1], tokens.shape[0])

    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(begin, with_kwargs=True).remove)
        for path, module in model.named_modules():
            enter, leave = _bracket(recorder.running, path)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        with recorder:
            yield


def _bracket(running: list[tuple[str, nn.Module]], path: str) -> tuple[Any, Any]:
    """Two hooks that keep the list of modules whose forward is running."""

    def enter(module: nn.Module, _: Any) -> None:
        running.append((path, module))

    def leave(*_: Any) -> None:
        if running:
            running.pop()

    return enter, leave

"""The two method objects that take the place of vLLM's unquantised ones.

They are instances of subclasses of the exact host classes, carry the attributes of the object they replace, and keep
that object: whatever is refused here is `original.apply(layer, x, bias)`. In a traced graph only the op call remains,
so the graph knows neither M nor a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from skinny_core import dispatch, op
from skinny_core.rules import Reason

if TYPE_CHECKING:
    from skinny_vllm.installer import Installation


class _Replacement:
    """What both share. `emits`: the op may be called for this layer (decided after its weight was processed).

    `siblings` is the parent's table of modules: while it holds the layer under `leaf`, nothing is wrapped around it.
    """

    original: Any
    family: str
    emits: bool
    siblings: dict[str, Any]
    leaf: str
    installation: Installation

    def adopt(self, original: Any, installation: Installation, siblings: dict[str, Any], leaf: str) -> None:
        """Take over `original`'s attributes (such as the chosen GEMM of 0.33) and remember it."""
        self.__dict__.update(original.__dict__)
        self.original = original
        self.installation = installation
        self.family = installation.package.name
        self.emits = False
        self.siblings = siblings
        self.leaf = leaf

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """The host's own processing (the CPU platform may replace the weight), then whether the op may be used."""
        self.original.process_weights_after_loading(layer)
        self.installation.settle(layer, self)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y = x @ layer.weight.T for x [..., K] and weight [N, K]; anything else is the original's business."""
        tracing = torch.compiler.is_compiling()
        reason = self.refusal(layer, bias, tracing)
        if reason is not None:
            if not tracing:
                self.count(getattr(layer, "weight", None), x, reason)
            return self.original.apply(layer, x, bias)
        if tracing:
            return op.linear(x, layer.weight, self.family)
        weight = layer.weight
        # vLLM's own parameter class answers every attribute through Python, about 1 us each (measured on a CPU host,
        # November 2026); its `data` is the same memory as a plain tensor.
        plain = weight if type(weight) is torch.nn.Parameter else weight.data
        return dispatch.linear(x, plain, self.family)

    def refusal(self, layer: torch.nn.Module, bias: torch.Tensor | None, tracing: bool) -> Reason | None:
        """Why this call is the original's, as far as vLLM knows; what the tensors show is judged by the dispatcher."""
        if bias is not None:
            return Reason.BIAS
        if not self.emits:
            return Reason.HOST_BACKEND
        if envs.VLLM_BATCH_INVARIANT:
            return Reason.BATCH_INVARIANT
        # A LoRA wrapper calls the method of the layer inside it; then the parent no longer holds the layer itself. Not
        # asked while tracing: LoRA needs an engine configuration that is refused at installation.
        if not tracing and self.siblings.get(self.leaf) is not layer:
            return Reason.LORA if hasattr(self.siblings.get(self.leaf), "base_layer") else Reason.HOOKED
        return None

    def count(self, weight: Any, x: torch.Tensor, reason: Reason) -> None:
        """One call that did not reach the dispatcher, beside those that it counts. A packed weight has no shape."""
        if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.shape[1]:
            n, k = weight.shape
            dispatch.declined(self.family, n, k, x.numel() // k, reason)


class SkinnyLinearMethod(_Replacement, UnquantizedLinearMethod):
    """For `LinearBase` layers. `create_weights` and the weight loader's version were fixed by the original."""

    def __init__(self, original: UnquantizedLinearMethod, **link: Any) -> None:
        # Not the parent's constructor: it would read the current vLLM configuration again.
        self.adopt(original, **link)


class SkinnyEmbeddingMethod(_Replacement, UnquantizedEmbeddingMethod):
    """For language-model heads, tied or not. `embedding` and `tie_weights` are inherited unchanged."""

    def __init__(self, original: UnquantizedEmbeddingMethod, **link: Any) -> None:
        self.adopt(original, **link)

"""The two method objects that take the place of vLLM's unquantised ones.

They are instances of subclasses of the exact host classes, carry the attributes of the object they replace, and keep that
object: whatever is refused here is `original.apply(layer, x, bias)`. In a traced graph only the op call remains, so the
graph knows neither M nor a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from skinny_core import dispatch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

if TYPE_CHECKING:
    from skinny_vllm.installer import Installation


class _Replacement:
    """What both share. `emits`: the op may be called for this layer (decided after its weight was processed).

    `siblings` is the parent's table of modules: while it holds the layer under `leaf`, nothing has been wrapped around it.
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
        """The host's own processing (the CPU platform may replace the weight), then decide whether the op may be used."""
        self.original.process_weights_after_loading(layer)
        self.installation.settle(layer)

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """y = x @ layer.weight.T for x [..., K] and weight [N, K]; anything else is the original's business."""
        if bias is not None or not self.emits or envs.VLLM_BATCH_INVARIANT:
            return self.original.apply(layer, x, bias)
        if torch.compiler.is_compiling():
            return torch.ops.skinny.linear(x, layer.weight, self.family)
        # A LoRA wrapper calls the method of the layer inside it; then the parent no longer holds the layer itself. Not
        # asked while tracing: LoRA needs an engine configuration that is refused at installation.
        if self.siblings.get(self.leaf) is not layer:
            return self.original.apply(layer, x, bias)
        return dispatch.linear(x, layer.weight, self.family)


class SkinnyLinearMethod(_Replacement, UnquantizedLinearMethod):
    """For `LinearBase` layers. `create_weights` and the weight loader's version were fixed by the original."""

    def __init__(self, original: UnquantizedLinearMethod, **link: Any) -> None:
        # Not the parent's constructor: it would read the current vLLM configuration again.
        self.adopt(original, **link)


class SkinnyEmbeddingMethod(_Replacement, UnquantizedEmbeddingMethod):
    """For language-model heads, tied or not. `embedding` and `tie_weights` are inherited unchanged."""

    def __init__(self, original: UnquantizedEmbeddingMethod, **link: Any) -> None:
        self.adopt(original, **link)

"""Which layers of a model have a method object that can be replaced, and why each of the others has not.

Rule: exactly the host's unquantised method class, a 2-D dense weight, no bias. A subclass is somebody's specialisation
(vLLM has several) and is left alone, which is also how two such packages stay out of each other's way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from skinny_core.rules import Reason
from skinny_vllm.methods import SkinnyEmbeddingMethod, SkinnyLinearMethod


@dataclass(frozen=True, slots=True)
class Site:
    """One layer: its path ("model.layers.0.mlp.down_proj"), the module it hangs on, its name there, and itself."""

    path: str
    parent: torch.nn.Module
    leaf: str
    layer: torch.nn.Module


def candidates(model: torch.nn.Module) -> Iterator[Site]:
    """Every linear layer and every language-model head of `model`, each once."""
    seen: set[int] = set()
    for prefix, parent in model.named_modules():
        for leaf, child in parent._modules.items():
            if child is None or id(child) in seen or not _is_projection(child, leaf):
                continue
            seen.add(id(child))
            yield Site(f"{prefix}.{leaf}" if prefix else leaf, parent, leaf, child)


def _is_projection(module: torch.nn.Module, leaf: str) -> bool:
    # A tied Qwen3 of 0.26 has `lm_head is embed_tokens`: only its name tells that this embedding is a head, too.
    tied = isinstance(module, VocabParallelEmbedding) and leaf == "lm_head"
    return isinstance(module, LinearBase | ParallelLMHead) or tied


def refusal(layer: Any) -> Reason | None:
    """Why this layer's method object stays as it is."""
    method = getattr(layer, "quant_method", None)
    exact = UnquantizedLinearMethod if isinstance(layer, LinearBase) else UnquantizedEmbeddingMethod
    if isinstance(method, SkinnyLinearMethod | SkinnyEmbeddingMethod):
        return None
    if type(method) is not exact:
        return Reason.HOST_BACKEND if isinstance(method, exact) else Reason.QUANTISED
    weight = getattr(layer, "weight", None)
    if getattr(layer, "bias", None) is not None:
        return Reason.BIAS
    if weight is None or weight.ndim != 2 or weight.layout != torch.strided:
        return Reason.LAYOUT
    return None if weight.dtype in (torch.bfloat16, torch.float16) else Reason.DTYPE


def survey(model: torch.nn.Module) -> tuple[list[Site], Counter[str]]:
    """Sites to replace (or already replaced), and how many layers were refused for each reason."""
    sites: list[Site] = []
    skipped: Counter[str] = Counter()
    for site in candidates(model):
        reason = refusal(site.layer)
        if reason is None:
            sites.append(site)
        else:
            skipped[reason.value] += 1
    return sites, skipped

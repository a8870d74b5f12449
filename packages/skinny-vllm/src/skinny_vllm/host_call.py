"""What would the host run for a layer? The op may stand in only for `F.linear(x, layer.weight)`.

On CUDA that is a fixed function. On the CPU vLLM chooses per layer after loading: packed GEMMs keep their own copy of
the weight and may drop the original, and only its last resort is `F.linear`.
"""

from __future__ import annotations

import types
from typing import Any

import torch.nn.functional as F
from vllm.model_executor.layers import utils as host
from vllm.platforms import current_platform

# Names in a function that is only `lambda x, weight, bias: torch.nn.functional.linear(x, weight, bias)`. The packed
# variants close over a handle or a packed copy; this one has nothing of its own.
_LINEAR = ("torch", "nn", "functional", "linear")


def is_plain_linear(method: Any, layer: Any) -> bool:
    """Whether `method.apply(layer, x)` is `F.linear(x, layer.weight)`, as far as the host has decided by now."""
    if current_platform.is_cuda():
        chosen = getattr(method, "_gemm_impl", None)
        return (chosen or host.dispatch_unquantized_gemm()) is host.default_unquantized_gemm
    if not current_platform.is_cpu():
        return False
    call = getattr(layer, "cpu_linear", None)
    return layer.weight.ndim == 2 and (call is F.linear or _only_calls_linear(call))


def _only_calls_linear(call: Any) -> bool:
    if not isinstance(call, types.FunctionType) or call.__closure__ or call.__defaults__:
        return False
    return call.__code__.co_names == _LINEAR and call.__module__ == host.__name__

"""Run one kernel by name. Where the dispatcher falls back, this raises: whoever asks for a kernel gets it or the
reason.
"""

from __future__ import annotations

import torch

from skinny_core import dispatch, env, kernels
from skinny_core.errors import CompileForbiddenError, KernelUnavailableError
from skinny_core.kernels import operands
from skinny_core.problem import MAX_M, DType, Epilogue, KernelConfig, Problem, WeightScheme

_launchers: dict[tuple[KernelConfig, Problem, int, int, bool], kernels.Launcher] = {}


def run(
    config: KernelConfig,
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`x @ w.T` and at most one epilogue by exactly this kernel and config, compiled now if need be.

    x: [..., K], w: [N, K], residual: [..., N] and bias: [N] of x's dtype; returns [..., N] in `out_dtype` (default: x's
    dtype). gated: w holds N / 2 gate rows, then N / 2 up rows; returns silu(gate) * up, [..., N / 2]. Everything is
    FP32 until one rounding at the end.
    Nothing is differentiated. Raises `KernelRefusedError` naming what the kernel cannot take, `KernelUnavailableError`
    without the DSL or a CUDA device, `ConfigError` and `UnknownKernelError` for a config that is none.
    """
    kernel = kernels.get(config.kernel)
    parsed = kernel.config_from(dict(config.params))
    epilogue = _epilogue(config.kernel, residual, bias, gated)
    problem, m = _problem(config.kernel, x, w, epilogue, out_dtype)
    if why := kernel.refuses(parsed, problem, m):
        raise operands.refused(config.kernel, f"{problem} at M = {m}: {why}", "another config or shape")
    if residual is not None and residual.shape != (*x.shape[:-1], problem.n):
        raise operands.refused(config.kernel, f"a residual {tuple(residual.shape)}", f"one of [..., {problem.n}]")
    x_stride = x.shape[-1] if x.is_contiguous() else dispatch.row_stride(x, m)
    residual_stride = 0 if residual is None else dispatch.row_stride(residual, m)
    added = bias if residual is None else residual
    if x_stride < 0 or residual_stride < 0:
        raise operands.refused(config.kernel, f"strides x {x.stride()}", "rows that one stride describes")
    y = x.new_empty((*x.shape[:-1], problem.outputs), dtype=problem.output.torch)
    operands.check(config.kernel, problem, x, w, y, added, x_stride, problem.outputs, residual_stride)
    if not x.is_cuda:
        raise KernelUnavailableError(
            f"{config.kernel} needs CUDA tensors, got {x.device}", "move them to a CUDA device"
        )
    key = (config, problem, m, x.get_device(), env.settings().pdl)
    launch = _launchers.get(key)
    if launch is None:
        if torch.cuda.is_current_stream_capturing():
            raise CompileForbiddenError(
                f"{config} is not compiled, during graph capture", "run it once before the capture"
            )
        launch = _launchers[key] = kernel.compile(parsed, problem, m, index=x.get_device(), prewait=False)
    launch(x, w, y, added, x_stride, problem.outputs, residual_stride, False)
    return y


def _epilogue(stem: str, residual: torch.Tensor | None, bias: torch.Tensor | None, gated: bool) -> Epilogue:
    asked = {Epilogue.RESIDUAL: residual is not None, Epilogue.BIAS: bias is not None, Epilogue.SILU_MUL: gated}
    found = [epilogue for epilogue, wanted in asked.items() if wanted]
    if len(found) > 1:
        raise operands.refused(stem, " and ".join(e.value for e in found), "one epilogue")
    return found[0] if found else Epilogue.NONE


def _problem(
    stem: str, x: torch.Tensor, w: torch.Tensor, epilogue: Epilogue, out_dtype: torch.dtype | None
) -> tuple[Problem, int]:
    activation, weight = DType.of(x.dtype), DType.of(w.dtype)
    output = activation if out_dtype is None else DType.of(out_dtype)
    if activation is None or output is None or weight not in (DType.BF16, DType.FP16):
        dtypes = f"dtypes x {x.dtype}, w {w.dtype}, out {out_dtype}"
        raise operands.refused(stem, dtypes, "BF16 or FP16 for both, and that or FP32 out")
    if x.dim() < 1 or w.dim() != 2 or x.shape[-1] != w.shape[1] or 0 in w.shape:
        raise operands.refused(stem, f"shapes x {tuple(x.shape)}, w {tuple(w.shape)}", "x [..., K] and w [N, K]")
    m = x.numel() // w.shape[1]
    if not 1 <= m <= MAX_M:
        raise operands.refused(stem, f"M = {m} rows", f"1 to {MAX_M} rows")
    problem = Problem(
        n=w.shape[0],
        k=w.shape[1],
        weight=WeightScheme(weight.value),
        activation=activation,
        output=output,
        epilogue=epilogue,
    )
    return problem, m

"""What Triton has to know to compile a Spec of `bf16_stream`: signature, constants, alignment, options."""

from __future__ import annotations

from typing import Any

from skinny_core.kernels import triton_objects
from skinny_core.kernels.bf16_stream.config import STEM, VECTOR, Spec


def _describe(spec: Spec) -> tuple[Any, dict[str, Any]]:
    from triton.compiler import ASTSource

    from skinny_core.kernels.bf16_stream.kernel import stream_kernel

    element = {"x": spec.dtype, "w": spec.dtype, "y": spec.output, "residual": spec.dtype}
    signature = dict.fromkeys(stream_kernel.arg_names, "constexpr")
    signature |= {name: f"*{dtype.value}" for name, dtype in element.items()}
    signature |= dict.fromkeys(("M", "N", "K"), "i32")
    signature |= dict.fromkeys(("stride_x", "stride_w", "stride_y", "stride_r"), "i64")
    # What `host` checks at every call: 16-byte addresses; K and row strides of x and w in whole 16-byte vectors.
    divisible = {"x": 16, "w": 16, "K": VECTOR, "stride_x": VECTOR, "stride_w": VECTOR}
    place = stream_kernel.arg_names.index
    code = ASTSource(
        fn=stream_kernel,
        signature=signature,
        constexprs={(place(name),): value for name, value in spec.constants.items()},
        attrs={(place(name),): [["tt.divisibility", by]] for name, by in divisible.items()},
    )
    options = {
        "num_warps": spec.config.num_warps,
        "num_stages": spec.config.num_stages,
        "maxnreg": spec.config.max_registers,
        "launch_pdl": spec.pdl,
        "enable_fp_fusion": True,
    }
    return code, options


SOURCE = triton_objects.Source(
    STEM, tuple(f"kernels/{STEM}/{name}.py" for name in ("kernel", "config", "build")), _describe
)

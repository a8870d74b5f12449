"""What Triton has to know to compile a Spec of the prefetch: signature, constants, alignment, options."""

from __future__ import annotations

from typing import Any

from skinny_core.kernels import triton_objects
from skinny_core.prefetch.config import STEM, VECTOR_BYTES, Spec


def _describe(spec: Spec) -> tuple[Any, dict[str, Any]]:
    from triton.compiler import ASTSource

    from skinny_core.prefetch.kernel import l2_prefetch

    signature = dict.fromkeys(l2_prefetch.arg_names, "constexpr")
    signature |= {"w": "*i8", "sink": "*i32", "stride": "i64"}
    signature |= dict.fromkeys(("vectors", "row_vectors", "never"), "i32")
    place = l2_prefetch.arg_names.index
    code = ASTSource(
        fn=l2_prefetch,
        signature=signature,
        constexprs={(place(name),): value for name, value in spec.constants.items()},
        attrs={(place(name),): [["tt.divisibility", VECTOR_BYTES]] for name in ("w", "stride")},
    )
    return code, {"num_warps": spec.threads // 32, "num_stages": 1}


SOURCE = triton_objects.Source(STEM, tuple(f"prefetch/{name}.py" for name in ("kernel", "config", "build")), _describe)

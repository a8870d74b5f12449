"""Test only: vLLM's CPU platform, compiling with vLLM's own backend as the GPU platforms do.

The real CPU platform replaces the compile mode by a plain Dynamo one, whose AOT artifacts vLLM writes but cannot load
again.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class StubCpu(CpuPlatform):
    """`is_cpu()` is true; compilation modes survive."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """What the CPU platform does, then the compile mode and backend that were asked for."""
        compilation = vllm_config.compilation_config
        mode, backend = compilation.mode, compilation.backend
        super().check_and_update_config(vllm_config)
        if mode is not None:
            compilation.mode, compilation.backend = mode, backend
            compilation.compile_sizes = compilation.compile_sizes or []

"""Test only: entry point of `vllm.platform_plugins`. `SKINNY_STUB_PLATFORM` is cpu, or a capability such as 9.0."""

from __future__ import annotations

import os


def activate() -> str | None:
    """Class path of the platform asked for, or None to leave vLLM's own choice."""
    wanted = os.environ.get("SKINNY_STUB_PLATFORM", "")
    if wanted == "cpu":
        return "skinny_stub_cpu.StubCpu"
    return "skinny_stub_fakecuda.FakeCuda" if wanted else None

"""What this wheel declares to skinny: entry point `skinny.models: qwen3`. It runs no code in a host."""

from __future__ import annotations

from skinny_core.family import packaged
from skinny_qwen3.call_sites import ARCHITECTURES, projections

PACKAGE = packaged("skinny_qwen3", ARCHITECTURES, projections)

"""What this wheel declares to skinny: entry point `skinny.models: llama31`. It runs no code in a host."""

from __future__ import annotations

from skinny_core.family import packaged
from skinny_llama31.call_sites import ARCHITECTURES, projections

PACKAGE = packaged("skinny_llama31", ARCHITECTURES, projections)

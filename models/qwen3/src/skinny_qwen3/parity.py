"""Does the model give the same results with skinny as without? Per projection against float64, and as greedy tokens.

report = check_model(model)             # any Transformers Qwen3 or Qwen3-MoE, on the CPU (fallback) or a GPU (kernels)
report = check_config("qwen3-8b")       # random weights of that model's shapes, one projection at a time
python -m skinny_qwen3.parity qwen3-8b  # the latter as a command; exit code 1 if anything differs
"""

from __future__ import annotations

import sys

import skinny_transformers
from skinny_core.testing.parity import Parity
from skinny_qwen3.package import PACKAGE

_CHECKS = Parity(PACKAGE, skinny_transformers)
check_model, check_config, main = _CHECKS.check_model, _CHECKS.check_config, _CHECKS.main

if __name__ == "__main__":
    sys.exit(main())

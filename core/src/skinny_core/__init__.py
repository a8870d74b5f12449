"""skinny-core: measured kernels for dense projections at 1 to 16 tokens, and the rules that decide when they run.

Importing this package imports torch and touches no device, no DSL, no file and no environment variable.
"""

from __future__ import annotations

from skinny_core.errors import SkinnyError
from skinny_core.problem import MAX_M, DType, Epilogue, KernelConfig, Problem, WeightScheme

__version__ = "0.1.0"
__all__ = ["MAX_M", "DType", "Epilogue", "KernelConfig", "Problem", "SkinnyError", "WeightScheme", "__version__"]

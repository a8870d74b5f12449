"""Tools that kernel tests here and in other projects share: numerics gates, SASS checks, Triton's interpreter made exact.

Needs nothing beyond the dependencies of skinny-core; `triton_mode` alone imports pytest. Nothing is imported on its own.
"""

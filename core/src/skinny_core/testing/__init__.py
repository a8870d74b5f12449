"""Tools that kernel tests here and elsewhere share: numerics gates, SASS checks, Triton's interpreter made exact, and
`ptx`, which runs the PTX of a CuTe DSL kernel on the CPU; `parity`, the check that a model package offers its users.

`triton_mode` needs pytest; the others need what skinny-core depends on. Importing this package imports none of them.
"""

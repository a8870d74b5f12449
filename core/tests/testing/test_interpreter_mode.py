"""A process of the wrong Triton mode gets an error that says what to set, in every order of imports."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

INSTALL = "from skinny_core.testing import interpreter; interpreter.install()"
COMPILE = (
    "from skinny_core.kernels.bf16_stream.host import KERNEL; from skinny_core.problem import Problem;"
    "p = Problem(n=64, k=64);"
    "KERNEL.cross_compile(KERNEL.candidates(p, 1)[0], p, 1, 'sm_90a')"
)
INTERPRET = COMPILE.replace("cross_compile", "interpret").replace(", 'sm_90a'", "")


@pytest.mark.parametrize(
    ("interpret", "code", "says"),
    [
        pytest.param("0", INSTALL, "was not asked for in this process", id="not-set"),
        pytest.param(
            "0",
            f"import os, triton; os.environ['TRITON_INTERPRET'] = '1'; {INSTALL}",
            "triton was imported before TRITON_INTERPRET=1 was set",
            id="set-too-late",
        ),
        pytest.param("1", COMPILE, "Triton cannot compile in this process", id="compile-in-the-interpreter"),
        pytest.param("0", INTERPRET, "start Python with TRITON_INTERPRET=1", id="interpret-without-it"),
    ],
)
def test_wrong_mode(interpret: str, code: str, says: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": interpret, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert says in done.stderr

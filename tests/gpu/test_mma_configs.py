"""The configs of `mma.py` are accepted: a predicate that changed would else be found on a GPU."""

from __future__ import annotations

from dataclasses import replace

from skinny_core import kernels
from skinny_core.kernels.bf16_mma.config import ALLOWED
from skinny_core.problem import Epilogue
from tests.gpu import mma


def test_the_configs_take_what_the_gpu_tests_run() -> None:
    assert {mma.parsed(config).parts for config in mma.SMALL} == set(ALLOWED["parts"])
    jobs = [*mma.jobs(), (mma.SMALL[0], replace(mma.PLAIN, k=1544), 32)]
    assert {problem.epilogue for _, problem, _ in jobs} == set(Epilogue)
    assert [(config, why) for config, problem, m in jobs if (why := kernels.refuses(config, problem, m))] == []

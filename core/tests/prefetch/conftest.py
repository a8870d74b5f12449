"""Tests marked `triton(mode)` run in a child process of that mode where this process is of the other."""

from skinny_core.testing.triton_mode import pytest_configure, pytest_runtest_protocol

__all__ = ["pytest_configure", "pytest_runtest_protocol"]

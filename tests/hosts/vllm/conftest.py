"""The promises are in `suite.py`, which is no test file: its assertions need rewriting too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.hosts.vllm.suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here needs what vLLM's Python tree imports."""
    for item in items:
        if "hosts/vllm" in item.nodeid:
            item.add_marker(pytest.mark.host("vllm"))

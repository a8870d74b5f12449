"""The promises are in `suite.py`, which is no test file: its assertions need rewriting too."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.hosts.vllm.suite")

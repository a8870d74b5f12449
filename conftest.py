"""Tests run from a bare checkout too: where the wheels are not installed, their sources are put on the path."""

from __future__ import annotations

from tests.checkout import activate

activate()

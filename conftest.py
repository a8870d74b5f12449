"""Tests run from a bare checkout too: where the wheels are not installed, their sources are put on the path."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from tests.checkout import activate

activate()

# A busy machine is not a failing test: no time limits, and the first draw may load its tables slowly.
settings.register_profile("skinny", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("skinny")

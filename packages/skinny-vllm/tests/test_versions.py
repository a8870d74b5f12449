"""The version gate: what counts as inside a tested range."""

from __future__ import annotations

import itertools

import pytest

from skinny_vllm import versions


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.26.3", "0.26.0+cu129", "0.26.0.post1", "v0.33.0", "0.33.0.post2+local", "0.33.12"]
)
def test_releases_inside_a_range_are_taken(version: str) -> None:
    assert versions.refusal(version) is None


@pytest.mark.parametrize("version", ["0.25.9", "0.27.0", "0.32.0", "0.34.0", "1.0", "0.260.0", "0.2.6"])
def test_releases_outside_name_version_and_ranges(version: str) -> None:
    text = versions.refusal(version)
    assert text is not None
    assert f"vLLM {version} is outside" in text
    assert ">=0.26.0,<0.27 or >=0.33.0,<0.34" in text
    assert "\n" not in text


@pytest.mark.parametrize("version", ["0.33.0rc1", "0.33.1.dev7+g1234", "0.26.0a1", "dev", "", "0.33.0-dirty"])
def test_anything_but_a_release_is_outside(version: str) -> None:
    text = versions.refusal(version)
    assert text is not None
    assert "is not a release" in text


def test_every_tested_version_is_inside_its_own_range_and_no_two_ranges_overlap() -> None:
    for item in versions.SUPPORTED:
        assert item.tested
        assert item.first in item.tested
        for tested in item.tested:
            assert versions.refusal(tested) is None
            assert versions._parts(item.first) <= versions._parts(tested) < versions._parts(item.below)
    ordered = sorted(versions.SUPPORTED, key=lambda item: versions._parts(item.first))
    assert all(versions._parts(a.below) <= versions._parts(b.first) for a, b in itertools.pairwise(ordered))

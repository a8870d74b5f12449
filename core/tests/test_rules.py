"""The rules: their order, one reason for each refusal, and no judgement about what nobody stated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skinny_core import rules
from skinny_core.device import product
from skinny_core.problem import MAX_M, Problem
from skinny_core.rules import OFF_TABLE, Context, Reason, decide

PLANNED = Problem(n=4096, k=4096, device=product("h200"))
# The one fact that makes each rule refuse, in the order of the rules.
REFUSALS: list[tuple[Reason, dict[str, Any]]] = [
    (Reason.DISABLED, {"enabled": False}),
    (Reason.HOST_VERSION, {"host_version_ok": False}),
    (Reason.HOST_BACKEND, {"host_backend_default": False}),
    (Reason.QUANTISED, {"quantised": True}),
    (Reason.SUBCLASSED_WEIGHT, {"weight_subclass": "DTensor"}),
    (Reason.HOOKED, {"hooked": True}),
    (Reason.LORA, {"lora": True}),
    (Reason.BIAS, {"bias": True}),
    (Reason.BATCH_INVARIANT, {"batch_invariant": True}),
    (Reason.GRADIENT, {"gradient": True}),
    (Reason.AUTOCAST, {"autocast": True}),
    (Reason.OFFLOADED, {"offloaded": True}),
    (Reason.NOT_CUDA, {"on_cuda": False}),
    (Reason.MIXED_DEVICES, {"same_device": False}),
    (Reason.DTYPE, {"dtypes_ok": False}),
    (Reason.ZERO_ROWS, {"m": 0}),
    (Reason.M_RANGE, {"m": MAX_M + 1}),
    (Reason.OTHER_DEVICE, {"device": product("h100-sxm")}),
    (Reason.OFF_TABLE, {"cell_status": OFF_TABLE}),
    (Reason.REFUSED, {"cell_status": "refused"}),
    (Reason.REPORTED, {"cell_status": "reported"}),
    (Reason.LAYOUT, {"layout_ok": False}),
    (Reason.ALIGNMENT, {"aligned": False}),
    (Reason.KERNEL_UNAVAILABLE, {"kernel_error": "ImportError: no module named cutlass"}),
    (Reason.NOT_WARM, {"warm": False}),
]
GOOD: dict[str, Any] = {
    "enabled": True, "host_version_ok": True, "host_backend_default": True, "quantised": False, "hooked": False,
    "lora": False, "bias": False, "batch_invariant": False, "gradient": False, "autocast": False, "offloaded": False,
    "on_cuda": True, "same_device": True, "dtypes_ok": True, "m": 1, "device": product("h200"), "cell_status": "win",
    "layout_ok": True, "aligned": True, "warm": True,
}  # fmt: skip


def test_every_reason_is_reachable_and_has_a_meaning() -> None:
    assert {reason for reason, _ in REFUSALS} == set(Reason)
    meanings = [reason.meaning for reason in Reason]
    assert len(set(meanings)) == len(meanings)
    assert all(len(meaning) > 10 for meaning in meanings)


def test_values_are_names() -> None:
    """Counters, logs and JSON carry the value; it must be stable and readable."""
    assert all(reason.value == reason.name.lower() for reason in Reason)


@pytest.mark.parametrize(("reason", "fact"), REFUSALS, ids=[r.value for r, _ in REFUSALS])
def test_one_fact_one_reason(reason: Reason, fact: dict[str, Any]) -> None:
    """Also with every other fact known and good: exactly one rule speaks."""
    assert decide(PLANNED, Context(**fact)).reason is reason
    assert decide(PLANNED, Context(**GOOD | fact)).reason is reason
    spoke = [rule for rule in rules.RULES if not rule(PLANNED, Context(**GOOD | fact)).ok]
    assert len(spoke) == 1
    assert spoke[0].__doc__


def test_nothing_known_or_all_good_is_allowed() -> None:
    assert decide(PLANNED, Context()) == rules.OK
    assert decide(PLANNED, Context(**GOOD)) == rules.OK
    assert rules.OK.reason is None


@given(st.lists(st.sampled_from(range(len(REFUSALS))), min_size=1, unique=True))
def test_the_first_refusal_wins(chosen: list[int]) -> None:
    facts: dict[str, Any] = {}
    effective: dict[str, int] = {}
    for i in chosen:  # two refusals may be about one fact: the later one is what is stated
        facts |= REFUSALS[i][1]
        effective |= dict.fromkeys(REFUSALS[i][1], i)
    verdict = decide(PLANNED, Context(**facts))
    assert verdict.reason is REFUSALS[min(effective.values())][0]
    assert not verdict.ok


@pytest.mark.parametrize("m", range(1, MAX_M + 1))
def test_rows_in_range(m: int) -> None:
    assert decide(PLANNED, Context(m=m)).ok


def test_details() -> None:
    assert decide(PLANNED, Context(m=17)).detail == "M = 17"
    assert decide(PLANNED, Context(weight_subclass="DTensor")).detail == "DTensor"
    assert decide(PLANNED, Context(kernel_error="why")).detail == "why"
    detail = decide(PLANNED, Context(device=product("h100-sxm"))).detail
    assert detail.startswith("plan for h200")
    assert "h100-sxm" in detail


def test_opting_in_to_reported_cells_leaves_refused_ones_refused() -> None:
    assert decide(PLANNED, Context(cell_status="reported", reported_allowed=True)).ok
    assert decide(PLANNED, Context(cell_status="refused", reported_allowed=True)).reason is Reason.REFUSED


def test_a_reported_cell_of_somebody_elses_kernel_never_runs() -> None:
    for allowed in (False, True):
        verdict = decide(PLANNED, Context(cell_status="reported", reported_allowed=allowed, foreign_kernel="theirs"))
        assert (verdict.reason, verdict.detail) == (
            Reason.REPORTED,
            "measured with theirs, which is none of our kernels",
        )


def test_device_unknown_on_either_side_is_not_judged() -> None:
    assert decide(Problem(n=1, k=8), Context(device=product("h200"))).ok
    assert decide(PLANNED, Context(device=None)).ok

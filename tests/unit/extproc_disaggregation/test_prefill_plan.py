"""The numbers that a plan is decided by: what is open on either side, what is computed, what is moved."""

import pytest

from extproc.disaggregation.prefill_plan import PrefillPlan, plan_prefill
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.disaggregation import Disaggregation
from tests.unit.extproc_choosing.pick_candidates import candidate, load

POLICY = Disaggregation(enabled=True, kv_bytes_per_token=1e5, link_bytes_per_second=1e9, hand_over_seconds=0.02)


def plan(decode: Candidate, *prefillers: Candidate, policy: Disaggregation = POLICY) -> PrefillPlan | None:
    return plan_prefill(
        decode,
        prefillers,
        policy=policy,
        labels={},
        estimates=LatencyEstimates(tokens_per_second=10_000.0),
        links=LinkEstimates(),
        target_seconds=None,
        yields=False,
        tie_break=lambda: 0.0,
        now=0.0,
    )


def test_the_sides_say_what_is_computed_moved_and_open() -> None:
    decode = candidate("d", reported=load(running_requests=3, waiting_requests=2), booked_requests=1, matched=400)
    prefill = candidate("p", matched=800, open_requests=2)
    found = plan(decode, prefill)

    assert found is not None
    sides = found.sides
    assert (sides.uncached_tokens, sides.decode_requests, sides.decode_open, sides.prefill_open) == (600, 3, 6, 2)
    assert sides.local_compute_seconds == pytest.approx(0.02 + 0.06)  # a step, and 600 tokens
    assert sides.remote_compute_seconds == pytest.approx(0.02 + 0.02)
    assert sides.transfer_seconds == pytest.approx(0.06 + 0.02)
    assert sides.remote_seconds == pytest.approx(0.04 + 0.08)


def test_what_is_open_counts_where_a_pod_does_not_report() -> None:
    found = plan(candidate("d", reported=None, open_requests=5), candidate("p", reported=None, open_requests=3))
    assert found is not None
    sides = found.sides
    assert (sides.decode_requests, sides.decode_open, sides.prefill_open, sides.prefill_queue) == (5, 5, 3, 3)


def test_the_prefill_pod_with_the_soonest_first_token_comes_first_and_the_others_stay_for_its_failure() -> None:
    busy = candidate("busy", backlog_tokens=5000.0, matched=900)
    found = plan(candidate("d"), busy, candidate("cold"), candidate("warm", matched=500))
    assert found is not None
    assert [place.endpoint for place in found.places] == ["warm", "cold", "busy"]


def test_there_is_no_plan_without_a_prefill_pod_or_a_prompt_of_known_length() -> None:
    assert plan(candidate("d")) is None
    assert plan(candidate("d", prompt=0), candidate("p", prompt=0)) is None

"""Filters, scorers and their sum: which endpoint wins and what the decision says of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.choosing.decision import DIGITS, best_first, decide
from extproc.errors import NoReadyEndpointError
from extproc.pods.endpoint import Candidate, Reachability
from extproc.pods.inflight import Bookings
from extproc.policy.values import PRESETS, PickPolicy, Strategy
from kvmesh.pods.pod_report import EndpointLoad
from tests.unit.extproc_choosing.pick_candidates import decided

POLICY = PickPolicy(strategy=Strategy.PREFIX_AWARE, weights=PRESETS[Strategy.PREFIX_AWARE])


def load(*, waiting: int = 0, kv_usage: float = 0.0) -> EndpointLoad:
    return EndpointLoad(
        waiting_requests=waiting,
        running_requests=0,
        kv_usage=kv_usage,
        prefix_hit_tokens=0,
        prefix_query_tokens=0,
        reported_at=0.0,
    )


def candidate(
    address: str,
    *,
    waiting: int = 0,
    kv_usage: float = 0.0,
    booked: int = 0,
    matched: int = 0,
    prompt: int = 100,
    known: bool = True,
    reachability: Reachability = Reachability.READY,
) -> Candidate:
    return Candidate(
        address=address,
        reachability=reachability,
        load=load(waiting=waiting, kv_usage=kv_usage) if known else None,
        booked_requests=booked,
        matched_tokens=matched,
        prompt_tokens=prompt,
    )


def winner(*candidates: Candidate, tie_break: float = 0.5) -> str:
    decision = decided(candidates, policy=POLICY, prompt_tokens=100, degraded={}, tie_break=lambda: tie_break)
    return decision.endpoints[0]


def test_a_whole_prefix_outweighs_the_longest_queue() -> None:
    assert winner(candidate("warm", waiting=9, matched=99), candidate("cold")) == "warm"


def test_half_a_prefix_does_not_outweigh_the_longest_queue() -> None:
    assert winner(candidate("warm", waiting=9, matched=50), candidate("cold")) == "cold"


def test_requests_booked_since_the_report_count_as_waiting() -> None:
    assert winner(candidate("booked", booked=2), candidate("waiting", waiting=1)) == "waiting"


def test_kv_usage_orders_endpoints_that_are_otherwise_equal() -> None:
    assert winner(candidate("full", kv_usage=0.9), candidate("empty", kv_usage=0.1)) == "empty"


def test_unknown_load_is_never_taken_for_idle() -> None:
    assert winner(candidate("unknown", known=False), candidate("busy", waiting=4, kv_usage=0.9)) == "busy"


def test_an_unknown_endpoint_is_still_picked_when_it_is_all_there_is() -> None:
    assert winner(candidate("unknown", known=False)) == "unknown"


def test_unreachable_endpoints_are_filtered_and_named() -> None:
    decision = decided(
        [candidate("gone", reachability=Reachability.UNREACHABLE, matched=99), candidate("there")],
        policy=POLICY,
        prompt_tokens=100,
        degraded={"no-tokenizer": "none given"},
        tie_break=lambda: 0.0,
    )
    assert decision.endpoints == ("there",)
    assert decision.rejected == {"gone": "ready: unreachable"}
    assert decision.degraded == {"no-tokenizer": "none given"}


@pytest.mark.parametrize("gone", [0, 2])
def test_without_a_ready_endpoint_the_client_gets_503(gone: int) -> None:
    candidates = [candidate(f"p{i}", reachability=Reachability.UNREACHABLE) for i in range(gone)]
    with pytest.raises(NoReadyEndpointError) as refusal:
        decided(candidates, policy=POLICY, prompt_tokens=0, degraded={}, tie_break=lambda: 0.0)
    assert (refusal.value.http_status, refusal.value.reason) == (503, "no-ready-endpoint")


def test_fallbacks_follow_in_the_order_of_their_totals() -> None:
    decision = decided(
        [candidate("c", waiting=3), candidate("a", matched=96), candidate("d", waiting=9), candidate("b", waiting=1)],
        policy=POLICY,
        prompt_tokens=100,
        degraded={},
        tie_break=lambda: 0.0,
    )
    assert decision.endpoints == ("a", "b", "c")
    assert decision.matched_tokens == 96


def test_the_fallbacks_of_a_rank_are_other_pods_and_fill_the_list() -> None:
    ranks = [candidate("a#0", matched=96), candidate("a#1", matched=90), candidate("b#1", waiting=9), candidate("c#0")]
    for kept, endpoints in ((ranks, ("a#0", "c#0", "b#1")), (ranks[:2], ("a#0", "a#0", "a#0"))):
        decision = decided(kept, policy=POLICY, prompt_tokens=100, degraded={}, tie_break=lambda: 0.0)
        assert decision.endpoints == endpoints, "beyond the list Envoy would send the header to any pod"


def test_ties_are_broken_by_the_random_number() -> None:
    numbers = iter([0.9, 0.1, 0.5])
    decision = decided(
        [candidate("a"), candidate("b"), candidate("c")],
        policy=POLICY,
        prompt_tokens=100,
        degraded={},
        tie_break=lambda: next(numbers),
    )
    assert decision.endpoints == ("b", "c", "a")


def test_the_reasons_name_the_weightiest_scorer_first() -> None:
    decision = decided(
        [candidate("a", matched=64, kv_usage=0.25), candidate("b", waiting=1)],
        policy=POLICY,
        prompt_tokens=80,
        degraded={},
        tie_break=lambda: 0.0,
    )
    assert decision.reasons() == ["queue-depth 1.00 × 2", "prefix 0.64 × 3", "kv-usage 0.75 × 1"]


def test_a_booking_made_while_the_report_was_asked_for_is_not_in_it() -> None:
    bookings = Bookings()
    bookings.book("a", now=1.0)
    assert bookings.booked_since("a", since=1.0) == 1


def test_bookings_since_the_report_are_counted_and_released_once() -> None:
    bookings = Bookings()
    early, late = bookings.book("a", now=1.0), bookings.book("a", now=3.0)
    bookings.book("b", now=3.0)
    assert (bookings.booked_since("a", since=0.0), bookings.booked_since("a", since=2.0)) == (2, 1)
    assert bookings.by_endpoint() == {"a": 2, "b": 1}
    bookings.release(late)
    assert (bookings.booked_since("a", since=2.0), bookings.by_endpoint()) == (0, {"a": 1, "b": 1})
    bookings.release(early)
    with pytest.raises(KeyError):
        bookings.release(early)


NEARLY_ONE = st.integers(-40, 40).map(lambda steps: 1.0 + steps * 1e-10)  # some are equal but for noise
TOTALS = st.lists(NEARLY_ONE | st.floats(-100.0, 100.0) | st.sampled_from([0.0, -0.0, 1e9]), min_size=1, max_size=6)


@given(totals=TOTALS, ties=st.lists(st.floats(0, 1) | st.sampled_from([0.1, 0.2]), min_size=6, max_size=6))
def test_the_order_is_that_of_the_rounded_totals_whether_they_were_rounded_or_not(
    totals: list[float], ties: list[float]
) -> None:
    ranks = [(-round(total, DIGITS), tie) for total, tie in zip(totals, ties, strict=False)]
    assert best_first(totals, iter(ties).__next__) == sorted(range(len(totals)), key=ranks.__getitem__)


@pytest.mark.parametrize(
    ("kept", "rejected", "expected"),
    [
        ("ab", {"p": "role: computes prompts for others"}, "aba"),
        ("a", {"p": "model: does not serve the model"}, "aaa"),
        ("ab", {"p": "healthy: has failed"}, "ab"),  # a retry there is better than none
        ("ab", {}, "ab"),
        ("abc", {"p": "role: computes prompts for others"}, "abc"),
    ],
)
def test_a_retry_stays_among_the_pods_that_may_serve(kept: str, rejected: dict[str, str], expected: str) -> None:
    candidates = [candidate(name, waiting=order) for order, name in enumerate(kept)]
    decision = decide(
        candidates, rejected=rejected, policy=POLICY, prompt_tokens=100, degraded={}, tie_break=lambda: 0.5
    )
    assert decision.endpoints == tuple(expected)

"""A long prompt stays with the endpoint that holds it where only waiting keeps it from there, and not for long."""

from typing import Any

import pytest

from extproc.answers.stream_promises import NO_PROMISES, StreamPromises
from extproc.choosing.choose import Choice, Full, PoolView, Query, RoundRobin, Snapshot, choose
from extproc.choosing.endpoint_health import EndpointHealth
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.pods.endpoint import Ask, Candidate
from extproc.pods.inflight import Bookings
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.values import PickPolicy
from extproc.prefixes.routing_memory import RoutingMemory
from tests.unit.extproc_choosing.pick_candidates import candidate, load
from tests.unit.extproc_choosing.test_room import limited_to
from tests.unit.extproc_choosing.test_stream_room import learned, promises
from tests.unit.extproc_pick.pick_fakes import FakeEndpoints

RATE = 10_000.0  # tokens a second
NOW = 10.0
POLICY = PickPolicy()


def chosen(
    *pods: Candidate,
    ceiling: float = 0.8,
    refused: str | None = None,
    estimates: LatencyEstimates | None = None,
    promised: StreamPromises = NO_PROMISES,
) -> str | None:
    """The first choice between these; None: the request waits."""
    health = EndpointHealth(POLICY.health)
    if refused is not None:
        health.full(refused, now=NOW)
    view = PoolView(
        endpoints=FakeEndpoints([]),
        bookings=Bookings(),
        memory=RoutingMemory(POLICY),
        health=health,
        estimates=estimates or LatencyEstimates(tokens_per_second=RATE),
        links=LinkEstimates(),
        hot=HotPrefixes(),
        turns=RoundRobin(),
        policy=POLICY,
        random=lambda: 0.5,
        promises=promised,
    )
    snapshot = Snapshot(
        kept=pods,
        rejected={},
        ask=Ask(class_name="chat"),
        prompt_tokens=pods[0].prompt_tokens,
        degraded={},
        at=NOW,
    )
    found = choose(view, Query(), snapshot, ceiling=ceiling)
    if isinstance(found, Full):
        return None
    assert isinstance(found, Choice)
    return found.decision.endpoints[0]


def holder(*, prompt: int = 8000, matched: int = 7999, kv_usage: float = 0.3, **values: Any) -> Candidate:
    """A pod that is busy with prompts for half a second, three times what fills it."""
    reported = load(running_requests=4, kv_usage=kv_usage, reported_at=NOW)
    return candidate(
        "a",
        reported=reported,
        prompt=prompt,
        matched=matched,
        **{"backlog_tokens": 5000.0, "open_requests": 4} | values,
    )


def idle(prompt: int = 8000) -> Candidate:
    return candidate("b", reported=load(reported_at=NOW), prompt=prompt)


def test_a_document_stays_where_at_least_half_of_it_is_held() -> None:
    assert chosen(holder(), idle()) == "a"
    assert chosen(holder(matched=4000), idle()) == "a"
    assert chosen(holder(matched=3999), idle()) == "b"


def test_requests_that_wait_there_for_a_place_do_not_send_it_away() -> None:
    known = limited_to(16, starts=40)
    waits = holder(open_requests=30, backlog_tokens=0.0)
    assert chosen(waits, idle(), estimates=known) == "a"


@pytest.mark.parametrize(("prompt", "goes_to"), [(1000, "b"), (1001, "a")])
def test_a_prompt_of_a_thousand_tokens_is_no_document(prompt: int, goes_to: str) -> None:
    # 0.14 s there, 0.12 s elsewhere
    waits = holder(prompt=prompt, matched=prompt - 1, backlog_tokens=1200.0)
    assert chosen(waits, idle(prompt), ceiling=0.5) == goes_to


def test_a_shorter_prompt_waits_for_its_prefix_only_below_three_times_a_full_endpoint() -> None:
    # 0.02 s of prompts fill it for this class; 0.12 s elsewhere
    below, above = (holder(prompt=1000, matched=999, backlog_tokens=tokens) for tokens in (599.0, 601.0))
    assert chosen(below, idle(1000), ceiling=0.1) == "a"
    assert chosen(above, idle(1000), ceiling=0.1) == "b"


def test_it_waits_for_no_more_than_half_as_long_again_as_it_takes_elsewhere() -> None:
    # 0.82 s elsewhere
    assert chosen(holder(backlog_tokens=12_000.0), idle()) == "a"
    assert chosen(holder(backlog_tokens=12_500.0), idle()) == "b"


def test_what_else_fills_its_endpoint_sends_it_away() -> None:
    assert chosen(holder(kv_usage=0.95), idle()) == "b"
    assert chosen(holder(), idle(), refused="a") == "b"
    assert chosen(holder(), idle(), estimates=learned(preempted=NOW), promised=promises(other=None, chat=None)) == "b"
    assert chosen(holder(), idle(), estimates=learned(), promised=promises(chat=0.03)) == "a"
    assert chosen(holder(open_requests=60), idle(), estimates=learned(), promised=promises(chat=0.03)) == "b"


def test_where_no_other_has_room_it_waits_for_its_turn() -> None:
    assert chosen(holder(), holder()) is None

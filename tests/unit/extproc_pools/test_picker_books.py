"""What is booked and remembered for a pick, what it came to, and that other replicas are told."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from extproc.admission.degradation import NO_MEASURES, Measures
from extproc.answers.answer_lengths import LEAST_ANSWERS, AnswerLength
from extproc.answers.realised import Comparison
from extproc.answers.response_plan import PASS_PLAN, Miss
from extproc.ledger.facts import Arrival, Ended, Read
from extproc.ledger.feature_telemetry import OverloadTelemetry
from extproc.ledger.ledger import DegradationLog, RequestWatch
from extproc.ledger.picker_telemetry import PickerTelemetry
from extproc.pick import pick
from extproc.pods.endpoint import EndpointTrend
from extproc.pods.inflight import Booking
from extproc.policy.priority import DegradationStep, StepKind
from extproc.policy.values import PickPolicy
from extproc.pools.picker_books import PickerBooks
from extproc.pools.pool_ledger import listeners_of
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from extproc.shared.shared_load import EndpointBookings
from tests.unit.extproc_choosing.pick_candidates import load
from tests.unit.extproc_ledger import told_facts
from tests.unit.extproc_ledger.told_facts import AtOnce
from tests.unit.extproc_pick.pick_fakes import (
    FakeIndex,
    FakePrompts,
    Hits,
    chat,
    explained,
    facts,
    pod,
    runtime,
    tokens,
)

CAPPED = DegradationStep(step=StepKind.CAP_OUTPUT, enter=1.0, leave=0.5)
KEYS = PromptKeys(keys=bytes(range(240)), tokens_each=16)  # 30 keys


class Shared:
    """In the place of `SharedState`."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def changed(self) -> None:
        self.told.append("changed")

    def ended(self) -> None:
        self.told.append("ended")

    def placed(self, **what: Any) -> None:
        self.told.append(what)


def books() -> tuple[PickerBooks, Shared, PickerTelemetry]:
    policy = PickPolicy(prefill_tokens_per_second=1.0)
    telemetry = PickerTelemetry()
    made = PickerBooks(("a", "b"), policy=policy, clock=lambda: 1.0)
    watch = RequestWatch()
    listeners = listeners_of(
        "",
        books=made,
        telemetry=telemetry,
        overload=OverloadTelemetry(telemetry.registry, classes=policy.priorities.classes),
        degradations=DegradationLog(),
        watch=watch,
    )
    made.ledger = AtOnce(watch, listeners)
    shared = Shared()
    made.shared = shared  # type: ignore[assignment]
    return made, shared, telemetry


async def picked(path: str = "/v1/chat/completions", *, held: int = 20, session: str | None = None) -> Any:
    headers = {} if session is None else {"x-session-id": session}
    hits = IndexHits(prompts=[Hits({"b": held})], keys=[KEYS], states={"a": "live", "b": "live"})
    a_pool = runtime(pod("a"), pod("b"), index=FakeIndex(hits), prompts=FakePrompts(tokens(500)))
    return await explained(a_pool, facts(path=path, headers=headers), chat())


def routed(made: PickerBooks, decided: Any) -> Booking:
    booking = made.book(decided)
    made.remember(decided)
    return booking


async def test_a_pick_is_booked_with_the_tokens_that_its_pod_has_to_compute() -> None:
    made, shared, _ = books()
    booking = routed(made, await picked(session="s"))
    assert (booking.endpoint, booking.uncached_tokens, booking.context_tokens) == ("b", 180, 500)
    assert made.own_bookings() == {"b": EndpointBookings(1, 180, 500)}
    assert made.memory.matches([KEYS], states={}, endpoints=("b",), now=1.0) == [({"b": 30}, 16)]
    assert made.memory.session_place("tiny\0s", now=1.0) == "b"
    assert shared.told == ["changed", {"endpoint": "b", "session": "tiny\0s", "adapter": None, "session_moved": False}]
    made.release(booking, status=200)
    assert (made.own_bookings(), shared.told[-1]) == ({}, "ended")


async def test_the_length_of_answers_is_learned_and_expected_at_the_next_pick() -> None:
    made, _, _ = books()
    decided = await picked()
    for _ in range(LEAST_ANSWERS):
        made.release(routed(made, decided), status=200, generated=300)
        made.release(routed(made, decided), status=200)  # not read
    kind = decided.prepared.asked.answer_kind(None)
    assert made.answers.expected(kind, most=None) == AnswerLength(tokens=300, spread=0)
    ask = structs.replace(decided.prepared.query.ask, answer_tokens=300.0, answer_spread=20.0)
    query = structs.replace(decided.prepared.query, ask=ask)
    expecting = structs.replace(decided, prepared=structs.replace(decided.prepared, query=query))
    booking = routed(made, expecting)
    assert (booking.answer_tokens, booking.answer_variance) == (300, 400)
    moved = made.rebook(booking, "a")
    assert made.bookings.totals("a", now=1.0).growth_tokens == 160
    made.release(moved, status=200, generated=260)
    assert made.answers.errors() == {"tiny": 40}


async def test_a_request_that_only_counts_tokens_leaves_nothing_in_a_cache() -> None:
    made, _, _ = books()
    booking = routed(made, await picked("/tokenize"))
    assert (booking.uncached_tokens, booking.context_tokens) == (0, 0)
    assert made.memory.matches([KEYS], states={}, endpoints=("a", "b"), now=1.0) == [({}, 16)]


@pytest.mark.parametrize("status", [400, 500, 0])
async def test_a_prompt_that_its_pod_has_not_computed_is_not_expected_there(status: int) -> None:
    made, _, _ = books()
    live = {"b": "live"}
    booking = routed(made, await picked())
    assert made.memory.matches([KEYS], states=live, endpoints=("b",), now=1.0) == [({"b": 30}, 16)]
    made.release(booking, status=status)
    assert made.memory.matches([KEYS], states=live, endpoints=("b",), now=1.0) == [({}, 16)]


async def test_a_retry_moves_the_booking_to_the_pod_that_serves() -> None:
    made, shared, _ = books()
    moved = made.rebook(routed(made, await picked(session="s")), "a")
    assert made.own_bookings() == {"a": EndpointBookings(1, 180, 500)}
    live = {"a": "live", "b": "live"}
    assert made.memory.matches([KEYS], states=live, endpoints=("a", "b"), now=1.0) == [({"a": 30}, 16)]
    assert made.memory.session_place("tiny\0s", now=1.0) == "a"
    assert {"endpoint": "a", "session": "tiny\0s", "adapter": None, "session_moved": False} in shared.told
    made.release(moved, status=200)


def test_pods_that_fail_are_avoided_and_strangers_are_not_counted() -> None:
    made, _, _ = books()
    for endpoint in ("a", "stranger") * 3:
        made.endpoint_answered(endpoint, failed=True)
    assert list(made.health.avoided(now=1.0)) == ["a"]
    assert (made.knows("a"), made.knows("stranger")) == (True, False)
    made.restarted("a")
    assert made.health.avoided(now=1.0) == {}


async def test_a_restarted_pod_is_expected_to_hold_nothing() -> None:
    made, _, _ = books()
    routed(made, await picked())
    assert made.memory.matches([KEYS], states={}, endpoints=("b",), now=1.0)[0][0] == {"b": 30}
    made.restarted("b")
    assert made.memory.matches([KEYS], states={}, endpoints=("b",), now=1.0)[0][0] == {}


async def test_a_learned_rate_drains_what_is_booked() -> None:
    made, _, _ = books()
    routed(made, await picked())
    made.reported("b", load(waiting_requests=9), EndpointTrend(prefill_tokens_per_second=100.0))
    assert made.bookings.totals("b", now=2.0).uncached_tokens == pytest.approx(80)


async def test_what_may_make_room_wakes_those_who_wait() -> None:
    made, _, _ = books()
    woken: list[str] = []
    made.freed = lambda: woken.append("freed")
    booking = routed(made, await picked())
    made.reported("b", load(), EndpointTrend())
    made.release(booking, status=200)
    assert len(woken) == 2


def test_a_pod_that_says_it_is_full_is_believed_and_has_not_failed() -> None:
    made, _, telemetry = books()
    for endpoint in ("a", "stranger"):
        made.endpoint_full(endpoint)
    assert (made.health.full_until(now=1.0), made.health.avoided(now=1.0)) == ({"a": 2.0}, {})
    assert 'kvmesh_endpoint_full_answers_total{endpoint="a"} 1.0' in asyncio.run(telemetry.page()).decode()


def test_what_came_true_is_counted_and_what_was_missed_is_named() -> None:
    made, _, telemetry = books()
    comparison = Comparison(
        model="tiny",
        arm="",
        endpoint="a",
        prompt_tokens=100,
        predicted_tokens=64,
        realised_tokens=48,
        error_tokens=-16,
        regret_tokens=16,
        prompt_error_tokens=0,
    )
    made.ledger.tell(Read(comparison=comparison, missed=(Miss.NOT_DELIVERED, Miss.TOO_LARGE)))
    page = asyncio.run(telemetry.page()).decode()
    for line in (
        'kvmesh_realised_predicted_tokens_total{model="tiny"} 64.0',
        'kvmesh_realised_cached_tokens_total{model="tiny"} 48.0',
        'kvmesh_realised_regret_tokens_total{model="tiny"} 16.0',
        'kvmesh_responses_missed_total{why="not-delivered"} 1.0',
    ):
        assert line in page
    assert len(made.realised_watch._windows["tiny"].taken) == 1


class Quotas:
    """In the place of `shared.shared_quotas.Quotas`."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def settle(self, ask: Any, *, generated_tokens: int | None) -> None:
        self.told.append(("settled", ask, generated_tokens))

    def cancel(self, ask: Any) -> None:
        self.told.append(("cancelled", ask))


@pytest.mark.parametrize(
    ("status", "stream", "unserved", "expected"),
    [
        (200, True, False, ("settled", "ask", None)),  # whoever reads the response tells
        (200, False, False, ("settled", "ask", None)),
        (400, False, False, ("settled", "ask", 0)),
        (500, True, False, ("settled", "ask", 0)),
        (0, True, False, ("settled", "ask", 0)),  # its headers would have come before its first token
        (0, False, False, ("settled", "ask", None)),  # the client has left, and the pod has worked
        (504, False, False, ("settled", "ask", None)),
        (503, False, True, ("cancelled", "ask")),
        (503, True, True, ("cancelled", "ask")),
    ],
)
async def test_an_end_costs_its_tenant_what_was_used(
    status: int, stream: bool, unserved: bool, expected: tuple[Any, ...]
) -> None:
    made, _, _ = books()
    quotas = Quotas()
    made.quotas = quotas  # type: ignore[assignment]
    a_pool = runtime(pod("a"), pod("b"), index=FakeIndex(IndexHits()), prompts=FakePrompts(tokens(500)))
    decided = await explained(a_pool, facts(), chat(stream=stream))
    booking = made.book(structs.replace(decided, prepared=structs.replace(decided.prepared, quota="ask")))
    made.release(booking, status=status, unserved=unserved)
    assert quotas.told == [expected]


async def test_the_first_token_is_expected_after_what_its_pod_has_to_compute() -> None:
    made, _, _ = books()
    made.reported("b", load(), EndpointTrend())
    expected, seconds_a_token = made.expect(await picked())
    pace = made.estimates.pace("b").prefill
    assert expected == pytest.approx(pace.seconds(180))
    assert seconds_a_token == pace.seconds_a_token
    assert list(made.estimates._samples["b"].promises) == [expected]


@pytest.mark.parametrize("measures", [NO_MEASURES, Measures(steps=(CAPPED,), output_tokens=9)])
async def test_what_was_asked_for_says_what_the_load_has_taken(measures: Measures) -> None:
    decided = await picked()
    sent = structs.replace(decided.prepared.sent, capped=measures is not NO_MEASURES)
    prepared = structs.replace(
        decided.prepared, asked=structs.replace(decided.prepared.asked, measures=measures), sent=sent
    )
    assert prepared.summary.model == "tiny"
    assert prepared.summary.steps == (() if measures is NO_MEASURES else ("cap-output",))


async def test_a_pick_that_is_remembered_after_its_endpoint_is_gone_leaves_only_its_count() -> None:
    made, _, telemetry = books()
    decided = await picked()
    booking = made.book(decided)
    made.set_endpoints(("a",))
    made.release(booking, status=200)  # its client has left at once
    made.remember(decided)
    facts = told_facts.routed("b"), Ended(arrival=Arrival(), endpoint="b", booked_on="b", status=200)
    made.ledger.tell(*facts)
    page = (await telemetry.page()).decode()
    assert 'kvmesh_decisions_total{outcome="routed"} 1.0' in page
    assert 'endpoint="b"' not in page
    assert made.memory.matches([KEYS], states={}, endpoints=("a", "b"), now=1.0) == [({}, 16)]


async def test_what_is_remembered_of_an_endpoint_that_leaves_is_forgotten_with_its_last_request() -> None:
    made, _, _ = books()
    decided = await picked()
    booking = made.book(decided)
    made.set_endpoints(("a",))
    made.remember(decided)
    made.release(booking, status=200)
    assert made.memory.matches([KEYS], states={}, endpoints=("a", "b"), now=1.0) == [({}, 16)]


async def test_a_response_finds_its_request_by_its_plan_until_the_exchange_ends() -> None:
    hits = IndexHits(prompts=[Hits({"b": 20})], keys=[KEYS], states={"a": "live", "b": "live"})
    pool = runtime(pod("a"), pod("b"), index=FakeIndex(hits), prompts=FakePrompts(tokens(500)))
    pool.sample_share = 1.0
    exchange = await pick(facts(), chat(), pool)
    prediction = exchange.plan.prediction
    assert prediction is not None
    anothers = structs.replace(exchange.plan, prediction=structs.replace(prediction, prompt_tokens=2))
    assert pool.books.exchange_of(exchange.plan) is exchange
    assert (pool.books.exchange_of(anothers), pool.books.exchange_of(PASS_PLAN)) == (None, None)
    exchange.finish()
    assert pool.books.exchange_of(exchange.plan) is None
    assert not pool.books.reading

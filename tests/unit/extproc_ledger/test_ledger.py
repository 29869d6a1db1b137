"""Listeners hear of each request in order, once, after the answer; their failures and their absence harm no request."""

import asyncio
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import Arrival, ClientLeftError, Decided, Ended, SpanContext
from extproc.ledger.ledger import Ledger, RequestWatch
from tests.unit.extproc_ledger.told_facts import routed

FACTS = RequestFacts(method="POST", path="/", objective=None, request_id="r1")
SPAN = SpanContext(trace_id=1, span_id=2, tracestate="a=1")


@dataclass
class Observer:
    told: list[str] = field(default_factory=list)
    fails: bool = False

    def decided(self, decided: Decided, /) -> None:
        self._take(f"decided {decided.arrival.number} {decided.outcome_kind}")

    def ended(self, ended: Ended, /) -> None:
        self._take(f"ended {ended.arrival.number} {ended.status}")

    def _take(self, words: str) -> None:
        if self.fails:
            raise ZeroDivisionError
        self.told.append(words)


@dataclass
class Traces(Observer):
    span: SpanContext | None = None

    def open(self, facts: RequestFacts) -> SpanContext | None:
        return self.span


def decided(arrival: Arrival) -> Decided:
    return routed("a", arrival=arrival, at=arrival.at + 0.5)


def ended(arrival: Arrival, status: int = 200) -> Ended:
    return Ended(arrival=arrival, endpoint="a", served_by="a", status=status, headers_at=arrival.at + 0.75, at=11.75)


async def test_facts_are_told_in_order_and_after_what_runs_now() -> None:
    watch, observer = RequestWatch(), Observer()
    watch.observers.append(observer)
    ledger = Ledger(watch, {Decided: [watch.decided], Ended: [watch.ended]})
    for _ in range(2):
        arrival = watch.arrival("ns/p", FACTS, at=10.0)
        ledger.tell(decided(arrival))
        ledger.tell(ended(arrival, 0))
    assert observer.told == []
    await asyncio.sleep(0)
    assert observer.told == ["decided 1 routed", "ended 1 0", "decided 2 routed", "ended 2 0"]


def test_times_count_from_the_arrival() -> None:
    arrival = Arrival(at=10.0)
    assert decided(arrival).seconds == 0.5
    assert (ended(arrival).seconds, ended(arrival).seconds_to_headers) == (1.75, 0.75)
    assert structs.replace(ended(arrival), headers_at=None).seconds_to_headers is None


def test_a_listener_that_fails_is_said_once_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Observer(fails=True), Observer()
    watch = RequestWatch()
    watch.observers += [bad, good]
    told: list[Decided] = []
    ledger = Ledger(watch, {Decided: [bad.decided, watch.decided, told.append]})
    for number in range(3):
        ledger.hear([decided(Arrival(number=number))])
    assert (len(good.told), len(told)) == (3, 3)
    assert caplog.text.count("a listener to facts failed") == 1


def test_traces_hear_of_what_has_a_span_alone() -> None:
    watch = RequestWatch()
    watch.traces = traces = Traces(span=SPAN)
    arrival = watch.arrival("", FACTS, at=0.0)
    watch.decided(decided(arrival))
    assert traces.told == ["decided 1 routed"]
    assert arrival.set_headers == {"traceparent": SPAN.traceparent, "tracestate": "a=1"}

    traces.span = None
    arrival = watch.arrival("", FACTS, at=0.0)
    watch.decided(decided(arrival))

    assert (arrival.set_headers, arrival.trace_id, len(traces.told)) == ({}, "", 1)


def test_a_client_that_left_is_499() -> None:
    assert (ClientLeftError("left").status, ClientLeftError.reason) == (499, "client-left")

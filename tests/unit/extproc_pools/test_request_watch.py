"""Observers hear of each request in order, once; their failures and their absence harm no request."""

from dataclasses import dataclass, field

import pytest

from extproc.errors import RequestShedError
from extproc.ext_proc.exchange import RequestFacts
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.request_watch import RequestTrace, RequestWatch
from extproc.records.request_events import ClientLeftError, Decided, DecisionRecord, Ended, RequestOutcome, SpanContext
from extproc.responses.response_plan import PASS_PLAN, Prediction, ResponsePlan
from tests.unit.extproc_pools.test_booked_exchange import Books

FACTS = RequestFacts(method="POST", path="/", objective=None, request_id="r1")
RECORD = DecisionRecord(at=0.0, id="d-1", facts=FACTS, model=None, outcome=RequestShedError("busy"))


@dataclass
class Observer:
    told: list[str] = field(default_factory=list)
    events: list[Decided | Ended] = field(default_factory=list)
    fails: bool = False

    def decided(self, decided: Decided, /) -> None:
        self._take(decided, f"decided {decided.number} {decided.outcome_kind}")

    def ended(self, ended: Ended, /) -> None:
        self._take(ended, f"ended {ended.number} {ended.status}")

    def _take(self, event: Decided | Ended, words: str) -> None:
        if self.fails:
            raise ZeroDivisionError
        self.told.append(words)
        self.events.append(event)


@dataclass
class Traces(Observer):
    span: SpanContext | None = None

    def open(self, facts: RequestFacts) -> SpanContext | None:
        return self.span


@dataclass
class Clock:
    now: float = 10.0

    def __call__(self) -> float:
        return self.now


def opened(watch: RequestWatch) -> RequestTrace:
    trace = watch.open("ns/p", FACTS)
    assert trace is not None
    return trace


def end(trace: RequestTrace, status: int = 200) -> None:
    trace.end(endpoint="a", served_by="a", status=status, unserved=False)


def test_without_observers_there_is_no_trace() -> None:
    watch = RequestWatch()
    assert not watch.is_used
    assert watch.open("", FACTS) is None


def test_an_observer_hears_the_decision_and_then_the_end() -> None:
    clock, observer = Clock(), Observer()
    watch = RequestWatch(clock=clock, unix_ns=lambda: 5)
    watch.observers.append(observer)
    trace = opened(watch)
    clock.now += 0.5
    assert trace.settle()
    clock.now += 0.25
    trace.decided(RequestOutcome.ROUTED, RECORD, endpoint="a")
    trace.responded()
    clock.now += 1.0
    end(trace)
    decided, ended = observer.events
    assert isinstance(decided, Decided)
    assert isinstance(ended, Ended)
    assert (decided.pool, decided.started_unix_ns, decided.seconds, decided.endpoint) == ("ns/p", 5, 0.5, "a")
    assert (ended.number, ended.seconds_to_headers, ended.seconds) == (decided.number, 0.75, 1.75)


def test_an_end_that_comes_first_is_told_after_the_decision() -> None:
    observer = Observer()
    watch = RequestWatch()
    watch.observers.append(observer)
    trace = opened(watch)
    end(trace, 0)
    assert observer.told == []
    trace.decided(RequestOutcome.ROUTED, RECORD, endpoint="a")
    assert observer.told == ["decided 1 routed", "ended 1 0"]


def test_what_was_dealt_with_once_is_not_dealt_with_again() -> None:
    watch = RequestWatch()
    watch.observers.append(Observer())
    trace = opened(watch)
    assert [trace.settle(), trace.settle()] == [True, False]


def test_an_observer_that_fails_is_said_once_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Observer(fails=True), Observer()
    watch = RequestWatch(clock=Clock())
    watch.observers += [bad, good]
    for _ in range(3):
        trace = opened(watch)
        trace.decided(RequestOutcome.ROUTED, RECORD, endpoint="a")
        end(trace)
    assert len(good.told) == 6
    assert caplog.text.count("an observer of requests failed") == 1


def test_traces_hear_of_what_has_a_span_alone() -> None:
    span = SpanContext(trace_id=1, span_id=2, tracestate="a=1")
    watch = RequestWatch()
    watch.traces = traces = Traces(span=span)
    trace = opened(watch)
    trace.decided(RequestOutcome.ABANDONED, RECORD)
    assert traces.told == ["decided 1 abandoned"]
    assert trace.set_headers == {"traceparent": span.traceparent, "tracestate": "a=1"}

    traces.span = None

    assert watch.open("", FACTS) is None


def test_a_response_finds_its_request_by_its_plan_until_the_exchange_ends() -> None:
    def plan(sent_at: float, prompt_tokens: int = 1) -> ResponsePlan:
        prediction = Prediction(
            model="m",
            endpoint="a",
            sent_at=sent_at,
            prompt_tokens=prompt_tokens,
            matched_tokens=0,
            best_matched_tokens=0,
        )
        return ResponsePlan(prediction=prediction)

    watch = RequestWatch()
    watch.observers.append(Observer())
    trace = opened(watch)
    trace.will_be_read(plan(5.0))
    assert watch.trace_of(plan(5.0)) is trace
    assert watch.trace_of(plan(6.0)) is None
    assert watch.trace_of(plan(5.0, prompt_tokens=2)) is None  # another picker's
    assert watch.trace_of(PASS_PLAN) is None
    end(trace)
    assert watch.trace_of(plan(5.0)) is None
    assert not watch.reading


def test_a_client_that_left_is_499() -> None:
    assert (ClientLeftError("left").status, ClientLeftError.reason) == (499, "client-left")


def test_a_request_that_was_sent_without_a_decision_is_followed_to_its_end() -> None:
    observer = Observer()
    watch = RequestWatch()
    watch.observers.append(observer)
    trace = opened(watch)
    exchange = BookedExchange(books=Books(), endpoints=("a", "b"), booking=None, trace=trace)
    trace.decided(RequestOutcome.FAILED_OPEN, RECORD, endpoint="a")
    exchange.responded(status=503, served_by=None, from_pod=False, content_type="")
    exchange.finish()
    assert observer.told == ["decided 1 failed-open", "ended 1 503"]
    ended = observer.events[1]
    assert isinstance(ended, Ended)
    assert (ended.endpoint, ended.served_by, ended.unserved) == ("a", None, True)

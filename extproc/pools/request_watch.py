"""Follows each request from its arrival to its end and tells the observers; where there are none, nothing is made.

Decides nothing; no observer's failure reaches a request.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Protocol

from extproc.admission.prepared_request import Picked
from extproc.ext_proc.exchange import NO_HEADERS, RequestFacts
from extproc.records.request_events import (
    Decided,
    DecisionRecord,
    Ended,
    LegEnd,
    RequestObserver,
    RequestOutcome,
    SpanContext,
)
from extproc.responses.realised import Usage
from extproc.responses.response_plan import ResponsePlan

log = logging.getLogger(__name__)

COMPLAINT_SECONDS = 60.0  # an observer that fails is in the log once in so long


class Traces(RequestObserver, Protocol):
    """Traces that are on: told of the exchanges alone that have a span."""

    def open(self, facts: RequestFacts) -> SpanContext | None:
        """Return the span of a request that has come now, None where it is not sampled."""


class RequestWatch:
    """The observers of one process, and the numbers of their traces."""

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, unix_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self.observers: list[RequestObserver] = []  # may change at any time
        self.traces: Traces | None = None  # None: off
        self.on_picked: Callable[[str, Picked], None] | None = None  # pool, and what was routed; after its answer
        self.reading: dict[tuple[float, str], tuple[RequestTrace, ResponsePlan]] = {}  # whose responses may be read
        self.clock = clock
        self.unix_ns = unix_ns
        self._numbers = count(1)
        self._complained_at = float("-inf")

    @property
    def is_used(self) -> bool:
        """Whether any request may be observed."""
        return bool(self.observers) or self.traces is not None

    def open(self, pool: str, facts: RequestFacts, *, audit_share: float = 1.0) -> "RequestTrace | None":
        """Begin the trace of a request that has come now; None where no observer would be told of it."""
        span = self.traces.open(facts) if self.traces is not None else None
        if span is None and not self.observers:
            return None
        return RequestTrace(self, next(self._numbers), pool, facts, span, audit_share)

    def trace_of(self, plan: ResponsePlan) -> "RequestTrace | None":
        """Return the open trace whose response has this plan: the response may come on a stream of its own."""
        key = _reading_key(plan)
        trace, planned = self.reading.get(key, (None, None)) if key is not None else (None, None)
        return trace if planned == plan else None

    def tell_decided(self, decided: Decided) -> None:
        """Tell all who are to know."""
        for observer in self._concerned(decided.span):
            try:
                observer.decided(decided)
            except Exception:
                self._complain(observer)

    def tell_ended(self, ended: Ended) -> None:
        """Tell all who are to know."""
        for observer in self._concerned(ended.span):
            try:
                observer.ended(ended)
            except Exception:
                self._complain(observer)

    def tell_picked(self, pool: str, picked: Picked) -> None:
        """Tell the listener that wants all that was routed."""
        if self.on_picked is not None:
            try:
                self.on_picked(pool, picked)
            except Exception:
                self._complain(self.on_picked)

    def _concerned(self, span: SpanContext | None) -> Sequence[RequestObserver]:
        if span is None or self.traces is None:
            return self.observers.copy()  # one may go while it is told
        return [*self.observers, self.traces]

    def _complain(self, observer: object) -> None:
        now = self.clock()
        if now - self._complained_at >= COMPLAINT_SECONDS:
            self._complained_at = now
            log.exception("an observer of requests failed", extra={"observer": type(observer).__name__})


class RequestTrace:
    """One request that is observed."""

    __slots__ = (
        "_audit_share",
        "_ended",
        "_facts",
        "_headers_at",
        "_is_told",
        "_legs",
        "_number",
        "_pool",
        "_reading_key",
        "_settled_at",
        "_started_at",
        "_started_unix_ns",
        "_watch",
        "first_token_seconds",
        "phases",
        "prompt_key",
        "queued_seconds",
        "span",
        "usage",
    )

    def __init__(
        self,
        watch: RequestWatch,
        number: int,
        pool: str,
        facts: RequestFacts,
        span: SpanContext | None,
        audit_share: float,
    ) -> None:
        self._watch = watch
        self._number = number
        self._pool = pool
        self._facts = facts
        self.span = span
        self._audit_share = audit_share
        self.prompt_key = b""
        self._started_unix_ns = watch.unix_ns()
        self._started_at = watch.clock()
        self._reading_key: tuple[float, str] | None = None
        self.phases: dict[str, float] = {}
        self.queued_seconds: float | None = None
        self.usage: Usage | None = None  # as read from the response
        self.first_token_seconds: float | None = None  # from the request's arrival, likewise
        self._headers_at: float | None = None
        self._settled_at: float | None = None
        self._is_told = False
        self._legs: tuple[LegEnd, ...] = ()
        self._ended: Ended | None = None  # before observers were told that it began

    @property
    def set_headers(self) -> Mapping[str, str]:
        """Request headers by which a pod's spans become children of the exchange's."""
        span = self.span
        if span is None:
            return NO_HEADERS
        state = {"tracestate": span.tracestate} if span.tracestate else {}
        return {"traceparent": span.traceparent} | state

    @property
    def trace_id(self) -> str:
        """The trace's name as headers have it; "" where the request is not traced."""
        return f"{self.span.trace_id:032x}" if self.span is not None else ""

    def will_be_read(self, plan: ResponsePlan) -> None:
        """Expect the response that has this plan to be read here, until the exchange ends."""
        key = _reading_key(plan)
        if key is not None and key not in self._watch.reading:
            self._reading_key = key
            self._watch.reading[key] = (self, plan)

    def settle(self) -> bool:
        """Take note that it has been dealt with now; False where it was before."""
        if self._settled_at is not None:
            return False
        self._settled_at = self._watch.clock()
        return True

    def decided(self, kind: RequestOutcome, record: DecisionRecord, *, endpoint: str | None = None) -> None:
        """Tell what was done about it. Called after the answer, which does not wait for observers."""
        watch, settled_at = self._watch, self._settled_at
        seconds = (settled_at if settled_at is not None else watch.clock()) - self._started_at
        watch.tell_decided(
            Decided(
                number=self._number,
                pool=self._pool,
                outcome_kind=kind,
                record=record,
                endpoint=endpoint,
                started_unix_ns=self._started_unix_ns,
                seconds=seconds,
                queued_seconds=self.queued_seconds,
                phases=self.phases,
                span=self.span,
                audit_share=self._audit_share,
                prompt_key=self.prompt_key,
            )
        )
        self._is_told = True
        if self._ended is not None:
            watch.tell_ended(self._ended)

    def leg(self, *, endpoint: str, outcome: str, seconds: float) -> None:
        """Take note of a prefill leg that has ended now."""
        began = self._watch.clock() - self._started_at - seconds
        self._legs += (LegEnd(endpoint=endpoint, outcome=outcome, began_seconds=began, seconds=seconds),)

    def responded(self) -> None:
        """Take note that the response's headers have come."""
        self._headers_at = self._watch.clock()

    def end(self, *, endpoint: str, served_by: str | None, status: int, unserved: bool) -> None:
        """Tell that the exchange is over, but never before it has begun."""
        if self._reading_key is not None:
            self._watch.reading.pop(self._reading_key, None)
        began, headers = self._started_at, self._headers_at
        ended = Ended(
            number=self._number,
            pool=self._pool,
            request_id=self._facts.request_id,
            endpoint=endpoint,
            served_by=served_by,
            status=status,
            unserved=unserved,
            seconds_to_headers=headers - began if headers is not None else None,
            seconds=self._watch.clock() - began,
            usage=self.usage,
            first_token_seconds=self.first_token_seconds,
            legs=self._legs,
            span=self.span,
        )
        if self._is_told:
            self._watch.tell_ended(ended)
        else:
            self._ended = ended


def _reading_key(plan: ResponsePlan) -> tuple[float, str] | None:
    """Return what tells one pick of a picker from its others; None where nothing was predicted."""
    prediction = plan.prediction
    return (prediction.sent_at, prediction.endpoint) if prediction is not None and prediction.sent_at else None

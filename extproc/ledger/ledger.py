"""Tells facts to their listeners, after the request's answer and in order; a listener's failure reaches no request.

`DegradationLog` logs missing inputs of decisions: each at most once a minute, however many requests lack it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Protocol

from extproc.admission.prepared_request import Picked
from extproc.answers.response_plan import Miss
from extproc.choosing.decision import Decision
from extproc.ext_proc.exchange import NO_HEADERS, RequestFacts
from extproc.ledger.facts import Arrival, Decided, Ended, LegEnd, Read, SpanContext

log = logging.getLogger(__name__)

THROTTLE_SECONDS = 60.0
Listener = Callable[[Any], None]
Listeners = Mapping[type, Sequence[Listener]]
REPEAT_SECONDS = 60.0
LEG_FAILED = "prefill-leg-failed"
# hints about Envoy's configuration, for responses that could not be read or changed
MISSING_IN_ENVOY = {
    Miss.NO_RESPONSE_FILTER: "a response was to be read, and Envoy has no second ext_proc filter for it "
    "(envoy/local.yaml)",
    Miss.NOT_DELIVERED: "a response was to be read, and none of it came: a client left, or allow_mode_override is "
    "missing",
}


class Throttle:
    """Passes once in `THROTTLE_SECONDS`, so that a lasting problem does not flood the log."""

    def __init__(self) -> None:
        self._passed_at = float("-inf")

    def passes(self) -> bool:
        """Return whether the last pass was long enough ago."""
        now = time.monotonic()
        if now - self._passed_at < THROTTLE_SECONDS:
            return False
        self._passed_at = now
        return True


class RequestObserver(Protocol):
    """Called on the event loop; must not block."""

    def decided(self, decided: Decided, /) -> None:
        """Take the decision on a request."""

    def ended(self, ended: Ended, /) -> None:
        """Take the end of an exchange, which may be older than this observer."""


class Traces(RequestObserver, Protocol):
    """The tracing exporter: it only gets exchanges that have a span."""

    def open(self, facts: RequestFacts) -> SpanContext | None:
        """Return the span of a new request, or None if it is not sampled."""


class RequestWatch:
    """The observers of all pools, which come and go; it numbers the requests of the process."""

    def __init__(self) -> None:
        self.observers: list[RequestObserver] = []  # may change at any time
        self.traces: Traces | None = None  # None if off
        self.on_picked: Callable[[str, Picked], None] | None = None  # gets pool and routed request, after its answer
        self._numbers = count(1)
        self._throttle = Throttle()

    def arrival(self, pool: str, facts: RequestFacts, *, at: float) -> Arrival:
        """Return the facts of a new request; `at` is in monotonic seconds."""
        span = self.traces.open(facts) if self.traces is not None else None
        return Arrival(
            number=next(self._numbers),
            pool=pool,
            request_id=facts.request_id,
            at=at,
            unix_ns=time.time_ns(),
            span=span,
            trace_id=f"{span.trace_id:032x}" if span is not None else "",
            set_headers=span.set_headers if span is not None else NO_HEADERS,
        )

    def decided(self, fact: Decided) -> None:
        """Pass a decision to the observers."""
        if self.observers or self.traces:
            self.pass_on(fact, [observer.decided for observer in self._concerned(fact.arrival.span)])

    def ended(self, fact: Ended) -> None:
        """Pass a request's end to the observers."""
        if self.observers or self.traces:
            self.pass_on(fact, [observer.ended for observer in self._concerned(fact.arrival.span)])

    def pass_on(self, fact: Any, listeners: Iterable[Listener]) -> None:
        """Pass a fact to listeners; a failure, logged at most once a minute for all, reaches no other listener."""
        for listener in listeners:
            try:
                listener(fact)
            except Exception:
                if self._throttle.passes():
                    name = getattr(listener, "__qualname__", "")
                    log.exception("a listener to facts failed", extra={"listener": name})

    def picked(self, pool: str, picked: Picked) -> None:
        """Pass a routed request to `on_picked`."""
        if self.on_picked is not None:
            self.on_picked(pool, picked)

    def _concerned(self, span: SpanContext | None) -> Sequence[RequestObserver]:
        return self.observers if span is None or self.traces is None else [*self.observers, self.traces]


class Ledger:
    """The listeners of one pool."""

    def __init__(self, watch: RequestWatch | None = None, listeners: Listeners | None = None) -> None:
        self.watch = watch or RequestWatch()
        self.listeners = listeners or {}
        self._told: list[Any] = []  # in this turn of the event loop

    def tell(self, *facts: Any) -> None:
        """Tell facts in the next turn of the event loop: the answer leaves in this one."""
        if not self._told:
            asyncio.get_running_loop().call_soon(self._hear_told)
        self._told += facts

    def tell_now(self, fact: Any) -> None:
        """Tell a fact that no answer waits for; only the facts told before it come first."""
        if self._told:
            self._told.append(fact)
        else:
            self.hear((fact,))

    def _hear_told(self) -> None:
        told, self._told = self._told, []
        self.hear(told)

    def hear(self, facts: Sequence[Any]) -> None:
        """Pass facts to their listeners."""
        for fact in facts:
            self.watch.pass_on(fact, self.listeners.get(type(fact), ()))


class DegradationLog:
    """Remembers when each missing input was last logged; their names are a closed set."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def decided(self, fact: Decided) -> None:
        """Log the missing inputs of a decision."""
        outcome = fact.record.outcome
        if isinstance(outcome, Decision) and outcome.degraded:
            self.note(outcome.degraded, now=fact.at)

    def read(self, fact: Read) -> None:
        """Log what Envoy's configuration seems to lack."""
        for why in fact.missed:
            if (words := MISSING_IN_ENVOY.get(why)) is not None:
                self.note({why.value: words}, now=time.monotonic())

    def leg_ended(self, fact: LegEnd) -> None:
        """Log a failed prefill request."""
        if fact.problem:
            self.note({LEG_FAILED: f"{fact.endpoint}: {fact.problem}"}, now=time.monotonic())

    def note(self, degraded: Mapping[str, str], *, now: float) -> None:
        """Log missing inputs, name -> text; `now` is monotonic seconds."""
        for missing, text in degraded.items():
            if now - self._logged_at.get(missing, -REPEAT_SECONDS) >= REPEAT_SECONDS:
                self._logged_at[missing] = now
                log.warning("a decision was made without one of its inputs: %s", text, extra={"degraded": missing})

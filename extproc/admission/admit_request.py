"""Decides whether a request goes to its endpoint now, waits in the queue until an endpoint has room, or is refused.

Draws on `flow_queue` for the order of waiting requests, on `choosing.room` for the room at endpoints and on
`pool_pressure` for the expected wait.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

from extproc.admission.admission_queue import (
    AdmissionQueue,
    DisplacedError,
    QueueClosedError,
    QueueTimeoutError,
    SentOnError,
)
from extproc.admission.asked_request import AskedRequest
from extproc.admission.flow_queue import QueueFullError, Ticket
from extproc.admission.gate import Gate, refused, waits
from extproc.admission.pool_pressure import Expectation, PoolPressure
from extproc.admission.prepared_request import Prepared, Preview
from extproc.admission.waiting_bodies import BodiesFullError
from extproc.choosing.choose import PoolView, Snapshot, rooms_in
from extproc.choosing.room import places_of
from extproc.errors import (
    DisplacedShedError,
    QueueFullShedError,
    QueueTimeoutShedError,
    RequestShedError,
    StoppingShedError,
)
from extproc.policy.request_class import PriorityPolicy, RequestClass
from extproc.policy.shadow import Withheld

T = TypeVar("T")

SHED_FOR: Mapping[type[Exception], type[RequestShedError]] = {
    QueueFullError: QueueFullShedError,
    BodiesFullError: QueueFullShedError,
    SentOnError: QueueFullShedError,
    QueueTimeoutError: QueueTimeoutShedError,
    DisplacedError: DisplacedShedError,
    QueueClosedError: StoppingShedError,
}


class RequestAdmission:
    """Admits the requests of one pool."""

    def __init__(
        self,
        *,
        policy: PriorityPolicy,
        pressure: PoolPressure,
        queue: AdmissionQueue,
        clock: Callable[[], float],
    ) -> None:
        self._policy = policy
        self._pressure = pressure
        self._queue = queue
        self._clock = clock

    def reconfigure(self, policy: PriorityPolicy) -> None:
        """Replace the policy, for waiting requests too."""
        self._policy = policy
        self._queue.wake()

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many requests of each class wait for room."""
        return self._queue.depth

    def close(self) -> None:
        """End all waiting requests; none waits from now on."""
        self._queue.close()

    def turn_away(self, asked: AskedRequest) -> None:
        """Raise RequestShedError if the request would be refused even with a fully cached prompt.

        This catches most of a flood before tokenizing and lookup, which would take the picker's time from the others.
        """
        if self._queue.is_empty or not asked.request_class.priority_class.sheddable or not self._policy.holds_back:
            return
        if self._would_wait(asked):
            self._pressure.turn_away(asked.request_class, pool=asked.pool)

    def ceiling(self, request_class: RequestClass) -> float | None:
        """Return the share of an endpoint's limits that the class may fill, or None if room does not count."""
        return request_class.priority_class.ceiling if self._policy.overload.enabled else None

    async def seat(
        self,
        prepared: Prepared,
        snapshot: Snapshot,
        *,
        look: Callable[[float], Snapshot],
        attempt: Callable[[Snapshot, float | None], T | None],
        gate: Gate,
    ) -> T:
        """Return the booking of `attempt`, made at once or when an endpoint has room.

        `snapshot` is the first look at the endpoints, `look` takes another one. `attempt` gets the ceiling of the
        class, or None if the request goes regardless of room; then it always books. Raise
        RequestShedError if the request is refused; the caller then releases a booking made meanwhile.
        """
        asked = prepared.asked
        ceiling = self.ceiling(asked.request_class)
        if ceiling is None or not asked.request.costs_gpu:
            return _booked(attempt(snapshot, None))
        if gate.is_shadow:
            made = attempt(snapshot, ceiling)
            if made is None:
                gate.note(self._would_do(asked, snapshot))
                made = _booked(attempt(snapshot, None))
            return made
        others_wait = not self._queue.is_empty and self._would_wait(asked)
        if not others_wait:
            made = attempt(snapshot, ceiling)
            if made is not None:
                return self._passed(made, asked, snapshot)
        return await self._wait(prepared, snapshot, look=look, attempt=attempt, tried=not others_wait)

    def preview(self, prepared: Prepared, view: PoolView, snapshot: Snapshot) -> Preview:
        """Return the fate the request would have now, without changing anything."""
        asked, request_class = prepared.asked, prepared.asked.request_class
        priority_class, pool = request_class.priority_class, asked.pool
        rooms = rooms_in(view, snapshot, ceiling=priority_class.ceiling)
        waits = not any(places_of(rooms)) or (not self._queue.is_empty and self._would_wait(asked))
        waits &= asked.request.costs_gpu
        expectation = self._pressure.expect(
            snapshot.kept, request_class, pool=pool, uncached_tokens=snapshot.uncached_tokens, waits=waits
        )
        verdict = "go"
        if waits and self._policy.overload.enabled:
            is_late = self._pressure.is_late(request_class, expectation, pool=pool)
            verdict = "refuse" if priority_class.sheddable and is_late else "wait"
        return Preview(
            verdict=verdict,
            rooms={candidate.address: room for candidate, room in zip(snapshot.kept, rooms, strict=True)},
            expected_ttft_seconds=expectation.ttft_seconds,
            waiting_requests=self._pressure.ahead(request_class, pool=pool),
        )

    async def _wait(
        self,
        prepared: Prepared,
        snapshot: Snapshot,
        *,
        look: Callable[[float], Snapshot],
        attempt: Callable[[Snapshot, float | None], T | None],
        tried: bool,
    ) -> T:
        """Wait for room as long as the class may; then refuse the request if sheddable, else send it on."""
        asked, began = prepared.asked, snapshot.at
        request_class, pool = asked.request_class, asked.pool
        priority_class = request_class.priority_class
        uncached = snapshot.uncached_tokens
        expectation = self._pressure.expect(snapshot.kept, request_class, pool=pool, uncached_tokens=uncached)
        if priority_class.sheddable and self._pressure.cannot_be_met(request_class, expectation, pool=pool):
            raise self._pressure.refusal(RequestShedError, request_class, pool, expectation, now=began)

        def turn(now: float, ceiling: float, /) -> T | None:
            return attempt(look(now), ceiling if self._policy.holds_back else None)

        ticket = Ticket(
            class_name=request_class.class_name,
            priority_class=priority_class,
            tenant=request_class.tenant,
            uncached_tokens=max(uncached, 1),
            pool=pool,
            group=asked.group,
            arrived_at=began,
            deadline=began + _patience(request_class, expectation),
            answer_tokens=snapshot.ask.answer_tokens,
            held_bytes=prepared.held_bytes,
        )
        try:
            made = await self._queue.enter(ticket, turn, tried=tried)
        except tuple(SHED_FOR) as error:
            now = self._clock()
            if isinstance(error, QueueTimeoutError):
                self._pressure.waited(request_class, expectation, pool=pool, seconds=now - began)
            if priority_class.sheddable:
                refusal = self._pressure.refusal(SHED_FOR[type(error)], request_class, pool, expectation, now=now)
                refusal.waited_seconds = now - began
                raise refusal from error
            later = look(now)
            return self._passed(_booked(attempt(later, None)), asked, later)
        self._pressure.waited(request_class, expectation, pool=pool, seconds=self._clock() - began)
        return made

    def _would_do(self, asked: AskedRequest, snapshot: Snapshot) -> Withheld:
        """Return the wait or the refusal that shadow mode skips for a request without room."""
        request_class, pool, pressure = asked.request_class, asked.pool, self._pressure
        expectation = pressure.expect(snapshot.kept, request_class, pool=pool, uncached_tokens=snapshot.uncached_tokens)
        if request_class.priority_class.sheddable and pressure.cannot_be_met(request_class, expectation, pool=pool):
            refusal = pressure.refusal(RequestShedError, request_class, pool, expectation, now=snapshot.at)
            return refused(refusal)
        return waits(expectation.ttft_seconds)

    def _would_wait(self, asked: AskedRequest) -> bool:
        """For an unconfigured model every waiting request of the pool counts, otherwise only its group."""
        group = asked.group if asked.resolved.base is not None else None
        return self._queue.would_wait(asked.pool, asked.request_class.priority_class.priority, group)

    def _passed(self, made: T, asked: AskedRequest, snapshot: Snapshot) -> T:
        """Count a request sent without a turn in the queue: waiting classes earn their reserved shares of its cost."""
        request_class = asked.request_class
        # while the queue is empty no class earns a share, so the cost does not matter
        cost = 1 if self._queue.is_empty else max(snapshot.uncached_tokens, 1)
        self._queue.passed(asked.pool, request_class.class_name, request_class.priority_class, cost=cost)
        return made


def _booked(made: T | None) -> T:
    assert made is not None, "without a ceiling every attempt books"
    return made


def _patience(request_class: RequestClass, expectation: Expectation) -> float:
    """Return the longest wait in seconds. A sheddable request must leave early enough to meet its TTFT target."""
    targets = request_class.priority_class.targets
    if not request_class.priority_class.sheddable:
        return targets.queue_seconds
    return min(targets.queue_seconds, max(targets.ttft_seconds - expectation.own_seconds, 0.0))

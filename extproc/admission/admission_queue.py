"""The queue of requests that wait for room at an endpoint, on the event loop; `admission.flow_queue` has their order.

Chooses no endpoint: a request's attempt chooses and books in one step. The queue only says whose attempt runs when.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue, QueueFullError
from extproc.admission.waiting_bodies import HeldBody, WaitingBodies
from extproc.errors import KvmeshError
from extproc.policy.priority import PriorityClass

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Requests tried, or ended, per turn of the event loop. The rest follows in later turns: other tasks run in between.
MOST_IN_ONE_PASS = 32
# Pause after a round that sent nothing: a try costs up to a millisecond, and at saturation most rounds are in vain.
PAUSE_SECONDS = 0.005
# rescan for a newcomer that queues behind its peers only if the pool was not scanned for this long
LOOKED_SECONDS = 0.05
SHORTEST_TIMER_SECONDS = 0.001


class QueueTimeoutError(KvmeshError):
    """The request's time in the queue is over."""

    reason: ClassVar[str] = "queue-timeout"


class DisplacedError(KvmeshError):
    """The request lost its place to another one."""

    reason: ClassVar[str] = "displaced"


class SentOnError(QueueFullError):
    """The request, the oldest of its class, must make room for a newer one. It may not be refused: send it on."""

    reason: ClassVar[str] = "sent-on"


class QueueClosedError(KvmeshError):
    """The picker is going down."""

    reason: ClassVar[str] = "shutting-down"


class Outcome(StrEnum):
    """How a request left the queue."""

    DISPATCHED = "dispatched"
    TIMEOUT = "timeout"
    DISPLACED = "displaced"
    FULL = "full"  # never queued, or sent on to make room for a newcomer
    CANCELLED = "cancelled"  # the client has left
    FAILED = "failed"  # its attempt raised
    CLOSED = "closed"


class QueueTelemetry(Protocol):
    """Receives the queue's measurements."""

    def left_queue(self, class_name: str, *, outcome: Outcome, seconds: float, tenant: str) -> None:
        """Record a request that left the queue after `seconds`. The client chooses the tenant's name."""


class Attempt(Protocol[T_co]):
    """Tries to book an endpoint for one request."""

    def __call__(self, now: float, ceiling: float, /) -> T_co | None:
        """Return None if every endpoint is filled to `ceiling`. Must not wait; an exception ends the request."""


class _Waiting(Generic[T]):
    __slots__ = ("answer", "attempt", "since")

    def __init__(self, attempt: Attempt[T], answer: asyncio.Future[T], *, since: float) -> None:
        self.attempt = attempt
        self.answer = answer
        self.since = since


class AdmissionQueue:
    """The waiting requests of this replica. Not thread-safe; every call but `enter` returns at once."""

    def __init__(
        self, queue: FlowQueue, *, bodies: WaitingBodies, clock: Callable[[], float], telemetry: QueueTelemetry
    ) -> None:
        """`clock` must be the one that the tickets' deadlines are measured by. `bodies` may serve several queues."""
        self._queue = queue
        self._bodies = bodies
        self._clock = clock
        self._telemetry = telemetry
        self._waiting: dict[Ticket, _Waiting[Any]] = {}
        self._looked_at: dict[str, float] = {}  # pool with waiting requests -> time of its last scan
        self._woken: dict[str, None] = {}  # pools to scan in the next round
        self._round: dict[str, None] = {}  # pools left to scan in this round, in order
        self._in_vain = True  # this round has sent no request yet
        self._no_pass_before = float("-inf")
        self._next_pass: asyncio.Handle | None = None
        self._over: dict[Ticket, tuple[Exception, Outcome]] = {}  # out of the order, their tasks not yet notified
        self._telling: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._room_at = float("inf")
        self._is_closed = False

    @property
    def depth(self) -> Mapping[str, int]:
        """Return the number of waiting requests by class."""
        return self._queue.sizes

    @property
    def is_empty(self) -> bool:
        """Whether no request waits, in any pool."""
        return not self._waiting

    def would_wait(self, pool: str, priority: int, group: str | None = "") -> bool:
        """Tell whether a newcomer must wait behind a request of the same or a higher priority.

        Only requests of `group` count, or of every group if it is None.
        """
        return bool(self._waiting) and self._queue.is_ahead(pool, priority, group)

    async def enter(
        self,
        ticket: Ticket,
        attempt: Attempt[T],
        *,
        tried: bool = False,
    ) -> T:
        """Wait until `attempt` returns a booking, and return it; the memory of waiting requests is bounded.

        `attempt` gets the time and the ceiling to try. `tried` says that it has just failed. Raise QueueFullError,
        SentOnError, QueueTimeoutError, DisplacedError or QueueClosedError if the request is not booked; then, as after
        CancelledError, the queue keeps nothing of it. After CancelledError the attempt may have booked in the same
        turn of the loop; the caller releases that booking.
        """
        if self._is_closed:
            raise QueueClosedError("the picker is going down")
        priority, give_way = ticket.priority_class.priority, partial(self.displace, ticket)
        body = HeldBody(priority=priority, tenant=ticket.tenant, size=ticket.held_bytes, give_way=give_way)
        try:
            with self._bodies.held(body):
                return await self._booked(ticket, attempt, tried=tried)
        except QueueFullError as error:
            if not isinstance(error, SentOnError):
                self._tell_left(ticket, Outcome.FULL, seconds=0.0)
            raise

    async def _booked(self, ticket: Ticket, attempt: Attempt[T], *, tried: bool) -> T:
        now = self._clock()
        displaced = self._queue.push(ticket)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = _Waiting(attempt, answer, since=now)
        has_resumed = False
        try:
            with self._guard():
                for other in displaced:
                    if other.priority_class.sheddable:
                        error = DisplacedError(f"gave its place up for a request of class {ticket.class_name}")
                        self._end(other, error, Outcome.DISPLACED, now=now)
                    else:
                        self._end_soon(other, SentOnError("a newer one of its class needs its place"), Outcome.FULL)
                self._look_for(ticket, now=now, tried=tried)
            made = await answer
            has_resumed = True
            return made
        finally:
            if not has_resumed:
                self._has_left(ticket, answer)
            del answer  # breaks a cycle (future, error, traceback, this frame) that would keep the body in memory

    def wake(self, pool: str | None = None) -> None:
        """Retry the waiting requests of this pool, or of all pools, in the next turn of the loop: room may be free.

        Costs next to nothing while the queue is empty. All calls in one turn make one pass, as do all calls within
        PAUSE_SECONDS of a round that sent nothing.
        """
        if not self._waiting:
            return
        if pool is None:
            self._woken.update(dict.fromkeys(self._looked_at))
        elif pool in self._looked_at:
            self._woken[pool] = None
        self._look_soon()

    def passed(self, pool: str, class_name: str, priority_class: PriorityClass, *, cost: int) -> None:
        """Count a request sent without a turn in the queue: waiting classes earn their reserved shares of its cost."""
        if self._waiting:
            self._queue.passed(pool, class_name, priority_class.ceiling, cost)

    def displace(self, ticket: Ticket) -> None:
        """End a waiting request in favour of others. Does nothing if it does not wait."""
        with self._guard():
            if self._queue.remove(ticket):
                error = DisplacedError("gave its place up for a more important request")
                self._end(ticket, error, Outcome.DISPLACED, now=self._clock())

    def wake_at(self, at: float) -> None:
        """Retry all pools at this time, when room appears without an event. The earliest time counts.

        Does nothing while the queue is empty.
        """
        if self._waiting and at < self._room_at:
            self._room_at = at
            self._set_timer(self._clock())

    def close(self) -> None:
        """End all waiting requests with QueueClosedError, and accept no more."""
        self._is_closed = True
        now = self._clock()
        with self._guard():
            for ticket in self._queue:
                self._queue.remove(ticket)
                self._end(ticket, QueueClosedError("the picker is going down"), Outcome.CLOSED, now=now)

    def _look_for(self, ticket: Ticket, *, now: float, tried: bool) -> None:
        """Schedule a newcomer's first try, unless it was tried or a similar one ahead has just found no room."""
        looked_at = self._looked_at.setdefault(ticket.pool, now if tried else float("-inf"))
        if not tried and (now - looked_at >= LOOKED_SECONDS or self._queue.is_alone(ticket)):
            self.wake(ticket.pool)

    def _look_soon(self) -> None:
        if self._next_pass is not None or not (self._round or self._woken):
            return
        loop = asyncio.get_running_loop()
        pause = self._no_pass_before - self._clock()
        if self._round or pause <= 0.0:
            self._next_pass = loop.call_soon(self._pass)
        else:
            self._next_pass = loop.call_later(min(pause, PAUSE_SECONDS), self._pass)

    def _pass(self) -> None:
        """Try waiting requests of the woken pools, at most MOST_IN_ONE_PASS in one turn of the loop.

        A round scans every pool once that was woken before the round began, by highest waiting priority.
        """
        self._next_pass = None
        with self._guard():
            now = self._clock()
            self._end_late(now)
            if not self._round:
                self._round = dict.fromkeys(sorted(self._woken, key=self._importance, reverse=True))
                self._woken.clear()
                self._in_vain = True
            self._send(now)
            if not self._round and self._in_vain:
                self._no_pass_before = now + PAUSE_SECONDS
        self._look_soon()

    def _importance(self, pool: str) -> float:
        highest = self._queue.highest(pool)
        return float("-inf") if highest is None else highest

    def _send(self, now: float) -> None:
        """Try the requests of this round; pools with untried requests stay in it."""
        left = MOST_IN_ONE_PASS
        while self._round:
            pool = next(iter(self._round))
            if pool in self._looked_at:
                self._looked_at[pool] = now
            has_sent = False
            for ticket in self._queue.candidates(pool, now):
                if not left:
                    if has_sent:  # goes on behind the other pools
                        del self._round[pool]
                        self._round[pool] = None
                    return
                left -= 1
                if self._try(ticket, now=now):
                    has_sent, self._in_vain = True, False
            del self._round[pool]

    def _try(self, ticket: Ticket, *, now: float) -> bool:
        """Run a request's attempt, and tell whether the request has left the queue."""
        waiting = self._waiting[ticket]
        if waiting.answer.done():  # cancelled, and its task has not run since
            self._queue.remove(ticket)
            self._take(ticket, Outcome.CANCELLED, now=now)
            return True
        try:
            made = waiting.attempt(now, ticket.tried_ceiling)
        except Exception as error:  # concerns this request alone: the others go on
            self._queue.remove(ticket)
            self._end(ticket, error, Outcome.FAILED, now=now)
            return True
        if made is None:
            return False
        waiting.answer.set_result(made)
        self._queue.went(ticket, now)
        self._take(ticket, Outcome.DISPATCHED, now=now)
        return True

    def _end_soon(self, ticket: Ticket, error: Exception, outcome: Outcome) -> None:
        """End a request, out of the order, in a later turn: to send it on costs as much as any other dispatch."""
        self._over[ticket] = (error, outcome)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._telling = None
        with self._guard():
            now = self._clock()
            for ticket in tuple(islice(self._over, MOST_IN_ONE_PASS)):
                error, outcome = self._over.pop(ticket)
                self._end(ticket, error, outcome, now=now)
        if self._over:
            self._telling = asyncio.get_running_loop().call_soon(self._tell)

    def _end(self, ticket: Ticket, error: Exception, outcome: Outcome, *, now: float) -> None:
        """End a request, already out of the order, with an error."""
        answer = self._waiting[ticket].answer
        if answer.done():  # cancelled, and its task has not run since
            self._take(ticket, Outcome.CANCELLED, now=now)
            return
        if isinstance(error, StopIteration):  # asyncio refuses it as a future's exception
            error = RuntimeError(f"an attempt raised {error!r}")
        answer.set_exception(error)
        self._take(ticket, outcome, now=now)

    def _take(self, ticket: Ticket, outcome: Outcome, *, now: float) -> None:
        """Forget a request that is already out of the order, and record how it left."""
        waiting = self._waiting.pop(ticket)
        if not self._queue.waits_in(ticket.pool):
            self._looked_at.pop(ticket.pool, None)  # absent if several left the order at once
        if not self._waiting:
            self._room_at = float("inf")
            self._stop_timer()
        self._tell_left(ticket, outcome, seconds=now - waiting.since)

    def _tell_left(self, ticket: Ticket, outcome: Outcome, *, seconds: float) -> None:
        self._telemetry.left_queue(ticket.class_name, outcome=outcome, seconds=seconds, tenant=ticket.tenant)

    def _has_left(self, ticket: Ticket, answer: asyncio.Future[T]) -> None:
        """Clean up after a task that got no booking: it was cancelled or its request was ended."""
        if self._queue.remove(ticket) or self._over.pop(ticket, None) is not None:
            self._take(ticket, Outcome.CANCELLED, now=self._clock())
        elif answer.done() and not answer.cancelled() and answer.exception() is None:
            # asyncio: a task that is cancelled between its future's result and its own next step never sees the result
            self.wake(ticket.pool)

    def _end_late(self, now: float) -> None:
        for ticket in self._queue.expired(now):
            seconds = now - self._waiting[ticket].since
            error = QueueTimeoutError(f"waited {seconds:.1f} s, the most for class {ticket.class_name}")
            self._end_soon(ticket, error, Outcome.TIMEOUT)

    def _set_timer(self, now: float) -> None:
        """Set the timer to the first deadline, or to the time from `wake_at` if that is earlier."""
        deadline = self._queue.next_deadline()
        at = self._room_at if deadline is None else min(deadline, self._room_at)
        if at >= self._timer_at:
            return  # the current timer fires earlier, and is set again then
        self._stop_timer()
        self._timer_at = at
        # never immediately: the loop's clock is coarser than ours and may fire a moment early
        self._timer = asyncio.get_running_loop().call_later(max(SHORTEST_TIMER_SECONDS, at - now), self._timer_fires)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._timer_at = float("inf")

    def _timer_fires(self) -> None:
        self._stop_timer()
        with self._guard():
            now = self._clock()
            if self._room_at <= now:
                self._room_at = float("inf")
                self.wake()
            self._end_late(now)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """On any error inside, fail the requests that left the order: nothing would ever try them again."""
        try:
            yield
        except BaseException:
            self._over.clear()
            for ticket, waiting in tuple(self._waiting.items()):
                if ticket not in self._queue:
                    del self._waiting[ticket]
                    if not waiting.answer.done():
                        waiting.answer.set_exception(RuntimeError("the queue lost this request"))
            raise
        finally:
            if self._waiting:
                self._set_timer(self._clock())

"""Requests for a pool that was scaled to zero: they wait for its first pod, while the signal asks for one.

They wait in the pool's ordinary queue, whose order they leave it in once a pod is there and has room. As nothing can be
sent on to no pod, all of them may be displaced and refused, whatever their class.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from math import ceil
from typing import Protocol, TypeVar

from extproc.admission.admission_queue import (
    AdmissionQueue,
    DisplacedError,
    QueueClosedError,
    QueueTimeoutError,
)
from extproc.admission.asked_request import PRIORITY_HEADER
from extproc.admission.flow_queue import QueueFullError, Ticket
from extproc.admission.prepared_request import Prepared
from extproc.admission.waiting_bodies import BodiesFullError, HeldBody, WaitingBodies
from extproc.choosing.choose import Snapshot
from extproc.errors import (
    DisplacedShedError,
    FirstPodLateError,
    NoReadyEndpointError,
    QueueFullShedError,
    RequestShedError,
    StoppingShedError,
)
from extproc.policy.autoscale import Autoscale
from extproc.policy.priority import PriorityClass, PriorityPolicy
from extproc.policy.request_class import RequestClass

T = TypeVar("T")

Refusal = RequestShedError | FirstPodLateError
# how a wait ends, beside the reasons of refusals. `ROOM`: a pod is there and is full, and the class's own wait begins
SERVED, ROOM, LEFT, FAILED = "served", "pod-full", "client-left", "failed"
SHED_FOR: Mapping[type[Exception], type[RequestShedError]] = {
    DisplacedError: DisplacedShedError,
    QueueClosedError: StoppingShedError,
    QueueFullError: QueueFullShedError,
    BodiesFullError: QueueFullShedError,
}
ENDS: tuple[type[Exception], ...] = (QueueTimeoutError, *SHED_FOR)
WORDS: Mapping[type[RequestShedError], str] = {
    DisplacedShedError: "a more important one has taken the request's place",
    QueueFullShedError: "as much waits for one as may",
    StoppingShedError: "this picker stops",
}


class FirstPodTelemetry(Protocol):
    """Where waits are counted."""

    def ended(self, class_name: str, *, outcome: str, seconds: float) -> None:
        """Count a request that waits for the first pod no longer."""


class Starts(Protocol):
    """What is known of how long pods take to start; see `scaling.pool_scaling`."""

    @property
    def start_seconds(self) -> float | None:
        """What new pods were seen to take; None: none was seen."""

    @property
    def first_start(self) -> float | None:
        """Since when (monotonic seconds) the oldest pod starts that will answer clients; None: none is seen."""


class FirstPodWaits:
    """The requests of one pool that wait for its first pod."""

    def __init__(
        self,
        autoscale: Autoscale,
        *,
        policy: PriorityPolicy,
        queue: AdmissionQueue,
        bodies: WaitingBodies,
        starts: Starts,
        serves: Callable[[], bool],
        ask: Callable[[], None],
        telemetry: FirstPodTelemetry,
        clock: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        """`serves`: whether any pod may answer clients now. `ask`: have one asked for at once."""
        self._roles, self._shadow_roles = autoscale.from_zero, autoscale.from_zero_in_shadow
        self._policy = policy
        self._queue = queue
        self._bodies = bodies
        self._starts = starts
        self._serves = serves
        self._ask = ask
        self._telemetry = telemetry
        self._clock = clock
        self._random = random
        self._asked_at: float | None = None  # since when requests wait for a pod, or are refused for want of one
        self._waiting: dict[str, int] = {}  # class -> requests

    def reconfigure(self, autoscale: Autoscale, policy: PriorityPolicy) -> None:
        """Go by another policy from now on; those that wait do so until the time that they were given."""
        self._roles, self._shadow_roles = autoscale.from_zero, autoscale.from_zero_in_shadow
        self._policy = policy
        self._queue.wake()

    def end(self) -> None:
        """Have nobody wait any more: the pool is gone. If it comes back, `reconfigure` says so."""
        self._roles = self._shadow_roles = {}
        self._queue.wake()

    def is_due(self) -> bool:
        """Tell whether no pod may answer clients, and the policy has one asked for."""
        if not self._roles:
            return False
        if not self._serves():
            return True
        self._asked_at = None
        return False

    def would_be_due(self) -> bool:
        """Tell whether requests would wait for a pod, were the policy not in shadow."""
        return bool(self._shadow_roles) and not self._serves()

    def look(self) -> None:
        """Take note of whether there is a pod, though no request asks: how long one has been asked for begins anew."""
        self.is_due()

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many requests of each class wait for the first pod; none once there is one: what waits then, for room."""
        if not any(self._waiting.values()) or not self.is_due():
            return {}
        return {name: count for name, count in self._waiting.items() if count}

    def most_seconds(self, priority_class: PriorityClass) -> float:
        """Return for how long a request of the class waits at most."""
        most = max((scaled.first_pod_seconds for scaled in self._roles.values()), default=0.0)
        own = priority_class.wait_from_zero_seconds
        return most if own is None else min(own, most)

    def seconds_left(self, now: float) -> float:
        """Return in how many seconds the first pod is to be expected, by what pods take to start.

        One that is overdue is expected to be so for as long again.
        """
        declared = min((scaled.start_seconds for scaled in self._roles.values()), default=0.0)
        usual = max(declared, self._starts.start_seconds or 0.0)
        began = self._starts.first_start
        if began is None:
            began = now if self._asked_at is None else self._asked_at
        return abs(usual - (now - began))

    def words(self, priority_class: PriorityClass) -> str:
        """Say what would become of a request of the class."""
        now, most = self._clock(), self.most_seconds(priority_class)
        what = f"it would wait up to {most:g} s for the first one" if most else "it would be refused"
        return f"no pod is ready: {what}, which is expected in {self.seconds_left(now):.0f} s"

    async def wait(
        self,
        prepared: Prepared,
        *,
        arrived_at: float,
        look: Callable[[float], Snapshot],
        attempt: Callable[[Snapshot, float | None], T | None],
        undo: Callable[[T], None],
    ) -> T | None:
        """Return what `attempt` has booked once a pod is there and has room; see `RequestAdmission.seat`.

        None where a pod is there and the time is over: it has to be admitted as any other. Raise PickError for a
        request that is refused.
        """
        asked, began = prepared.asked, self._clock()
        request_class = asked.request_class
        deadline = arrived_at + self.most_seconds(request_class.priority_class)
        if self._asked_at is None:
            self._asked_at = began
        self._ask()
        if deadline <= began:
            raise self._late(request_class, waited=began - arrived_at)
        ticket = _ticket(prepared, arrived_at=arrived_at, deadline=deadline)

        def turn(now: float, ceiling: float, /) -> T | None:
            try:
                seen = look(now)
            except NoReadyEndpointError:
                if self.is_due():
                    return None
                raise
            return attempt(seen, ceiling if self._policy.holds_back else None)

        name, outcome = request_class.class_name, FAILED
        self._waiting[name] = self._waiting.get(name, 0) + 1
        try:
            with self._held(prepared, ticket):
                made = await self._queue.enter(ticket, turn, undo=undo, tried=True)
            outcome = SERVED
            return made
        except ENDS as error:
            if self._may_go_on(error, request_class.priority_class):
                outcome = ROOM
                return None
            refusal = self._refusal(error, request_class, waited=self._clock() - began)
            outcome = refusal.reason
            raise refusal from error
        except asyncio.CancelledError:
            outcome = LEFT
            raise
        finally:
            self._waiting[name] -= 1
            self._telemetry.ended(name, outcome=outcome, seconds=self._clock() - began)

    @contextmanager
    def _held(self, prepared: Prepared, ticket: Ticket) -> Iterator[None]:
        """Count what a request holds in memory; raise BodiesFullError where that is too much."""
        body = HeldBody(
            priority=ticket.priority_class.priority,
            tenant=ticket.tenant,
            size=prepared.held_bytes,
            give_way=lambda: self._queue.displace(ticket),
        )
        self._bodies.hold(body)
        try:
            yield
        finally:
            self._bodies.release(body)

    def _may_go_on(self, error: Exception, priority_class: PriorityClass) -> bool:
        """Tell whether a pod is there by now, and the request has lost nothing but its place here."""
        if isinstance(error, QueueClosedError) or (isinstance(error, DisplacedError) and priority_class.sheddable):
            return False
        return not self.is_due()

    def _refusal(self, error: Exception, request_class: RequestClass, *, waited: float) -> Refusal:
        kind = next((shed for cause, shed in SHED_FOR.items() if isinstance(error, cause)), None)
        if kind is None:
            return self._late(request_class, waited=waited)
        is_stopping = kind is StoppingShedError  # another picker takes it at once
        seconds = 0.0 if is_stopping else self.seconds_left(self._clock())
        return self._answer(kind, WORDS[kind], request_class, seconds=seconds, waited=waited)

    def _late(self, request_class: RequestClass, *, waited: float) -> Refusal:
        words = (
            f"none has come in the {waited:.0f} s that the request has waited"
            if waited >= 1.0
            else "none is waited for"
        )
        seconds = self.seconds_left(self._clock())
        return self._answer(FirstPodLateError, words, request_class, seconds=seconds, waited=waited)

    def _answer(
        self, kind: type[Refusal], words: str, request_class: RequestClass, *, seconds: float, waited: float
    ) -> Refusal:
        overload, name = self._policy.overload, request_class.class_name
        # all of them shall not come back in the same moment
        spread = max(seconds, overload.least_retry_seconds) * (1.0 + overload.retry_jitter * self._random())
        told = min(spread, overload.most_retry_seconds)
        refusal = kind(
            f"no pod is ready, and {words}: a request of class {name!r}; the first pod is expected in "
            f"{seconds:.0f} s, try again in {ceil(told)} s",
            retry_after_seconds=ceil(told),
            http_status=HTTPStatus.SERVICE_UNAVAILABLE,
            headers={PRIORITY_HEADER: name, "retry-after-ms": str(int(told * 1000))},
        )
        refusal.waited_seconds = waited
        return refusal


def _ticket(prepared: Prepared, *, arrived_at: float, deadline: float) -> Ticket:
    """Return its place in the queue; it may be displaced whatever its class: it cannot be sent on to no pod."""
    asked = prepared.asked
    request_class = asked.request_class
    return Ticket(
        class_name=request_class.class_name,
        priority_class=request_class.priority_class,
        tenant=request_class.tenant,
        uncached_tokens=max(prepared.tokens.estimated_tokens, 1),
        pool=asked.pool,
        group=asked.group,
        requested_model=asked.resolved.requested,
        body_bytes=len(asked.body.raw) if asked.body is not None else 0,
        arrived_at=arrived_at,
        deadline=deadline,
        gives_way=True,
    )

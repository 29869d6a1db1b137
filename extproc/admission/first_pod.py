"""Requests for a pool scaled to zero: they wait for its first pod while the scaling signal asks for one.

They wait in the pool's ordinary queue, and leave it in its order once a pod is there and has room. All of them may be
displaced and refused regardless of class: there is no pod to send them on to.
"""

import asyncio
from collections.abc import Callable, Mapping
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
from extproc.admission.pressure_memory import LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS, RETRY_JITTER
from extproc.admission.waiting_bodies import BodiesFullError
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
from extproc.policy.priority import PriorityClass
from extproc.policy.request_class import PriorityPolicy, RequestClass

T = TypeVar("T")

Refusal = RequestShedError | FirstPodLateError
# outcomes of a wait, besides the refusals' reasons. `ROOM`: a pod is there but full, and the class's own wait begins
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
    """Receives the measurements of the waits."""

    def ended(self, class_name: str, *, outcome: str, seconds: float) -> None:
        """Count a request that stopped waiting for the first pod."""


class Starts(Protocol):
    """The observed start times of pods; see `scaling.pool_scaling`."""

    @property
    def start_seconds(self) -> float | None:
        """How long observed pods took to start, or None without an observed start."""

    @property
    def first_start(self) -> float | None:
        """When (monotonic seconds) the oldest of the starting pods for clients began, or None if none is starting."""


class FirstPodWaits:
    """The requests of one pool that wait for its first pod."""

    def __init__(
        self,
        autoscale: Autoscale,
        *,
        policy: PriorityPolicy,
        queue: AdmissionQueue,
        starts: Starts,
        serves: Callable[[], bool],
        ask: Callable[[], None],
        telemetry: FirstPodTelemetry,
        clock: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        """`serves` tells whether any pod may answer clients now; `ask` has the signal ask for one at once."""
        self._set(autoscale, policy)
        self._queue = queue
        self._starts = starts
        self._serves = serves
        self._ask = ask
        self._telemetry = telemetry
        self._clock = clock
        self._random = random
        self._asked_at: float | None = None  # time of the first request that waited, or was refused, for want of a pod
        self._waiting: dict[str, int] = {}  # class -> requests

    def reconfigure(self, autoscale: Autoscale, policy: PriorityPolicy) -> None:
        """Replace the policy; waiting requests keep their deadlines."""
        self._set(autoscale, policy)
        self._queue.wake()

    def _set(self, autoscale: Autoscale, policy: PriorityPolicy) -> None:
        self._policy = policy
        # in shadow mode nothing waits: the reported replicas would not rise
        self._roles = {} if policy.shadow else autoscale.from_zero
        self._shadow_roles = autoscale.from_zero if policy.shadow else {}

    def end(self) -> None:
        """Let no request wait any longer: the pool is gone. If it comes back, `reconfigure` is called."""
        self._roles = self._shadow_roles = {}
        self._queue.wake()

    def is_due(self) -> bool:
        """Tell whether no pod may answer clients and the policy scales the pool from zero."""
        if not self._roles:
            return False
        if not self._serves():
            return True
        self._asked_at = None
        return False

    def would_be_due(self) -> bool:
        """Tell whether requests would wait for a pod if the policy were not in shadow mode."""
        return bool(self._shadow_roles) and not self._serves()

    def look(self) -> None:
        """Check for a pod even without requests: once there is one, the next wait for a first pod starts from zero."""
        self.is_due()

    @property
    def waiting(self) -> Mapping[str, int]:
        """The number of requests by class that wait for the first pod; empty once it is there: they wait for room."""
        if not any(self._waiting.values()) or not self.is_due():
            return {}
        return {name: count for name, count in self._waiting.items() if count}

    def most_seconds(self, priority_class: PriorityClass) -> float:
        """Return the longest wait of a request of the class, in seconds."""
        most = max((scaled.first_pod_seconds for scaled in self._roles.values()), default=0.0)
        own = priority_class.wait_from_zero_seconds
        return most if own is None else min(own, most)

    def seconds_left(self, now: float) -> float:
        """Return the expected seconds to the first pod, by the declared or the observed start time, the longer.

        A pod that is overdue by N s is expected in another N s.
        """
        declared = min((scaled.start_seconds for scaled in self._roles.values()), default=0.0)
        usual = max(declared, self._starts.start_seconds or 0.0)
        began = self._starts.first_start
        if began is None:
            began = now if self._asked_at is None else self._asked_at
        return abs(usual - (now - began))

    def words(self, priority_class: PriorityClass) -> str:
        """Explain the fate of a request of the class, for people."""
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
    ) -> T | None:
        """Return the booking of `attempt` once a pod is there and has room; see `RequestAdmission.seat`.

        Return None if the wait ended without a booking while a pod is there: admit the request like any other. Raise
        PickError if the request is refused.
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
            made = await self._queue.enter(ticket, turn, tried=True)
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

    def _may_go_on(self, error: Exception, priority_class: PriorityClass) -> bool:
        """Tell whether a pod is there by now and nothing but the first-pod wait has failed: admission then decides."""
        if isinstance(error, QueueClosedError) or (isinstance(error, DisplacedError) and priority_class.sheddable):
            return False
        return not self.is_due()

    def _refusal(self, error: Exception, request_class: RequestClass, *, waited: float) -> Refusal:
        kind = next((shed for cause, shed in SHED_FOR.items() if isinstance(error, cause)), None)
        if kind is None:
            return self._late(request_class, waited=waited)
        is_stopping = kind is StoppingShedError  # another picker can take the retry at once
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
        name = request_class.class_name
        # jitter: the clients must not all return at the same moment
        spread = max(seconds, LEAST_RETRY_SECONDS) * (1.0 + RETRY_JITTER * self._random())
        told = min(spread, MOST_RETRY_SECONDS)
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
    """Return the request's ticket, displaceable regardless of class: there is no pod to send it on to."""
    asked = prepared.asked
    request_class = asked.request_class
    return Ticket(
        class_name=request_class.class_name,
        priority_class=request_class.priority_class,
        tenant=request_class.tenant,
        uncached_tokens=max(prepared.tokens.estimated_tokens, 1),
        pool=asked.pool,
        group=asked.group,
        arrived_at=arrived_at,
        deadline=deadline,
        answer_tokens=prepared.query.ask.answer_tokens,
        held_bytes=prepared.held_bytes,
        gives_way=True,
    )

"""Between a request and its endpoint: it goes now, waits in the queue until an endpoint has room, or is refused.

Called by `service` for each request. The order in which waiting requests go is
`admission.flow_queue`'s, when an endpoint has room `admission.saturation`'s, and what must be expected
`admission.pool_pressure`'s; here is what follows from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from extproc.admission.admission_preview import Preview
from extproc.admission.admission_queue import (
    AdmissionQueue,
    DisplacedError,
    QueueClosedError,
    QueueTimeoutError,
    SentOnError,
)
from extproc.admission.flow_queue import QueueFullError, Ticket
from extproc.admission.pool_pressure import Expectation, PoolPressure
from extproc.admission.prepared_request import Prepared, pool_of
from extproc.admission.saturation import Room, expected_ttft, rooms_of
from extproc.choosing.health import EndpointHealth
from extproc.errors import (
    DisplacedShedError,
    NoReadyEndpointError,
    QueueFullShedError,
    QueueTimeoutShedError,
    RequestShedError,
    StoppingShedError,
)
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.model_rules import ResolvedModel
from extproc.pick import EndpointPicker, Picked, Survey
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import PriorityPolicy
from extproc.policy.request_class import RequestClass
from extproc.pools.request_watch import PhaseNotes, current_story, in_its_turn
from extproc.records.request_story import AskedFor
from extproc.replicas.shared_load import EndpointBookings

T = TypeVar("T")

MOST_FILL = 3.0  # of an endpoint that is still the best place for what it holds
SHED_FOR: Mapping[type[Exception], type[RequestShedError]] = {
    QueueFullError: QueueFullShedError,
    SentOnError: QueueFullShedError,
    QueueTimeoutError: QueueTimeoutShedError,
    DisplacedError: DisplacedShedError,
    QueueClosedError: StoppingShedError,
}


class AdmissionTelemetry(Protocol):
    """Where admission reports what it did; classes are the policy's, hence a closed set."""

    def admitted(self, class_name: str, *, tenant: str) -> None:
        """Count a request that was sent to an endpoint; the tenant is whatever the client says."""

    def shed(self, class_name: str, *, reason: str, tenant: str) -> None:
        """Count a refusal."""

    def objective_ignored(self, why: str) -> None:
        """Count a header x-gateway-inference-objective that did not count; `why` is of a closed set."""


class RequestAdmission(Generic[T]):
    """Admits requests for one picker.

    `book` books a decision in the same turn of the loop and returns the booking; `unbook` releases one whose client
    left in that moment.
    """

    def __init__(
        self,
        *,
        picker: EndpointPicker,
        policy: PriorityPolicy,
        pressure: PoolPressure,
        estimates: LatencyEstimates,
        health: EndpointHealth,
        queue: AdmissionQueue,
        book: Callable[[Picked], T],
        unbook: Callable[[T], None],
        others: Callable[[], Mapping[str, EndpointBookings] | None],
        telemetry: AdmissionTelemetry,
        clock: Callable[[], float],
    ) -> None:
        self._picker, self._observed = picker, _observed(picker)
        self._policy = policy
        self._pressure = pressure
        self._estimates = estimates
        self._health = health
        self._queue = queue
        self._book = book
        self._unbook = unbook
        self._others = others
        self._telemetry = telemetry
        self._clock = clock

    def reconfigure(self, picker: EndpointPicker, policy: PriorityPolicy) -> None:
        """Decide by another policy from now on, also about those that wait."""
        self._picker, self._observed, self._policy = picker, _observed(picker), policy
        self._queue.wake()

    async def admit(self, facts: RequestFacts, body: bytes | None) -> T:
        """Return the booking of an endpoint for the request, at once or when there is room.

        Raise PickError with the answer for the client where it goes nowhere.
        """
        story = current_story()
        picker = self._picker if story is None else self._observed
        try:
            prepared = await picker.prepare(facts, body, gate=self._turn_away)
        except RequestShedError as error:  # before anything was done with its prompt
            assert isinstance(error.asked, AskedFor), "only what was read is refused for load"
            request_class = error.asked.request_class
            self._note_ignored(request_class)
            self._telemetry.shed(request_class.class_name, reason=error.reason, tenant=request_class.tenant)
            raise
        self._note_ignored(prepared.request_class)
        if story is not None:
            story.prepared = prepared
        try:
            while True:
                try:
                    return await self._admit(prepared)
                except NoReadyEndpointError as refusal:
                    prepared = await picker.fall_back(prepared, refusal)
        except BaseException as error:  # a client that leaves, too
            if prepared.quota is not None:
                self._picker.quotas.cancel(prepared.quota)
            if isinstance(error, RequestShedError):
                request_class = prepared.request_class
                self._telemetry.shed(request_class.class_name, reason=error.reason, tenant=request_class.tenant)
            raise

    @property
    def waiting(self) -> Mapping[str, int]:
        """How many requests of each class wait for room."""
        return self._queue.depth

    def rooms(self, survey: Survey, *, ceiling: float) -> Sequence[Room]:
        """Return how full each endpoint of the survey is for a class with this ceiling."""
        return rooms_of(
            survey.kept,
            ceiling=ceiling,
            policy=self._policy.overload,
            estimates=self._estimates,
            full_until=self._health.full_until(now=survey.at),
            now=survey.at,
        )

    def preview(self, prepared: Prepared, survey: Survey) -> Preview:
        """Return what would become of the request, and change nothing."""
        request_class, pool = prepared.request_class, prepared.pool
        rooms = self.rooms(survey, ceiling=request_class.priority_class.ceiling)
        waits = not any(room.fill < 1.0 for room in rooms) or self._would_wait(prepared)
        expectation = self._pressure.expect(
            survey.kept, request_class, pool=pool, uncached_tokens=_uncached_tokens(survey), waits=waits
        )
        verdict = "go"
        if waits and self._policy.overload.enabled:
            is_late = self._pressure.is_late(request_class, expectation, pool=pool)
            verdict = "refuse" if request_class.priority_class.sheddable and is_late else "wait"
        return Preview(
            verdict=verdict,
            rooms={candidate.address: room for candidate, room in zip(survey.kept, rooms, strict=True)},
            expected_ttft_seconds=expectation.ttft_seconds,
            waiting_requests=self._pressure.ahead(request_class, pool=pool),
        )

    def close(self) -> None:
        """Answer all who wait; nobody waits from now on."""
        self._queue.close()

    def _note_ignored(self, request_class: RequestClass) -> None:
        if request_class.ignored_objective:
            self._telemetry.objective_ignored(request_class.ignored_objective.value)

    def _turn_away(self, facts: RequestFacts, resolved: ResolvedModel, request_class: RequestClass) -> None:
        """Raise RequestShedError for a request that would be refused whatever its prompt is, however much is cached.

        Most of a flood is: tokenizing it and looking it up would take the picker's time from the others.
        """
        if self._queue.is_empty or not request_class.priority_class.sheddable or not self._policy.overload.enabled:
            return
        if self._must_wait(facts, resolved, request_class):
            self._pressure.turn_away(request_class, pool=pool_of(resolved))

    async def _admit(self, prepared: Prepared) -> T:
        now = self._clock()
        survey = self._picker.survey(prepared, now=now)
        if not self._policy.overload.enabled:
            return self._go(prepared, survey)
        others_wait = self._would_wait(prepared)
        if not others_wait:
            ceiling = prepared.request_class.priority_class.ceiling
            booking = self._go_where_there_is_room(prepared, survey, ceiling=ceiling)
            if booking is not None:
                return self._passed(booking, prepared, survey)
        return await self._wait(prepared, survey, tried=not others_wait)

    async def _wait(self, prepared: Prepared, survey: Survey, *, tried: bool) -> T:
        """Wait for room as long as the class may; what may not be refused is sent on in the end."""
        request_class, pool, began = prepared.request_class, prepared.pool, survey.at
        priority_class = request_class.priority_class
        uncached = _uncached_tokens(survey)
        expectation = self._pressure.expect(survey.kept, request_class, pool=pool, uncached_tokens=uncached)
        if priority_class.sheddable and self._pressure.cannot_be_met(request_class, expectation, pool=pool):
            raise self._pressure.refusal(RequestShedError, request_class, pool, expectation, now=began)

        def attempt(now: float, ceiling: float, /) -> T | None:
            later = self._picker.survey(prepared, now=now, others=self._others())
            if not self._policy.overload.enabled:  # any more
                return self._go(prepared, later)
            return self._go_where_there_is_room(prepared, later, ceiling=ceiling)

        ticket = Ticket(
            class_name=request_class.class_name,
            priority_class=priority_class,
            tenant=request_class.tenant,
            uncached_tokens=max(uncached, 1),
            pool=pool,
            group=_group(prepared.facts, prepared.resolved),
            arrived_at=began,
            deadline=began + _patience(request_class, expectation),
        )
        story = current_story()
        turn = in_its_turn(story, attempt, since=began)
        try:
            booking = await self._queue.enter(ticket, turn, undo=self._unbook, tried=tried)
        except tuple(SHED_FOR) as error:
            now = self._clock()
            if story is not None:
                story.queued_seconds = now - began
            if isinstance(error, QueueTimeoutError):
                self._pressure.waited(request_class, expectation, pool=pool, seconds=now - began)
            if priority_class.sheddable:
                raise self._pressure.refusal(
                    SHED_FOR[type(error)], request_class, pool, expectation, now=now
                ) from error
            later = self._picker.survey(prepared, now=now, others=self._others())
            return self._passed(self._go(prepared, later), prepared, later)
        try:
            self._pressure.waited(request_class, expectation, pool=pool, seconds=self._clock() - began)
        except BaseException:
            self._unbook(booking)  # of which nobody else knows yet
            raise
        return booking

    def _would_wait(self, prepared: Prepared) -> bool:
        """Tell whether it must not overtake somebody who waits; one with an invented model nobody of its pool."""
        if self._queue.is_empty:  # nearly always
            return False
        return self._must_wait(prepared.facts, prepared.resolved, prepared.request_class)

    def _must_wait(self, facts: RequestFacts, resolved: ResolvedModel, request_class: RequestClass) -> bool:
        group = _group(facts, resolved) if resolved.base is not None else None
        return self._queue.would_wait(pool_of(resolved), request_class.priority_class.priority, group)

    def _passed(self, booking: T, prepared: Prepared, survey: Survey) -> T:
        """Count a request that was sent without a turn for the shares of those that wait."""
        request_class = prepared.request_class
        try:
            # where nobody waits, nobody earns of it, whatever it costs
            cost = 1 if self._queue.is_empty else max(_uncached_tokens(survey), 1)
            self._queue.passed(prepared.pool, request_class.class_name, request_class.priority_class, cost=cost)
        except BaseException:
            self._unbook(booking)  # of which nobody else knows yet
            raise
        return booking

    def _go(self, prepared: Prepared, survey: Survey) -> T:
        """Send the request to the best endpoint, whether there is room or not."""
        return self._send(prepared, survey, survey.kept, survey.rejected)

    def _go_where_there_is_room(self, prepared: Prepared, survey: Survey, *, ceiling: float) -> T | None:
        """Send the request to the best endpoint with room, or return None where none has any."""
        kept, now = survey.kept, survey.at
        rooms = self.rooms(survey, ceiling=ceiling)
        free = []
        for candidate, room in zip(kept, rooms, strict=True):
            if room.fill < 1.0:
                free.append(candidate)
        self._pressure.saw(prepared.request_class, kept, pool=prepared.pool, has_room=bool(free), now=now)
        if not free:
            opens_in = min((room.opens_in_seconds for room in rooms if room.opens_in_seconds is not None), default=None)
            if opens_in is not None:
                self._queue.wake_at(now + opens_in)  # nothing else tells of a backlog that is gone
            return None
        if len(free) == len(kept):
            return self._send(prepared, survey, kept, survey.rejected)
        best = min(expected_ttft(candidate, self._estimates, now=now) for candidate in free)
        rejected = dict(survey.rejected)
        places: list[Candidate] = []
        reserve: list[tuple[float, str]] = []
        for candidate, room in zip(kept, rooms, strict=True):
            if room.fill < 1.0 or self._is_worth_the_wait(candidate, room, best_seconds=best, now=now):
                places.append(candidate)
            else:
                rejected[candidate.address] = f"room: {room.why}"
                reserve.append((room.fill, candidate.address))
        return self._send(prepared, survey, places, rejected, [address for _, address in sorted(reserve)])

    def _is_worth_the_wait(self, candidate: Candidate, room: Room, *, best_seconds: float, now: float) -> bool:
        """Tell whether a full endpoint is a place nevertheless: what it holds makes the wait there the shorter one.

        Only where prompts to be computed fill it, and little beyond its limit: what is not sent there goes elsewhere
        at once, and computing a prompt again takes room from everybody.
        """
        return (
            room.by_backlog
            and room.fill < MOST_FILL
            and expected_ttft(candidate, self._estimates, now=now) < best_seconds
        )

    def _send(
        self,
        prepared: Prepared,
        survey: Survey,
        kept: Sequence[Candidate],
        rejected: Mapping[str, str],
        reserve: Sequence[str] = (),
    ) -> T:
        picker = self._picker if current_story() is None else self._observed
        picked = picker.choose(prepared, survey, kept=kept, rejected=rejected, reserve=reserve)
        request_class = prepared.request_class
        self._telemetry.admitted(request_class.class_name, tenant=request_class.tenant)
        decision = picked.decision
        uncached = max(decision.prompt_tokens - decision.matched_tokens, 0)
        self._pressure.went(request_class, pool=prepared.pool, uncached_tokens=uncached, now=survey.at)
        return self._book(picked)


def _observed(picker: EndpointPicker) -> EndpointPicker:
    """Return the picker of the requests that somebody observes."""
    return replace(picker, telemetry=PhaseNotes(picker.telemetry))


def _group(facts: RequestFacts, resolved: ResolvedModel) -> str:
    """Return what narrows the endpoints within the pool: a request of another group may fit where this one does not."""
    adapter, subset = resolved.adapter, facts.subset
    name = adapter if resolved.base is not None else resolved.model  # some pods may know it
    if name is None and subset is None:
        return ""
    return f"{name or ''}\0{','.join(sorted(subset)) if subset is not None else '*'}"


def _patience(request_class: RequestClass, expectation: Expectation) -> float:
    """Return how long the request may wait: what may be refused is not sent on when it is too late for its target."""
    targets = request_class.priority_class.targets
    if not request_class.priority_class.sheddable:
        return targets.queue_seconds
    return min(targets.queue_seconds, max(targets.ttft_seconds - expectation.own_seconds, 0.0))


def _uncached_tokens(survey: Survey) -> int:
    """Return the tokens that the warmest endpoint would have to compute."""
    most = max(candidate.matched_tokens for candidate in survey.kept)
    return max(survey.match.prompt_tokens - most, 0)

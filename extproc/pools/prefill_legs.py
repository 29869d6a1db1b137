"""The prefill legs of a pool's requests: planned when the decode pod is chosen, run before the request is sent to it.

Each leg is booked on its prefill pod until it ends, whatever its outcome. After a failed leg, the next prefill pod is
tried. When the class's time for this is over, the decode pod computes the prompt itself: the client never sees an
avoidable error. In a race, the first two legs run at once, and the first answer cancels the other leg. If the protocol
needs both pods at the same time, the leg runs alongside its request and ends with it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec

from extproc.admission.asked_request import CONTENT_ENCODING
from extproc.admission.prepared_request import Picked, Prepared
from extproc.choosing.choose import Choice, PoolView, open_prefillers
from extproc.disaggregation.leg_answers import EngineIds
from extproc.disaggregation.leg_body import cannot_be_split, decode_body
from extproc.disaggregation.offload import Verdict
from extproc.disaggregation.prefill_leg import LegError, LegRequest, run_leg
from extproc.disaggregation.prefill_plan import PrefillPlace, PrefillPlan, plan_prefill
from extproc.disaggregation.racing import RaceBudget, race_of
from extproc.disaggregation.transfer_protocols import (
    LEAST_NUMBER,
    MOST_NUMBER,
    NO_RETRIES,
    PREFILLER_HEADER,
    PROTOCOLS,
    Fields,
    LegNames,
    LegOutcome,
    TransferProtocol,
    protocol_of,
)
from extproc.errors import NoReadyEndpointError, PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import Arrival, LegEnd, LegsEnded
from extproc.pods.inflight import Booking
from extproc.pods.pod_ranks import pod_of
from extproc.policy.disaggregation import Protocol
from extproc.policy.priority import StepKind
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.picker_books import PickerBooks
from extproc.requests.json_edit import JsonObject
from kvmesh.pods.pod_http import PodPages

LEAST_SECONDS = 1e-6  # the least expected duration of a leg


class BookedLeg(msgspec.Struct, kw_only=True, eq=False):
    """One leg: a prompt booked on one prefill pod."""

    place: PrefillPlace
    names: LegNames
    booking: Booking | None  # None once it is over
    began: float  # monotonic seconds


class PrefillWork(msgspec.Struct, kw_only=True, eq=False):
    """The inputs of a booked request's legs, and their result."""

    plan: PrefillPlan
    protocol: TransferProtocol
    asked: LegRequest
    picked: Picked
    seconds: float  # for all legs together
    arrival: Arrival
    ends: list[LegEnd] = []
    legs: list[BookedLeg] = []  # those booked so far, in the order of the plan's places
    won: BookedLeg | None = None  # the first leg that returned its parameters
    fields: Fields = {}  # for the decode pod's body, from the winner


class PrefillLegs:
    """Plans, books and runs the legs of one pool."""

    def __init__(
        self,
        *,
        books: PickerBooks,
        pages: PodPages,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """`draw(n)` returns a random number in [0, n); it numbers the transfers."""
        self._books = books
        self._clock = clock
        self._pages = pages
        self._draw = draw
        self._engines = EngineIds()
        self.beside: set[asyncio.Task[None]] = set()  # legs that run alongside their requests

    def book(self, picked: Picked, exchange: BookedExchange) -> PrefillWork | None:
        """Book the leg of a request that has just been booked, or both legs of a race.

        Return the work to do before the request is sent to its pod. If the exchange finishes first, it ends the legs.
        """
        plan, prepared = picked.prefill, picked.prepared
        if plan is None or not plan.is_remote:
            return None
        first = plan.places[0]
        protocol = protocol_of(plan.policy)
        if protocol is None:  # the decode pod's sidecar runs it
            exchange.leg = self._book(first, picked)
            exchange.set_headers = {**exchange.set_headers, PREFILLER_HEADER: pod_of(first.endpoint)}
            return None
        body = exchange.body if exchange.body is not None else prepared.sent.plain
        assert body is not None, "only what can be read is split"
        promised = prepared.asked.request_class.priority_class.targets.ttft_seconds
        work = PrefillWork(
            plan=plan,
            protocol=protocol,
            asked=LegRequest(
                request=prepared.asked.request,
                body=JsonObject(body),
                headers=_leg_headers(prepared.asked.facts, exchange.set_headers),
            ),
            picked=picked,
            seconds=min(plan.policy.timeout_seconds, max(promised - plan.sides.local_seconds, 2.0 * first.leg_seconds)),
            arrival=exchange.arrival,
        )
        exchange.legs = work.ends
        exchange.end_leg = lambda _: self._end(work)
        for place in plan.places[: 2 if plan.races else 1]:
            self._begin(work, place)
        return work

    def _book(self, place: PrefillPlace, picked: Picked) -> Booking:
        prompts, context_tokens = picked.prepared.query.prompts, picked.decision.prompt_tokens
        return self._books.book_leg(place, prompts, context_tokens=context_tokens)

    async def run(self, work: PrefillWork, exchange: BookedExchange) -> None:
        """Run the legs, and put the location of the blocks, if any leg succeeded, into the decode pod's body.

        If the protocol needs both pods at the same time, return once the leg has begun.
        """
        if work.protocol.is_at_once:
            self._run_beside(work, exchange)
            return
        until = self._clock() + work.seconds
        try:
            await self._first_legs(work)
            for place in work.plan.places[len(work.legs) :]:
                left = until - self._clock()
                if work.won is not None or left < place.leg_seconds:  # no time left for another leg
                    break
                await self._leg(work, self._begin(work, place), timeout_seconds=left)
        finally:
            exchange.end_leg = None
            self._end(work)
        if work.won is None:
            self._books.ledger.tell(LegsEnded(fell_back=True))
            exchange.computes_itself(work.plan.sides.uncached_tokens)
            return
        _hand_over(work, exchange, work.fields, work.won.place)

    def keep_endpoints(self, endpoints: Collection[str]) -> None:
        """Forget all other endpoints, and close their connections."""
        self._pages.keep(endpoints)
        self._engines.keep(map(pod_of, endpoints))

    def close(self) -> None:
        """Cancel the legs that run alongside requests, and close the connections to prefill pods."""
        for task in tuple(self.beside):
            task.cancel()
        self._pages.close()

    async def _first_legs(self, work: PrefillWork) -> None:
        """Run the booked legs; in a race, both at once until one returns its parameters."""
        if len(work.legs) == 1:
            await self._leg(work, work.legs[0], timeout_seconds=work.seconds)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                running = {
                    tasks.create_task(self._leg(work, leg, timeout_seconds=work.seconds), name=_task_name(leg))
                    for leg in work.legs
                }
                while running and work.won is None:
                    _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in running:
                    task.cancel()
        finally:
            winner = work.legs.index(work.won) if work.won is not None else -1
            self._books.ledger.tell(LegsEnded(race_winner=winner))

    def _run_beside(self, work: PrefillWork, exchange: BookedExchange) -> None:
        """Start the leg alongside its request; it ends with its answer or with the exchange, whichever is first."""
        (leg,) = work.legs
        _hand_over(work, exchange, work.protocol.hand_over(leg.names, b""), leg.place)
        leg.began = self._clock()
        running = self._leg(work, leg, timeout_seconds=None)
        task = asyncio.get_running_loop().create_task(running, name=_task_name(leg))
        self.beside.add(task)
        task.add_done_callback(self.beside.discard)

        def end(status: int) -> None:
            if leg.booking is not None:  # the decode pod's success implies that it got the prompt's blocks
                self._ended(work, leg, LegOutcome.ANSWERED if 200 <= status < 300 else LegOutcome.CLIENT_LEFT)
            task.cancel()

        exchange.end_leg = end

    def _begin(self, work: PrefillWork, place: PrefillPlace) -> BookedLeg:
        leg = BookedLeg(
            place=place,
            names=LegNames(
                host=place.endpoint.rpartition(":")[0],
                bootstrap_port=work.plan.policy.bootstrap_port,
                number=LEAST_NUMBER + self._draw(MOST_NUMBER - LEAST_NUMBER),
                side_channel_hosts=work.plan.policy.side_channel_hosts,
                claim=partial(self._engines.claim, pod_of(place.endpoint)),
            ),
            booking=self._book(place, work.picked),
            began=self._clock(),
        )
        work.legs.append(leg)
        return leg

    async def _leg(self, work: PrefillWork, leg: BookedLeg, *, timeout_seconds: float | None) -> None:
        """Run one booked leg, and end its booking; the first leg to return its parameters wins."""
        outcome, problem, leg.began, endpoint = None, "", self._clock(), leg.place.endpoint
        asked = work.asked.at_rank(endpoint, self._books.ranks)
        try:
            fields = await run_leg(
                self._pages, endpoint, asked, work.protocol, leg.names, timeout_seconds=timeout_seconds
            )
            outcome = LegOutcome.LATE
            if work.won is None:
                outcome, work.won, work.fields = LegOutcome.ANSWERED, leg, fields
        except LegError as error:
            outcome, problem = error.outcome, str(error)
        finally:
            if leg.booking is not None:  # else its exchange has already ended it
                self._ended(work, leg, outcome or _given_up(work), problem=problem)

    def _end(self, work: PrefillWork) -> None:
        """End the legs that have not begun."""
        for leg in work.legs:
            if leg.booking is not None:
                self._ended(work, leg, _given_up(work))

    def _ended(self, work: PrefillWork, leg: BookedLeg, outcome: LegOutcome, *, problem: str = "") -> None:
        assert leg.booking is not None, "a leg is released once"
        booking, leg.booking = leg.booking, None
        self._books.release_leg(booking)
        place, seconds = leg.place, self._clock() - leg.began
        lost = None
        if outcome in (LegOutcome.LOST, LegOutcome.LATE):
            part = 1.0 if outcome is LegOutcome.LATE else min(seconds / max(place.leg_seconds, LEAST_SECONDS), 1.0)
            lost = part * place.uncached_tokens
        end = LegEnd(
            endpoint=place.endpoint,
            outcome=outcome,
            began_seconds=leg.began - work.arrival.at,
            seconds=seconds,
            lost_tokens=lost,
            problem=problem,
            trace_id=work.arrival.trace_id,
        )
        work.ends.append(end)
        self._books.ledger.tell(end)
        self._note(place.endpoint, outcome)

    def _note(self, endpoint: str, outcome: LegOutcome) -> None:
        if outcome is LegOutcome.FULL:
            self._books.endpoint_full(endpoint)
        elif outcome not in (LegOutcome.CLIENT_LEFT, LegOutcome.LOST):
            failed = outcome not in (LegOutcome.ANSWERED, LegOutcome.LATE, LegOutcome.REFUSED)
            self._books.endpoint_answered(endpoint, failed=failed, is_whole=True)


def plan_of(
    prepared: Prepared, choice: Choice, view: PoolView, *, ceiling: float | None, races: RaceBudget
) -> PrefillPlan | None:
    """Return where a request's prompt is computed, or None if only the decode pod can. Without side effects.

    Raise NoReadyEndpointError if they cannot and there is no prefill pod.
    """
    snapshot, asked, policy = choice.snapshot, prepared.asked, view.policy.disaggregation
    protocol = protocol_of(policy)
    only_remote = protocol is not None and not protocol.decode_pods_prefill
    prefillers = snapshot.prefillers
    if not prefillers and not only_remote:
        return None
    if ceiling is not None and not only_remote:
        prefillers = open_prefillers(view, snapshot)
    priority_class = asked.request_class.priority_class
    plan = plan_prefill(
        choice.decision.winner,
        prefillers,
        policy=policy,
        labels=view.policy.pair_labels,
        estimates=view.estimates,
        links=view.links,
        target_seconds=priority_class.targets.ttft_seconds,
        yields=priority_class.sheddable,
        tie_break=view.random,
        now=snapshot.at,
    )
    if plan is None and only_remote and choice.decision.prompt_tokens:
        raise NoReadyEndpointError(f"no prefill pod may serve the request; {_no_prompts(policy.protocol)}")
    if plan is None or not (plan.is_remote or only_remote):
        return plan
    why = _why_whole(prepared, protocol)
    if why is not None:
        return msgspec.structs.replace(plan, verdict=Verdict(remote=False, why=why))
    if not plan.is_remote:
        plan = msgspec.structs.replace(plan, verdict=Verdict(remote=True, why=_no_prompts(policy.protocol)))
    race = race_of(plan, races)
    return plan if race is None else msgspec.structs.replace(plan, race=race)


def _no_prompts(protocol: Protocol) -> str:
    return f"with {protocol.value} the decode pods compute no prompts"


def _why_whole(prepared: Prepared, protocol: TransferProtocol | None) -> str | None:
    """Return why the decode pod must compute a request's prompt regardless of the numbers, or None.

    `protocol` is None if the decode pod's sidecar runs the leg; the rules of vLLM's protocols then apply.
    """
    asked, plain = prepared.asked, prepared.sent.plain
    protocol = protocol or PROTOCOLS[Protocol.NIXL]
    if asked.measures.no_remote_prefill and protocol.decode_pods_prefill:
        return f"class {asked.request_class.class_name!r} is under pressure: {StepKind.NO_REMOTE_PREFILL.value}"
    if not plain:
        return "its body cannot be read"
    try:
        return cannot_be_split(asked.request, JsonObject(plain), protocol)
    except PickError as error:
        return f"its body cannot be changed: {error}"


def _given_up(work: PrefillWork) -> LegOutcome:
    """Return the outcome of a leg that ended without an answer or a timeout: the client left, or it lost the race."""
    return LegOutcome.CLIENT_LEFT if work.won is None else LegOutcome.LOST


def _task_name(leg: BookedLeg) -> str:
    return f"prefill leg at {leg.place.endpoint}"


def _hand_over(work: PrefillWork, exchange: BookedExchange, fields: Fields, place: PrefillPlace) -> None:
    exchange.body = decode_body(work.asked.body, fields)
    if fields:  # good for one fetch only: on a retry, a second pod would silently read other blocks
        exchange.set_headers = {**exchange.set_headers, **NO_RETRIES}
    if work.picked.prepared.is_coded:
        exchange.removed_headers = (*exchange.removed_headers, CONTENT_ENCODING)
    exchange.comes_from(cached_tokens=place.cached_tokens if work.protocol.tells_prefill_hits else None)


def _leg_headers(facts: RequestFacts, set_headers: Mapping[str, str]) -> Mapping[str, str]:
    name = facts.request_id  # part of the answer's request id, which has bounds
    headers = {"x-request-id": name} if name.isascii() and name.isprintable() and 0 < len(name) <= 256 else {}
    if facts.traceparent is not None:
        headers["traceparent"] = facts.traceparent
    return {**headers, **set_headers}

"""The prefill legs of a pool's requests: planned when the decode pod is chosen, run before the request goes there.

Each leg has a booking of its own on the prefill pod, released when the leg ends, however it does. A leg that brings
nothing is followed by one to the next prefill pod, and by the decode pod's own prefill when the time that the class has
for this is over: the client never sees an error that this could have avoided. In a race the first two legs run at once,
and the first answer ends the other one. Where the protocol wants both pods at once, the leg runs beside its request and
ends with it.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from extproc.admission.asked_request import CONTENT_ENCODING
from extproc.admission.prepared_request import Picked, Prepared
from extproc.choosing.choose import Choice, PoolView, open_prefillers
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
from extproc.pods.inflight import Booking
from extproc.policy.disaggregation import Protocol
from extproc.policy.priority import StepKind
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.picker_books import PickerBooks
from extproc.pools.request_watch import RequestTrace
from extproc.prefixes.prompt_match import PromptKeys
from extproc.requests.json_edit import JsonObject
from extproc.telemetry.degradation_log import DegradationLog
from extproc.telemetry.prefill_telemetry import FIRST, NONE, SECOND, PrefillTelemetry
from kvmesh.pods.pod_http import PodPages

LEAST_SECONDS = 1e-6  # of a leg, expected
LEG_FAILED = "prefill-leg-failed"  # a word of the log


class BookedLeg(msgspec.Struct, kw_only=True, eq=False):
    """One leg: a prompt that is booked at one prefill pod."""

    place: PrefillPlace
    names: LegNames
    booking: Booking | None  # None: it is over
    began: float  # monotonic seconds


class PrefillWork(msgspec.Struct, kw_only=True, eq=False):
    """What a booked request's legs need, and what has come of them."""

    plan: PrefillPlan
    protocol: TransferProtocol
    asked: LegRequest
    prompts: Sequence[PromptKeys]
    context_tokens: int  # of the prompt
    seconds: float  # for all legs together
    removed_headers: tuple[str, ...] = ()  # that describe the client's body and not this one
    trace: RequestTrace | None = None  # None: it is not observed
    legs: list[BookedLeg] = []  # in the order of the plan's places, as far as they have been booked
    won: BookedLeg | None = None  # the first that has brought its parameters
    fields: Fields = {}  # of the decode pod's body, by that leg


class PrefillLegs:
    """Plans, books and runs the legs of one pool."""

    def __init__(
        self,
        *,
        books: PickerBooks,
        telemetry: PrefillTelemetry,
        degradations: DegradationLog,
        pages: PodPages,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[int], int] = secrets.randbelow,
    ) -> None:
        """Take, with `draw`, what numbers transfers: it returns a number from 0 on, below its argument."""
        self._books = books
        self._telemetry = telemetry
        self._degradations = degradations
        self._clock = clock
        self._pages = pages
        self._draw = draw
        self.beside: set[asyncio.Task[None]] = set()  # legs that run beside their requests

    def book(self, picked: Picked, exchange: BookedExchange) -> PrefillWork | None:
        """Book the leg of a request that has just been booked, or both legs of a race.

        Return what is left to be done before the request goes to its pod. An exchange that is finished before ends it.
        """
        plan, prepared = picked.prefill, picked.prepared
        if plan is None:
            return None
        self._telemetry.decided(remote=plan.is_remote)
        if not plan.is_remote:
            return None
        first, prompts, context_tokens = plan.places[0], prepared.query.prompts, picked.decision.prompt_tokens
        protocol = protocol_of(plan.policy)
        if protocol is None:  # the decode pod's sidecar runs it
            exchange.leg = self._books.book_leg(first, prompts, context_tokens=context_tokens)
            exchange.set_headers = {**exchange.set_headers, PREFILLER_HEADER: first.endpoint}
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
            prompts=prompts,
            context_tokens=context_tokens,
            removed_headers=(CONTENT_ENCODING,) if prepared.is_coded else (),
            seconds=min(plan.policy.timeout_seconds, max(promised - plan.sides.local_seconds, 2.0 * first.leg_seconds)),
            trace=exchange.trace,
        )
        exchange.end_leg = lambda _: self._end(work)
        for place in plan.places[: 2 if plan.races else 1]:
            self._begin(work, place)
        return work

    async def run(self, work: PrefillWork, exchange: BookedExchange) -> None:
        """Run the leg, and put into the exchange what the decode pod gets: where the blocks are, or nothing of it.

        Where the protocol wants both pods at once, return when the leg has begun.
        """
        if work.protocol.is_at_once:
            self._run_beside(work, exchange)
            return
        until = self._clock() + work.seconds
        try:
            await self._first_legs(work)
            for place in work.plan.places[len(work.legs) :]:
                left = until - self._clock()
                if work.won is not None or left < place.leg_seconds:  # the decode pod would have to hurry as it is
                    break
                await self._leg(work, self._begin(work, place), timeout_seconds=left)
        finally:
            exchange.end_leg = None
            self._end(work)
        if work.won is None:
            self._telemetry.fell_back()
            exchange.computes_itself(work.plan.sides.uncached_tokens)
            return
        _hand_over(work, exchange, work.fields, work.won.place)

    def keep_endpoints(self, endpoints: Iterable[str]) -> None:
        """Close the connections to all others."""
        self._pages.keep(endpoints)

    def close(self) -> None:
        """Close the connections to prefill pods, and end what runs there beside its request."""
        for task in tuple(self.beside):
            task.cancel()
        self._pages.close()

    async def _first_legs(self, work: PrefillWork) -> None:
        """Run the legs that are booked, two of them at once until one has brought its parameters."""
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
            self._telemetry.raced(NONE if work.won is None else FIRST if work.won is work.legs[0] else SECOND)

    def _run_beside(self, work: PrefillWork, exchange: BookedExchange) -> None:
        """Begin the leg; it ends by its answer or with the exchange, whichever comes first."""
        (leg,) = work.legs
        _hand_over(work, exchange, work.protocol.hand_over(leg.names, b""), leg.place)
        leg.began = self._clock()
        running = self._leg(work, leg, timeout_seconds=None)
        task = asyncio.get_running_loop().create_task(running, name=_task_name(leg))
        self.beside.add(task)
        task.add_done_callback(self.beside.discard)

        def end(status: int) -> None:
            if leg.booking is not None:  # an answer could not be without the prompt's blocks
                self._ended(work, leg, LegOutcome.ANSWERED if 200 <= status < 300 else LegOutcome.CLIENT_LEFT)
            task.cancel()

        exchange.end_leg = end

    def _begin(self, work: PrefillWork, place: PrefillPlace) -> BookedLeg:
        """Book one more leg."""
        leg = BookedLeg(
            place=place,
            names=LegNames(
                host=place.endpoint.rpartition(":")[0],
                bootstrap_port=work.plan.policy.bootstrap_port,
                number=LEAST_NUMBER + self._draw(MOST_NUMBER - LEAST_NUMBER),
            ),
            booking=self._books.book_leg(place, work.prompts, context_tokens=work.context_tokens),
            began=self._clock(),
        )
        work.legs.append(leg)
        return leg

    async def _leg(self, work: PrefillWork, leg: BookedLeg, *, timeout_seconds: float | None) -> None:
        """Run one leg that is booked, and end its booking; the first that brings its parameters has won."""
        outcome, leg.began, endpoint = None, self._clock(), leg.place.endpoint
        try:
            fields = await run_leg(
                self._pages, endpoint, work.asked, work.protocol, leg.names, timeout_seconds=timeout_seconds
            )
            outcome = LegOutcome.LATE
            if work.won is None:
                outcome, work.won, work.fields = LegOutcome.ANSWERED, leg, fields
        except LegError as error:
            outcome = error.outcome
            self._degradations.note({LEG_FAILED: f"{endpoint}: {error}"}, now=self._clock())
        finally:
            if leg.booking is not None:  # else its exchange has ended it
                self._ended(work, leg, outcome or _given_up(work))

    def _end(self, work: PrefillWork) -> None:
        """End the legs that nothing has ended: those that have not begun."""
        for leg in work.legs:
            if leg.booking is not None:
                self._ended(work, leg, _given_up(work))

    def _ended(self, work: PrefillWork, leg: BookedLeg, outcome: LegOutcome) -> None:
        assert leg.booking is not None, "a leg is released once"
        booking, leg.booking = leg.booking, None
        self._books.release_leg(booking)
        place, seconds = leg.place, self._clock() - leg.began
        trace_id = work.trace.trace_id if work.trace is not None else ""
        self._telemetry.leg_ended(place.endpoint, outcome, seconds=seconds, trace_id=trace_id)
        if outcome in (LegOutcome.LOST, LegOutcome.LATE):
            part = 1.0 if outcome is LegOutcome.LATE else min(seconds / max(place.leg_seconds, LEAST_SECONDS), 1.0)
            self._telemetry.lost(seconds=seconds, tokens=part * place.uncached_tokens)
        if work.trace is not None:
            work.trace.leg(endpoint=place.endpoint, outcome=outcome.value, seconds=seconds)
        self._note(place.endpoint, outcome)

    def _note(self, endpoint: str, outcome: LegOutcome) -> None:
        if outcome is LegOutcome.FULL:
            self._books.endpoint_full(endpoint)
        elif outcome not in (LegOutcome.CLIENT_LEFT, LegOutcome.LOST):
            failed = outcome not in (LegOutcome.ANSWERED, LegOutcome.LATE, LegOutcome.REFUSED)
            self._books.endpoint_answered(endpoint, failed=failed)


def plan_of(
    prepared: Prepared, choice: Choice, view: PoolView, *, ceiling: float | None, races: RaceBudget
) -> PrefillPlan | None:
    """Return where a request's prompt is computed; None where there is nobody but the decode pod. Changes nothing.

    In shadow it stays where it is decoded, unless the decode pods compute no prompts at all.
    Raise NoReadyEndpointError where nobody can: no prefill pod is there, and the decode pods compute no prompts.
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
    if view.policy.shadow and not only_remote:
        local = Verdict(remote=False, why=f"shadow, else remote: {plan.verdict.why}")
        return msgspec.structs.replace(plan, verdict=local, withheld=plan.verdict)
    race = race_of(plan, races)
    return plan if race is None else msgspec.structs.replace(plan, race=race)


def _no_prompts(protocol: Protocol) -> str:
    return f"with {protocol.value} the decode pods compute no prompts"


def _why_whole(prepared: Prepared, protocol: TransferProtocol | None) -> str | None:
    """Return why a request's prompt is computed where it is decoded, whatever the numbers say.

    `protocol`: None where the sidecar of the decode pod runs the leg, which takes what vLLM's protocols take.
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
    """Return how a leg has ended that neither its pod nor its time has ended."""
    return LegOutcome.CLIENT_LEFT if work.won is None else LegOutcome.LOST


def _task_name(leg: BookedLeg) -> str:
    return f"prefill leg at {leg.place.endpoint}"


def _hand_over(work: PrefillWork, exchange: BookedExchange, fields: Fields, place: PrefillPlace) -> None:
    """Put into the exchange what the decode pod gets."""
    exchange.body = decode_body(work.asked.body, fields)
    if fields:  # they are worth one fetch: a second pod that got them would answer with other words
        exchange.set_headers = {**exchange.set_headers, **NO_RETRIES}
    exchange.removed_headers = (*exchange.removed_headers, *work.removed_headers)
    exchange.comes_from(cached_tokens=place.cached_tokens if work.protocol.tells_prefill_hits else None)


def _leg_headers(facts: RequestFacts, set_headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers of a leg: the request's identity and its trace."""
    headers = {"x-request-id": facts.request_id} if facts.request_id else {}
    if facts.traceparent is not None:
        headers["traceparent"] = facts.traceparent
    return {**headers, **set_headers}

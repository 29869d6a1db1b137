"""The prefill legs of a pool's requests: planned when the decode pod is chosen, run before the request goes there.

Each leg has a booking of its own on the prefill pod, released when the leg ends, however it does. A leg that brings
nothing is followed by one to the next prefill pod, and by the decode pod's own prefill when the time that the class has
for this is over: the client never sees an error that this could have avoided. Where the protocol wants both pods at
once, the leg runs beside its request and ends with it.
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
from extproc.telemetry.prefill_telemetry import PrefillTelemetry
from kvmesh.pods.pod_http import PodPages

LEG_FAILED = "prefill-leg-failed"  # a word of the log


class PrefillWork(msgspec.Struct, kw_only=True, eq=False):
    """What a booked request's leg needs."""

    plan: PrefillPlan
    protocol: TransferProtocol
    asked: LegRequest
    prompts: Sequence[PromptKeys]
    booking: Booking | None  # of the first place; None: its leg is over
    context_tokens: int  # of the prompt
    seconds: float  # for all legs together
    removed_headers: tuple[str, ...] = ()  # that describe the client's body and not this one


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
        self.beside: set[asyncio.Task[Fields | None]] = set()  # legs that run beside their requests

    def book(self, picked: Picked, exchange: BookedExchange) -> PrefillWork | None:
        """Book the leg of a request that has just been booked; return what is left to be done before it goes there."""
        plan, prepared = picked.prefill, picked.prepared
        if plan is None:
            return None
        self._telemetry.decided(remote=plan.is_remote)
        if not plan.is_remote:
            return None
        first, prompts, context_tokens = plan.places[0], prepared.query.prompts, picked.decision.prompt_tokens
        booking = self._books.book_leg(first, prompts, context_tokens=context_tokens)
        protocol = protocol_of(plan.policy)
        if protocol is None:
            exchange.leg = booking  # the decode pod's sidecar runs it
            exchange.set_headers = {**exchange.set_headers, PREFILLER_HEADER: first.endpoint}
            return None
        body = exchange.body if exchange.body is not None else prepared.sent.plain
        assert body is not None, "only what can be read is split"
        promised = prepared.asked.request_class.priority_class.targets.ttft_seconds
        return PrefillWork(
            plan=plan,
            protocol=protocol,
            asked=LegRequest(
                request=prepared.asked.request,
                body=JsonObject(body),
                headers=_leg_headers(prepared.asked.facts, exchange.set_headers),
            ),
            prompts=prompts,
            booking=booking,
            context_tokens=context_tokens,
            removed_headers=(CONTENT_ENCODING,) if prepared.is_coded else (),
            seconds=min(plan.policy.timeout_seconds, max(promised - plan.sides.local_seconds, 2.0 * first.leg_seconds)),
        )

    async def run(self, work: PrefillWork, exchange: BookedExchange) -> None:
        """Run the leg, and put into the exchange what the decode pod gets: where the blocks are, or nothing of it.

        Where the protocol wants both pods at once, return when the leg has begun.
        """
        if work.protocol.is_at_once:
            self._run_beside(work, exchange)
            return
        until = self._clock() + work.seconds
        fields, place = None, None
        try:
            for place in work.plan.places:
                left = until - self._clock()
                if work.booking is None:
                    if left < place.leg_seconds:  # the decode pod would have to hurry as it is
                        break
                    work.booking = self._books.book_leg(place, work.prompts, context_tokens=work.context_tokens)
                fields = await self._leg(
                    work, place, self._names(work, place), timeout_seconds=left, trace=exchange.trace
                )
                if fields is not None:
                    break
        finally:
            if work.booking is not None:
                self._release(work)
        if fields is None or place is None:
            self._telemetry.fell_back()
            exchange.computes_itself(work.plan.sides.uncached_tokens)
            return
        _hand_over(work, exchange, fields, place)

    def keep_endpoints(self, endpoints: Iterable[str]) -> None:
        """Close the connections to all others."""
        self._pages.keep(endpoints)

    def close(self) -> None:
        """Close the connections to prefill pods, and end what runs there beside its request."""
        for task in tuple(self.beside):
            task.cancel()
        self._pages.close()

    def _run_beside(self, work: PrefillWork, exchange: BookedExchange) -> None:
        """Begin the leg; it ends by its answer or with the exchange, whichever comes first."""
        place = work.plan.places[0]
        names = self._names(work, place)
        _hand_over(work, exchange, work.protocol.hand_over(names, b""), place)
        began = self._clock()
        leg = self._leg(work, place, names, timeout_seconds=None, trace=exchange.trace)
        task = asyncio.get_running_loop().create_task(leg, name=f"prefill leg at {place.endpoint}")
        self.beside.add(task)
        task.add_done_callback(self.beside.discard)

        def end(status: int) -> None:
            if work.booking is not None:  # an answer could not be without the prompt's blocks
                outcome = LegOutcome.ANSWERED if 200 <= status < 300 else LegOutcome.CLIENT_LEFT
                self._ended(work, place, outcome, began=began, trace=exchange.trace)
            task.cancel()

        exchange.end_leg = end

    def _names(self, work: PrefillWork, place: PrefillPlace) -> LegNames:
        return LegNames(
            host=place.endpoint.rpartition(":")[0],
            bootstrap_port=work.plan.policy.bootstrap_port,
            number=LEAST_NUMBER + self._draw(MOST_NUMBER - LEAST_NUMBER),
        )

    async def _leg(
        self,
        work: PrefillWork,
        place: PrefillPlace,
        names: LegNames,
        *,
        timeout_seconds: float | None,
        trace: RequestTrace | None,
    ) -> Fields | None:
        """Run one leg that is booked, and end its booking; None where it brings nothing."""
        outcome, began = LegOutcome.CLIENT_LEFT, self._clock()
        try:
            fields = await run_leg(
                self._pages, place.endpoint, work.asked, work.protocol, names, timeout_seconds=timeout_seconds
            )
            outcome = LegOutcome.ANSWERED
        except LegError as error:
            outcome = error.outcome
            self._degradations.note({LEG_FAILED: f"{place.endpoint}: {error}"}, now=self._clock())
            return None
        finally:
            if work.booking is not None:  # else its exchange has ended it
                self._ended(work, place, outcome, began=began, trace=trace)
        return fields

    def _ended(
        self, work: PrefillWork, place: PrefillPlace, outcome: LegOutcome, *, began: float, trace: RequestTrace | None
    ) -> None:
        self._release(work)
        seconds = self._clock() - began
        self._telemetry.leg_ended(place.endpoint, outcome, seconds=seconds)
        if trace is not None:
            trace.leg(endpoint=place.endpoint, outcome=outcome.value, seconds=seconds)
        self._note(place.endpoint, outcome)

    def _release(self, work: PrefillWork) -> None:
        assert work.booking is not None, "a leg is released once"
        booking, work.booking = work.booking, None
        self._books.release_leg(booking)

    def _note(self, endpoint: str, outcome: LegOutcome) -> None:
        if outcome is LegOutcome.FULL:
            self._books.endpoint_full(endpoint)
        elif outcome is not LegOutcome.CLIENT_LEFT:
            failed = outcome not in (LegOutcome.ANSWERED, LegOutcome.REFUSED)
            self._books.endpoint_answered(endpoint, failed=failed)


def plan_of(prepared: Prepared, choice: Choice, view: PoolView, *, ceiling: float | None) -> PrefillPlan | None:
    """Return where a request's prompt is computed; None where there is nobody but the decode pod. Changes nothing.

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
        return msgspec.structs.replace(plan, verdict=Verdict(remote=True, why=_no_prompts(policy.protocol)))
    return plan


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

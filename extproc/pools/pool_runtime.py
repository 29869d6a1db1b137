"""What a pick goes through in one pool, and the one place where it changes anything: `book`.

`pick` reads the parts, decides, and hands the decision to `book`, or the error to `without_decision`. Nothing here
decides or waits.
"""

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import AskedRequest, RequestReader
from extproc.admission.first_pod import FirstPodWaits
from extproc.admission.pool_pressure import PoolPressure
from extproc.admission.prepared_request import Picked, PrefixIndex, Prepared, PromptSource
from extproc.admission.withheld import FIRST_POD
from extproc.choosing.choose import Choice, Full, PoolView, Snapshot
from extproc.choosing.decision import Decision
from extproc.disaggregation.racing import RaceBudget
from extproc.errors import (
    DEFECT,
    FirstPodLateError,
    InternalPickError,
    NoReadyEndpointError,
    PickError,
    PromptLimitError,
    RequestShedError,
)
from extproc.ext_proc.exchange import NO_HEADERS, RequestFacts
from extproc.models.model_rules import ResolvedModel
from extproc.pods.endpoint import Reachability
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.decision_headers import decision_headers, new_decision_id
from extproc.pools.picker_books import PickerBooks, model_names
from extproc.pools.plan_response import Pace, plan_response
from extproc.pools.prefill_legs import PrefillLegs, PrefillWork
from extproc.pools.request_watch import RequestTrace, RequestWatch
from extproc.prefixes.routing_memory import KEY_BYTES
from extproc.quotas.quota import QuotaAsk
from extproc.quotas.shared_quotas import Quotas
from extproc.records.request_events import ClientLeftError, DecisionRecord, RequestOutcome
from extproc.replicas.shared_load import EndpointBookings
from extproc.requests.kept_responses import RANDOM_BYTES, owned_id, with_response_id
from extproc.requests.long_work import LongWork
from extproc.requests.request import TEXT_APIS
from extproc.slo.judgement import Outcome
from extproc.slo.promise import AnswerPromise, OpenPromise
from extproc.telemetry.degradation_log import DegradationLog
from extproc.telemetry.extension_metrics import ModelNames
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry

log = logging.getLogger(__name__)

READY, UNKNOWN = Reachability.READY, Reachability.UNKNOWN

FAILED_OPEN = "failed-open"  # an outcome: sent without a decision


class PendingPick:
    """One pick that is under way, and what is to be noted or given back when it ends."""

    __slots__ = (
        *("arrived_at", "asked", "decision_id", "facts", "is_held", "phases", "prefill", "prepared", "prompt_tokens"),
        *("queued_seconds", "quota", "trace"),
    )

    def __init__(self, facts: RequestFacts, trace: RequestTrace | None = None, *, arrived_at: float = 0.0) -> None:
        self.facts = facts
        self.decision_id = new_decision_id()
        self.arrived_at = arrived_at  # monotonic seconds at which the request was complete
        self.trace = trace  # None: it is not observed
        self.asked: AskedRequest | None = None  # once it is read
        self.prepared: Prepared | None = None  # once it is looked up
        self.prompt_tokens = 0  # once they are known
        self.quota: QuotaAsk | None = None  # what is asked of its tenant's quota
        self.prefill: PrefillWork | None = None  # what is left to do once it is booked; None: nothing
        self.queued_seconds: float | None = None  # None: it did not wait for room
        self.is_held = False  # a promised inter-token time has kept it from an endpoint, which is counted
        self.phases: dict[str, float] = {}  # parse, tokenize, lookup, decide: seconds

    def phase(self, name: str, seconds: float) -> None:
        """Note how long a phase took; of one that comes again, the sum."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds


@dataclass(slots=True, kw_only=True)
class PoolRuntime:
    """The parts of one pool, and what a pick does to them."""

    name: str  # "namespace/name", "" for the pool of `--endpoints`
    reader: RequestReader
    view: PoolView
    prompts: PromptSource
    index: PrefixIndex
    pressure: PoolPressure
    admission: RequestAdmission
    books: PickerBooks
    telemetry: PickerTelemetry
    overload: OverloadTelemetry
    watch: RequestWatch
    degradations: DegradationLog
    reads: Pace  # of responses that are read although they are not sampled
    full: Callable[[float], None]  # told when the pool will have room though nothing happens: monotonic seconds
    long_work: LongWork = field(default_factory=LongWork)
    legs: PrefillLegs | None = None  # None: no prompt is computed by another pod
    races: RaceBudget = field(default_factory=RaceBudget)  # of these legs
    quotas: Quotas | None = None
    others: Callable[[], Mapping[str, EndpointBookings] | None] = lambda: None  # what other replicas have booked
    clock: Callable[[], float] = time.monotonic
    recent: deque[DecisionRecord] = field(default_factory=deque)
    labels: frozenset[str] = frozenset()  # names of models that may be a metric's label
    sample_share: float = 0.0  # of the responses that are read
    read_below_bytes: int = 0
    most_endpoints: int | None = None  # that an answer to Envoy names; None: as the policy has it
    tells_decisions: bool = False  # to clients, in headers of the answer
    # endpoints that a request may go to without a decision; none where the pool fails closed
    anywhere: Callable[[], Sequence[str]] = tuple
    first_pod: FirstPodWaits | None = None  # None: no request waits for one
    under_way: int = 0  # picks: neither booked nor refused
    picked_at: float = float("-inf")  # monotonic seconds of the last pick
    has_failed_open: bool = False

    def begin(self, facts: RequestFacts) -> PendingPick:
        """Count a pick that begins now, and follow it while there is an observer."""
        self.under_way += 1
        if not self.watch.is_used:
            return PendingPick(facts, arrived_at=self.clock())
        audit_share = self.view.policy.observability.audit_share
        trace = self.watch.open(self.name, facts, audit_share=audit_share)
        pending = PendingPick(facts, trace, arrived_at=self.clock())
        if pending.trace is not None:
            pending.trace.phases = pending.phases
        return pending

    def end(self, pending: PendingPick) -> None:
        """Count a pick that is over, whatever it came to."""
        self.under_way -= 1
        trace_id = pending.trace.trace_id if pending.trace is not None else ""
        for name, seconds in pending.phases.items():
            self.telemetry.phase(name, seconds, trace_id=trace_id)
        if pending.asked is None:
            return
        if ignored := pending.asked.request_class.ignored_objective:
            self.overload.objective_ignored(ignored.value)
        for why in pending.asked.ignored_targets:
            self.telemetry.slo.header_ignored(why)

    def book(self, picked: Picked, pending: PendingPick) -> BookedExchange:
        """Book a decision in the turn of the event loop in which it was made: the next one counts with it.

        What is to be done before the request goes there is in `pending.prefill` then.
        """
        decision, prepared, snapshot = picked.decision, picked.prepared, picked.choice.snapshot
        asked, trace = prepared.asked, pending.trace
        resolved = asked.resolved
        label = self._label(resolved)
        # before the booking, as all that may fail: it would not be released
        self._count_admitted(picked.choice, asked)
        if picked.choice.by_promise:
            self._count_held(pending, asked, has_room=True)
        if picked.withheld:
            self.telemetry.shadow.withheld(asked.request_class.class_name, picked.withheld)
        if picked.prefill is not None and picked.prefill.race is not None:
            self.races.count(picked.prefill)
        now, sent_at = self.clock(), time.time()
        is_sampled = random.random() < self.sample_share  # noqa: S311
        promise, answer = self._make_promise(picked, pending, is_sampled=is_sampled, now=now, sent_at=sent_at)
        plan = plan_response(
            picked,
            pool=self.name,
            is_sampled=is_sampled,
            read_below_bytes=self.read_below_bytes,
            reads=self.reads,
            now=now,
            label=label,
            sent_at=sent_at,
            promise=answer,
        )
        body, response_id = prepared.sent.changed, asked.request.response_id
        if prepared.sent.has_response_id:
            assert body is not None, "it has the id in it"
            response_id = owned_id(decision.endpoints[0], secrets.token_bytes(RANDOM_BYTES))
            body = with_response_id(body, response_id)
        exchange = BookedExchange(
            books=self.books,
            endpoints=decision.endpoints[: self.most_endpoints],
            booking=self.books.book(
                picked,
                label=label,
                arrived_at=pending.arrived_at,
                trace_id=trace.trace_id if trace is not None else "",
            ),
            model=label,
            arm=resolved.arm,
            body=body,
            response_id=response_id,
            removed_headers=prepared.sent.removed_headers,
            response_headers=self.told(pending, prepared.response_headers, decision),
            plan=plan,
            trace=trace,
            promise=promise,
            set_headers=trace.set_headers if trace is not None else NO_HEADERS,
        )
        if self.legs is not None and picked.prefill is not None:
            try:
                pending.prefill = self.legs.book(picked, exchange)
            except BaseException:
                exchange.finish()  # nobody else would release what is booked
                raise
        pending.phase("decide", self.clock() - snapshot.at)
        if trace is not None:
            trace.settle()
            trace.will_be_read(plan)
            trace.prompt_key, trace.queued_seconds = _prompt_key(prepared), pending.queued_seconds
        # the answer leaves in this turn of the loop; what need not be ready for it comes after it
        asyncio.get_running_loop().call_soon(self._remember, picked, pending, label)
        return exchange

    def _names(self, pending: PendingPick) -> ModelNames:
        """Return a request's models as the inference extension's metrics name them."""
        resolved = pending.asked.resolved if pending.asked is not None else None
        return model_names(resolved, self._label(resolved) if resolved is not None else "")

    def _label(self, resolved: ResolvedModel) -> str:
        """Return the model that was asked for, if it may be a metric's label."""
        return resolved.requested if resolved.requested is not None and resolved.requested in self.labels else ""

    def told(
        self, pending: PendingPick, headers: Mapping[str, str], decision: Decision | None = None
    ) -> Mapping[str, str]:
        """Add what the client is told of the decision to the headers of its answer."""
        if not self.tells_decisions:
            return headers
        predicted = decision.matched_tokens if decision is not None and decision.prompt_tokens else None
        return {**headers, **decision_headers(pending.decision_id, predicted_tokens=predicted)}

    def serves(self, endpoint: str) -> bool:
        """Tell whether an endpoint may get requests now, as far as is known."""
        statuses = self.view.endpoints.snapshot(now=self.clock())
        return any(each.address == endpoint and each.reachability in (READY, UNKNOWN) for each in statuses)

    def no_room(self, found: Full, asked: AskedRequest, snapshot: Snapshot, pending: PendingPick) -> None:
        """Note that a request has found every endpoint full."""
        now = snapshot.at
        if found.by_promise and not self.view.policy.shadow:  # there it is sent on all the same
            self._count_held(pending, asked, has_room=False)
        self.pressure.saw(asked.request_class, snapshot.kept, pool=asked.pool, has_room=False, now=now)
        if found.opens_in_seconds is not None:
            self.full(now + found.opens_in_seconds)

    def without_decision(self, pending: PendingPick, error: BaseException) -> BookedExchange | None:
        """Give back what a pick has taken that failed, and count it; `error` is then the answer for the client.

        Where the pool fails open, return an exchange with an endpoint taken by chance in its place.
        """
        if pending.quota is not None and self.quotas is not None:
            self.quotas.cancel(pending.quota)
        if isinstance(error, RequestShedError):
            self._count_shed(pending, error)
        if not isinstance(error, Exception):  # the client has left, or the picker stops
            self._count_missed(pending, Outcome.LATE)
            if pending.trace is not None and isinstance(error, asyncio.CancelledError):
                left = ClientLeftError("the client left while it waited")
                self._tell(pending, RequestOutcome.ABANDONED, _refusal_record(pending, left))
            return None
        refusal = error if isinstance(error, PickError) else InternalPickError(DEFECT)
        refusal.headers = self.told(pending, refusal.headers)
        if refusal is not error:
            request_id = pending.facts.request_id
            ids = {"request_id": request_id, "decision_id": pending.decision_id}
            log.error("a pick failed; the client gets a 500", exc_info=error, extra=ids)
        if isinstance(refusal, NoReadyEndpointError):
            self._count_no_pod(pending, refusal)
        if isinstance(refusal, NoReadyEndpointError | InternalPickError):
            exchange = self._anywhere(pending, refusal)
            if exchange is not None:
                return exchange
        self._count_refused(pending, refusal)
        self.telemetry.refused(refusal.reason)
        self.telemetry.history.load.refused(now=self.clock())
        if self.telemetry.extension is not None:
            self.telemetry.extension.refused(self._names(pending), status=refusal.status)
        record = _refusal_record(pending, refusal)
        self.recent.appendleft(record)
        self._tell(pending, RequestOutcome.REFUSED, record)
        return None

    def _count_no_pod(self, pending: PendingPick, refusal: NoReadyEndpointError) -> None:
        self.overload.found_no_pod()
        if self.telemetry.extension is not None:
            self.telemetry.extension.scheduling.not_given(target=self._names(pending).target)
        if isinstance(refusal, FirstPodLateError):
            pending.queued_seconds = refusal.waited_seconds
        elif self.first_pod is not None and pending.asked is not None and self.first_pod.would_be_due():
            self.telemetry.shadow.left_to_wait(pending.asked.request_class.class_name, FIRST_POD)

    def _count_held(self, pending: PendingPick, asked: AskedRequest, *, has_room: bool) -> None:
        if not pending.is_held:
            pending.is_held = True
            self.overload.held_by_promise(asked.request_class.class_name, has_room=has_room)

    def _count_admitted(self, choice: Choice, asked: AskedRequest) -> None:
        decision, snapshot, request_class = choice.decision, choice.snapshot, asked.request_class
        now = snapshot.at
        if choice.needed_room:
            self.pressure.saw(request_class, snapshot.kept, pool=asked.pool, has_room=True, now=now)
        uncached = max(decision.prompt_tokens - decision.matched_tokens, 0)
        self.pressure.went(request_class, pool=asked.pool, uncached_tokens=uncached, now=now)
        self.overload.admitted(
            request_class.class_name,
            tenant=request_class.tenant,
            uncached_tokens=uncached,
            cached_tokens=decision.matched_tokens,
        )
        self.view.turns.count(snapshot.ask.model)
        if choice.warm_wait is not None:
            self.view.hot.note(choice.warm_wait, endpoint=decision.endpoints[0], now=now)

    def _promise(self, asked: AskedRequest, pending: PendingPick) -> OpenPromise | None:
        """Return what a request is promised; None where nothing is judged: it wants no text, or no answer is read."""
        request = asked.request
        if not self.sample_share or request.api not in TEXT_APIS:
            return None
        return OpenPromise(
            promise=self.telemetry.slo.promise_of(asked.request_class, model=asked.pool),
            asked=asked.asked_targets,
            arrived_at=pending.arrived_at,
            is_stream=request.stream,
        )

    def _make_promise(
        self, picked: Picked, pending: PendingPick, *, is_sampled: bool, now: float, sent_at: float
    ) -> tuple[OpenPromise | None, AnswerPromise | None]:
        """Count what a request is promised; return what may still be kept, and what its answer is judged by, if it is.

        `now`: monotonic seconds; `sent_at`: the same moment in unix seconds.
        """
        prepared, endpoint = picked.prepared, picked.decision.endpoints[0]
        promise = self._promise(prepared.asked, pending)
        if promise is None:
            return None, None
        self.telemetry.slo.promised(promise.promise)
        if promise.is_broken(now=now):
            self.books.broken(promise, Outcome.LATE, endpoint=endpoint)
            return None, None
        is_always_read = prepared.quota is not None and prepared.quota.note is not None
        if not (is_sampled or is_always_read):
            return promise, None
        answer = AnswerPromise(
            promise=promise.promise,
            asked=promise.asked,
            arrived_at=sent_at - (now - promise.arrived_at),
            endpoint=endpoint,
            weight=1.0 if is_always_read else 1.0 / self.sample_share,
        )
        return promise, answer

    def _count_refused(self, pending: PendingPick, refusal: PickError) -> None:
        """Count the promise that a refusal breaks, which is not the client's own fault or its quota's."""
        if refusal.status >= 500 or isinstance(refusal, RequestShedError | PromptLimitError):
            self._count_missed(pending, Outcome.REFUSED)

    def _count_missed(self, pending: PendingPick, outcome: Outcome) -> None:
        promise = self._promise(pending.asked, pending) if pending.asked is not None else None
        if promise is None or (outcome is Outcome.LATE and not promise.is_broken(now=self.clock())):
            return  # of a client that has left in time nothing is known
        self.telemetry.slo.promised(promise.promise)
        self.telemetry.slo.missed(promise, outcome)

    def _count_shed(self, pending: PendingPick, error: RequestShedError) -> None:
        assert pending.asked is not None, "only what was read is refused for load"
        request_class = pending.asked.request_class
        self.overload.shed(request_class.class_name, reason=error.reason, tenant=request_class.tenant)
        if error.waited_seconds is not None:
            pending.queued_seconds = error.waited_seconds

    def _anywhere(self, pending: PendingPick, error: PickError) -> BookedExchange | None:
        """Return an exchange with an endpoint taken by chance; None where the pool fails closed, or has none."""
        subset, trace = pending.facts.subset, pending.trace
        endpoints = [address for address in self.anywhere() if subset is None or address in subset]
        if not endpoints:
            return None
        self.picked_at, self.has_failed_open = self.clock(), True
        self.telemetry.refused(FAILED_OPEN)
        most = self.most_endpoints or 1 + self.view.policy.fallbacks
        chosen = random.sample(endpoints, min(most, len(endpoints)))
        self._tell(pending, RequestOutcome.FAILED_OPEN, _refusal_record(pending, error), endpoint=chosen[0])
        return BookedExchange(
            books=self.books,
            endpoints=chosen,
            booking=None,
            response_headers=self.told(pending, NO_HEADERS),
            trace=trace,
            set_headers=trace.set_headers if trace is not None else NO_HEADERS,
        )

    def _tell(
        self, pending: PendingPick, kind: RequestOutcome, record: DecisionRecord, *, endpoint: str | None = None
    ) -> None:
        trace = pending.trace
        if trace is None or not trace.settle():  # or it was booked, and is told of as that
            return
        trace.queued_seconds = pending.queued_seconds
        if pending.prepared is not None:
            trace.prompt_key = _prompt_key(pending.prepared)
        asyncio.get_running_loop().call_soon(partial(trace.decided, kind, record, endpoint=endpoint))

    def _remember(self, picked: Picked, pending: PendingPick, label: str) -> None:
        decision, asked, trace = picked.decision, picked.prepared.asked, pending.trace
        self.picked_at = now = self.clock()
        if decision.degraded:
            self.degradations.note(decision.degraded, now=now)
        self.books.remember(picked, label=label)
        summary = picked.prepared.summary
        record = DecisionRecord(
            at=time.time(),
            id=pending.decision_id,
            facts=asked.facts,
            model=summary.model,
            outcome=decision,
            asked=summary,
            prefill=picked.prefill,
            shadow=picked.withheld,
        )
        self.recent.appendleft(record)
        if trace is not None:
            trace.decided(RequestOutcome.ROUTED, record, endpoint=decision.endpoints[0])
        self.watch.tell_picked(self.name, picked)


def _refusal_record(pending: PendingPick, refusal: PickError) -> DecisionRecord:
    """Return what is remembered of a request without a decision."""
    asked = None
    if pending.prepared is not None:
        asked = pending.prepared.summary
    elif pending.asked is not None:
        asked = pending.asked.summary(prompt_tokens=pending.prompt_tokens)
    model = asked.model if asked is not None else None
    return DecisionRecord(
        at=time.time(), id=pending.decision_id, facts=pending.facts, model=model, outcome=refusal, asked=asked
    )


def _prompt_key(prepared: Prepared) -> bytes:
    """Return the key of the prompt's last whole block, "" where its blocks are not known."""
    prompts = prepared.query.prompts
    return bytes(prompts[0].keys[-KEY_BYTES:]) if prompts else b""

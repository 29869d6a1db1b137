"""The parts of one pool that a pick uses, and the only place where a decision takes effect: `book`.

`pick` reads the parts, decides, and passes the decision to `book`, or the error to `without_decision`. Nothing here
decides or waits.
"""

import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import AskedRequest, RequestReader, SentBody, most_generated
from extproc.admission.first_pod import FirstPodWaits
from extproc.admission.gate import FIRST_POD, Gate
from extproc.admission.pool_pressure import PoolPressure
from extproc.admission.prepared_request import Picked, PrefixIndex, Prepared, PromptSource
from extproc.answers.promise import AnswerPromise, OpenPromise, Promise
from extproc.choosing.choose import Choice, Full, PoolView, Snapshot
from extproc.choosing.decision import Decision
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.disaggregation.racing import RaceBudget
from extproc.errors import DEFECT, FirstPodLateError, InternalPickError, NoReadyEndpointError, PickError
from extproc.ext_proc.exchange import NO_HEADERS, RequestFacts
from extproc.ledger.facts import (
    Arrival,
    ClientLeftError,
    Decided,
    DecisionRecord,
    Held,
    NoDecision,
    RequestOutcome,
)
from extproc.ledger.ledger import RequestWatch
from extproc.pods.endpoint import Reachability
from extproc.policy.request_class import RequestClass
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.picker_books import PickerBooks
from extproc.pools.plan_response import Pace, decision_headers, new_decision_id, plan_response
from extproc.pools.prefill_legs import PrefillLegs, PrefillWork
from extproc.prefixes.routing_memory import KEY_BYTES
from extproc.requests.client_body import ClientBody
from extproc.requests.long_work import LongWork
from extproc.requests.request import TEXT_APIS
from extproc.requests.responses_api import RANDOM_BYTES, owned_id, with_response_id
from extproc.shared.quota import QuotaAsk
from extproc.shared.shared_load import EndpointBookings
from extproc.shared.shared_quotas import Quotas

log = logging.getLogger(__name__)


class Draft:
    """One pick under way: the facts to record, the policy's gate, and the holds to release if it fails."""

    __slots__ = (
        *("arrival", "asked", "body", "decision_id", "facts", "gate", "held", "holds", "is_told"),
        *("phases", "prefill", "prepared", "prompt_tokens", "queued_seconds"),
    )

    def __init__(self, facts: RequestFacts, arrival: Arrival, gate: Gate) -> None:
        self.facts = facts
        self.decision_id = new_decision_id()
        self.arrival = arrival
        self.gate = gate
        self.holds: list[Callable[[], None]] = []  # release the ask to its tenant's quota, or the booking
        self.body: ClientBody | None = None  # None if Envoy does not send it
        self.asked: AskedRequest | None = None  # after parsing
        self.prepared: Prepared | None = None  # after the lookup
        self.prompt_tokens = 0  # after tokenizing
        self.prefill: PrefillWork | None = None  # the legs to run after the booking, if any
        self.queued_seconds: float | None = None  # None if it did not wait for room
        self.held: Held | None = None  # the first time that an inter-token target has kept it from an endpoint
        self.is_told = False  # its decision
        self.phases: dict[str, float] = {}  # seconds of parse, tokenize, lookup, decide

    def release(self) -> None:
        """Release the holds, the last first."""
        with ExitStack() as stack:
            while self.holds:
                stack.callback(self.holds.pop(0))

    def phase(self, name: str, seconds: float) -> None:
        """Add to the duration of a phase; phases may repeat."""
        self.phases[name] = self.phases.get(name, 0.0) + seconds


@dataclass(slots=True, kw_only=True)
class PoolRuntime:
    """The parts of one pool, and a pick's effects on them."""

    name: str  # "namespace/name", "" for the pool of `--endpoints`
    reader: RequestReader
    view: PoolView
    prompts: PromptSource
    index: PrefixIndex
    pressure: PoolPressure
    admission: RequestAdmission
    books: PickerBooks
    promise_of: Callable[[RequestClass, str], Promise]  # by class and model, as labels may name them
    watch: RequestWatch
    reads: Pace  # of responses that are read without being sampled
    full: Callable[[float], None]  # called with the monotonic time at which the pool will have room without any event
    long_work: LongWork = field(default_factory=LongWork)
    legs: PrefillLegs | None = None  # None without prefill by other pods
    races: RaceBudget = field(default_factory=RaceBudget)  # of the legs
    quotas: Quotas | None = None
    others: Callable[[], Mapping[str, EndpointBookings] | None] = lambda: None  # the other replicas' bookings
    clock: Callable[[], float] = time.monotonic
    labels: frozenset[str] = frozenset()  # model names allowed as a metric's label
    sample_share: float = 0.0  # share of responses that are read
    read_below_bytes: int = 0
    most_endpoints: int | None = None  # in an answer to Envoy; None leaves it to the policy
    tells_decisions: bool = False  # in headers of the client's answer
    # endpoints for requests without a decision; none if the pool fails closed
    anywhere: Callable[[], Sequence[str]] = tuple
    first_pod: FirstPodWaits | None = None  # None if requests never wait for a first pod
    under_way: int = 0  # picks neither booked nor refused yet
    picked_at: float = float("-inf")  # monotonic seconds of the last pick
    has_failed_open: bool = False

    def draft(self, facts: RequestFacts) -> Draft:
        """Return the draft of an explanation."""
        return Draft(facts, Arrival(), Gate(is_shadow=self.view.policy.shadow))

    def begin(self, facts: RequestFacts) -> Draft:
        """Count a pick that begins now."""
        self.under_way += 1
        arrival = self.watch.arrival(self.name, facts, at=self.clock())
        return Draft(facts, arrival, Gate(is_shadow=self.view.policy.shadow))

    def ask_quota(self, asked: AskedRequest, sent: SentBody, draft: Draft) -> QuotaAsk | None:
        """Reserve a request's tokens of its tenant's quota until it is settled; None if no quota applies."""
        if self.quotas is None or not draft.arrival.number or not asked.request.costs_gpu:
            return None
        key = self.quotas.match(asked.request_class.tenant, asked.charged)
        if key is None:
            return None
        most = most_generated(asked, sent)
        sequences = asked.request.sequences
        ask = self.quotas.ask(key, prompt_tokens=draft.prompt_tokens, most_generated=most, sequences=sequences)
        draft.holds.append(partial(self.quotas.cancel, ask))
        return ask

    def book(self, picked: Picked, draft: Draft) -> BookedExchange:
        """Book a decision in the same turn of the event loop, so that the next decision takes it into account.

        Afterwards, `draft.prefill` has the legs to run before the request is sent.
        """
        decision, prepared, snapshot = picked.choice.decision, picked.prepared, picked.choice.snapshot
        asked, arrival, endpoint = prepared.asked, draft.arrival, decision.endpoints[0]
        requested = asked.resolved.requested
        label = requested if requested is not None and requested in self.labels else ""
        # before the booking, like everything that may fail: the booking would leak
        self._take_load(picked.choice, asked)
        if picked.choice.by_promise and draft.held is None:
            draft.held = Held.ELSEWHERE
        if picked.prefill is not None and picked.prefill.race is not None:
            self.races.count(picked.prefill)
        self.picked_at = now = self.clock()
        sent_at = time.time()
        is_sampled = random.random() < self.sample_share  # noqa: S311
        promise = self._promise(asked, draft)
        is_late = promise is not None and promise.is_broken(now=now)
        open_promise = None if is_late else promise
        answer = self._answer_promise(open_promise, picked, is_sampled=is_sampled, epoch=sent_at - now)
        is_watched = asked.request.stream and self.books.health.is_suspect(endpoint, partial(self.reads.take, now=now))
        plan = plan_response(
            picked,
            pool=self.name,
            is_sampled=is_sampled,
            is_watched=is_watched,
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
            response_id = owned_id(endpoint, secrets.token_bytes(RANDOM_BYTES), key=self.books.response_key)
            body = with_response_id(body, response_id)
        endpoints, rank = picked.sent_to(self.books.ranks, self.most_endpoints)
        expected = self.books.expect(picked)
        record = self._record(draft, decision, prefill=picked.prefill)
        exchange = BookedExchange(
            books=self.books,
            arrival=arrival,
            endpoints=endpoints,
            booking=self.books.book(picked),
            model=label,
            arm=asked.resolved.arm,
            body=body,
            response_id=response_id,
            removed_headers=prepared.sent.removed_headers,
            response_headers=self.told(draft, prepared.response_headers, decision),
            plan=plan,
            promise=open_promise,
            set_headers=arrival.set_headers,
        )
        draft.holds = [exchange.finish]  # which settles the quota, too
        if self.legs is not None and picked.prefill is not None:
            draft.prefill = self.legs.book(picked, exchange)
        if rank:  # not before the leg, which has another one
            exchange.set_headers = {**exchange.set_headers, **rank}
        if (key := plan.key) is not None:  # the response may come on a separate stream, and finds its request by this
            exchange.reading_key = key
            self.books.reading[key] = exchange
        draft.phase("decide", self.clock() - snapshot.at)
        self._tell(
            *(draft, RequestOutcome.ROUTED, record, picked),
            endpoint=endpoint,
            promise=promise,
            is_late=is_late,
            label=label,
            expected=expected,
        )
        return exchange

    def told(self, draft: Draft, headers: Mapping[str, str], decision: Decision | None = None) -> Mapping[str, str]:
        """Return the client's answer headers with the decision headers added, if enabled."""
        if not self.tells_decisions:
            return headers
        is_known = draft.prepared is not None and draft.prepared.tokens.prompts
        predicted = decision.matched_tokens if decision is not None and is_known else None
        return {**headers, **decision_headers(draft.decision_id, predicted_tokens=predicted)}

    def serves(self, endpoint: str) -> bool:
        """Tell whether an endpoint is in the pool, and ready or of unknown state."""
        statuses = self.view.endpoints.snapshot(now=self.clock())
        usable = Reachability.READY, Reachability.UNKNOWN
        return any(each.address == endpoint and each.reachability in usable for each in statuses)

    def no_room(self, found: Full, asked: AskedRequest, snapshot: Snapshot, draft: Draft) -> None:
        """Record that a request found every endpoint full."""
        now = snapshot.at
        if found.by_promise and draft.held is None and not draft.gate.is_shadow:
            draft.held = Held.NO_ROOM  # in shadow mode the target holds no request back
        self.pressure.saw(asked.request_class, snapshot.kept, pool=asked.pool, has_room=False, now=now)
        if found.opens_in_seconds is not None:
            self.full(now + found.opens_in_seconds)

    def without_decision(self, draft: Draft, error: BaseException) -> BookedExchange | None:
        """Tell a pick's failure; `error` becomes the client's answer.

        If the pool fails open, return an exchange with a random endpoint instead.
        """
        promise = self._promise(draft.asked, draft) if draft.asked is not None else None
        if not isinstance(error, Exception):  # the client has left, or the picker is stopping
            record = self._record(draft, NoDecision.of(ClientLeftError("the client left while it waited")))
            is_late = promise is not None and promise.is_broken(now=self.clock())
            self._tell(draft, RequestOutcome.ABANDONED, record, promise=promise, is_late=is_late)
            return None
        refusal = error if isinstance(error, PickError) else InternalPickError(DEFECT)
        refusal.headers = self.told(draft, refusal.headers)
        if refusal is not error:
            request_id = draft.facts.request_id
            ids = {"request_id": request_id, "decision_id": draft.decision_id}
            log.error("a pick failed; the client gets a 500", exc_info=error, extra=ids)
        if refusal.waited_seconds is not None:
            draft.queued_seconds = refusal.waited_seconds
        if self._would_wait(draft, refusal):
            draft.gate.note(FIRST_POD)
        record = self._record(draft, NoDecision.of(refusal))
        if isinstance(refusal, NoReadyEndpointError | InternalPickError):
            exchange = self._anywhere(draft)
            if exchange is not None:
                self._tell(draft, RequestOutcome.FAILED_OPEN, record, endpoint=exchange.endpoints[0])
                return exchange
        self._tell(draft, RequestOutcome.REFUSED, record, promise=promise)
        return None

    def _would_wait(self, draft: Draft, refusal: PickError) -> bool:
        """Tell whether a request would have waited for the first pod if the policy were live."""
        if not isinstance(refusal, NoReadyEndpointError) or isinstance(refusal, FirstPodLateError):
            return False
        if self.first_pod is None or draft.asked is None or not draft.asked.request.costs_gpu:
            return False
        return self.first_pod.would_be_due()

    def _take_load(self, choice: Choice, asked: AskedRequest) -> None:
        decision, snapshot, request_class = choice.decision, choice.snapshot, asked.request_class
        now, pool = snapshot.at, asked.pool
        self.view.turns.count(snapshot.ask.model)
        if not asked.request.costs_gpu:
            return
        if choice.needed_room:
            self.pressure.saw(request_class, snapshot.kept, pool=pool, has_room=True, now=now)
        uncached = max(decision.prompt_tokens - decision.matched_tokens, 0)
        self.pressure.went(request_class, pool=pool, uncached_tokens=uncached, now=now)
        if choice.warm_wait is not None:
            self.view.hot.note(choice.warm_wait, endpoint=decision.endpoints[0], now=now)

    def _promise(self, asked: AskedRequest, draft: Draft) -> OpenPromise | None:
        """Return a request's targets, or None if it is not judged: no text API, or no answers are read."""
        request = asked.request
        if not self.sample_share or request.api not in TEXT_APIS:
            return None
        return OpenPromise(
            promise=self.promise_of(asked.request_class, asked.pool),
            asked=asked.asked_targets,
            arrived_at=draft.arrival.at,
            is_stream=request.stream,
        )

    def _answer_promise(
        self, promise: OpenPromise | None, picked: Picked, *, is_sampled: bool, epoch: float
    ) -> AnswerPromise | None:
        """Return the targets to judge a request's answer by, if it is read.

        `epoch`: unix seconds at 0 of the monotonic clock.
        """
        quota = picked.prepared.quota
        is_always_read = quota is not None and quota.note is not None
        if promise is None or not (is_sampled or is_always_read):
            return None
        return AnswerPromise(
            promise=promise.promise,
            asked=promise.asked,
            arrived_at=epoch + promise.arrived_at,
            endpoint=picked.decision.endpoints[0],
            weight=1.0 if is_always_read else 1.0 / self.sample_share,
        )

    def _anywhere(self, draft: Draft) -> BookedExchange | None:
        """Return an exchange with a random endpoint, or None if the pool fails closed or has no endpoint."""
        subset = draft.facts.subset
        endpoints = [address for address in self.anywhere() if subset is None or address in subset]
        if not endpoints:
            return None
        try:
            sent = self.reader.unread(draft.facts, draft.body)
        except PickError:  # no pod may get it
            return None
        self.picked_at, self.has_failed_open = self.clock(), True
        most = self.most_endpoints or 1 + self.view.policy.fallbacks
        return BookedExchange(
            books=self.books,
            arrival=draft.arrival,
            endpoints=random.sample(endpoints, min(most, len(endpoints))),
            booking=None,
            body=sent.changed,
            removed_headers=sent.removed_headers,
            response_headers=self.told(draft, NO_HEADERS),
            set_headers=draft.arrival.set_headers,
        )

    def _record(
        self, draft: Draft, outcome: Decision | NoDecision, *, prefill: PrefillPlan | None = None
    ) -> DecisionRecord:
        asked = None
        if draft.prepared is not None:
            asked = draft.prepared.summary
        elif draft.asked is not None:
            asked = draft.asked.summary(prompt_tokens=draft.prompt_tokens)
        return DecisionRecord(
            at=time.time(),
            id=draft.decision_id,
            facts=draft.facts,
            model=asked.model if asked is not None else None,
            outcome=outcome,
            asked=asked,
            prefill=prefill,
            shadow=tuple(draft.gate.noted),
        )

    def _tell(
        self,
        draft: Draft,
        kind: RequestOutcome,
        record: DecisionRecord,
        *facts: Picked,
        endpoint: str | None = None,
        promise: OpenPromise | None = None,
        is_late: bool = False,
        label: str = "",
        expected: tuple[float | None, float] = (None, 0.0),
    ) -> None:
        """Tell the decision after `facts`, once."""
        if draft.is_told:
            return
        draft.is_told = True
        asked = draft.asked
        resolved = asked.resolved if asked is not None else None
        prompts = draft.prepared.query.prompts if draft.prepared is not None else ()
        fact = Decided(
            arrival=draft.arrival,
            outcome_kind=kind,
            record=record,
            endpoint=endpoint,
            at=self.clock(),
            queued_seconds=draft.queued_seconds,
            phases=draft.phases,
            audit_share=self.view.policy.observability.audit_share,
            prompt_key=bytes(prompts[0].keys[-KEY_BYTES:]) if prompts else b"",  # of its last full block
            label=label,
            served=resolved.base.name if resolved is not None and resolved.base is not None else "",
            promise=promise,
            is_late=is_late,
            ignored_targets=asked.ignored_targets if asked is not None else (),
            held=draft.held,
            expected_ttft_seconds=expected[0],
            seconds_a_token=expected[1],
        )
        self.books.ledger.tell(*facts, fact)

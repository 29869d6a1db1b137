"""The books of a pool: bookings, their outcomes, and the memory for later picks."""

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from extproc.admission.prepared_request import Picked, response_session
from extproc.answers.answer_lengths import AnswerKind, AnswerLengths
from extproc.answers.realised import RealisedWatch
from extproc.answers.response_plan import ResponsePlan
from extproc.choosing.deadly_requests import DeadlyRequests
from extproc.choosing.endpoint_health import EndpointHealth, Outcome
from extproc.choosing.room import expected_ttft
from extproc.disaggregation.prefill_plan import PrefillPlace
from extproc.ledger.facts import (
    Decided,
    Ended,
    EndpointFailed,
    EndpointFull,
    EndpointRemoved,
    LegEnd,
    Read,
    Rerouted,
)
from extproc.ledger.ledger import Ledger
from extproc.pods.endpoint import EndpointTrend, Role
from extproc.pods.inflight import Booking, Bookings
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.values import PickPolicy
from extproc.pools.booked_exchange import BookedExchange
from extproc.prefixes.prompt_match import PromptKeys
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.shared.quota import QuotaAsk, QuotaNote, surely_generated
from extproc.shared.shared_load import EndpointBookings
from extproc.shared.shared_quotas import Quotas
from extproc.shared.shared_state import PoolShare
from kvmesh.pods.pod_report import EndpointLoad

SEED, OWN_KEY = secrets.randbits(64), secrets.token_bytes(32)  # of digests of requests; of ids of kept responses
UNREAD = 6  # streams in a row, per picker, without a read reaching this one: the odds by chance are 1 in 400


class PickerBooks:
    """Implements `booked_exchange.ExchangeBooks`."""

    def __init__(
        self, endpoints: Iterable[str], *, policy: PickPolicy, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.picks: dict[str, int] = dict.fromkeys(endpoints, 0)
        self.ranks: dict[str, tuple[int, ...]] = {}  # pod -> its ranks, if it has several that a header can choose
        self._roles = policy.roles
        self._leaving: set[str] = set()  # removed endpoints with open requests
        self.bookings = Bookings(tokens_per_second=policy.prefill_tokens_per_second)
        self.memory = RoutingMemory(policy)
        self.health = EndpointHealth(policy.health)
        self.health.endpoints = len(self.picks)
        self.deadly = DeadlyRequests()
        self.estimates = LatencyEstimates(tokens_per_second=policy.prefill_tokens_per_second)
        self.links = LinkEstimates()
        self.answers = AnswerLengths()
        self.realised_watch = RealisedWatch()
        # set later, because they read the books
        self.shared: PoolShare | None = None
        self.quotas: Quotas | None = None
        self.freed: Callable[[], None] = lambda: None  # called when there may be room for a waiting request
        self.ledger = Ledger()
        self.reading: dict[tuple[float, str], BookedExchange] = {}  # those whose responses may be read
        self._sent: dict[Booking, _Sent] = {}
        self._legs: dict[Booking, Sequence[PromptKeys]] = {}  # bookings of prefill legs, and their prompts
        self.clock = clock

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Set the endpoints. Removed ones keep their bookings, and are forgotten once these have ended."""
        there = dict.fromkeys(endpoints)
        gone = [endpoint for endpoint in self.picks if endpoint not in there]
        self.picks = {endpoint: self.picks.get(endpoint, 0) for endpoint in (*there, *gone)}
        self._leaving = set(gone)
        self.health.endpoints = len(there)
        for endpoint in gone:
            self.memory.forget(endpoint)
            self._forget_if_free(endpoint)
        self.freed()  # a waiting request may fit now, or fit nowhere any more

    def reconfigure(self, policy: PickPolicy, *, memory_share: float = 1.0) -> None:
        """Switch to another policy; bookings and learned values stay."""
        tokens_per_second = policy.prefill_tokens_per_second
        self._roles = policy.roles
        self.bookings.reconfigure(tokens_per_second=tokens_per_second)
        self.estimates.reconfigure(tokens_per_second=tokens_per_second)
        self.memory.reconfigure(policy, share=memory_share)
        self.health.reconfigure(policy.health)

    @property
    def response_key(self) -> bytes:
        """The key of kept responses' ids: all pickers', or this one's if it shares nothing."""
        return OWN_KEY if self.shared is None else self.shared.secret

    @property
    def open_requests(self) -> int:
        """The number of open requests."""
        return len(self._sent)

    def role_of(self, endpoint: str) -> str:
        """Return the name of an endpoint's role in the policy."""
        return self._roles.get(endpoint, Role.BOTH).value

    def _forget_if_free(self, endpoint: str) -> None:
        if endpoint in self._leaving and self.bookings.forget(endpoint):
            self._leaving.discard(endpoint)
            del self.picks[endpoint]
            self._forget(endpoint)

    def _forget(self, endpoint: str) -> None:
        self.memory.forget(endpoint)  # again: a request under way may have been remembered since
        self.estimates.forget(endpoint)
        self.links.forget(endpoint)
        self.health.restarted(endpoint)
        self.deadly.forget(endpoint)
        self.ledger.tell(EndpointRemoved(endpoint))

    def book(self, picked: Picked) -> Booking:
        """Book a decision, so that the next pick takes it into account."""
        decision, prepared, now = picked.choice.decision, picked.prepared, self.clock()
        endpoint, request = decision.endpoints[0], prepared.asked.request
        prompts: Sequence[PromptKeys] = ()
        uncached = context = 0
        if request.costs_gpu:  # else it leaves nothing in the cache
            prompts, context = prepared.query.prompts, decision.prompt_tokens
            uncached = picked.uncached_tokens
        ask = prepared.query.ask
        booking = self.bookings.book(
            endpoint,
            now=now,
            uncached_tokens=uncached,
            context_tokens=context,
            promised=prepared.asked.promised_class,
            sequences=request.sequences if request.costs_gpu else 0,
            answer_tokens=ask.answer_tokens,
            answer_variance=ask.answer_spread**2,
        )
        self._sent[booking] = _Sent(
            prompts=prompts,
            session=prepared.query.session,
            adapter=prepared.asked.resolved.adapter,
            quota=prepared.quota,
            is_stream=request.stream,
            answer=prepared.answer_kind,
            digest=prepared.asked.digest(SEED),
        )
        booking.is_engines = request.costs_gpu and not request.has_media
        if prompts:
            self.memory.began(endpoint, prompts, now=now)
        self.health.sent(endpoint, now=now)
        if self.shared is not None:
            self.shared.changed()
        return booking

    def book_leg(self, place: PrefillPlace, prompts: Sequence[PromptKeys], *, context_tokens: int) -> Booking:
        """Book a prompt on a prefill pod until `release_leg`. It does not count as a request."""
        now, uncached = self.clock(), place.uncached_tokens
        booking = self.bookings.book(place.endpoint, now=now, uncached_tokens=uncached, context_tokens=context_tokens)
        self._legs[booking] = prompts
        self.memory.began(place.endpoint, prompts, now=now)
        self.estimates.promised(place.endpoint, seconds=place.leg_seconds)
        self.memory.note(place.endpoint, prompts=prompts, session=None, adapter=None, now=now)
        self.health.sent(place.endpoint, now=now)
        if self.shared is not None:
            self.shared.changed()
        return booking

    def release_leg(self, booking: Booking) -> None:
        """End the booking of a prefill leg."""
        self.memory.ended(booking.endpoint, self._legs.pop(booking), computed=True, now=self.clock())
        self.bookings.release(booking)
        self.freed()
        if self.shared is not None:
            self.shared.ended()
        self._forget_if_free(booking.endpoint)

    def computes_itself(self, booking: Booking, uncached_tokens: int) -> Booking:
        """Book on the pod itself a prompt that a prefill pod should have computed; return the new booking."""
        return self._move(booking, booking.endpoint, uncached_tokens=uncached_tokens)

    def expect(self, picked: Picked) -> tuple[float, float]:
        """Expect a booked request's first token; return its seconds, and the endpoint's seconds to compute a token."""
        chosen, plan = picked.choice.decision.winner, picked.prefill
        pace = self.estimates.pace(chosen.address).prefill.seconds_a_token
        if plan is None or not plan.is_remote:
            expected = expected_ttft(chosen, self.estimates, now=self.clock())
            self.estimates.promised(chosen.address, seconds=expected)
            return expected, pace
        # the client also waits for the prefill pod; the decode pod's own part begins with the fetch of the KV cache
        self.estimates.promised(chosen.address, seconds=plan.sides.transfer_seconds)
        return plan.sides.remote_seconds, pace

    def remember(self, picked: Picked) -> None:
        """Remember a booked decision; this can wait until its answer is out."""
        decision, prepared, now = picked.choice.decision, picked.prepared, self.clock()
        asked, chosen = prepared.asked, decision.winner
        winner, load = chosen.address, chosen.load
        prompts, session, adapter = prepared.query.prompts, prepared.query.session, asked.resolved.adapter
        self.memory.note(
            winner,
            prompts=prompts if asked.request.costs_gpu and (load is None or load.keeps_prompts) else (),
            session=session,
            adapter=adapter,
            now=now,
        )
        if session is not None or adapter is not None:
            self._tell_place(winner, session, adapter, session_moved=picked.session_moved)
        if winner in self.picks:
            self.picks[winner] += 1

    def read(self, fact: Read) -> None:
        """Compare predictions and results in the long run."""
        if fact.comparison is not None:
            self.realised_watch.add(fact.comparison, now=self.clock())

    def settled(self, fact: Decided | Ended | LegEnd | EndpointFailed | EndpointFull) -> None:
        """Forget a removed endpoint again if the listeners before this one have counted its last request."""
        endpoint = fact.booked_on if isinstance(fact, Ended) else fact.endpoint
        if endpoint is not None and endpoint not in self.picks:
            self._forget(endpoint)

    def exchange_of(self, plan: ResponsePlan) -> BookedExchange | None:
        """Return the open exchange of the response with this plan, if it was picked here."""
        exchange = self.reading.get(key) if (key := plan.key) is not None else None
        return exchange if exchange is not None and exchange.plan == plan else None

    def knows(self, endpoint: str) -> bool:
        """Tell whether the endpoint belongs to the pool, or still has open requests."""
        return endpoint in self.picks

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        """Move a booking, and the expected cache contents, to the pod of Envoy's retry."""
        self.ledger.tell(Rerouted(picked=booking.endpoint, served_by=endpoint))
        return self._move(booking, endpoint, uncached_tokens=booking.uncached_tokens)

    def _move(self, booking: Booking, endpoint: str, *, uncached_tokens: int) -> Booking:
        self.bookings.release(booking)
        moved = self.bookings.book(
            endpoint,
            now=self.clock(),
            uncached_tokens=uncached_tokens,
            context_tokens=booking.context_tokens,
            promised=booking.promised,
            sequences=booking.sequences,
            answer_tokens=booking.answer_tokens,
            answer_variance=booking.answer_variance,
        )
        self._sent[moved] = sent = self._sent.pop(booking)
        moved.is_engines, moved.is_cut = booking.is_engines, booking.is_cut
        if endpoint != booking.endpoint:
            self.memory.ended(booking.endpoint, sent.prompts, computed=False, now=moved.booked_at)
            self.memory.began(endpoint, sent.prompts, now=moved.booked_at)
        self.memory.note(
            endpoint, prompts=sent.prompts, session=sent.session, adapter=sent.adapter, now=moved.booked_at
        )
        if sent.session is not None or sent.adapter is not None:
            self._tell_place(endpoint, sent.session, sent.adapter)
        if self.shared is not None:
            self.shared.changed()
        self._forget_if_free(booking.endpoint)
        self.freed()
        return moved

    def endpoint_full(self, endpoint: str) -> None:
        """Record that the pod has no room."""
        if endpoint in self.picks:
            self.health.full(endpoint, now=self.clock())
            self.ledger.tell(EndpointFull(endpoint))

    def endpoint_answered(self, endpoint: str, *, failed: bool, is_whole: bool = False) -> None:
        """Record whether the pod failed; `is_whole`: the answer is complete, no body follows."""
        if endpoint in self.picks:
            self.health.note(endpoint, failed=failed, now=self.clock())
            if is_whole and not failed:
                self.health.ended(endpoint, good=True, now=self.clock())
            if failed:
                self.ledger.tell(EndpointFailed(endpoint))

    def stream_read(self, endpoint: str, outcome: Outcome, *, seconds: float) -> None:
        """Record the outcome of a stream read for `seconds`."""
        if endpoint in self.picks and self.health.read(endpoint, outcome, seconds=seconds, now=self.clock()):
            self.ledger.tell(EndpointFailed(endpoint))

    def _most_unread(self) -> int:
        """Return how many watched streams of an endpoint may end unread in a row: another picker may read them."""
        others = self.shared.facts()["others"] if self.shared is not None else 0
        return UNREAD * (1 + others) if others else 2

    def release(
        self,
        booking: Booking,
        *,
        status: int,
        unserved: bool = False,
        answered_at: float = 0.0,
        is_watched: bool = False,
        generated: int | None = None,
    ) -> None:
        """End the booking, settle its quota, and learn its answer's length; `generated`: its tokens, if it is whole."""
        self.bookings.release(booking)
        sent = self._sent.pop(booking)
        if generated is not None and sent.answer is not None:
            self.answers.note(sent.answer, generated, expected=booking.answer_tokens)
        if sent.quota is not None and self.quotas is not None:
            if unserved:
                self.quotas.cancel(sent.quota)
            else:
                self.quotas.settle(sent.quota, generated_tokens=surely_generated(status, is_stream=sent.is_stream))
        if sent.prompts:
            self.memory.ended(booking.endpoint, sent.prompts, computed=200 <= status < 300, now=self.clock())
        self.freed()
        if self.shared is not None:
            self.shared.ended()
        if (endpoint := booking.endpoint) in self.picks:
            most, now = self._most_unread() if is_watched else None, self.clock()
            times = {"sent_at": booking.booked_at, "answered_at": answered_at, "now": now}
            outcome = self.health.closed(endpoint, status=status, is_stream=sent.is_stream, most_unread=most, **times)
            if booking.is_cut or outcome in (Outcome.FAILED, Outcome.UNPROVEN):
                self.deadly.unanswered(endpoint, sent.digest, is_unserved=booking.is_cut, now=now)
        self._forget_if_free(booking.endpoint)

    def keeps(self, response_id: str, endpoint: str) -> None:
        """Remember a stored response like a session's place, and tell the other replicas."""
        session = response_session(response_id)
        self.memory.note(endpoint, prompts=(), session=session, adapter=None, now=self.clock())
        self._tell_place(endpoint, session, None)

    def generated(self, note: QuotaNote, tokens: int) -> None:
        """Charge the tenant's quota the generated tokens, in place of the reserved ones."""
        if self.quotas is not None:
            self.quotas.generated(note, tokens)

    # --- for the scraper and the other replicas -------------------------------------------------------------------

    def reported(self, endpoint: str, load: EndpointLoad, trend: EndpointTrend) -> None:
        """Process a pod's report."""
        if endpoint not in self.picks:  # scraped before it was removed
            return
        now = self.clock()
        self.estimates.report(endpoint, load, now=now)
        self.estimates.trend(endpoint, trend)
        self.links.report(endpoint, load)
        self.health.reported(endpoint, load, self.bookings)
        self.deadly.reported(endpoint)
        seconds = self.estimates.pace(endpoint).first_token_seconds
        self.bookings.reported(endpoint, load, first_token_seconds=seconds)
        if (rate := self.estimates.tokens_per_second(endpoint)) is not None:
            self.bookings.prefill_rate(endpoint, tokens_per_second=rate, now=now)
        self.freed()

    def changed(self) -> None:
        """React to a possible change of an endpoint: a failed scrape, or news from other replicas."""
        self.freed()

    def restarted(self, endpoint: str) -> None:
        """Forget all expectations of a pod that is a new process now."""
        self.estimates.forget(endpoint)
        self.links.forget(endpoint)
        self.memory.forget(endpoint)
        self.health.restarted(endpoint)
        self.deadly.died(endpoint, now=self.clock())
        self.bookings.emptied(endpoint)

    def own_bookings(self) -> Mapping[str, EndpointBookings]:
        """Return this picker's open bookings, in the form for the other replicas."""
        totals = self.bookings.all_totals(now=self.clock())
        return {
            endpoint: EndpointBookings(each.requests, int(each.uncached_tokens), each.context_tokens, each.promised)
            for endpoint, each in totals.items()
        }

    def _tell_place(
        self, endpoint: str, session: str | None, adapter: str | None, *, session_moved: bool = False
    ) -> None:
        if self.shared is not None:
            self.shared.placed(endpoint=endpoint, session=session, adapter=adapter, session_moved=session_moved)


class _Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an open request that its books need until its end."""

    prompts: Sequence[PromptKeys]
    session: str | None
    adapter: str | None
    quota: QuotaAsk | None
    is_stream: bool
    answer: AnswerKind | None
    digest: int | None  # of its body, if it computes

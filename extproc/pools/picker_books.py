"""The books of a pool: what is booked where, what it came to, and what is remembered for the next pick."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from extproc.admission.asked_request import AskedRequest
from extproc.admission.prepared_request import Picked, response_session
from extproc.choosing.health import EndpointHealth
from extproc.choosing.room import expected_ttft
from extproc.disaggregation.prefill_plan import PrefillPlace
from extproc.models.model_rules import ResolvedModel
from extproc.pods.endpoint import EndpointTrend, Role
from extproc.pods.inflight import Booking, Bookings
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.values import PickPolicy
from extproc.pools.booked_exchange import GATEWAY_TIMEOUT, NO_RESPONSE_FILTER, NOT_DELIVERED, NOT_IMPLEMENTED
from extproc.prefixes.match_watch import MatchWatch
from extproc.prefixes.prompt_match import PromptKeys
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.quotas.quota import QuotaAsk, QuotaNote
from extproc.quotas.shared_quotas import Quotas
from extproc.replicas.shared_load import EndpointBookings
from extproc.replicas.shared_state import PoolShare
from extproc.requests.request import TEXT_APIS, ApiKind
from extproc.responses.realised import Comparison, RealisedWatch
from extproc.slo.judgement import Judgement, Measured, Outcome
from extproc.slo.promise import AnswerPromise, OpenPromise
from extproc.telemetry.degradation_log import DegradationLog
from extproc.telemetry.extension_metrics import CountedRequest, ModelNames
from extproc.telemetry.metrics import OTHER
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from kvmesh.pods.pod_report import EndpointLoad

# what Envoy's configuration lacks, where a response cannot be read or changed
MISSING_IN_ENVOY = {
    NO_RESPONSE_FILTER: "a response was to be read, and Envoy has no second ext_proc filter for it (envoy/local.yaml)",
    NOT_DELIVERED: "a response was to be read, and none of it came: a client left, or allow_mode_override is missing",
}


class PickerBooks:
    """Implements `booked_exchange.ExchangeBooks`."""

    def __init__(
        self,
        endpoints: Iterable[str],
        *,
        policy: PickPolicy,
        telemetry: PickerTelemetry,
        overload: OverloadTelemetry,
        degradations: DegradationLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.picks: dict[str, int] = dict.fromkeys(endpoints, 0)
        self._roles = policy.roles
        self._leaving: set[str] = set()  # endpoints that are gone and have requests to finish
        self.bookings = Bookings(tokens_per_second=policy.prefill_tokens_per_second)
        self.memory = RoutingMemory(policy)
        self.health = EndpointHealth(policy.health, full_seconds=policy.priorities.overload.full_seconds)
        self.estimates = LatencyEstimates(tokens_per_second=policy.prefill_tokens_per_second)
        self.links = LinkEstimates()
        self.matches = MatchWatch()
        self.realised_watch = RealisedWatch()
        # these read the books, hence are set later
        self.shared: PoolShare | None = None
        self.quotas: Quotas | None = None
        self.freed: Callable[[], None] = _no_request_waits  # told when there may be room for a request that waits
        self._sent: dict[Booking, _Sent] = {}
        self._legs: set[Booking] = set()  # of prompts that are computed for other pods
        self._telemetry = telemetry
        self._overload = overload
        self._degradations = degradations
        self._clock = clock

    def set_endpoints(self, endpoints: Iterable[str]) -> None:
        """Have these from now on. What is booked at others is kept until its end, and then they are forgotten."""
        there = dict.fromkeys(endpoints)
        gone = [endpoint for endpoint in self.picks if endpoint not in there]
        self.picks = {endpoint: self.picks.get(endpoint, 0) for endpoint in there} | {
            endpoint: self.picks[endpoint] for endpoint in gone
        }
        self._leaving = set(gone)
        for endpoint in gone:
            self.memory.forget(endpoint)
            self._forget_if_free(endpoint)
        self.freed()  # one that waits may fit now, or nowhere any more

    def reconfigure(self, policy: PickPolicy, *, memory_share: float = 1.0) -> None:
        """Go by another policy from now on; what is booked and what was learned stays."""
        tokens_per_second = policy.prefill_tokens_per_second
        self._roles = policy.roles
        self.bookings.reconfigure(tokens_per_second=tokens_per_second)
        self.estimates.reconfigure(tokens_per_second=tokens_per_second)
        self.memory.reconfigure(policy, share=memory_share)
        self.health.reconfigure(policy.health, full_seconds=policy.priorities.overload.full_seconds)

    @property
    def open_requests(self) -> int:
        """How many requests have not ended."""
        return len(self._sent)

    def role_of(self, endpoint: str) -> str:
        """Return an endpoint's role in words, by the policy."""
        return self._roles.get(endpoint, Role.BOTH).value

    def _forget_if_free(self, endpoint: str) -> None:
        if endpoint in self._leaving and self.bookings.forget(endpoint):
            self._leaving.discard(endpoint)
            del self.picks[endpoint]
            self._forget(endpoint)

    def _forget(self, endpoint: str) -> None:
        self.memory.forget(endpoint)  # once more: a request that was on its way may have been remembered since
        self.estimates.forget(endpoint)
        self.links.forget(endpoint)
        self.health.restarted(endpoint)
        self.matches.forget(endpoint)
        self._telemetry.forget(endpoint)
        self._overload.forget(endpoint)

    def book(self, picked: Picked, *, label: str = "", arrived_at: float | None = None, trace_id: str = "") -> Booking:
        """Book a decision: from now on the next pick counts with it.

        `label` as in `remember`; `arrived_at`: monotonic seconds at which its request was complete, by default now;
        `trace_id`: "" where it is not traced.
        """
        decision, prepared, now = picked.decision, picked.prepared, self._clock()
        endpoint, request = decision.endpoints[0], prepared.asked.request
        prompts: Sequence[PromptKeys] = ()
        uncached = context = 0
        if request.api is not ApiKind.TOKENIZE:  # which costs no GPU and leaves nothing in its cache
            prompts, context = prepared.query.prompts, decision.prompt_tokens
            uncached = picked.uncached_tokens
        booking = self.bookings.book(
            endpoint, now=now, uncached_tokens=uncached, context_tokens=context, promised=_promised(prepared.asked)
        )
        self._sent[booking] = _Sent(
            prompts=prompts,
            session=prepared.query.session,
            adapter=prepared.asked.resolved.adapter,
            quota=prepared.quota,
            is_stream=request.stream,
            counted=self._count(picked, label, arrived_at=now if arrived_at is None else arrived_at),
            trace_id=trace_id,
        )
        self.health.sent(endpoint, now=now)
        if self.shared is not None:
            self.shared.changed()
        return booking

    def _count(self, picked: Picked, label: str, *, arrived_at: float) -> CountedRequest | None:
        """Count a request under the names of the inference extension, if that is wanted."""
        extension = self._telemetry.extension
        if extension is None:
            return None
        asked, tokens = picked.prepared.asked, picked.prepared.tokens
        return extension.routed(
            model_names(asked.resolved, label),
            priority=asked.request_class.priority_class.priority,
            arrived_at=arrived_at,
            body_bytes=len(asked.body.raw) if asked.body is not None else None,
            input_tokens=tokens.estimated_tokens if tokens.prompts and tokens.degraded is None else None,
        )

    def book_leg(self, place: PrefillPlace, prompts: Sequence[PromptKeys], *, context_tokens: int) -> Booking:
        """Book a prompt on a prefill pod; `release_leg` ends it. It is no request of its own in any count."""
        now = self._clock()
        booking = self.bookings.book(
            place.endpoint, now=now, uncached_tokens=place.uncached_tokens, context_tokens=context_tokens
        )
        self._legs.add(booking)
        self.estimates.promised(place.endpoint, seconds=place.leg_seconds)
        self.memory.note(place.endpoint, prompts=prompts, session=None, adapter=None, now=now)
        self.matches.routed(place.endpoint, prompt_tokens=context_tokens, matched_tokens=place.cached_tokens)
        self.health.sent(place.endpoint, now=now)
        if self.shared is not None:
            self.shared.changed()
        return booking

    def release_leg(self, booking: Booking) -> None:
        """End the booking of a prefill leg."""
        self._legs.remove(booking)
        self.bookings.release(booking)
        self.freed()
        if self.shared is not None:
            self.shared.ended()
        if self._leaving:
            self._forget_if_free(booking.endpoint)

    def computes_itself(self, booking: Booking, uncached_tokens: int) -> Booking:
        """Book for a pod that it computes a prompt which was to come to it from another one; return the new booking."""
        return self._move(booking, booking.endpoint, uncached_tokens=uncached_tokens)

    def remember(self, picked: Picked, *, label: str = "") -> None:
        """Remember and count a booked decision, which can wait until its answer is out.

        `label`: the model that was asked for, where its name is a configured one.
        """
        decision, prepared, now = picked.decision, picked.prepared, self._clock()
        asked, chosen = prepared.asked, decision.winner
        resolved = asked.resolved
        winner = chosen.address
        # no other pick asks what this one was promised, and the pods' reports tell of first tokens far later than now
        plan = picked.prefill
        if plan is None or not plan.is_remote:
            promised = expected_ttft(chosen, self.estimates, now=now)
            self.estimates.promised(winner, seconds=promised)
        else:
            # to the client; the decode pod's own time begins when the cache is to be fetched
            promised = plan.sides.remote_seconds
            self.estimates.promised(winner, seconds=plan.sides.transfer_seconds)
        prompts, session, adapter = prepared.query.prompts, prepared.query.session, resolved.adapter
        self.memory.note(
            winner,
            prompts=prompts if asked.request.api is not ApiKind.TOKENIZE else (),
            session=session,
            adapter=adapter,
            now=now,
            indexed=chosen.indexed_tokens >= sum([prompt.tokens for prompt in prompts]),
        )
        if session is not None or adapter is not None:
            self._tell_place(winner, session, adapter, session_moved=picked.session_moved)
        if winner in self.picks:
            self.picks[winner] += 1
        self.matches.routed(winner, prompt_tokens=decision.prompt_tokens, matched_tokens=decision.matched_tokens)
        self._telemetry.history.load.routed(
            prompt_tokens=decision.prompt_tokens, cached_tokens=decision.matched_tokens, now=now
        )
        self._telemetry.routed(
            endpoint=winner,
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
            best_matched_tokens=decision.best_matched_tokens,
            degraded=decision.degraded,
            model=label,
            arm=resolved.arm,
            served=resolved.base.name if resolved.base is not None else "",  # a configured name
            tenant=asked.request_class.tenant,
            seconds_a_token=self.estimates.pace(winner).prefill.seconds_a_token,
            promised_seconds=promised,
        )
        if self._telemetry.extension is not None:
            names = model_names(resolved, label)
            self._telemetry.extension.predicted(names, seconds=promised)
            self._telemetry.extension.scheduling.given(
                winner,
                target=names.target,
                prompt_tokens=decision.prompt_tokens,
                matched_tokens=decision.matched_tokens,
            )
        if winner not in self.picks:
            self._forget(winner)  # gone, and this request's end came first: nothing would forget it any more

    # --- booked_exchange.ExchangeBooks ----------------------------------------------------------------------------

    def knows(self, endpoint: str) -> bool:
        """Tell whether it is one of ours."""
        return endpoint in self.picks

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        """Move a booking to the pod that Envoy's retry went to, and what is expected to be there."""
        self._telemetry.rerouted(picked=booking.endpoint, served_by=endpoint)
        return self._move(booking, endpoint, uncached_tokens=booking.uncached_tokens)

    def _move(self, booking: Booking, endpoint: str, *, uncached_tokens: int) -> Booking:
        self.bookings.release(booking)
        moved = self.bookings.book(
            endpoint,
            now=self._clock(),
            uncached_tokens=uncached_tokens,
            context_tokens=booking.context_tokens,
            promised=booking.promised,
        )
        self._sent[moved] = sent = self._sent.pop(booking)
        self.memory.note(
            endpoint, prompts=sent.prompts, session=sent.session, adapter=sent.adapter, now=moved.booked_at
        )
        if sent.session is not None or sent.adapter is not None:
            self._tell_place(endpoint, sent.session, sent.adapter)
        if self.shared is not None:
            self.shared.changed()
        if self._leaving:
            self._forget_if_free(booking.endpoint)
        self.freed()
        return moved

    def endpoint_full(self, endpoint: str) -> None:
        """Believe it."""
        if endpoint in self.picks:
            self.health.full(endpoint, now=self._clock())
            self._overload.endpoint_full(endpoint)

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        """Note whether it failed."""
        if endpoint in self.picks:
            self.health.note(endpoint, failed=failed, now=self._clock())
            if failed:
                self._telemetry.endpoint_failed(endpoint)

    def release(self, booking: Booking, *, status: int, model: str, arm: str, unserved: bool = False) -> None:
        """End a booking and count its request."""
        self.bookings.release(booking)
        sent = self._sent.pop(booking)
        if sent.quota is not None and self.quotas is not None:
            if unserved:
                self.quotas.cancel(sent.quota)
            else:
                self.quotas.settle(sent.quota, generated_tokens=_generated(status, is_stream=sent.is_stream))
        self.freed()
        if self.shared is not None:
            self.shared.ended()
        now = self._clock()
        self._telemetry.exchange_ended(
            endpoint=booking.endpoint,
            status=status,
            model=model,
            arm=arm,
            seconds=now - booking.booked_at,
            trace_id=sent.trace_id,
        )
        if sent.counted is not None:
            sent.counted.ended(status=status, now=now, trace_id=sent.trace_id)
        if self._leaving:
            self._forget_if_free(booking.endpoint)

    def keeps(self, response_id: str, endpoint: str) -> None:
        """Remember it as a session's place, and tell the other replicas."""
        session = response_session(response_id)
        self.memory.note(endpoint, prompts=(), session=session, adapter=None, now=self._clock())
        self._tell_place(endpoint, session, None)

    def realised(self, comparison: Comparison) -> None:
        """Take what was predicted and what came true."""
        self.realised_watch.add(comparison, now=self._clock())
        pace = self.estimates.pace(comparison.endpoint)
        self._telemetry.realised(comparison, seconds_a_token=pace.prefill.seconds_a_token)

    def generated(self, note: QuotaNote, tokens: int) -> None:
        """Tell the quotas."""
        if self.quotas is not None:
            self.quotas.generated(note, tokens)

    def judged(
        self,
        answer: AnswerPromise,
        judgement: Judgement,
        asked: Judgement | None,
        *,
        served_by: str | None,
        has_come: bool,
        measured: Measured,
    ) -> None:
        """Count it."""
        slo, role = self._telemetry.slo, self.role_of(served_by or answer.endpoint)
        (slo.judged if has_come else slo.left_unseen)(answer, judgement, asked, role=role)
        key = answer.promise.class_name, answer.promise.model
        self._telemetry.history.measured(key, measured, weight=answer.weight, now=self._clock())

    def unanswered(self, promise: OpenPromise, *, status: int, endpoint: str) -> None:
        """Count what was surely missed; a client that left before its time was up has missed nothing."""
        if status == NOT_IMPLEMENTED or (status == 0 and not promise.is_broken(now=self._clock())):
            return
        self.broken(promise, Outcome.FAILED if status else Outcome.LATE, endpoint=endpoint)

    def broken(self, promise: OpenPromise, outcome: Outcome, *, endpoint: str) -> None:
        """Count a promise that was surely broken."""
        self._telemetry.slo.missed(promise, outcome, role=self.role_of(endpoint))

    def response_missed(self, why: str) -> None:
        """Count a response whose plan was not carried out."""
        self._telemetry.response_missed(why)
        if (words := MISSING_IN_ENVOY.get(why)) is not None:
            self._degradations.note({why: words}, now=self._clock())

    # --- for the scraper and the other replicas -------------------------------------------------------------------

    def reported(self, endpoint: str, load: EndpointLoad, trend: EndpointTrend) -> None:
        """Take a pod's report."""
        if endpoint not in self.picks:  # asked before it was gone
            return
        now = self._clock()
        self.estimates.report(endpoint, load, now=now)
        self.estimates.trend(endpoint, trend)
        self.links.report(endpoint, load)
        seconds = self.estimates.pace(endpoint).first_token_seconds
        self.bookings.reported(endpoint, load, first_token_seconds=seconds)
        rate = self.estimates.tokens_per_second(endpoint)
        if rate is not None:
            self.bookings.prefill_rate(endpoint, tokens_per_second=rate, now=now)
        self.freed()

    def changed(self) -> None:
        """Take note that an endpoint may not be what it was: a failed scrape, or news of the other replicas."""
        self.freed()

    def restarted(self, endpoint: str) -> None:
        """Forget what was expected of a pod that is another process now."""
        self.estimates.forget(endpoint)
        self.links.forget(endpoint)
        self.memory.forget(endpoint)
        self.health.restarted(endpoint)
        self.bookings.emptied(endpoint)

    def own_bookings(self) -> Mapping[str, EndpointBookings]:
        """Return what is open here, as the other replicas are told."""
        return {
            endpoint: EndpointBookings(
                totals.requests, int(totals.uncached_tokens), totals.context_tokens, totals.promised
            )
            for endpoint, totals in self.bookings.all_totals(now=self._clock()).items()
        }

    def _tell_place(
        self, endpoint: str, session: str | None, adapter: str | None, *, session_moved: bool = False
    ) -> None:
        """Have the other replicas know where a session or an adapter is."""
        if self.shared is not None:
            self.shared.placed(endpoint=endpoint, session=session, adapter=adapter, session_moved=session_moved)


def model_names(resolved: ResolvedModel | None, label: str) -> ModelNames:
    """Return the names of a request's model as labels: clients invent those that are not configured."""
    if resolved is None or resolved.requested is None:
        return ModelNames(requested="", target="")
    return ModelNames(requested=label or OTHER, target=(resolved.model or "") if label else OTHER)


class _Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What an open request leaves where it is served."""

    prompts: Sequence[PromptKeys]
    session: str | None
    adapter: str | None
    quota: QuotaAsk | None
    is_stream: bool
    trace_id: str = ""  # "": it is not traced
    counted: CountedRequest | None = None  # None: it is not counted under the names of the inference extension


def _promised(asked: AskedRequest) -> str:
    """Return the class of a request whose answer's tokens are promised to come in time; "" else."""
    request_class = asked.request_class
    if request_class.priority_class.inter_token_seconds is None or asked.request.api not in TEXT_APIS:
        return ""
    return request_class.class_name


def _generated(status: int, *, is_stream: bool) -> int | None:
    """Return what was surely generated; None: the reader of the response tells, or it is not known."""
    if 200 <= status < 300:
        return None
    # a stream's headers come before its first token; all the rest is there before its headers
    return None if status in (0, GATEWAY_TIMEOUT) and not is_stream else 0


def _no_request_waits() -> None:
    pass

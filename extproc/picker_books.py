"""The picker's books: what is booked where, what it came to, and what is remembered for the next pick.

Filled by `service` for what was routed and by `booked_exchange` for what became of it; the picker reads them.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from extproc.adapters.degradation_log import DegradationLog
from extproc.adapters.shared_state import SharedState
from extproc.adapters.telemetry import PickerTelemetry
from extproc.booked_exchange import NO_RESPONSE_FILTER, NOT_DELIVERED
from extproc.core.endpoint import EndpointTrend
from extproc.core.health import EndpointHealth
from extproc.core.inflight import Booking, Bookings
from extproc.core.match_watch import MatchWatch
from extproc.core.policy import PickPolicy
from extproc.core.prompt_match import PromptKeys
from extproc.core.realised import Comparison, RealisedWatch
from extproc.core.recent_routes import KEY_BYTES
from extproc.core.request import ApiKind
from extproc.core.routing_memory import RoutingMemory
from extproc.core.shared_load import EndpointBookings
from extproc.pick_endpoint import Picked

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
        degradations: DegradationLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.picks: dict[str, int] = dict.fromkeys(endpoints, 0)
        self.bookings = Bookings(tokens_per_second=policy.prefill_tokens_per_second)
        self.memory = RoutingMemory(policy)
        self.health = EndpointHealth(policy.health)
        self.matches = MatchWatch()
        self.realised_watch = RealisedWatch()
        self.shared: SharedState | None = None  # reads these books, hence set later
        self._sent: dict[Booking, _Sent] = {}
        self._telemetry = telemetry
        self._degradations = degradations
        self._clock = clock

    def book(self, picked: Picked) -> Booking:
        """Book a decision: from now on the next pick counts with it."""
        decision = picked.decision
        context = decision.prompt_tokens if _fills_cache(picked) else 0
        uncached = max(context - decision.matched_tokens, 1) if context else 0
        booking = self.bookings.book(
            decision.endpoints[0], now=self._clock(), uncached_tokens=uncached, context_tokens=context
        )
        self._sent[booking] = _sent(picked)
        self._changed()
        return booking

    def remember(self, picked: Picked) -> None:
        """Remember and count a booked decision, which can wait until its answer is out."""
        decision = picked.decision
        winner = decision.endpoints[0]
        self._place(
            winner,
            _sent(picked),
            session_moved=picked.session_moved,
            indexed=decision.winner.indexed_tokens >= _keyed_tokens(picked.prompts),
        )
        self.picks[winner] += 1
        self.matches.routed(winner, prompt_tokens=decision.prompt_tokens, matched_tokens=decision.matched_tokens)
        self._telemetry.routed(
            endpoint=winner,
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
            best_matched_tokens=decision.best_matched_tokens,
            degraded=decision.degraded,
        )

    # --- booked_exchange.ExchangeBooks ----------------------------------------------------------------------------

    def knows(self, endpoint: str) -> bool:
        """Tell whether it is one of ours."""
        return endpoint in self.picks

    def rebook(self, booking: Booking, endpoint: str) -> Booking:
        """Move a booking to the pod that Envoy's retry went to, and what is expected to be there."""
        self._telemetry.rerouted(picked=booking.endpoint, served_by=endpoint)
        self.bookings.release(booking)
        moved = self.bookings.book(
            endpoint,
            now=self._clock(),
            uncached_tokens=booking.uncached_tokens,
            context_tokens=booking.context_tokens,
        )
        self._sent[moved] = sent = self._sent.pop(booking)
        self._place(endpoint, sent)
        self._changed()
        return moved

    def endpoint_answered(self, endpoint: str, *, failed: bool) -> None:
        """Note whether it failed."""
        if endpoint in self.picks:
            self.health.note(endpoint, failed=failed, now=self._clock())
            if failed:
                self._telemetry.endpoint_failed(endpoint)

    def release(self, booking: Booking, *, status: int, model: str, arm: str) -> None:
        """End a booking and count its request."""
        self.bookings.release(booking)
        del self._sent[booking]
        if self.shared is not None:
            self.shared.ended()
        self._telemetry.exchange_ended(endpoint=booking.endpoint, status=status, model=model, arm=arm)

    def realised(self, comparison: Comparison) -> None:
        """Take what was predicted and what came true."""
        self.realised_watch.add(comparison, now=self._clock())
        self._telemetry.realised(comparison)

    def response_missed(self, why: str) -> None:
        """Count a response whose plan was not carried out."""
        self._telemetry.response_missed(why)
        if (words := MISSING_IN_ENVOY.get(why)) is not None:
            self._degradations.note({why: words}, now=self._clock())

    # --- for the scraper and the other replicas -------------------------------------------------------------------

    def restarted(self, endpoint: str) -> None:
        """Forget what was expected of a pod that is another process now."""
        self.memory.forget(endpoint)
        self.health.restarted(endpoint)
        self.bookings.emptied(endpoint)

    def trend(self, endpoint: str, trend: EndpointTrend) -> None:
        """Take how fast the endpoint computes prompts."""
        if trend.prefill_tokens_per_second is not None:
            self.bookings.prefill_rate(endpoint, tokens_per_second=trend.prefill_tokens_per_second, now=self._clock())

    def own_bookings(self) -> Mapping[str, EndpointBookings]:
        """Return what is open here, as the other replicas are told."""
        return {
            endpoint: EndpointBookings(totals.requests, int(totals.uncached_tokens), totals.context_tokens)
            for endpoint, totals in self.bookings.all_totals(now=self._clock()).items()
        }

    def _place(self, endpoint: str, sent: "_Sent", *, session_moved: bool = False, indexed: bool = False) -> None:
        self.memory.note(
            endpoint,
            prompts=sent.prompts,
            session=sent.session,
            adapter=sent.adapter,
            now=self._clock(),
            indexed=indexed,
        )
        if self.shared is not None and (sent.session is not None or sent.adapter is not None):
            self.shared.placed(
                endpoint=endpoint, session=sent.session, adapter=sent.adapter, session_moved=session_moved
            )

    def _changed(self) -> None:
        if self.shared is not None:
            self.shared.changed()


class _Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What an open request leaves where it is served."""

    prompts: Sequence[PromptKeys]
    session: str | None
    adapter: str | None


def _sent(picked: Picked) -> _Sent:
    return _Sent(
        prompts=picked.prompts if _fills_cache(picked) else (),
        session=picked.session,
        adapter=picked.resolved.adapter,
    )


def _keyed_tokens(prompts: Sequence[PromptKeys]) -> int:
    """Return the tokens of all that can be indexed of these prompts."""
    return sum([len(prompt.keys) // KEY_BYTES * prompt.tokens_each for prompt in prompts])


def _fills_cache(picked: Picked) -> bool:
    return picked.request.api is not ApiKind.TOKENIZE  # which costs no GPU and leaves nothing in its cache

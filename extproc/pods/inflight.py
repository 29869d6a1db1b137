"""Bookings: this picker's in-flight requests at each endpoint, and their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, sqrt
from operator import attrgetter
from statistics import median

import msgspec

from kvmesh.pods.pod_report import EndpointLoad

ON_THE_WAY_SECONDS = 0.02  # from a pick until its request can be in the pod's queue
MOST_SEQUENCES = 1_024  # of one request: as many as engines run at once (vLLM's max_num_seqs)
ARRIVAL_SECONDS = 0.1  # from a pick until the pod's report shows the request: network, tokenizing, the running step


class Booking(msgspec.Struct, kw_only=True, eq=False):
    """One request on one endpoint, from the pick until its exchange ends. Compared by identity."""

    endpoint: str
    booked_at: float  # monotonic seconds
    uncached_tokens: int = 0  # of its prompt, to be computed there
    context_tokens: int = 0  # of its whole prompt
    queued_tokens: float = 0.0  # uncached tokens not computed yet, estimated
    promised: str = ""  # its class, if the class has an inter-token target
    sequences: int = 1  # as the pod counts requests: one for each choice of each prompt
    answer_tokens: float = 0.0  # expected, of all sequences; 0 if unknown
    answer_variance: float = 0.0
    is_engines: bool = False  # its engine should be working on it: it is not refused, and has no media to fetch
    is_cut: bool = False  # Envoy answered in the place of the pod


NONE_PROMISED: Mapping[str, int] = {}


class EndpointTotals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The open bookings of one endpoint."""

    requests: int = 0  # as the pod counts them: one for each choice of each prompt
    uncached_tokens: float = 0.0  # not computed yet, estimated
    context_tokens: int = 0
    growth_tokens: float = 0.0  # of the expected answers, still to come: half of them, with their spread
    filled_tokens: float = 0.0  # computed there recently, by open and ended requests: they fill its cache; decays
    promised: Mapping[str, int] = NONE_PROMISED  # requests by class, only of classes with an inter-token target


NO_BOOKINGS = EndpointTotals()


class Bookings:
    """All open bookings by endpoint, oldest first."""

    def __init__(self, *, tokens_per_second: float = 8000.0, fill_seconds: float = 60.0) -> None:
        """Set the prefill rate until `prefill_rate` is called, and the decay of `filled_tokens` (to 1/e)."""
        self.tokens_per_second = tokens_per_second  # the prefill rate of an endpoint, measured or configured
        self._fill_seconds = fill_seconds
        self._endpoints: dict[str, _EndpointBookings] = {}
        self._rates: dict[str, float] = {}

    def reconfigure(self, *, tokens_per_second: float) -> None:
        """Set the prefill rate to use until one was measured."""
        if not self._rates:
            self.tokens_per_second = tokens_per_second
            for booked in self._endpoints.values():
                booked.tokens_per_second = tokens_per_second

    def forget(self, endpoint: str) -> bool:
        """Forget an endpoint that is gone; keep it and return False while it has open bookings."""
        booked = self._endpoints.get(endpoint)
        if booked is not None and booked.open:
            return False
        self._endpoints.pop(endpoint, None)
        self._rates.pop(endpoint, None)
        return True

    def book(
        self,
        endpoint: str,
        *,
        now: float,
        uncached_tokens: int = 0,
        context_tokens: int = 0,
        promised: str = "",
        sequences: int = 1,
        answer_tokens: float = 0.0,
        answer_variance: float = 0.0,
    ) -> Booking:
        """Count one more request on the endpoint; every booking must be released exactly once.

        `promised`: its class, if the class has an inter-token target. `sequences`: the answers to be generated; no
        more than MOST_SEQUENCES count, as a pod refuses absurd numbers only after it was booked. `answer_tokens` and
        `answer_variance`: the expected length of all answers together.
        """
        booking = Booking(
            endpoint=endpoint,
            booked_at=now,
            uncached_tokens=uncached_tokens,
            context_tokens=context_tokens,
            queued_tokens=float(uncached_tokens),
            promised=promised,
            sequences=min(sequences, MOST_SEQUENCES),
            answer_tokens=answer_tokens,
            answer_variance=answer_variance,
        )
        booked = self._endpoints.get(endpoint)
        if booked is None:
            booked = self._endpoints[endpoint] = _EndpointBookings(
                drained_at=now, filled_at=now, tokens_per_second=self.tokens_per_second
            )
        booked.drain(now)
        booked.open[booking] = None
        booked.sequences += booking.sequences
        booked.context_tokens += context_tokens
        booked.answer_tokens += answer_tokens
        booked.answer_variance += answer_variance
        if promised:
            booked.promised[promised] = booked.promised.get(promised, 0) + 1
        if uncached_tokens > 0:
            booked.queued[booking] = None
            booked.queued_tokens += uncached_tokens
        else:
            booked.early += 1.0
        booked.filled_tokens = booked.faded(now, self._fill_seconds) + uncached_tokens
        booked.filled_at = now
        return booking

    def release(self, booking: Booking) -> None:
        """Remove the booking; raise KeyError if it was released before."""
        booked = self._endpoints[booking.endpoint]
        del booked.open[booking]
        booked.sequences -= booking.sequences
        booked.context_tokens -= booking.context_tokens
        if booked.answer_tokens:  # float sums drift: exactly 0 when nothing is open
            booked.answer_tokens = booked.answer_tokens - booking.answer_tokens if booked.open else 0.0
            booked.answer_variance = booked.answer_variance - booking.answer_variance if booked.open else 0.0
        if booking.promised:
            booked.promised[booking.promised] -= 1
            if not booked.promised[booking.promised]:
                del booked.promised[booking.promised]
        if booking in booked.queued:
            booked.computed(booking)

    def reported(self, endpoint: str, load: EndpointLoad, *, first_token_seconds: float = 0.0) -> None:
        """Correct the estimated queue by a report: vLLM computes prompts in order of arrival, and fills its steps.

        - Each first token that the pod has counted marks the oldest prompt as computed.
        - The waiting requests came last, and nothing of them is computed. An estimated rate slightly too high would
          lose them.
        - Prompts sent before those are computed, except the running step: the largest one, and all prompts sent within
          the recent TTFT (`first_token_seconds`, at least ARRIVAL_SECONDS). An estimated rate too low would let them
          pile up.

        If others send requests there, too, our share of the counted and of the waiting requests is our share of the
        open ones; for the last rule all waiting ones may be ours.
        """
        booked = self._endpoints.get(endpoint)
        if booked is None:
            return
        booked.drain(load.reported_at)
        reported = load.unfinished_requests
        ours = min(booked.sequences / reported, 1.0) if reported else 1.0
        waiting = round(load.waiting_requests * ours)
        booked.counted(load.first_token_count, ours=ours, waiting=waiting)
        booked.put_back(waiting, booked_before=load.reported_at - ON_THE_WAY_SECONDS)
        if len(booked.queued) <= load.waiting_requests + 1:
            return
        at = load.reported_at - max(ARRIVAL_SECONDS, first_token_seconds)
        before = [booking for booking in booked.queued if booking.booked_at < at]
        begun = before[: max(len(before) - load.waiting_requests, 0)]
        largest = max(begun, key=attrgetter("queued_tokens"), default=None)
        for booking in begun:
            if booking is not largest:
                booked.computed(booking)

    def booked_since(self, endpoint: str, *, since: float) -> int:
        """Count the sequences booked from `since` on: the pod's last report cannot show them yet."""
        booked = self._endpoints.get(endpoint)
        if booked is None:
            return 0
        count = 0
        for booking in reversed(booked.open):  # newest first: these are few
            if booking.booked_at < since:
                break
            count += booking.sequences
        return count

    def sent_since(self, endpoint: str, since: float) -> list[Booking]:
        """Return the open bookings from `since` on."""
        booked = self._endpoints.get(endpoint)
        return [] if booked is None else [booking for booking in booked.open if booking.booked_at >= since]

    def totals(self, endpoint: str, *, now: float, others_tokens: float | None = None) -> EndpointTotals:
        """Return the endpoint's totals; uncached tokens shrink at its prefill rate, oldest first.

        `others_tokens`: uncached tokens of other replicas there; from now on they share the endpoint's rate.
        """
        booked = self._endpoints.get(endpoint)
        if booked is None:
            return NO_BOOKINGS
        if booked.queued:  # an empty queue is drained by the next booking
            booked.drain(now)
        if others_tokens is not None:
            booked.others_tokens = others_tokens
        filled = booked.filled_tokens
        if filled:  # `faded` inlined: this runs for each endpoint at each pick
            since = booked.filled_at - now
            filled *= exp((since if since < 0.0 else 0.0) / self._fill_seconds)
        growth = booked.answer_tokens / 2
        return EndpointTotals(
            requests=booked.sequences,
            uncached_tokens=booked.queued_tokens,
            context_tokens=booked.context_tokens,
            growth_tokens=growth and growth + sqrt(max(booked.answer_variance, 0.0)) / 2,
            filled_tokens=filled,
            promised=dict(booked.promised) if booked.promised else NONE_PROMISED,
        )

    def all_totals(self, *, now: float) -> Mapping[str, EndpointTotals]:
        """Return the totals of each endpoint with open bookings, to share with the other replicas."""
        return {endpoint: self.totals(endpoint, now=now) for endpoint, booked in self._endpoints.items() if booked.open}

    def emptied(self, endpoint: str) -> None:
        """Note that the endpoint has restarted: its cache is empty."""
        booked = self._endpoints.get(endpoint)
        if booked is not None:
            booked.filled_tokens = 0.0

    def by_endpoint(self) -> Mapping[str, int]:
        """Count the open bookings of each endpoint, without endpoints that have none."""
        return {endpoint: len(booked.open) for endpoint, booked in self._endpoints.items() if booked.open}

    def prefill_rate(self, endpoint: str, *, tokens_per_second: float, now: float) -> None:
        """Set the measured prefill rate of one endpoint under load.

        Each endpoint uses the median of all: a rate is measured only under load, and a seemingly slow pod gets none.
        """
        self._rates[endpoint] = tokens_per_second
        self.tokens_per_second = median(self._rates.values())
        for booked in self._endpoints.values():
            booked.drain(now)
            booked.tokens_per_second = self.tokens_per_second


@dataclass(slots=True, kw_only=True, eq=False)
class _EndpointBookings:
    """One endpoint's open bookings, oldest first, and the prompts among them that are not computed yet."""

    drained_at: float
    filled_at: float
    tokens_per_second: float
    open: dict[Booking, None] = field(default_factory=dict)
    queued: dict[Booking, None] = field(default_factory=dict)
    queued_tokens: float = 0.0
    others_tokens: float = 0.0  # uncached tokens of other replicas there
    sequences: int = 0
    context_tokens: int = 0
    answer_tokens: float = 0.0
    answer_variance: float = 0.0
    promised: dict[str, int] = field(default_factory=dict)
    filled_tokens: float = 0.0
    first_token_count: int | None = None  # of the last report
    early: float = 0.0  # prompts considered computed before the pod counted their first tokens

    def counted(self, first_token_count: int, *, ours: float, waiting: int) -> None:
        """Mark as many of our oldest prompts computed as the pod has counted; the last `waiting` ones are not."""
        last, self.first_token_count = self.first_token_count, first_token_count
        if last is None:
            return
        if first_token_count < last:  # the pod has restarted
            self.early = 0.0
            return
        self.early -= (first_token_count - last) * ours
        while self.early <= -1.0 and len(self.queued) > waiting:
            self.computed(next(iter(self.queued)))
        if self.early <= -1.0:  # first tokens of requests without a booking; fractions of one add up
            self.early = 0.0
        # an ended request has been counted by now, or never will be: its client left
        self.early = min(self.early, float(len(self.open) - len(self.queued)))

    def put_back(self, newest: int, *, booked_before: float) -> None:
        """Mark the `newest` last bookings made until `booked_before` as wholly uncomputed again."""
        has_changed = False
        for booking in reversed(self.open):
            if newest <= 0:
                break
            if booking.booked_at <= booked_before:
                newest -= 1
                if booking.queued_tokens < booking.uncached_tokens:
                    booking.queued_tokens = float(booking.uncached_tokens)
                    has_changed = True
        if has_changed:
            queued = {booking: None for booking in self.open if booking.queued_tokens > 0.0}
            self.early = max(self.early - (len(queued) - len(self.queued)), 0.0)
            self.queued = queued
            self.queued_tokens = sum(booking.queued_tokens for booking in queued)

    def computed(self, booking: Booking) -> None:
        """Mark a prompt as computed; the prompt of an ended request counts as computed, too."""
        if booking in self.queued:
            del self.queued[booking]
            self.early += 1.0
            # float sums drift: reset to exactly 0 when nothing is queued
            self.queued_tokens = self.queued_tokens - booking.queued_tokens if self.queued else 0.0
            booking.queued_tokens = 0.0

    def faded(self, now: float, fill_seconds: float) -> float:
        return self.filled_tokens * exp(min(self.filled_at - now, 0.0) / fill_seconds)

    def drain(self, now: float) -> None:
        """Mark the oldest prompts computed at the endpoint's rate: pods do not report the tokens of their queue."""
        computed = (now - self.drained_at) * self.tokens_per_second
        self.drained_at = max(now, self.drained_at)
        if self.others_tokens > 0 and self.queued_tokens > 0 and computed > 0:
            # replicas share the pod's rate: with the whole rate, each would think the pod idle too soon
            ours = computed * self.queued_tokens / (self.queued_tokens + self.others_tokens)
            self.others_tokens = max(self.others_tokens - (computed - ours), 0.0)
            computed = ours
        while self.queued and computed > 0:
            oldest = next(iter(self.queued))
            if oldest.queued_tokens > computed:
                oldest.queued_tokens -= computed
                self.queued_tokens -= computed
                return
            computed -= oldest.queued_tokens
            self.computed(oldest)

"""Bookings: what this picker has sent to each endpoint and has not seen the end of, in requests and in tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp
from operator import attrgetter
from statistics import median

import msgspec

from kvmesh.pods.pod_report import EndpointLoad

ON_THE_WAY_SECONDS = 0.02  # from a pick until its request can wait at the pod
ARRIVAL_SECONDS = 0.1  # from a pick until the pod's report shows its request: network, tokenizing, the running step


class Booking(msgspec.Struct, kw_only=True, eq=False):
    """One request on one endpoint, from the pick until its exchange ends. Compared by identity."""

    endpoint: str
    booked_at: float  # monotonic seconds
    uncached_tokens: int = 0  # of its prompt, expected to be computed there
    context_tokens: int = 0  # of its prompt altogether
    queued_tokens: float = 0.0  # of the uncached ones, those not computed yet, by estimate
    promised: str = ""  # its class, where that is promised an inter-token time


NONE_PROMISED: Mapping[str, int] = {}


class EndpointTotals(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The open bookings of one endpoint."""

    requests: int = 0
    uncached_tokens: float = 0.0  # expected not to be computed yet
    context_tokens: int = 0
    filled_tokens: float = 0.0  # computed there of late, open or not: what has filled its cache; fades
    promised: Mapping[str, int] = NONE_PROMISED  # requests by class, of classes with a promised inter-token time


NO_BOOKINGS = EndpointTotals()


class Bookings:
    """All open bookings by endpoint, in the order in which they were made."""

    def __init__(self, *, tokens_per_second: float = 8000.0, fill_seconds: float = 60.0) -> None:
        """Until `prefill_rate` is called, an endpoint computes `tokens_per_second`.

        What it has computed fades to a third in `fill_seconds`.
        """
        self._fill_seconds = fill_seconds
        self._endpoints: dict[str, _EndpointBookings] = {}
        self._rates: dict[str, float] = {}
        self._tokens_per_second = tokens_per_second

    @property
    def tokens_per_second(self) -> float:
        """How fast an endpoint computes prompts, as far as is known."""
        return self._tokens_per_second

    def reconfigure(self, *, tokens_per_second: float) -> None:
        """Expect another rate until one was measured."""
        if not self._rates:
            self._tokens_per_second = tokens_per_second
            for booked in self._endpoints.values():
                booked.tokens_per_second = tokens_per_second

    def forget(self, endpoint: str) -> bool:
        """Forget an endpoint that is gone; return False, and keep it, while anything is booked there."""
        booked = self._endpoints.get(endpoint)
        if booked is not None and booked.open:
            return False
        self._endpoints.pop(endpoint, None)
        self._rates.pop(endpoint, None)
        return True

    def book(
        self, endpoint: str, *, now: float, uncached_tokens: int = 0, context_tokens: int = 0, promised: str = ""
    ) -> Booking:
        """Count one more request on the endpoint; every booking must be released exactly once.

        `promised`: its class, where that is promised an inter-token time.
        """
        booking = Booking(
            endpoint=endpoint,
            booked_at=now,
            uncached_tokens=uncached_tokens,
            context_tokens=context_tokens,
            queued_tokens=float(uncached_tokens),
            promised=promised,
        )
        booked = self._endpoints.get(endpoint)
        if booked is None:
            booked = self._endpoints[endpoint] = _EndpointBookings(
                drained_at=now, filled_at=now, tokens_per_second=self._tokens_per_second
            )
        booked.drain(now)
        booked.open[booking] = None
        booked.context_tokens += context_tokens
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
        """Forget the booking; raise KeyError if it was released before."""
        booked = self._endpoints[booking.endpoint]
        del booked.open[booking]
        booked.context_tokens -= booking.context_tokens
        if booking.promised:
            booked.promised[booking.promised] -= 1
            if not booked.promised[booking.promised]:
                del booked.promised[booking.promised]
        if booking in booked.queued:
            booked.computed(booking)

    def reported(self, endpoint: str, load: EndpointLoad, *, first_token_seconds: float = 0.0) -> None:
        """Take from a report what is computed and what is not: vLLM goes by arrival, and fills its steps.

        - As many prompts are computed, the oldest first, as the pod has counted first tokens.
        - Those that wait there came last, and nothing of them is computed. A rate that is believed a little too high
          would lose sight of them.
        - What was sent before those is computed, unless it may be in the running step: one prompt, of which the largest
          is left, and all that was sent so short a time ago; `first_token_seconds` is what requests take there of late.
          A rate that is believed too low would pile up in the books.

        Where others send requests there, too, ours are taken for as large a part of those that were counted, and of
        those that wait, as of all that are open; by the last rule all that wait may be ours.
        """
        booked = self._endpoints.get(endpoint)
        if booked is None:
            return
        booked.drain(load.reported_at)
        reported = load.unfinished_requests
        ours = min(len(booked.open) / reported, 1.0) if reported else 1.0
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
        """Count the open bookings made from `since` on: what the pod's last report cannot show yet."""
        booked = self._endpoints.get(endpoint)
        if booked is None:
            return 0
        count = 0
        for booking in reversed(booked.open):  # newest first: these are few
            if booking.booked_at < since:
                break
            count += 1
        return count

    def totals(self, endpoint: str, *, now: float, others_tokens: float | None = None) -> EndpointTotals:
        """Return what is open there; uncached tokens shrink at the endpoint's rate, oldest first.

        `others_tokens`: what other replicas have waiting there; the endpoint's rate is shared with it from then on.
        """
        booked = self._endpoints.get(endpoint)
        if booked is None:
            return NO_BOOKINGS
        if booked.queued:  # else a booking does it before anything is
            booked.drain(now)
        if others_tokens is not None:
            booked.others_tokens = others_tokens
        filled = booked.filled_tokens
        if filled:  # as `faded` has it: this is asked for each endpoint at each pick
            since = booked.filled_at - now
            filled *= exp((since if since < 0.0 else 0.0) / self._fill_seconds)
        return EndpointTotals(
            requests=len(booked.open),
            uncached_tokens=booked.queued_tokens,
            context_tokens=booked.context_tokens,
            filled_tokens=filled,
            promised=dict(booked.promised) if booked.promised else NONE_PROMISED,
        )

    def all_totals(self, *, now: float) -> Mapping[str, EndpointTotals]:
        """Return what is open on each endpoint that has any booking, as it is sent to the other replicas."""
        return {endpoint: self.totals(endpoint, now=now) for endpoint, booked in self._endpoints.items() if booked.open}

    def emptied(self, endpoint: str) -> None:
        """Note that the endpoint's cache is empty: it is another process."""
        booked = self._endpoints.get(endpoint)
        if booked is not None:
            booked.filled_tokens = 0.0

    def by_endpoint(self) -> Mapping[str, int]:
        """Count the open bookings of each endpoint that has any."""
        return {endpoint: len(booked.open) for endpoint, booked in self._endpoints.items() if booked.open}

    def prefill_rate(self, endpoint: str, *, tokens_per_second: float, now: float) -> None:
        """Take how fast the endpoint computes prompts when it has enough to do.

        The median of all counts for each: a rate is learned under load only, and a pod that is thought slow gets none.
        """
        self._rates[endpoint] = tokens_per_second
        self._tokens_per_second = median(self._rates.values())
        for booked in self._endpoints.values():
            booked.drain(now)
            booked.tokens_per_second = self._tokens_per_second


@dataclass(slots=True, kw_only=True, eq=False)
class _EndpointBookings:
    """One endpoint: its open bookings, oldest first, and the prompts among them that wait to be computed."""

    drained_at: float
    filled_at: float
    tokens_per_second: float
    open: dict[Booking, None] = field(default_factory=dict)
    queued: dict[Booking, None] = field(default_factory=dict)
    queued_tokens: float = 0.0
    others_tokens: float = 0.0  # of other replicas, waiting there too
    context_tokens: int = 0
    promised: dict[str, int] = field(default_factory=dict)
    filled_tokens: float = 0.0
    first_token_count: int | None = None  # of the last report
    early: float = 0.0  # prompts that were taken for computed before the pod counted their first tokens

    def counted(self, first_token_count: int, *, ours: float, waiting: int) -> None:
        """Take the pod's count; of those that wait there none is computed."""
        last, self.first_token_count = self.first_token_count, first_token_count
        if last is None:
            return
        if first_token_count < last:  # another process
            self.early = 0.0
            return
        self.early -= (first_token_count - last) * ours
        while self.early <= -1.0 and len(self.queued) > waiting:
            self.computed(next(iter(self.queued)))
        if self.early <= -1.0:  # of prompts that are not in the books; a part of one, as our share may be, adds up
            self.early = 0.0
        # a request that has ended was counted by now, or never will be: its client had left
        self.early = min(self.early, float(len(self.open) - len(self.queued)))

    def put_back(self, newest: int, *, booked_before: float) -> None:
        """Put the prompts of so many of those that were booked last, but before then, back as a whole."""
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
        """Take a prompt for computed, which that of a request that has ended is."""
        if booking in self.queued:
            del self.queued[booking]
            self.early += 1.0
            # a sum of floats drifts: nothing queued is exactly nothing
            self.queued_tokens = self.queued_tokens - booking.queued_tokens if self.queued else 0.0
            booking.queued_tokens = 0.0

    def faded(self, now: float, fill_seconds: float) -> float:
        return self.filled_tokens * exp(min(self.filled_at - now, 0.0) / fill_seconds)

    def drain(self, now: float) -> None:
        """Take the oldest prompts for computed at the endpoint's rate: pods report no token counts of their queue."""
        computed = (now - self.drained_at) * self.tokens_per_second
        self.drained_at = max(now, self.drained_at)
        if self.others_tokens > 0 and self.queued_tokens > 0 and computed > 0:
            # one pod computes for all: each replica that took its whole rate for itself would think it idle too soon
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

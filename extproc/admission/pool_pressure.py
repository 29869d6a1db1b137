"""The expected wait of a newcomer, and its consequences for the class: degradation steps, refusals, Retry-After.

Here a pool is the endpoints of one model. Nothing here waits.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, Protocol

import msgspec

from extproc.admission.asked_request import PRIORITY_HEADER
from extproc.admission.degradation import NO_MEASURES, Degradation, Measures, measures_of
from extproc.admission.pressure_memory import FIRST, DispatchRates, RetrySlots, TenantShares, WaitMargin
from extproc.choosing.stream_room import least_seconds
from extproc.errors import RequestShedError
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.request_class import RequestClass

OUTLOOK_SECONDS = 2.0  # an older look at a pool says nothing about it now
SHED_LEAVE = 0.8  # of the target: below it refusing ends
LEAST_SHARE = 0.02  # of a pool, left to a class at least; with less its requests would be refused anyway
MOST_SHEDDING = 10_000  # (class, tenant, pool) remembered
ANY_CLASS = ""  # in place of a class's name
WORK_SHARE = 0.1  # weight of the newest request in the moving mean of its class's work
MOST_POOLS = 1024  # remembered: without configured models, clients invent names


class Waiting(Protocol):
    """The queue, as a newcomer sees it."""

    def ahead(self, pool: str, priority: int, tenant: str | None = None, cost: int = 0) -> tuple[int, int]:
        """Return the uncached tokens and the number of requests that wait with this priority or a higher one.

        With a tenant, count only the requests before its newcomer with `cost` uncached tokens.
        """

    def waits_in(self, pool: str) -> bool:
        """Tell whether any request waits in this pool."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the last look at a pool's endpoints."""

    has_room: bool
    endpoints: tuple[str, ...]
    base_seconds: float  # TTFT of a request without uncached tokens at the best endpoint
    at: float  # monotonic seconds
    inter_token_seconds: float = 0.0  # with one more stream, at the endpoint where it is shortest; 0 if unknown


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """The estimates for one request if it has to wait from now on."""

    ttft_seconds: float
    own_seconds: float  # the part of the TTFT after dispatch
    work_seconds: float  # the pool's work on this request alone

    @property
    def wait_seconds(self) -> float:
        """The part of the TTFT before dispatch."""
        return self.ttft_seconds - self.own_seconds


class PoolPressure:
    """The estimates, by class and tenant, for one picker's pools."""

    def __init__(
        self,
        *,
        estimates: LatencyEstimates,
        degradation: Degradation,
        waiting: Waiting,
        clock: Callable[[], float],
        random: Callable[[], float],
        replicas: Callable[[], int] = lambda: 1,
    ) -> None:
        """`replicas` is the number of pickers that share the pools; each other queue is assumed as long as this one."""
        self._replicas = replicas
        self._estimates = estimates
        self._degradation = degradation
        self._waiting = waiting
        self._clock = clock
        self._random = random
        self._outlooks: dict[tuple[str, str], Outlook] = {}  # class, pool: each class has its own ceiling
        self._shedding: dict[tuple[str, str, str], None] = {}  # class, tenant, pool
        self._rates: dict[str, DispatchRates] = {}
        self._margins: dict[tuple[str, str, str], WaitMargin] = {}  # class, tenant, pool
        # class, pool: sheddable classes only; the least recently used is first
        self._shares: dict[tuple[str, str], TenantShares] = {}
        self._sharing = 0  # total of tenants in `_shares`
        self._lines: dict[tuple[str, str], RetrySlots] = {}
        self._work: dict[tuple[str, str], float] = {}  # class, pool: mean work in seconds of its judged requests

    def saw(
        self, request_class: RequestClass, kept: Sequence[Candidate], *, pool: str, has_room: bool, now: float
    ) -> None:
        """Record a look at the pool's endpoints for the class."""
        outlook = Outlook(
            has_room=has_room,
            endpoints=tuple([candidate.address for candidate in kept]),
            base_seconds=0.0 if has_room else self._best(kept, own=False),
            at=now,
            inter_token_seconds=least_seconds(kept, self._estimates) if _is_degraded_by_tokens(request_class) else 0.0,
        )
        for key in ((request_class.class_name, pool), (ANY_CLASS, pool)):
            if key not in self._outlooks:
                _make_room(self._outlooks, most=MOST_POOLS)
            self._outlooks[key] = outlook

    def measures(self, request_class: RequestClass, *, pool: str) -> Measures:
        """Update and return the class's measures for a newcomer; raise RequestShedError if the step `reject` is on."""
        if not request_class.priority_class.degrade:
            return NO_MEASURES
        now = self._clock()
        targets = request_class.priority_class.targets
        expected = self._newcomer(request_class, pool, now)
        pressure = max(
            expected / targets.ttft_seconds, self._inter_token(request_class, pool, now) / targets.inter_token_seconds
        )
        measures = self._degradation.measures(request_class.class_name, pool=pool, pressure=pressure, now=now)
        if measures.reject:
            raise self.refusal(
                RequestShedError,
                request_class,
                pool,
                Expectation(ttft_seconds=expected, own_seconds=0.0, work_seconds=0.0),
                now=now,
            )
        return measures

    def in_force(self, request_class: RequestClass, *, pool: str) -> Measures:
        """Return the class's measures without updating them; raise RequestShedError if the step `reject` is on."""
        measures = measures_of(
            [
                entry.step
                for entry in self._degradation.in_force(now=self._clock())
                if (entry.class_name, entry.pool) == (request_class.class_name, pool)
            ]
        )
        if measures.reject:
            raise RequestShedError(f"class {request_class.class_name!r} is refused while its step `reject` is in force")
        return measures

    def expect(
        self,
        kept: Sequence[Candidate],
        request_class: RequestClass,
        *,
        pool: str,
        uncached_tokens: int,
        waits: bool = True,
    ) -> Expectation:
        """Return the estimates for a request: the work ahead of it if it waits, then its own prompt."""
        endpoints = [candidate.address for candidate in kept]
        wait = 0.0
        if waits:
            wait = self._wait(request_class, pool, uncached_tokens, endpoints, now=self._clock())
        return Expectation(
            ttft_seconds=wait + self._best(kept, own=True),
            own_seconds=self._best(kept, own=True),
            work_seconds=self._replicas() * self._estimates.drain_seconds(uncached_tokens, 1, endpoints=endpoints),
        )

    def went(self, request_class: RequestClass, *, pool: str, uncached_tokens: int, now: float) -> None:
        """Count a dispatched request: it takes this much of the pool from lower classes."""
        rates = self._rates.get(pool)
        if rates is None:
            _make_room(self._rates, most=MOST_POOLS)
            rates = self._rates[pool] = DispatchRates(now=now)
        some_wait = self._waiting.waits_in(pool)
        rates.went(request_class.priority_class.priority, uncached_tokens, some_wait=some_wait, now=now)
        if request_class.priority_class.sheddable:
            self._share(request_class, pool, uncached_tokens, now=now)

    def _share(self, request_class: RequestClass, pool: str, tokens: int, *, now: float) -> None:
        """Count a tenant's tokens. The total of entries is bounded, as clients may invent the names of both parts."""
        key = (request_class.class_name, pool)
        shares = self._shares.pop(key, None) or TenantShares()
        self._shares[key] = shares
        before = len(shares)
        shares.went(request_class.tenant, tokens, now=now)
        self._sharing += len(shares) - before
        while self._sharing > MOST_SHEDDING:
            self._sharing -= len(self._shares.pop(next(iter(self._shares))))

    def waited(self, request_class: RequestClass, expectation: Expectation, *, pool: str, seconds: float) -> None:
        """Learn from a request that spent `seconds` in the queue, unless its client ended the wait."""
        key = (request_class.class_name, request_class.tenant, pool)
        margin = self._margins.get(key)
        if margin is None:
            _make_room(self._margins, most=MOST_SHEDDING)
            margin = self._margins[key] = WaitMargin()
        target = request_class.priority_class.targets.ttft_seconds
        margin.waited(seconds, expected_seconds=expectation.wait_seconds, target_seconds=target)

    def _wait(
        self, request_class: RequestClass, pool: str, uncached_tokens: int, endpoints: Sequence[str], *, now: float
    ) -> float:
        """Return the seconds until all work before a newcomer is sent: requests ahead and future overtakers."""
        asked = request_class.priority_class
        replicas = self._replicas()
        tokens, requests = self._waiting.ahead(pool, asked.priority, request_class.tenant, uncached_tokens)
        seconds = self._estimates.drain_seconds(tokens * replicas, requests * replicas + 1, endpoints=endpoints)
        rates = self._rates.get(pool)
        if rates is None:
            return seconds
        seconds = rates.drain_seconds(tokens, estimated=seconds, now=now)
        above = rates.above(asked.priority, now=now)
        taken = self._estimates.drain_seconds(above * replicas, 0, endpoints=endpoints)  # seconds of work per second
        taken = rates.share_above(asked.priority, estimated=taken, now=now)
        return seconds / max(1.0 - taken, asked.reserved_share, LEAST_SHARE)

    def ahead(self, request_class: RequestClass, *, pool: str) -> int:
        """Return the number of waiting requests with the class's priority or a higher one."""
        return self._waiting.ahead(pool, request_class.priority_class.priority)[1]

    def cannot_be_met(self, request_class: RequestClass, expectation: Expectation, *, pool: str) -> bool:
        """Tell whether the class's TTFT target is out of reach; then also until the estimate is well below it again."""
        self._judged(request_class, expectation, pool=pool)
        key = (request_class.class_name, request_class.tenant, pool)
        if not self.is_late(request_class, expectation, pool=pool):
            self._shedding.pop(key, None)
            return False
        _make_room(self._shedding, most=MOST_SHEDDING)
        self._shedding[key] = None
        return True

    def turn_away(self, request_class: RequestClass, *, pool: str) -> None:
        """Raise RequestShedError if the tenant's requests are being shed and even an empty prompt would be too late.

        For a newcomer that has to wait: a fully cached prompt makes its wait no shorter.
        """
        if (request_class.class_name, request_class.tenant, pool) not in self._shedding:
            return
        now = self._clock()
        outlook = self._outlook(request_class, pool, now)
        if outlook is None:
            return
        wait = self._wait(request_class, pool, 0, outlook.endpoints, now=now)
        expectation = Expectation(
            ttft_seconds=wait, own_seconds=0.0, work_seconds=self._work.get((request_class.class_name, pool), 0.0)
        )
        if self.is_late(request_class, expectation, pool=pool):
            raise self.refusal(RequestShedError, request_class, pool, expectation, now=now)

    def _judged(self, request_class: RequestClass, expectation: Expectation, *, pool: str) -> None:
        key = (request_class.class_name, pool)
        if key not in self._work:
            _make_room(self._work, most=MOST_POOLS)
            self._work[key] = expectation.work_seconds
        self._work[key] += WORK_SHARE * (expectation.work_seconds - self._work[key])

    def is_late(self, request_class: RequestClass, expectation: Expectation, *, pool: str) -> bool:
        """Tell the same as `cannot_be_met` without recording it."""
        key = (request_class.class_name, request_class.tenant, pool)
        target = request_class.priority_class.targets.ttft_seconds
        worst = expectation.own_seconds + expectation.wait_seconds * self._margin(request_class, pool)
        if key in self._shedding:
            target *= SHED_LEAVE
        return worst > target

    def _margin(self, request_class: RequestClass, pool: str) -> float:
        """Return how many times the expected wait the request may wait at worst.

        A flood makes waits uncertain. A tenant that got less than another is not refused more often for that.
        """
        margin = self._margins.get((request_class.class_name, request_class.tenant, pool))
        if margin is None:
            return FIRST
        shares = self._shares.get((request_class.class_name, pool))
        if shares is not None and shares.is_behind(request_class.tenant, now=self._clock()):
            return min(margin.factor, FIRST)
        return margin.factor

    def refusal(
        self,
        kind: type[RequestShedError],
        request_class: RequestClass,
        pool: str,
        expectation: Expectation,
        *,
        now: float,
    ) -> RequestShedError:
        """Return the answer for a refused client, with the time to retry."""
        priority_class = request_class.priority_class
        target = priority_class.targets.ttft_seconds
        key = (request_class.class_name, pool)
        line = self._lines.get(key)
        if line is None:
            _make_room(self._lines, most=MOST_POOLS)
            line = self._lines[key] = RetrySlots()
        seconds = line.after(
            wait_seconds=max(expectation.ttft_seconds - target * SHED_LEAVE, 0.0),
            work_seconds=expectation.work_seconds,
            now=now,
            random=self._random,
        )
        return kind(
            f"the pool is busy ({kind.reason}): a request of class {request_class.class_name!r} would wait about "
            f"{expectation.ttft_seconds:.3g} s for its first token, and {target:g} s is what the class is promised; "
            f"try again in {ceil(seconds)} s",
            retry_after_seconds=ceil(seconds),
            http_status=priority_class.refusal_status,
            headers={
                PRIORITY_HEADER: request_class.class_name,
                # the openai SDKs read it first; whole seconds would bring all of them back at once
                "retry-after-ms": str(int(seconds * 1000)),
            },
        )

    def _newcomer(self, request_class: RequestClass, pool: str, now: float) -> float:
        """Return the expected TTFT in seconds of any newcomer of the class, without its own prompt."""
        outlook = self._outlook(request_class, pool, now)
        _, requests = self._waiting.ahead(pool, request_class.priority_class.priority)
        if outlook is None or (not requests and now - outlook.at > OUTLOOK_SECONDS):
            return 0.0
        if outlook.has_room and not requests:
            return outlook.base_seconds
        return outlook.base_seconds + self._wait(request_class, pool, 0, outlook.endpoints, now=now)

    def _best(self, kept: Sequence[Candidate], *, own: bool) -> float:
        """Return the TTFT in seconds at the best endpoint, with the request's own uncached tokens or without."""
        return min(
            self._estimates.ttft(
                candidate.address,
                backlog_tokens=candidate.backlog_tokens,
                uncached_tokens=max(candidate.prompt_tokens - candidate.matched_tokens, 0) if own else 0,
                waiting_requests=candidate.queue_depth or 0,
            )
            for candidate in kept
        )

    def _outlook(self, request_class: RequestClass, pool: str, now: float) -> Outlook | None:
        own = self._outlooks.get((request_class.class_name, pool))
        if own is None or now - own.at > OUTLOOK_SECONDS or self.ahead(request_class, pool=pool):
            return self._outlooks.get((ANY_CLASS, pool))
        return own

    def _inter_token(self, request_class: RequestClass, pool: str, now: float) -> float:
        """In seconds, 0 if unknown; for a class with its own inter-token target, the time with one more stream."""
        outlook = self._outlook(request_class, pool, now)
        if outlook is None:
            return 0.0
        if outlook.inter_token_seconds and _is_degraded_by_tokens(request_class):
            return outlook.inter_token_seconds
        known = (self._estimates.pace(endpoint).inter_token_seconds for endpoint in outlook.endpoints)
        return min((seconds for seconds in known if seconds is not None), default=0.0)


def _is_degraded_by_tokens(request_class: RequestClass) -> bool:
    priority_class = request_class.priority_class
    return bool(priority_class.degrade) and priority_class.inter_token_seconds is not None


def _make_room(remembered: dict[Any, Any], *, most: int) -> None:
    """Evict the oldest entry when the map is full; its keys come from clients."""
    if len(remembered) >= most:
        del remembered[next(iter(remembered))]

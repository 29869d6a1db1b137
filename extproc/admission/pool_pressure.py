"""How long a newcomer must expect to wait, and what follows for its class: steps of degradation, refusals, Retry-After.

A pool is here the endpoints of one model. Nothing here waits.
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus
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
from extproc.policy.priority import PriorityClass, PriorityPolicy
from extproc.policy.request_class import RequestClass

OUTLOOK_SECONDS = 2.0  # what a pool looked like then says nothing now
LEAST_SHARE = 0.02  # of a pool that is left to a class; what is below it is refused anyhow
MOST_SHEDDING = 10_000  # (class, tenant, pool) remembered
ANY_CLASS = ""  # in the place of a class's name
WORK_SHARE = 0.1  # that the newest request has in the mean work of its class
MOST_POOLS = 1024  # remembered: clients name models, and where none is configured they name what they like


class Waiting(Protocol):
    """The queue, as far as a newcomer is concerned."""

    def ahead(self, pool: str, priority: int, tenant: str | None = None, cost: int = 0) -> tuple[int, int]:
        """Return the uncached tokens and the number of requests that wait with this priority or a higher one.

        With a tenant: those of them that go before a newcomer of that tenant with `cost` uncached tokens.
        """

    def waits_in(self, pool: str) -> bool:
        """Tell whether any request waits in this pool."""


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What the last look at a pool's endpoints has shown."""

    has_room: bool
    endpoints: tuple[str, ...]
    base_seconds: float  # TTFT of a request without tokens of its own at the best endpoint
    at: float  # monotonic seconds
    inter_token_seconds: float = 0.0  # with one more stream, where it would be the shortest; 0: not known


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """What one request must expect were it to wait now."""

    ttft_seconds: float
    own_seconds: float  # of these, from the moment in which it is sent on
    work_seconds: float  # of the pool, for this request alone

    @property
    def wait_seconds(self) -> float:
        """Until it is sent on."""
        return self.ttft_seconds - self.own_seconds


class PoolPressure:
    """What is expected of one picker's pool, by class and tenant."""

    def __init__(
        self,
        *,
        policy: PriorityPolicy,
        estimates: LatencyEstimates,
        degradation: Degradation,
        waiting: Waiting,
        clock: Callable[[], float],
        random: Callable[[], float],
        replicas: Callable[[], int] = lambda: 1,
        sheddable_status: int = HTTPStatus.SERVICE_UNAVAILABLE,
    ) -> None:
        """`replicas`: how many pickers share the pools; at the others as much is taken to wait as here.

        `sheddable_status`: of refusals of sheddable classes that name none.
        """
        self._sheddable_status = sheddable_status
        self._replicas = replicas
        self._policy = policy
        self._estimates = estimates
        self._degradation = degradation
        self._waiting = waiting
        self._clock = clock
        self._random = random
        self._outlooks: dict[tuple[str, str], Outlook] = {}  # class, pool: each class has its own ceiling
        self._shedding: dict[tuple[str, str, str], None] = {}  # class, tenant, pool
        self._rates: dict[str, DispatchRates] = {}
        self._margins: dict[tuple[str, str, str], WaitMargin] = {}  # class, tenant, pool
        # class, pool: of classes that may be refused; the one used last is last
        self._shares: dict[tuple[str, str], TenantShares] = {}
        self._sharing = 0  # tenants in all of them
        self._lines: dict[tuple[str, str], RetrySlots] = {}
        self._work: dict[tuple[str, str], float] = {}  # class, pool: mean seconds of those that had to be judged

    def reconfigure(self, policy: PriorityPolicy) -> None:
        """Go by another policy from now on; what was learned of the pool stays."""
        self._policy = policy
        self._lines.clear()  # their bounds are the policy's

    def saw(
        self, request_class: RequestClass, kept: Sequence[Candidate], *, pool: str, has_room: bool, now: float
    ) -> None:
        """Remember how the pool's endpoints stand for the class."""
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
        """Return what is taken from a request of the class now; raise RequestShedError for the step `reject`."""
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
        """Return what is taken from the class now, and change nothing; raise RequestShedError where it is refused."""
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
        """Return what a request has to expect: where it waits, those ahead of it, and then its own prompt."""
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
        """Take a request that was sent on: those below it have that much less of the pool."""
        rates = self._rates.get(pool)
        if rates is None:
            _make_room(self._rates, most=MOST_POOLS)
            rates = self._rates[pool] = DispatchRates(now=now)
        some_wait = self._waiting.waits_in(pool)
        rates.went(request_class.priority_class.priority, uncached_tokens, some_wait=some_wait, now=now)
        if request_class.priority_class.sheddable:
            self._share(request_class, pool, uncached_tokens, now=now)

    def _share(self, request_class: RequestClass, pool: str, tokens: int, *, now: float) -> None:
        """Note what a tenant got; clients invent both names, so that what is bounded is all of it together."""
        key = (request_class.class_name, pool)
        shares = self._shares.pop(key, None) or TenantShares()
        self._shares[key] = shares
        before = len(shares)
        shares.went(request_class.tenant, tokens, now=now)
        self._sharing += len(shares) - before
        while self._sharing > MOST_SHEDDING:
            self._sharing -= len(self._shares.pop(next(iter(self._shares))))

    def waited(self, request_class: RequestClass, expectation: Expectation, *, pool: str, seconds: float) -> None:
        """Learn from a request that was in the queue for so long, whatever ended it but its client."""
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
        """Return the seconds until those are gone that go before a newcomer, now or because they will overtake it."""
        asked = request_class.priority_class
        replicas = self._replicas()
        tokens, requests = self._waiting.ahead(pool, asked.priority, request_class.tenant, uncached_tokens)
        seconds = self._estimates.drain_seconds(tokens * replicas, requests * replicas + 1, endpoints=endpoints)
        rates = self._rates.get(pool)
        if rates is None:
            return seconds
        seconds = rates.drain_seconds(tokens, estimated=seconds, now=now)
        above = rates.above(asked.priority, now=now)
        taken = self._estimates.drain_seconds(above * replicas, 0, endpoints=endpoints)  # share of each second
        taken = rates.share_above(asked.priority, estimated=taken, now=now)
        return seconds / max(1.0 - taken, asked.reserved_share, LEAST_SHARE)

    def ahead(self, request_class: RequestClass, *, pool: str) -> int:
        """Return how many requests wait that such a request would not overtake."""
        return self._waiting.ahead(pool, request_class.priority_class.priority)[1]

    def cannot_be_met(self, request_class: RequestClass, expectation: Expectation, *, pool: str) -> bool:
        """Tell whether the class's target is out of reach; once it is, until the estimate is well below it again."""
        self._judged(request_class, expectation, pool=pool)
        key = (request_class.class_name, request_class.tenant, pool)
        if not self.is_late(request_class, expectation, pool=pool):
            self._shedding.pop(key, None)
            return False
        _make_room(self._shedding, most=MOST_SHEDDING)
        self._shedding[key] = None
        return True

    def turn_away(self, request_class: RequestClass, *, pool: str) -> None:
        """Raise RequestShedError where, as a moment ago, the target is out of reach already for a prompt of no tokens.

        For a newcomer that has to wait: one that is cached altogether waits no shorter than that.
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
        """Tell the same without taking note of it, for explanations."""
        key = (request_class.class_name, request_class.tenant, pool)
        target = request_class.priority_class.targets.ttft_seconds
        worst = expectation.own_seconds + expectation.wait_seconds * self._margin(request_class, pool)
        if key in self._shedding:
            target *= self._policy.overload.shed_leave
        return worst > target

    def _margin(self, request_class: RequestClass, pool: str) -> float:
        """Return how many times longer than expected the request may wait.

        Those who flood make waits uncertain. A tenant that got less than another is not refused more for that.
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
        """Return the answer for a client that is sent away, with the time at which it shall come back."""
        priority_class = request_class.priority_class
        target = priority_class.targets.ttft_seconds
        key = (request_class.class_name, pool)
        line = self._lines.get(key)
        if line is None:
            _make_room(self._lines, most=MOST_POOLS)
            overload = self._policy.overload
            line = self._lines[key] = RetrySlots(
                least_seconds=overload.least_retry_seconds,
                most_seconds=overload.most_retry_seconds,
                jitter=overload.retry_jitter,
            )
        seconds = line.after(
            wait_seconds=max(expectation.ttft_seconds - target * self._policy.overload.shed_leave, 0.0),
            work_seconds=expectation.work_seconds,
            now=now,
            random=self._random,
        )
        return kind(
            f"the pool is busy ({kind.reason}): a request of class {request_class.class_name!r} would wait about "
            f"{expectation.ttft_seconds:.3g} s for its first token, and {target:g} s is what the class is promised; "
            f"try again in {ceil(seconds)} s",
            retry_after_seconds=ceil(seconds),
            http_status=self._status(priority_class),
            headers={
                PRIORITY_HEADER: request_class.class_name,
                # the openai SDKs read it first; whole seconds would bring all of them back at once
                "retry-after-ms": str(int(seconds * 1000)),
            },
        )

    def _status(self, priority_class: PriorityClass) -> int:
        default = self._sheddable_status if priority_class.sheddable else HTTPStatus.SERVICE_UNAVAILABLE
        return priority_class.refusal_status or default

    def _newcomer(self, request_class: RequestClass, pool: str, now: float) -> float:
        """Return the TTFT in seconds that any request of the class must expect."""
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
        """Return what the class's last look has shown; any class's if it was long ago or requests wait ahead."""
        own = self._outlooks.get((request_class.class_name, pool))
        if own is None or now - own.at > OUTLOOK_SECONDS or self.ahead(request_class, pool=pool):
            return self._outlooks.get((ANY_CLASS, pool))
        return own

    def _inter_token(self, request_class: RequestClass, pool: str, now: float) -> float:
        """Return the seconds a token at the quickest endpoint, 0 where that is not known.

        Of a class that says itself what it is promised: those that one more stream would have.
        """
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
    """Forget the one that was entered first where there are as many as may be: clients invent names."""
    if len(remembered) >= most:
        del remembered[next(iter(remembered))]

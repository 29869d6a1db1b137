"""Statistics of a pool's requests for the estimate of the next one: rates, waits, tenants' shares, retry slots.

Pure; times are monotonic seconds, given as arguments.
"""

from collections.abc import Callable
from math import exp

RATE_SECONDS = 10.0  # window of the moving means; shorter ones refuse requests on any noise
DECAY_SECONDS = 0.01  # a thousandth of it: sums need not be exact within
PRIOR_SECONDS = 1.0  # of observed waiting, at which the measured rate weighs as much as the estimate


class DispatchRates:
    """The dispatch rate of one pool, and the part of it that goes to priorities above a class.

    Both are counted at dispatch, the event that requests wait for, and so include every limit of the pods: prompts,
    decoding, places, room kept for others. Only the highest priority drains at the full rate. A lower request is
    overtaken by all higher ones that arrive meanwhile; an estimate without them is several times too optimistic for low
    classes.
    """

    def __init__(self, *, now: float) -> None:
        self._began = self._at = now
        self._tokens: dict[int, float] = {}  # priority -> tokens, decayed as of `_at`, like all sums here
        self._busy_tokens: dict[int, float] = {}  # the same, of requests sent while others waited
        self._busy_seconds = 0.0

    def went(self, priority: int, tokens: int, *, some_wait: bool, now: float) -> None:
        """Count a dispatched request. If `some_wait`, the pool has worked at its full rate since the last one."""
        since = max(now - self._at, 0.0)
        if some_wait or since >= DECAY_SECONDS:
            self._decay(now)
        self._tokens[priority] = self._tokens.get(priority, 0.0) + tokens
        if some_wait:
            self._busy_seconds += since
            self._busy_tokens[priority] = self._busy_tokens.get(priority, 0.0) + tokens

    def above(self, priority: int, *, now: float) -> float:
        """Return the tokens per second of all higher priorities, as a mean over the window: bursts are smoothed."""
        fade = exp(min(self._at - now, 0.0) / RATE_SECONDS)
        # shorter window until enough time has been observed
        seconds = RATE_SECONDS * (1.0 - exp(min(self._began - now, 0.0) / RATE_SECONDS))
        tokens = fade * sum(tokens for other, tokens in self._tokens.items() if other > priority)
        return tokens / max(seconds, 1.0)

    def drain_seconds(self, tokens: float, *, estimated: float, now: float) -> float:
        """Return the pool's seconds for these tokens: a mean of `estimated` and the rate measured under waiting."""
        busy = sum(self._busy_tokens.values())
        if busy <= 0.0:
            return estimated
        return estimated + self._weight(now) * (tokens * self._busy_seconds / busy - estimated)

    def share_above(self, priority: int, *, estimated: float, now: float) -> float:
        """Return the higher priorities' share of the pool: a mean of `estimated` and the share measured under waiting.

        After a rise of the load, a moving mean alone would show the old load for the length of its window.
        """
        busy = sum(self._busy_tokens.values())
        if busy <= 0.0:
            return estimated
        above = sum(tokens for other, tokens in self._busy_tokens.items() if other > priority)
        return estimated + self._weight(now) * (above / busy - estimated)

    def _weight(self, now: float) -> float:
        """Return the weight, 0 to 1, of the rates measured under waiting."""
        seconds = self._busy_seconds * exp(min(self._at - now, 0.0) / RATE_SECONDS)
        return seconds / (seconds + PRIOR_SECONDS)

    def _decay(self, now: float) -> None:
        fade = exp(min(self._at - now, 0.0) / RATE_SECONDS)
        self._at = max(self._at, now)
        self._tokens = {priority: tokens * fade for priority, tokens in self._tokens.items()}
        self._busy_tokens = {priority: tokens * fade for priority, tokens in self._busy_tokens.items()}
        self._busy_seconds *= fade


LEAST_RETRY_SECONDS, MOST_RETRY_SECONDS = 1.0, 60.0
RETRY_JITTER = 0.5  # largest random share added to a wait, or subtracted from the longest one


class RetrySlots:
    """Retry times for refused clients of one class in one pool, one after the other.

    A constant Retry-After brings all of them back at the same moment, to be refused again. Here each refusal gets the
    next slot of a schedule. It begins when the class's estimate is expected to be within its target, and each slot is
    as long as the work of its request.
    """

    def __init__(self) -> None:
        self._end = float("-inf")

    def after(self, *, wait_seconds: float, work_seconds: float, now: float, random: Callable[[], float]) -> float:
        """Return the seconds after which the client should retry.

        `wait_seconds` pass until there would be room if it were the only client; `work_seconds` is the pool's work on
        its request. `random` returns 0..1.
        """
        begin = max(self._end, now + wait_seconds)
        # no wait exceeds MOST_RETRY_SECONDS: at the end of the schedule jitter alone spreads the clients
        self._end = min(begin + work_seconds, now + MOST_RETRY_SECONDS)
        seconds = max(begin - now, LEAST_RETRY_SECONDS)
        if seconds >= MOST_RETRY_SECONDS:
            return MOST_RETRY_SECONDS * (1.0 - RETRY_JITTER * random() / (1.0 + RETRY_JITTER))
        return min(seconds * (1.0 + RETRY_JITTER * random()), MOST_RETRY_SECONDS)


# Share of queued requests that may wait longer than estimate x margin: 99 of 100 refusals must be quick ones.
LATE_SHARE = 0.01
STEP = 0.25  # of the factor's logarithm, for a request that waited longer
FIRST = 1.5  # at the start of an overload: better refuse a few too many than let all of those wait in vain
MOST = 8.0
# of the target: waits below it even at worst say nothing about waits near the target
TELLING_SHARE = 0.2


class WaitMargin:
    """The worst-case ratio of real to expected wait, for one tenant's requests of one class in one pool.

    With an estimate that is right on average, half of the requests that miss their target would be refused only after a
    long wait. So the class's target is compared with a wait that all but a few stay below: the estimate times this
    factor. The factor is a quantile of the ratio real / expected wait, tracked by steps (Robbins, Monro 1951): a large
    step up for each request that waited longer, a small step down for each other one.
    """

    def __init__(self) -> None:
        self.factor = FIRST

    def waited(self, real_seconds: float, *, expected_seconds: float, target_seconds: float) -> None:
        """Count a request that left the queue for an endpoint or by timeout."""
        # Times the factor: else a large factor would refuse every request that could show it is too large.
        if expected_seconds * self.factor < TELLING_SHARE * target_seconds:
            return
        is_late = real_seconds > expected_seconds * self.factor
        step = STEP * (1.0 - LATE_SHARE) if is_late else -STEP * LATE_SHARE
        self.factor = min(max(self.factor * exp(step), 1.0), MOST)


ROUNDING = 1e-9  # sums decayed in different numbers of steps differ by less
SHARE_SECONDS = 10.0  # time constant of the decaying sums: a few requests each
MOST_TENANTS = 1000  # remembered; a forgotten tenant counts as one that got nothing


class TenantShares:
    """Recent tokens by tenant of one class in one pool, to find tenants that got less than the largest.

    Tenants with requests always waiting get equal parts, the largest there are. A tenant with less sent too few
    requests, or they were refused.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[float, float]] = {}  # tenant -> (tokens, as of this time)
        # the largest of all; as all sums decay alike, only a dispatch can raise one above it
        self._most = (0.0, 0.0)

    def went(self, tenant: str, tokens: int, *, now: float) -> None:
        """Count a dispatched request of the tenant."""
        sum_now = _faded(self._sent.pop(tenant, (0.0, now)), now) + tokens
        if len(self._sent) >= MOST_TENANTS:
            del self._sent[next(iter(self._sent))]  # the tenant with the oldest last dispatch
        self._sent[tenant] = (sum_now, now)
        if sum_now > _faded(self._most, now):
            self._most = (sum_now, now)

    def __len__(self) -> int:
        return len(self._sent)

    def is_behind(self, tenant: str, *, now: float) -> bool:
        """Tell whether another tenant got more."""
        return _faded(self._sent.get(tenant, (0.0, now)), now) < _faded(self._most, now) * (1.0 - ROUNDING)


def _faded(entry: tuple[float, float], now: float) -> float:
    tokens, at = entry
    return tokens * exp(min(at - now, 0.0) / SHARE_SECONDS)

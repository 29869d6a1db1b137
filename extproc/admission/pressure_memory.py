"""What is remembered of a pool's requests to say what the next one must expect: rates, waits, shares, promised returns.

Pure; times are monotonic seconds, given as arguments.
"""

from collections.abc import Callable
from math import exp

RATE_SECONDS = 10.0  # of the moving means: shorter ones refuse in every noisy moment
PRIOR_SECONDS = 1.0  # of waiting that must have been seen for what was counted to weigh as much as the estimate


class DispatchRates:
    """How fast one pool takes work, and how much of that the bands of priority above a class take.

    Both are counted where requests are sent on, which is what waiting requests wait for: whatever limits the pods
    (prompts, decoding, places, room that is kept for others) is in it. A queue drains at that rate for the highest band
    only. A request below it is overtaken by all that come meanwhile, and an estimate that forgets them promises low
    classes several times too much.
    """

    def __init__(self, *, now: float) -> None:
        self._began = self._at = now
        self._tokens: dict[int, float] = {}  # priority -> tokens, decayed as of `_at`, like all sums here
        self._busy_tokens: dict[int, float] = {}  # the same, of what was sent on while requests waited
        self._busy_seconds = 0.0

    def went(self, priority: int, tokens: int, *, some_wait: bool, now: float) -> None:
        """Take a request that was sent on; `some_wait`: so the pool has taken since the last one what it can."""
        since = max(now - self._at, 0.0)
        self._decay(now)
        self._tokens[priority] = self._tokens.get(priority, 0.0) + tokens
        if some_wait:
            self._busy_seconds += since
            self._busy_tokens[priority] = self._busy_tokens.get(priority, 0.0) + tokens

    def above(self, priority: int, *, now: float) -> float:
        """Return the tokens a second of all higher priorities; a burst counts with its share of the window."""
        fade = exp(min(self._at - now, 0.0) / RATE_SECONDS)
        # the window is as long as there was something to see
        seconds = RATE_SECONDS * (1.0 - exp(min(self._began - now, 0.0) / RATE_SECONDS))
        tokens = fade * sum(tokens for other, tokens in self._tokens.items() if other > priority)
        return tokens / max(seconds, 1.0)

    def drain_seconds(self, tokens: float, *, estimated: float, now: float) -> float:
        """Return how long the pool takes for so many tokens: as `estimated`, and as counted while requests waited."""
        busy = sum(self._busy_tokens.values())
        if busy <= 0.0:
            return estimated
        return estimated + self._weight(now) * (tokens * self._busy_seconds / busy - estimated)

    def share_above(self, priority: int, *, estimated: float, now: float) -> float:
        """Return the part of the pool that higher priorities take: as `estimated`, and as counted while others waited.

        A mean over the last seconds alone would for as long take a load that has just risen for the one before.
        """
        busy = sum(self._busy_tokens.values())
        if busy <= 0.0:
            return estimated
        above = sum(tokens for other, tokens in self._busy_tokens.items() if other > priority)
        return estimated + self._weight(now) * (above / busy - estimated)

    def _weight(self, now: float) -> float:
        """Return how much what was counted while requests waited says, from 0 to 1."""
        seconds = self._busy_seconds * exp(min(self._at - now, 0.0) / RATE_SECONDS)
        return seconds / (seconds + PRIOR_SECONDS)

    def _decay(self, now: float) -> None:
        fade = exp(min(self._at - now, 0.0) / RATE_SECONDS)
        self._at = max(self._at, now)
        self._tokens = {priority: tokens * fade for priority, tokens in self._tokens.items()}
        self._busy_tokens = {priority: tokens * fade for priority, tokens in self._busy_tokens.items()}
        self._busy_seconds *= fade


class RetrySlots:
    """When refused clients of one class in one pool are asked to come back: one after the other.

    A constant Retry-After brings all of them back at the same moment, to be refused again. Here each refusal takes a
    place in a line that exists in time only: it begins when the class's estimate is expected to be within its target,
    and grows by the work of each request that was sent away.
    """

    def __init__(self, *, least_seconds: float, most_seconds: float, jitter: float) -> None:
        """`jitter`: up to this share of a wait is added by chance, or taken where it is the longest there is."""
        self._least_seconds = least_seconds
        self._most_seconds = most_seconds
        self._jitter = jitter
        self._end = float("-inf")

    def after(self, *, wait_seconds: float, work_seconds: float, now: float, random: Callable[[], float]) -> float:
        """Return in how many seconds the client shall ask again.

        `wait_seconds`: until there would be room for it were it the only one; `work_seconds`: what the pool needs for
        it. `random` returns 0..1.
        """
        begin = max(self._end, now + wait_seconds)
        # no client is told a longer wait than the longest: those at the end of the line are spread by chance alone
        self._end = min(begin + work_seconds, now + self._most_seconds)
        seconds = max(begin - now, self._least_seconds)
        if seconds >= self._most_seconds:
            return self._most_seconds * (1.0 - self._jitter * random() / (1.0 + self._jitter))
        return min(seconds * (1.0 + self._jitter * random()), self._most_seconds)


# of the waiting requests may wait longer than the margin says: a refusal is to be quick for 99 in 100
LATE_SHARE = 0.01
STEP = 0.25  # in the logarithm, for one that waited longer
FIRST = 1.5  # an overload that begins refuses some too many, and not all that then wait in vain
MOST = 8.0
# of the target: waits that stay below it even at their worst tell nothing of those that are near it
TELLING_SHARE = 0.2


class WaitMargin:
    """How much longer than expected one tenant's requests of one class in one pool wait at worst.

    An estimate that is right on average refuses half of the requests that will be late only when they are: after a long
    wait. So the class's target is compared with the wait that all but a few stay below: the estimate times this margin.
    It is a quantile of real by expected wait, tracked by steps (Robbins, Monro 1951): up by a large one for each
    request that waited longer, down by a small one for each that did not.
    """

    def __init__(self) -> None:
        self.factor = FIRST

    def waited(self, real_seconds: float, *, expected_seconds: float, target_seconds: float) -> None:
        """Take a request that has left the queue for an endpoint, or because it was too late."""
        # with the margin, or one that has become large would admit no request that could show that it may shrink
        if expected_seconds * self.factor < TELLING_SHARE * target_seconds:
            return
        is_late = real_seconds > expected_seconds * self.factor
        step = STEP * (1.0 - LATE_SHARE) if is_late else -STEP * LATE_SHARE
        self.factor = min(max(self.factor * exp(step), 1.0), MOST)


ROUNDING = 1e-9  # of sums that fade in more or fewer steps
SHARE_SECONDS = 10.0  # of the fading sums: some requests each
MOST_TENANTS = 1000  # remembered; one that was forgotten got nothing


class TenantShares:
    """Which tenants of one class got less of one pool of late than the one that got most.

    Tenants that always have requests waiting get equal parts, and none gets more: one that got less had not enough of
    them, or they were refused.
    """

    def __init__(self) -> None:
        self._sent: dict[str, tuple[float, float]] = {}  # tenant -> tokens as of when
        # of all tenants; as all fade alike, only a tenant that is sent something can come to have more
        self._most = (0.0, 0.0)

    def went(self, tenant: str, tokens: int, *, now: float) -> None:
        """Take a request of the tenant that was sent on."""
        sum_now = _faded(self._sent.pop(tenant, (0.0, now)), now) + tokens
        if len(self._sent) >= MOST_TENANTS:
            del self._sent[next(iter(self._sent))]  # the one that was sent nothing for longest
        self._sent[tenant] = (sum_now, now)
        if sum_now > _faded(self._most, now):
            self._most = (sum_now, now)

    def __len__(self) -> int:
        """Return how many tenants are remembered."""
        return len(self._sent)

    def is_behind(self, tenant: str, *, now: float) -> bool:
        """Tell whether another tenant got more."""
        return _faded(self._sent.get(tenant, (0.0, now)), now) < _faded(self._most, now) * (1.0 - ROUNDING)


def _faded(entry: tuple[float, float], now: float) -> float:
    tokens, at = entry
    return tokens * exp(min(at - now, 0.0) / SHARE_SECONDS)

"""Which endpoints are avoided although they report: too many failures, or tokens much slower than the others'.

Beside it which ones have said themselves that they are full: a 503 of the pod (vLLM's queue limits) is no failure.

Pure; time is an argument, monotonic seconds.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

from extproc.policy.values import HealthPolicy

LONGEST_WINDOW = 256  # outcomes remembered an endpoint: at a high rate the last ones tell enough
NONE_AVOIDED: Mapping[str, str] = {}
NEVER_FULL: Mapping[str, float] = {}
MOST_FULL_SECONDS = 8.0  # for a pod that says again and again that it is full, and not for how long
LONGEST_FULL_SECONDS = 30.0  # that a pod's own Retry-After keeps it out


class EndpointHealth:
    """What the last requests of each endpoint came to. Avoided ones get a trial after a while that doubles."""

    def __init__(self, policy: HealthPolicy | None = None, *, full_seconds: float = 1.0) -> None:
        """`full_seconds`: how long an endpoint counts as full after a 503 of its own that does not say how long."""
        self._policy = policy or HealthPolicy()
        self._full_seconds = full_seconds
        self._outcomes: dict[str, deque[tuple[float, bool]]] = {}
        self._avoided: dict[str, tuple[float, str]] = {}  # endpoint -> until, why
        self._avoided_since: dict[str, float] = {}  # endpoint -> when it was first, of several times in a row
        self._in_a_row: dict[str, int] = {}
        self._trials: dict[str, float] = {}  # endpoint -> until when its trial may take
        self._full_until: dict[str, float] = {}
        self._full_in_a_row: dict[str, int] = {}

    def reconfigure(self, policy: HealthPolicy, *, full_seconds: float) -> None:
        """Judge by another policy from now on; who is avoided stays so for the time that was set."""
        self._policy, self._full_seconds = policy, full_seconds

    def note(self, endpoint: str, *, failed: bool, now: float) -> None:
        """Take the end of one request there: failed means a 5xx, a reset, or a connection that was not made."""
        outcomes = self._outcomes.get(endpoint)
        if outcomes is None:
            outcomes = self._outcomes[endpoint] = deque(maxlen=LONGEST_WINDOW)
        if now < self._avoided.get(endpoint, (0.0, ""))[0]:
            return  # an answer to what was sent before: it neither prolongs nor ends the time
        self._trials.pop(endpoint, None)
        if not failed:
            self._full_in_a_row.pop(endpoint, None)
        outcomes.append((now, failed))
        while outcomes and now - outcomes[0][0] > self._policy.window_seconds:
            outcomes.popleft()
        if failed:
            self._judge(endpoint, outcomes, now)
        elif endpoint in self._in_a_row and not any(bad for _, bad in outcomes):
            del self._in_a_row[endpoint], self._avoided[endpoint]  # the trial has gone well
            self._avoided_since.pop(endpoint, None)

    def avoided(self, *, now: float) -> Mapping[str, str]:
        """Return the endpoints to be avoided at `now` and why, in a few words."""
        if not self._avoided:
            return NONE_AVOIDED
        return {
            endpoint: why
            for endpoint, (until, why) in self._avoided.items()
            if now < until or now < self._trials.get(endpoint, 0.0)
        }

    def avoided_times(self, endpoint: str) -> tuple[float, float] | None:
        """Return since when it is avoided for its failures, and when one request is tried there; None: it is not."""
        since, avoided = self._avoided_since.get(endpoint), self._avoided.get(endpoint)
        return None if since is None or avoided is None else (since, avoided[0])

    def sent(self, endpoint: str, *, now: float) -> None:
        """Note that a request goes there: a trial is one request, until it is answered or takes too long."""
        if self._avoided and now >= self._avoided.get(endpoint, (now + 1.0, ""))[0]:
            self._trials[endpoint] = now + self._policy.avoid_seconds

    def full(self, endpoint: str, *, now: float, seconds: float | None = None) -> None:
        """Believe a pod that answers 503 itself: it is full for so long (its Retry-After), which is no failure.

        One that goes on answering so, though nothing was sent meanwhile, is believed for twice as long each time.
        """
        self._trials.pop(endpoint, None)  # it lives
        if now < self._full_until.get(endpoint, 0.0):
            return  # an answer to what was sent before
        times = self._full_in_a_row.get(endpoint, 0)
        self._full_in_a_row[endpoint] = times + 1
        if seconds is None or not seconds >= 0.0:  # NaN is neither
            seconds = min(self._full_seconds * 2.0 ** min(times, 30), MOST_FULL_SECONDS)
        self._full_until[endpoint] = now + min(seconds, LONGEST_FULL_SECONDS)

    def full_until(self, *, now: float) -> Mapping[str, float]:
        """Return the endpoints that have said to be full, and until when (monotonic seconds)."""
        if not self._full_until:
            return NEVER_FULL
        ended = [endpoint for endpoint, until in self._full_until.items() if until <= now]
        for endpoint in ended:
            del self._full_until[endpoint]
        return self._full_until

    def restarted(self, endpoint: str) -> None:
        """Forget what another process did, or what has healed."""
        self._outcomes.pop(endpoint, None)
        self._avoided.pop(endpoint, None)
        self._avoided_since.pop(endpoint, None)
        self._in_a_row.pop(endpoint, None)
        self._trials.pop(endpoint, None)
        self._full_until.pop(endpoint, None)
        self._full_in_a_row.pop(endpoint, None)

    def _judge(self, endpoint: str, outcomes: deque[tuple[float, bool]], now: float) -> None:
        policy = self._policy
        failures = sum(bad for _, bad in outcomes)
        times = self._in_a_row.get(endpoint, 0)
        # after a trial the first failure is enough
        if not times and (len(outcomes) < policy.least_requests or failures < policy.failure_share * len(outcomes)):
            return
        seconds = min(policy.avoid_seconds * 2.0 ** min(times, 30), policy.longest_avoid_seconds)
        self._trials.pop(endpoint, None)
        self._avoided_since.setdefault(endpoint, now)
        self._avoided[endpoint] = now + seconds, f"{failures} of {len(outcomes)} requests failed"
        self._in_a_row[endpoint] = times + 1
        outcomes.clear()


def slow_endpoints(inter_token_seconds: Mapping[str, float], *, policy: HealthPolicy) -> Mapping[str, str]:
    """Return the endpoints whose inter-token time is an outlier (seconds by endpoint), and why, in a few words."""
    if len(inter_token_seconds) < 3:  # of two, it cannot be said which is odd
        return NONE_AVOIDED
    usual = median(inter_token_seconds.values())
    limit = max(usual * policy.slow_factor, policy.slow_floor_seconds)
    return {
        endpoint: f"{seconds * 1000:.0f} ms a token, the others {usual * 1000:.0f} ms"
        for endpoint, seconds in inter_token_seconds.items()
        if seconds > limit
    }


def at_most(avoided: Mapping[str, str], *, endpoints: int, share: float) -> Mapping[str, str]:
    """Return `avoided`, or none where that is a larger share of the endpoints: then it is not the endpoints."""
    return avoided if len(avoided) <= endpoints * share else NONE_AVOIDED

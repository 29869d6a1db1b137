"""Which endpoints are avoided although they report: too many failures, or tokens much slower than the others'.

Told by the exchanges (`note`) and the scraper's reports; asked by `pick_endpoint` once a request. Pure; time is an
argument, monotonic seconds.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

from extproc.core.policy import HealthPolicy

LONGEST_WINDOW = 256  # outcomes remembered an endpoint: at a high rate the last ones tell enough
NOBODY: Mapping[str, str] = {}


class EndpointHealth:
    """What the last requests of each endpoint came to. Avoided ones get a trial after a while that doubles."""

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self._policy = policy or HealthPolicy()
        self._outcomes: dict[str, deque[tuple[float, bool]]] = {}
        self._avoided: dict[str, tuple[float, str]] = {}  # endpoint -> until, why
        self._in_a_row: dict[str, int] = {}

    def note(self, endpoint: str, *, failed: bool, now: float) -> None:
        """Take the end of one request there: failed means a 5xx, a reset, or a connection that was not made."""
        outcomes = self._outcomes.get(endpoint)
        if outcomes is None:
            outcomes = self._outcomes[endpoint] = deque(maxlen=LONGEST_WINDOW)
        if now < self._avoided.get(endpoint, (0.0, ""))[0]:
            return  # an answer to what was sent before: it neither prolongs nor ends the time
        outcomes.append((now, failed))
        while outcomes and now - outcomes[0][0] > self._policy.window_seconds:
            outcomes.popleft()
        if failed:
            self._judge(endpoint, outcomes, now)
        elif endpoint in self._in_a_row and not any(bad for _, bad in outcomes):
            del self._in_a_row[endpoint], self._avoided[endpoint]  # the trial has gone well

    def avoided(self, *, now: float) -> Mapping[str, str]:
        """Return the endpoints to be avoided at `now` and why, in a few words."""
        if not self._avoided:
            return NOBODY
        return {endpoint: why for endpoint, (until, why) in self._avoided.items() if now < until}

    def restarted(self, endpoint: str) -> None:
        """Forget what another process did, or what has healed."""
        self._outcomes.pop(endpoint, None)
        self._avoided.pop(endpoint, None)
        self._in_a_row.pop(endpoint, None)

    def _judge(self, endpoint: str, outcomes: deque[tuple[float, bool]], now: float) -> None:
        policy = self._policy
        failures = sum(bad for _, bad in outcomes)
        times = self._in_a_row.get(endpoint, 0)
        # after a trial the first failure is enough
        if not times and (len(outcomes) < policy.least_requests or failures < policy.failure_share * len(outcomes)):
            return
        seconds = min(policy.avoid_seconds * 2.0 ** min(times, 30), policy.longest_avoid_seconds)
        self._avoided[endpoint] = now + seconds, f"{failures} of {len(outcomes)} requests failed"
        self._in_a_row[endpoint] = times + 1
        outcomes.clear()


def slow_endpoints(inter_token_seconds: Mapping[str, float], *, policy: HealthPolicy) -> Mapping[str, str]:
    """Return the endpoints whose time a token is an outlier (seconds by endpoint), and why, in a few words."""
    if len(inter_token_seconds) < 3:  # of two, nobody can say which is odd
        return NOBODY
    usual = median(inter_token_seconds.values())
    limit = max(usual * policy.slow_factor, policy.slow_floor_seconds)
    return {
        endpoint: f"{seconds * 1000:.0f} ms a token, the others {usual * 1000:.0f} ms"
        for endpoint, seconds in inter_token_seconds.items()
        if seconds > limit
    }


def at_most(avoided: Mapping[str, str], *, endpoints: int, share: float) -> Mapping[str, str]:
    """Return `avoided`, or nobody where that is a larger share of the endpoints: then it is not the endpoints."""
    return avoided if len(avoided) <= endpoints * share else NOBODY

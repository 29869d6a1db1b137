"""The rules of room with all that they look at beside the candidates, for tests that ask often."""

from collections.abc import Sequence

from extproc.choosing.endpoint_health import EndpointHealth
from extproc.choosing.room import Room, expected_ttft, rooms_of
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import OverloadPolicy


class Saturation:
    """Has what a picker hands to the rules at each try."""

    def __init__(self, policy: OverloadPolicy, *, estimates: LatencyEstimates, health: EndpointHealth) -> None:
        self.policy = policy
        self._estimates = estimates
        self._health = health

    def rooms(self, candidates: Sequence[Candidate], *, ceiling: float, now: float) -> list[Room]:
        """Return how full each is at `now` for a class that may fill `ceiling` (0..1) of the limits."""
        return rooms_of(
            candidates,
            ceiling=ceiling,
            policy=self.policy,
            estimates=self._estimates,
            full_until=self._health.full_until(now=now),
            now=now,
        )

    def ttft(self, candidate: Candidate, *, now: float) -> float:
        """Return the seconds to the first token of this request if it is sent there now."""
        return expected_ttft(candidate, self._estimates, now=now)

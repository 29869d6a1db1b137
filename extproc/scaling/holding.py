"""Smooths recommendations into desired replicas: up at once, down late, both in bounded steps. Pure.

Scales down only to the highest recommendation of the stabilisation window, as Kubernetes' HPA does
(`stabilizeRecommendation` in pkg/controller/podautoscaler), and by at most a third of the pods a minute. Steps up are
the HPA's defaults.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

UP_FACTOR, UP_PODS, UP_SECONDS = 2.0, 4, 15.0  # step up: x2 or +4, whichever is larger
DOWN_SHARE, DOWN_SECONDS = 1 / 3, 60.0
# windows: the wait doubles whenever a removed pod is needed again at once. Otherwise pods would come and go with every
# load whose cycle is longer than the window
MOST_PATIENCE = 8.0


@dataclass(slots=True, eq=False)
class Holding:
    """The desired replicas of one role or variant."""

    wanted: int | None = None  # None before the first look
    _since: float | None = None  # time of the first recommendation, in seconds
    _recent: deque[tuple[float, int]] = field(default_factory=deque)  # times and recommendations, in falling order
    _raised_at: float = float("-inf")
    _lowered_at: float = float("-inf")
    _patience: float = 1.0  # windows
    _regretted_at: float = float("-inf")

    def settle(self, recommended: int, *, present: int, now: float, window_seconds: float) -> tuple[int, str]:
        """Return the desired replicas, and in words why they differ from the recommended ones ("" if they do not).

        `present` counts all pods, including starting ones. It is the initial number: a picker that has just started
        must not remove pods that its predecessor asked for.
        """
        if self.wanted is None:
            self.wanted = present
        if self._since is None:
            self._since = now
        recent, usual_seconds = self._recent, window_seconds
        window_seconds *= self._patience
        while recent and recent[-1][1] <= recommended:
            recent.pop()
        recent.append((now, recommended))
        while recent[0][0] < now - window_seconds:
            recent.popleft()
        if recommended > self.wanted:
            if now - self._raised_at >= UP_SECONDS:
                self._raised_at = now
                self._regret(now, usual_seconds)
                self.wanted = min(recommended, max(ceil(UP_FACTOR * self.wanted), self.wanted + UP_PODS))
            return self.wanted, f"{recommended} in steps" if self.wanted < recommended else ""
        highest = recent[0][1]
        if recommended == self.wanted:
            return self.wanted, ""
        if now - self._since < window_seconds or highest >= self.wanted:
            return self.wanted, f"fewer ({recommended}) only after {window_seconds:g} s below"
        if now - self._lowered_at < DOWN_SECONDS:
            return self.wanted, f"{recommended} in steps"
        self._lowered_at = now
        self.wanted = max(highest, self.wanted - max(int(DOWN_SHARE * self.wanted), 1))
        return self.wanted, f"{recommended} in steps" if self.wanted > recommended else ""

    def _regret(self, now: float, window_seconds: float) -> None:
        """Double the next wait if a pod was removed just before it is needed again; reset it after a quiet time."""
        if now - self._lowered_at < window_seconds:
            self._patience = min(2.0 * self._patience, MOST_PATIENCE)
            self._regretted_at, self._lowered_at = now, float("-inf")  # each removal counts once
        elif now - self._regretted_at > MOST_PATIENCE * window_seconds:
            self._patience = 1.0

    def hold(self, least: int, *, present: int) -> int:
        """Return the desired replicas while there is no recommendation; this restarts the window."""
        if self.wanted is None:
            self.wanted = present
        self.wanted = max(self.wanted, least)
        self._since = None
        self._recent.clear()
        return self.wanted

    def bound(self, least: int, most: int | None) -> None:
        """Clamp the number itself to the policy's bounds, so that it need not step back into them later."""
        if self.wanted is not None:
            self.wanted = max(self.wanted if most is None else min(self.wanted, most), least)

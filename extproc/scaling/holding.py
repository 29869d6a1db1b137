"""Recommendations -> a number that does not swing: up at once, down late, both in bounded steps. Pure.

Down only to the highest recommendation of the stabilisation window, as Kubernetes' HPA has it
(`stabilizeRecommendation` in pkg/controller/podautoscaler), and a third of the pods a minute at most. Steps up are its
defaults, too.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

UP_FACTOR, UP_PODS, UP_SECONDS = 2.0, 4, 15.0  # a step up: so many times, or so many more, whatever is more
DOWN_SHARE, DOWN_SECONDS = 1 / 3, 60.0
# windows: it doubles with each pod that is missed as soon as it is gone, or pods would come and go with any load that
# rises and falls more slowly than the window is long
MOST_PATIENCE = 8.0


@dataclass(slots=True, eq=False)
class Holding:
    """Of one role."""

    wanted: int | None = None  # None: nothing was recommended yet
    _since: float | None = None  # seconds from which on recommendations are known
    _recent: deque[tuple[float, int]] = field(default_factory=deque)  # times and recommendations, which fall
    _raised_at: float = float("-inf")
    _lowered_at: float = float("-inf")
    _patience: float = 1.0  # windows
    _regretted_at: float = float("-inf")

    def settle(self, recommended: int, *, present: int, now: float, window_seconds: float) -> tuple[int, str]:
        """Return the number that is wanted, and in words why it is not the one that is recommended, if it is not.

        `present`: the pods that there are, starting ones too. The number begins with them: a picker that has just been
        started must not take pods away that the one before has asked for.
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
        """Wait longer the next time if a pod is asked for that has just been let go; or no longer than usual."""
        if now - self._lowered_at < window_seconds:
            self._patience = min(2.0 * self._patience, MOST_PATIENCE)
            self._regretted_at, self._lowered_at = now, float("-inf")  # once for each time
        elif now - self._regretted_at > MOST_PATIENCE * window_seconds:
            self._patience = 1.0

    def hold(self, least: int, *, present: int) -> int:
        """Return the number that is wanted while nothing can be recommended, which starts the window anew."""
        if self.wanted is None:
            self.wanted = present
        self.wanted = max(self.wanted, least)
        self._since = None
        self._recent.clear()
        return self.wanted

    def bound(self, least: int, most: int | None) -> None:
        """Take the policy's bounds for the number itself, so that it never has to come back from beyond them."""
        if self.wanted is not None:
            self.wanted = max(self.wanted if most is None else min(self.wanted, most), least)

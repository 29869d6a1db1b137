"""How fast a pool takes work, and how much of that the bands above a class take. Pure; one for each pool.

Both are counted where requests are sent on, which is what those who wait are waiting for: whatever limits the pods
(prompts, decoding, places, room that is kept for others) is in it. A queue drains at that rate for the highest band
only. Whoever is below it is overtaken by all who come meanwhile, and an estimate that forgets them promises low classes
several times too much.
"""

from math import exp

SECONDS = 10.0  # of the moving means: shorter ones refuse in every noisy moment
PRIOR_SECONDS = 1.0  # of waiting that must have been seen for what was counted to weigh as much as the estimate


class DispatchRates:
    """Of one pool. Times are monotonic seconds."""

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
        fade = exp(min(self._at - now, 0.0) / SECONDS)
        # the window is as long as there was something to see
        seconds = SECONDS * (1.0 - exp(min(self._began - now, 0.0) / SECONDS))
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
        seconds = self._busy_seconds * exp(min(self._at - now, 0.0) / SECONDS)
        return seconds / (seconds + PRIOR_SECONDS)

    def _decay(self, now: float) -> None:
        fade = exp(min(self._at - now, 0.0) / SECONDS)
        self._at = max(self._at, now)
        self._tokens = {priority: tokens * fade for priority, tokens in self._tokens.items()}
        self._busy_tokens = {priority: tokens * fade for priority, tokens in self._busy_tokens.items()}
        self._busy_seconds *= fade

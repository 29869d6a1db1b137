"""Exponential backoff. Pure."""

from dataclasses import dataclass

FIRST_SECONDS = 5.0
MOST_SECONDS = 300.0
MOST_DOUBLINGS = 6


@dataclass(slots=True)
class Retries:
    """The backoff of one operation; `now` is monotonic seconds."""

    _failures: int = 0  # consecutive, at most MOST_DOUBLINGS
    _again_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Tell whether to try: it never failed, or its pause is over."""
        return now >= self._again_at

    def failed(self, now: float) -> None:
        """Record a failure, and double the pause."""
        self._again_at = now + min(FIRST_SECONDS * 2.0**self._failures, MOST_SECONDS)
        self._failures = min(self._failures + 1, MOST_DOUBLINGS)

"""When something that has failed is tried again: after a while, and after twice as long each further time. Pure."""

from dataclasses import dataclass

FIRST_SECONDS = 5.0
MOST_SECONDS = 300.0
MOST_DOUBLINGS = 6


@dataclass(slots=True)
class Retries:
    """Of one thing; `now` is monotonic seconds."""

    _failures: int = 0  # one after another
    _again_at: float = float("-inf")

    def is_due(self, now: float) -> bool:
        """Tell whether it is to be tried: it never failed, or long enough ago."""
        return now >= self._again_at

    def failed(self, now: float) -> None:
        """Take note of a failure."""
        self._again_at = now + min(FIRST_SECONDS * 2.0**self._failures, MOST_SECONDS)
        self._failures = min(self._failures + 1, MOST_DOUBLINGS)

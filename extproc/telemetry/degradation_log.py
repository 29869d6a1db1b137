"""Says in the log what decisions had to do without: each word once a minute at most, however many requests it meets."""

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0


class DegradationLog:
    """Remembers when each word was last logged; the words are a closed set."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def note(self, degraded: Mapping[str, str], *, now: float) -> None:
        """Log what was missing; `now` is monotonic seconds."""
        for word, text in degraded.items():
            if now - self._logged_at.get(word, -REPEAT_SECONDS) >= REPEAT_SECONDS:
                self._logged_at[word] = now
                log.warning("a decision was made without one of its inputs: %s", text, extra={"degraded": word})

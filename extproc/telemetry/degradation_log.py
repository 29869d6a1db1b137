"""Logs which inputs decisions were made without: each at most once a minute, however many requests lack it."""

import logging
from collections.abc import Mapping

log = logging.getLogger(__name__)

REPEAT_SECONDS = 60.0


class DegradationLog:
    """Remembers when each missing input was last logged; their names are a closed set."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def note(self, degraded: Mapping[str, str], *, now: float) -> None:
        """Log what was missing, name -> text; `now` is monotonic seconds."""
        for missing, text in degraded.items():
            if now - self._logged_at.get(missing, -REPEAT_SECONDS) >= REPEAT_SECONDS:
                self._logged_at[missing] = now
                log.warning("a decision was made without one of its inputs: %s", text, extra={"degraded": missing})

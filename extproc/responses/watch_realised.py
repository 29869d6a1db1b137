"""Use case: every few seconds, let go of old comparisons and say which models' predictions do not come true.

Asked by `pools`; the comparisons come from `booked_exchange`. Loud where predictions drift: a log line and a metric.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from extproc.responses.realised import DriftFinding, RealisedWatch

log = logging.getLogger(__name__)


class DriftDisplay(Protocol):
    """Where a finding is counted."""

    def model_finding(self, *, model: str, reason: str, stands: bool) -> None:
        """Show that a finding has appeared or healed."""


class RealisedReporter:
    """Looks, and says what has changed."""

    def __init__(self, *, watch: RealisedWatch, display: DriftDisplay, clock: Callable[[], float]) -> None:
        self._watch = watch
        self._display = display
        self._clock = clock
        self._said: dict[tuple[str, str], DriftFinding] = {}

    def look(self) -> None:
        """Say which findings have come and gone."""
        self._watch.expire(now=self._clock())
        standing = {(finding.model, finding.reason): finding for finding in self._watch.findings.values()}
        for name, finding in standing.items():
            if name not in self._said:
                log.error("%s: %s", finding.reason, finding.message)
                self._display.model_finding(model=finding.model, reason=finding.reason, stands=True)
        for name, finding in self._said.items():
            if name not in standing:
                log.info("%s: predictions for the model %s are right again", finding.reason, finding.model)
                self._display.model_finding(model=finding.model, reason=finding.reason, stands=False)
        self._said = standing

"""Use case: once a second, hold what the pods found in their caches against what was predicted for them.

Asked by `pools`, which also tells what was routed. Loud where the two never meet: a log line and a metric.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from extproc.pods.endpoint import EndpointStatus
from extproc.prefixes.match_watch import MatchFinding, MatchWatch

log = logging.getLogger(__name__)


class MatchDisplay(Protocol):
    """Where a finding is counted."""

    def finding(self, *, endpoint: str, reason: str, stands: bool) -> None:
        """Show that a finding has appeared or healed."""


class MatchReporter:
    """Looks, and says what has changed."""

    def __init__(
        self,
        *,
        watch: MatchWatch,
        endpoints: Callable[[float], Sequence[EndpointStatus]],
        display: MatchDisplay,
        clock: Callable[[], float],
    ) -> None:
        """`endpoints` gives every endpoint as it is known at a time, which is `clock`'s (monotonic seconds)."""
        self._watch = watch
        self._endpoints = endpoints
        self._display = display
        self._clock = clock
        self._said: dict[str, MatchFinding] = {}

    def look(self) -> None:
        """Take every pod's counters and say which findings have come and gone."""
        for status in self._endpoints(self._clock()):
            if (load := status.load) is not None:
                self._watch.reported(
                    status.address,
                    hit_tokens=load.prefix_hit_tokens,
                    query_tokens=load.prefix_query_tokens,
                    now=load.reported_at,
                )
        standing = dict(self._watch.findings)
        for endpoint, finding in standing.items():
            if endpoint not in self._said:
                log.error("%s: %s", finding.reason, finding.message)
                self._display.finding(endpoint=endpoint, reason=finding.reason, stands=True)
        for endpoint, finding in self._said.items():
            if endpoint not in standing:
                log.info("%s: predictions for %s are right again", finding.reason, endpoint)
                self._display.finding(endpoint=endpoint, reason=finding.reason, stands=False)
        self._said = standing

"""Says which predictions do not come true: a log line and a metric each time that a finding appears or is gone.

Once a second what the pods found in their caches is held against what was predicted for them, pod by pod; every few
seconds the responses that were read are held against their predictions, model by model.
"""

import logging
from collections.abc import Callable, Sequence

from extproc.pods.endpoint import EndpointStatus
from extproc.prefixes.match_watch import MatchFinding, MatchWatch
from extproc.responses.realised import DriftFinding, RealisedWatch

log = logging.getLogger(__name__)


class MatchReporter:
    """Looks at the pods' counters, and says what has changed."""

    def __init__(
        self,
        *,
        watch: MatchWatch,
        endpoints: Callable[[float], Sequence[EndpointStatus]],
        show: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        """`endpoints` gives every endpoint as it is known at a time, which is `clock`'s (monotonic seconds).

        `show(endpoint=, reason=, stands=)` counts a finding that has appeared or healed.
        """
        self._watch = watch
        self._endpoints = endpoints
        self._show = show
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
                log.error("%s: %s", finding.reason, finding.message, extra={"endpoint": endpoint})
                self._show(endpoint=endpoint, reason=finding.reason, stands=True)
        for endpoint, finding in self._said.items():
            if endpoint not in standing:
                log.info("%s: predictions for %s are right again", finding.reason, endpoint)
                self._show(endpoint=endpoint, reason=finding.reason, stands=False)
        self._said = standing


class RealisedReporter:
    """Looks at the comparisons of responses, and says what has changed."""

    def __init__(
        self,
        *,
        watch: RealisedWatch,
        show: Callable[..., None],
        stands: Callable[[DriftFinding], None],
        clock: Callable[[], float],
    ) -> None:
        """`show(model=, reason=, stands=)` counts a finding that has appeared or healed.

        `stands` is called at each look with each finding that stands.
        """
        self._watch = watch
        self._show = show
        self._stands = stands
        self._clock = clock
        self._said: dict[tuple[str, str], DriftFinding] = {}

    def look(self) -> None:
        """Let go of old comparisons, and say which findings have come and gone."""
        self._watch.expire(now=self._clock())
        standing = {(finding.model, finding.reason): finding for finding in self._watch.findings.values()}
        for name, finding in standing.items():
            if name not in self._said:
                log.error("%s: %s", finding.reason, finding.message)
                self._show(model=finding.model, reason=finding.reason, stands=True)
            self._stands(finding)
        for name, finding in self._said.items():
            if name not in standing:
                log.info("%s: predictions for the model %s are right again", finding.reason, finding.model)
                self._show(model=finding.model, reason=finding.reason, stands=False)
        self._said = standing

"""Who listens to the facts of a pool's requests, and the reports of its wrong predictions.

Every few seconds, the responses that were read are compared with their predictions, by model. A log line and a metric
show whenever a finding appears or is gone.
"""

import logging
from collections.abc import Callable
from functools import partial

from extproc.admission.prepared_request import Picked
from extproc.answers.realised import DriftFinding, RealisedWatch
from extproc.ledger.facts import (
    Decided,
    Ended,
    EndpointFailed,
    EndpointFull,
    EndpointRemoved,
    LegEnd,
    LegsEnded,
    Read,
    Rerouted,
)
from extproc.ledger.feature_telemetry import OverloadTelemetry
from extproc.ledger.ledger import DegradationLog, Listeners, RequestWatch
from extproc.ledger.picker_telemetry import PickerTelemetry
from extproc.pools.picker_books import PickerBooks

log = logging.getLogger(__name__)


def listeners_of(
    name: str,
    *,
    books: PickerBooks,
    telemetry: PickerTelemetry,
    overload: OverloadTelemetry,
    degradations: DegradationLog,
    watch: RequestWatch,
) -> Listeners:
    """Return the listeners of one pool by kind of fact; `books.settled` follows all that count by endpoint."""
    prefill = telemetry.prefill
    return {
        Picked: (books.remember, partial(watch.picked, name)),
        Decided: (telemetry.decided, overload.decided, degradations.decided, watch.decided, books.settled),
        Read: (telemetry.read, books.read, degradations.read),
        Ended: (telemetry.ended, watch.ended, books.settled),
        LegEnd: (prefill.leg_ended, degradations.leg_ended, books.settled),
        LegsEnded: (prefill.legs_ended,),
        Rerouted: (telemetry.rerouted,),
        EndpointFailed: (telemetry.endpoint_failed, books.settled),
        EndpointFull: (overload.endpoint_full, books.settled),
        EndpointRemoved: (telemetry.removed,),
    }


class RealisedReporter:
    """Checks the comparisons of responses, and reports changed findings."""

    def __init__(
        self,
        *,
        watch: RealisedWatch,
        show: Callable[..., None],
        clock: Callable[[], float],
    ) -> None:
        """`show(model=, reason=, stands=)` shows a finding that has appeared or is gone."""
        self._watch = watch
        self._show = show
        self._clock = clock
        self._said: dict[tuple[str, str], DriftFinding] = {}

    def look(self) -> None:
        """Drop old comparisons, and report new and resolved findings."""
        self._watch.expire(now=self._clock())
        standing = {(finding.model, finding.reason): finding for finding in self._watch.findings.values()}
        for name, finding in standing.items():
            if name not in self._said:
                log.error("%s: %s", finding.reason, finding.message)
                self._show(model=finding.model, reason=finding.reason, stands=True)
        for name, finding in self._said.items():
            if name not in standing:
                log.info("%s: nothing shows it of the model %s any more", finding.reason, finding.model)
                self._show(model=finding.model, reason=finding.reason, stands=False)
        self._said = standing

"""What prefill legs count, in the picker's registry."""

from extproc.disaggregation.transfer_protocols import LegOutcome
from extproc.telemetry import metrics
from kvmesh.metrics.registry import Registry

FIRST, SECOND, NONE = "first", "second", "none"  # who has won a race; labels
REMOTE, LOCAL, FELL_BACK = "remote", "local", "fell-back"  # where a prompt is computed; labels


class PrefillTelemetry:
    """Counts where prompts are computed, and how their legs end."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._prompts = registry.values(metrics.PREFILL_PROMPTS)
        self._legs = registry.values(metrics.PREFILL_LEGS)
        self._races = registry.values(metrics.PREFILL_RACES)
        self._lost_seconds = registry.values(metrics.PREFILL_RACE_LOST_SECONDS).of()
        self._lost_tokens = registry.values(metrics.PREFILL_RACE_LOST_TOKENS).of()
        self._seconds = registry.histograms(metrics.PREFILL_LEG_SECONDS).of()

    def decided(self, *, remote: bool) -> None:
        """Count a prompt that could be computed by another pod than the one that decodes."""
        self._prompts.of(REMOTE if remote else LOCAL).value += 1

    def fell_back(self) -> None:
        """Count a prompt whose legs have all failed: the decode pod computes it."""
        self._prompts.of(FELL_BACK).value += 1

    def leg_ended(self, endpoint: str, outcome: LegOutcome, *, seconds: float, trace_id: str = "") -> None:
        """Count a leg; `seconds` from the request to the prefill pod to its answer; `trace_id` "": it is not traced."""
        self._legs.of(endpoint, outcome.value).value += 1
        if outcome is LegOutcome.ANSWERED:
            self._seconds.observe(seconds, trace_id)

    def raced(self, winner: str) -> None:
        """Count a race that is over; `winner` is FIRST, SECOND or NONE."""
        self._races.of(winner).value += 1

    def lost(self, *, seconds: float, tokens: float) -> None:
        """Count what a leg has cost that was not the first: its time, and the prompt tokens computed by then."""
        self._lost_seconds.value += seconds
        self._lost_tokens.value += tokens

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that is gone."""
        self._legs.drop("endpoint", (endpoint,))

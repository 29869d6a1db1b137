"""What prefill legs count, in the picker's registry."""

from extproc.disaggregation.transfer_protocols import LegOutcome
from extproc.telemetry import metrics
from kvmesh.metrics.registry import Registry

REMOTE, LOCAL, FELL_BACK = "remote", "local", "fell-back"  # where a prompt is computed; labels


class PrefillTelemetry:
    """Counts where prompts are computed, and how their legs end."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._prompts = registry.values(metrics.PREFILL_PROMPTS)
        self._legs = registry.values(metrics.PREFILL_LEGS)
        self._seconds = registry.histograms(metrics.PREFILL_LEG_SECONDS).of()

    def decided(self, *, remote: bool) -> None:
        """Count a prompt that could be computed by another pod than the one that decodes."""
        self._prompts.of(REMOTE if remote else LOCAL).value += 1

    def fell_back(self) -> None:
        """Count a prompt whose legs have all failed: the decode pod computes it."""
        self._prompts.of(FELL_BACK).value += 1

    def leg_ended(self, endpoint: str, outcome: LegOutcome, *, seconds: float) -> None:
        """Count a leg; `seconds` from the request to the prefill pod to its answer."""
        self._legs.of(endpoint, outcome.value).value += 1
        if outcome is LegOutcome.ANSWERED:
            self._seconds.observe(seconds)

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that is gone."""
        self._legs.drop("endpoint", (endpoint,))

"""The picker's Prometheus metrics; label values are a closed set of our own words or configured endpoints."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class PickerTelemetry:
    """One registry for one picker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._outcomes = Counter(
            "kvmesh_decisions", "Requests by what became of them.", ["outcome"], registry=self.registry
        )
        self._picks = Counter("kvmesh_picks", "Requests sent to each endpoint.", ["endpoint"], registry=self.registry)
        self._degraded = Counter(
            "kvmesh_degraded_decisions",
            "Decisions made without one of their inputs.",
            ["missing"],
            registry=self.registry,
        )
        self._phases = Histogram(
            "kvmesh_pick_phase_seconds",
            "Time a pick spent in each phase.",
            ["phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._prompt_tokens = Counter("kvmesh_prompt_tokens", "Tokens of routed prompts.", registry=self.registry)
        self._predicted = Counter(
            "kvmesh_predicted_cached_tokens",
            "Prompt tokens that the chosen endpoint was expected to hold.",
            registry=self.registry,
        )
        self._bookings = Gauge(
            "kvmesh_open_bookings", "Exchanges that have not ended.", ["endpoint"], registry=self.registry
        )
        self._responses = Counter(
            "kvmesh_pod_responses",
            "Ended exchanges by the pod's status; none: it ended before the pod answered.",
            ["endpoint", "status"],
            registry=self.registry,
        )
        self._rerouted = Counter(
            "kvmesh_rerouted_picks",
            "Requests that Envoy's retry took to another pod than the one picked.",
            ["endpoint"],
            registry=self.registry,
        )
        self._phase_children = {name: self._phases.labels(name) for name in ("parse", "tokenize", "lookup", "decide")}

    def phase(self, name: str, seconds: float) -> None:
        """Record how long one phase of a pick took."""
        self._phase_children[name].observe(seconds)

    def routed(self, *, endpoint: str, prompt_tokens: int, matched_tokens: int, degraded: tuple[str, ...]) -> None:
        """Count one routed request."""
        self._outcomes.labels("routed").inc()
        self._picks.labels(endpoint).inc()
        self._bookings.labels(endpoint).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._predicted.inc(matched_tokens)
        for missing in degraded:
            self._degraded.labels(missing).inc()

    def rerouted(self, *, picked: str, served_by: str) -> None:
        """Count one request that a retry took to another pod than the one picked."""
        self._bookings.labels(picked).dec()
        self._bookings.labels(served_by).inc()
        self._rerouted.labels(picked).inc()

    def refused(self, reason: str) -> None:
        """Count one request that the picker answered itself."""
        self._outcomes.labels(reason).inc()

    def exchange_ended(self, *, endpoint: str, status: int) -> None:
        """Count the end of a routed request; `status` is the pod's, 0 where none came."""
        self._bookings.labels(endpoint).dec()
        self._responses.labels(endpoint, f"{status // 100}xx" if status else "none").inc()

    def exposition(self) -> bytes:
        """Return all metrics as Prometheus text."""
        return generate_latest(self.registry)

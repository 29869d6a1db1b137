"""The picker's Prometheus metrics; label values are a closed set of our own words or configured endpoints."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from extproc.core.realised import Comparison

_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_BOUNDS = (*map(str, _SECONDS), "+Inf")  # as the exposition format writes them
_ERROR_TOKENS = (-4096, -1024, -256, -64, -16, -1, 0, 16, 64, 256, 1024, 4096)
_PHASES = ("parse", "tokenize", "lookup", "decide")


class NoTelemetry:
    """Records nothing: for decisions that nobody asked to be carried out."""

    def phase(self, name: str, seconds: float) -> None:
        """Forget it."""


class _PhaseTimes:
    """How long one phase took: counted four times a pick, hence without the library's locks and checks.

    Only the event loop's thread may touch it.
    """

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self.seconds = 0.0
        self.counts = [0] * (len(_SECONDS) + 1)  # by bucket, not cumulative; the last one has no bound
        self.created_at = time.time()

    def observe(self, seconds: float) -> None:
        """Count one pick; a bucket's bound belongs to it."""
        self.counts[bisect_left(_SECONDS, seconds)] += 1
        self.seconds += seconds


class _PhaseHistogram(Collector):
    """The phases in the shape that prometheus_client's own Histogram has."""

    def __init__(self, phases: Iterable[_PhaseTimes]) -> None:
        self._phases = tuple(phases)

    def collect(self) -> Iterator[Metric]:
        metric = Metric("kvmesh_pick_phase_seconds", "Time a pick spent in each phase.", "histogram")
        for times in self._phases:
            labels = {"phase": times.phase}
            counts = tuple(accumulate(times.counts))
            for le, count in zip(_BOUNDS, counts, strict=True):
                metric.add_sample(f"{metric.name}_bucket", {**labels, "le": le}, float(count))
            metric.add_sample(f"{metric.name}_count", labels, float(counts[-1]))
            metric.add_sample(f"{metric.name}_sum", labels, times.seconds)
            metric.add_sample(f"{metric.name}_created", labels, times.created_at)
        yield metric


class _Tallies(Collector):
    """What was counted since somebody looked last; a request counts seven times, the library's locks and checks cost.

    Registered before all metrics: whoever collects them finds them counted. Only the event loop's thread may touch it.
    """

    def __init__(self) -> None:
        self._amounts: dict[Counter | Gauge, float] = {}

    def add(self, metric: Counter | Gauge, amount: float = 1) -> None:
        self._amounts[metric] = self._amounts.get(metric, 0) + amount

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        self.count()
        return iter(())

    def count(self) -> None:
        amounts, self._amounts = self._amounts, {}
        for metric, amount in amounts.items():
            metric.inc(amount)


class PickerTelemetry:
    """One registry for one picker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._tallies = _Tallies()
        self.registry.register(self._tallies)
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
        self._phases = {name: _PhaseTimes(name) for name in _PHASES}
        self.registry.register(_PhaseHistogram(self._phases.values()))
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
        self._by_model = Counter(
            "kvmesh_model_requests",
            "Ended exchanges by model as the client asked for it, arm of its split, and the pod's status.",
            ["model", "arm", "status"],
            registry=self.registry,
        )
        self._regret = Counter(
            "kvmesh_regret_tokens",
            "Cached prompt tokens that were given up: held by the best endpoint and not by the one picked.",
            registry=self.registry,
        )
        self._failures = Counter(
            "kvmesh_endpoint_failures",
            "Requests that an endpoint failed: a 5xx of its own, broken off, or not reached.",
            ["endpoint"],
            registry=self.registry,
        )
        self._realised = {
            name: Counter(f"kvmesh_realised_{name}", text, ["model"], registry=self.registry)
            for name, text in {
                "requests": "Responses whose usage was compared with what was predicted.",
                "prompt_tokens": "Prompt tokens of these responses.",
                "predicted_tokens": "Of these, tokens that were predicted to be cached.",
                "cached_tokens": "Of these, tokens that the pod found in its cache.",
                "regret_tokens": "Tokens that another endpoint was known to hold beyond the one picked.",
            }.items()
        }
        self._prediction_error = Histogram(
            "kvmesh_prediction_error_tokens",
            "Cached tokens as the pod reports them less those predicted.",
            ["model"],
            buckets=_ERROR_TOKENS,
            registry=self.registry,
        )
        self._alert_hit_ratio = Gauge(
            "kvmesh_alert_hit_ratio",
            "Share of prompt tokens that is to be found in caches, below which the policy wants an alert; 0: none.",
            registry=self.registry,
        )
        self._missed = Counter(
            "kvmesh_responses_missed",
            "Responses that were to be read or changed and were not.",
            ["why"],
            registry=self.registry,
        )
        self._findings = Gauge(
            "kvmesh_extproc_finding",
            "1 while something is wrong with an endpoint although nothing has failed (docs/findings.md).",
            ["reason", "endpoint"],
            registry=self.registry,
        )
        self._model_findings = Gauge(
            "kvmesh_extproc_model_finding",
            "1 while predictions for a model do not come true (docs/findings.md).",
            ["reason", "model"],
            registry=self.registry,
        )
        # finding a child by its labels costs more than counting; the labels are a closed set
        self._outcomes_of = cache(self._outcomes.labels)
        self._picks_of = cache(self._picks.labels)
        self._degraded_of = cache(self._degraded.labels)
        self._bookings_of = cache(self._bookings.labels)
        self._rerouted_of = cache(self._rerouted.labels)
        self._responses_of = cache(self._responses.labels)
        self._by_model_of = cache(self._by_model.labels)

    def phase(self, name: str, seconds: float) -> None:
        """Record how long one phase of a pick took."""
        self._phases[name].observe(seconds)

    def routed(
        self,
        *,
        endpoint: str,
        prompt_tokens: int,
        matched_tokens: int,
        degraded: Iterable[str],
        best_matched_tokens: int = 0,
    ) -> None:
        """Count one routed request."""
        add = self._tallies.add
        add(self._outcomes_of("routed"))
        add(self._picks_of(endpoint))
        add(self._bookings_of(endpoint))
        add(self._prompt_tokens, prompt_tokens)
        add(self._predicted, matched_tokens)
        if best_matched_tokens > matched_tokens:
            add(self._regret, best_matched_tokens - matched_tokens)
        for missing in degraded:
            add(self._degraded_of(missing))

    def rerouted(self, *, picked: str, served_by: str) -> None:
        """Count one request that a retry took to another pod than the one picked."""
        self._bookings_of(picked).dec()
        self._bookings_of(served_by).inc()
        self._rerouted_of(picked).inc()

    def refused(self, reason: str) -> None:
        """Count one request that the picker answered itself."""
        self._outcomes_of(reason).inc()

    def exchange_ended(self, *, endpoint: str, status: int, model: str = "", arm: str = "") -> None:
        """Count the end of a routed request; `status` is the pod's, 0 where none came; names are configured ones."""
        add = self._tallies.add
        add(self._bookings_of(endpoint), -1)
        outcome = f"{status // 100}xx" if status else "none"
        add(self._responses_of(endpoint, outcome))
        if model:
            add(self._by_model_of(model, arm, outcome))

    def endpoint_failed(self, endpoint: str) -> None:
        """Count one request that an endpoint failed."""
        self._failures.labels(endpoint).inc()

    def realised(self, comparison: Comparison) -> None:
        """Count one response's usage beside what was predicted."""
        for name, tokens in (
            ("requests", 1),
            ("prompt_tokens", comparison.prompt_tokens),
            ("predicted_tokens", comparison.predicted_tokens),
            ("cached_tokens", comparison.realised_tokens),
            ("regret_tokens", comparison.regret_tokens),
        ):
            self._realised[name].labels(comparison.model).inc(tokens)
        self._prediction_error.labels(comparison.model).observe(comparison.error_tokens)

    def response_missed(self, why: str) -> None:
        """Count one response that was to be read or changed and was not; `why` is of a closed set."""
        self._missed.labels(why).inc()

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that is gone: new pods come with new addresses for ever."""
        self._tallies.count()
        for metric in (self._picks, self._bookings, self._rerouted, self._failures, self._responses, self._findings):
            _drop(metric, "endpoint", endpoint)
        for labelled in (self._picks_of, self._bookings_of, self._rerouted_of, self._responses_of):
            labelled.cache_clear()

    def alert_below(self, hit_ratio: float) -> None:
        """Show what the policy wants an alert for."""
        self._alert_hit_ratio.set(hit_ratio)

    def finding(self, *, endpoint: str, reason: str, stands: bool) -> None:
        """Show that a finding has appeared or healed."""
        self._findings.labels(reason, endpoint).set(int(stands))

    def model_finding(self, *, model: str, reason: str, stands: bool) -> None:
        """Show that a finding about a model's predictions has appeared or healed."""
        self._model_findings.labels(reason, model).set(int(stands))

    def exposition(self) -> bytes:
        """Return all metrics as Prometheus text."""
        return generate_latest(self.registry)


def _drop(metric: Counter | Gauge, label: str, value: str) -> None:
    """Remove all series of a metric that have this label."""
    names = metric._labelnames  # the library has no public way to list or to remove by one label
    at = names.index(label)
    for values in [values for values in metric._metrics if values[at] == value]:
        metric.remove(*values)

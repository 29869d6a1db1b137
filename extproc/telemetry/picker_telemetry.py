"""The picker's Prometheus metrics; label values are a closed set of our own words or configured endpoints.

What is shown is listed in docs/metrics.md, which is made from this. Only the event loop's thread may count.
"""

from collections.abc import Iterable
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from extproc.policy.values import PickPolicy
from extproc.responses.realised import Comparison
from extproc.telemetry.endpoint_telemetry import EndpointTelemetry, EndpointView
from extproc.telemetry.histogram_telemetry import TimesHistogram
from extproc.telemetry.latency_telemetry import LatencyTelemetry
from extproc.telemetry.metrics_text import metric_lines
from extproc.telemetry.model_telemetry import ModelTelemetry
from extproc.telemetry.process_telemetry import process_exposition
from extproc.telemetry.tallies import TalliesFirst
from extproc.telemetry.tenant_telemetry import TenantTelemetry

PHASE_SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
    *(2.5, 5.0, 10.0, 30.0, 60.0),  # nothing but the queue takes so long
)
_ERROR_TOKENS = (-4096, -1024, -256, -64, -16, -1, 0, 16, 64, 256, 1024, 4096)
QUEUE = "queue"
PHASES = ("parse", "tokenize", "lookup", "decide", QUEUE)
MOST_KEPT = 10_000  # ends of exchanges that differ, until they are counted though nobody asks


class NoTelemetry:
    """Records nothing: for decisions that nobody asked to be carried out."""

    def phase(self, name: str, seconds: float) -> None:
        """Forget it."""


class _Kept:
    """What was counted since somebody looked last; the library's locks and checks cost (`tallies`)."""

    __slots__ = ("ended", "picks", "predicted_tokens", "prompt_tokens", "regret_tokens")

    def __init__(self) -> None:
        self.prompt_tokens = self.predicted_tokens = self.regret_tokens = 0
        self.picks: dict[str, int] = {}  # by endpoint
        self.ended: dict[tuple[str, int, str, str], int] = {}  # by endpoint, status, model, arm


class PickerTelemetry:
    """One registry for one picker."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._kept = _Kept()
        TalliesFirst(self._count_kept, registry=self.registry)
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
        phases = TimesHistogram(
            "kvmesh_pick_phase_seconds",
            "Time a pick spent in each phase; in the queue: of the requests that waited.",
            ("phase",),
            bounds=PHASE_SECONDS,
            registry=self.registry,
        )
        self._phases = {name: phases.of(name) for name in PHASES}
        self.latencies = LatencyTelemetry(self.registry)
        self.models = ModelTelemetry(self.registry)
        self.tenants = TenantTelemetry(self.registry)
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
                "prompt_tokens": "Prompt tokens of the responses that were compared.",
                "predicted_tokens": "Prompt tokens of the responses that were compared, predicted to be cached.",
                "cached_tokens": "Prompt tokens of the responses that were compared, found in the pod's cache.",
                "regret_tokens": "Tokens that another endpoint held beyond the one picked, of compared responses.",
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
        model: str = "",
        arm: str = "",
        served: str = "",
        tenant: str = "",
        seconds_a_token: float = 0.0,
        promised_seconds: float | None = None,
    ) -> None:
        """Count one routed request.

        `model` as the client asked for it and `served` as the pods call it are configured names or "", `tenant` may be
        anything; `seconds_a_token`: what computing a prompt's token costs at the endpoint; `promised_seconds`: what
        `promised` would be told.
        """
        self.models.routed(
            model,
            arm,
            served=served,
            prompt=prompt_tokens,
            cached=matched_tokens,
            seconds_a_token=seconds_a_token,
            promised_seconds=promised_seconds,
        )
        self.tenants.routed(tenant, prompt=prompt_tokens, cached=matched_tokens)
        kept = self._kept
        picks = kept.picks
        picks[endpoint] = picks.get(endpoint, 0) + 1
        kept.prompt_tokens += prompt_tokens
        kept.predicted_tokens += matched_tokens
        if best_matched_tokens > matched_tokens:
            kept.regret_tokens += best_matched_tokens - matched_tokens
        for missing in degraded:
            self._degraded_of(missing).inc()

    def rerouted(self, *, picked: str, served_by: str) -> None:
        """Count one request that a retry took to another pod than the one picked."""
        self._bookings_of(picked).dec()
        self._bookings_of(served_by).inc()
        self._rerouted_of(picked).inc()

    def refused(self, reason: str) -> None:
        """Count one request that the picker answered itself."""
        self._outcomes_of(reason).inc()

    def exchange_ended(
        self, *, endpoint: str, status: int, model: str = "", arm: str = "", seconds: float | None = None
    ) -> None:
        """Count the end of a routed request; `status` is the pod's, 0 where none came; names are configured ones.

        `seconds`: since it was booked.
        """
        if seconds is not None:
            self.models.ended(model, arm, seconds=seconds)
        ended, key = self._kept.ended, (endpoint, status, model, arm)
        ended[key] = ended.get(key, 0) + 1
        if len(ended) > MOST_KEPT:
            self._count_kept()

    def endpoint_failed(self, endpoint: str) -> None:
        """Count one request that an endpoint failed."""
        self._failures.labels(endpoint).inc()

    def promised(self, served: str, *, seconds: float) -> None:
        """Count the time to the first token that a pick expects."""
        self.models.promised(served, seconds=seconds)

    def queued(self, seconds: float) -> None:
        """Count the time that a request spent in the queue."""
        self._phases[QUEUE].observe(seconds)

    def realised(self, comparison: Comparison, *, seconds_a_token: float = 0.0) -> None:
        """Count one response's usage beside what was predicted; `seconds_a_token` as in `routed`."""
        self.models.realised(comparison, seconds_a_token=seconds_a_token)
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
        self._count_kept()
        for metric in (self._picks, self._bookings, self._rerouted, self._failures, self._responses, self._findings):
            _drop(metric, "endpoint", endpoint)
        for labelled in (self._picks_of, self._bookings_of, self._rerouted_of, self._responses_of):
            labelled.cache_clear()

    def _count_kept(self) -> None:
        """Move what was kept into the metrics."""
        kept, self._kept = self._kept, _Kept()
        for endpoint, count in kept.picks.items():
            self._outcomes_of("routed").inc(count)
            self._picks_of(endpoint).inc(count)
            self._bookings_of(endpoint).inc(count)
        self._prompt_tokens.inc(kept.prompt_tokens)
        self._predicted.inc(kept.predicted_tokens)
        self._regret.inc(kept.regret_tokens)
        for (endpoint, status, model, arm), count in kept.ended.items():
            outcome = f"{status // 100}xx" if status else "none"
            self._bookings_of(endpoint).dec(count)
            self._responses_of(endpoint, outcome).inc(count)
            if model:
                self._by_model_of(model, arm, outcome).inc(count)

    def reconfigure(self, policy: PickPolicy) -> None:
        """Go by another policy from now on: its tenants, its price, its target."""
        self.alert_below(policy.alert_hit_ratio)
        self.models.reconfigure(policy.observability)
        self.tenants.know(policy.priorities.quotas)

    def alert_below(self, hit_ratio: float) -> None:
        """Show what the policy wants an alert for."""
        self._alert_hit_ratio.set(hit_ratio)

    def show(self, view: EndpointView) -> None:
        """Show the endpoints as the picker sees them, at each scrape; to be called once."""
        self.latencies.role_of = view.role_of
        EndpointTelemetry(view, registry=self.registry)

    def finding(self, *, endpoint: str, reason: str, stands: bool) -> None:
        """Show that a finding has appeared or healed."""
        self._findings.labels(reason, endpoint).set(int(stands))

    def model_finding(self, *, model: str, reason: str, stands: bool) -> None:
        """Show that a finding about a model's predictions has appeared or healed."""
        self._model_findings.labels(reason, model).set(int(stands))

    async def page(self, *, ready: bool | None = None) -> bytes:
        """Return all metrics as Prometheus text, those of the process at the end.

        Made in many small turns of the loop: with 500 endpoints it takes 100 ms, and picks wait.
        """
        families: dict[bytes, list[bytes]] = {}
        async for comment, lines in metric_lines(self.registry):
            families.setdefault(comment, []).append(lines)
        parts = [part for comment, lines in families.items() for part in (comment, *lines)]
        return b"".join((*parts, process_exposition(ready=ready)))


def _drop(metric: Counter | Gauge, label: str, value: str) -> None:
    """Remove all series of a metric that have this label."""
    names = metric._labelnames  # the library has no public way to list or to remove by one label
    at = names.index(label)
    for values in [values for values in metric._metrics if values[at] == value]:
        metric.remove(*values)

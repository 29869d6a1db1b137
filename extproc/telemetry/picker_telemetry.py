"""What a picker counts of its requests, and the page of its metrics. Only the event loop's thread may count.

The series of an endpoint go with it; the values of all other labels are closed sets of ours or configured names.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from extproc.policy.values import ObservabilityPolicy, PickPolicy
from extproc.responses.realised import Comparison
from extproc.telemetry import metrics
from extproc.telemetry.endpoint_telemetry import EndpointView, LatencyTelemetry, endpoint_metrics
from extproc.telemetry.extension_metrics import ExtensionTelemetry
from extproc.telemetry.pool_history import PoolHistory
from extproc.telemetry.prefill_telemetry import PrefillTelemetry
from extproc.telemetry.process_telemetry import process_text
from extproc.telemetry.shadow_telemetry import ShadowTelemetry
from extproc.telemetry.slo_telemetry import SloTelemetry
from extproc.telemetry.tenant_telemetry import TenantTelemetry
from kvmesh.metrics.exposition import Form
from kvmesh.metrics.registry import Histogram, MetricsPage, Registry, Value

QUEUE, DECIDE = "queue", "decide"
MOST_MODELS = 100  # models and arms of splits with series of their own; all others are `other`
SECONDS_AN_HOUR = 3600.0
PHASES = ("parse", "tokenize", "lookup", DECIDE, QUEUE)


class PickerTelemetry:
    """One registry for one picker."""

    def __init__(self, *, as_extension: bool = False) -> None:
        """`as_extension`: also under the names of the inference extension."""
        self.registry = registry = Registry()
        self.extension = ExtensionTelemetry(registry) if as_extension else None
        self._outcomes = registry.values(metrics.DECISIONS)
        self._routed = self._outcomes.of("routed")
        self._degraded = registry.values(metrics.DEGRADED)
        phases = registry.histograms(metrics.PHASES)
        self._phases = {name: phases.of(name) for name in PHASES}
        self.history = PoolHistory(began_at=time.monotonic())
        self.latencies = LatencyTelemetry(registry, history=self.history)
        self.models = ModelTelemetry(registry)
        self.tenants = TenantTelemetry(registry)
        self.slo = SloTelemetry(registry, tenants=self.tenants, latencies=self.latencies)
        self._prompt_tokens = registry.values(metrics.PROMPT_TOKENS).of()
        self._predicted = registry.values(metrics.PREDICTED_TOKENS).of()
        self._regret = registry.values(metrics.REGRET_TOKENS).of()
        self._picks = registry.values(metrics.PICKS)
        self._bookings = registry.values(metrics.OPEN_BOOKINGS)
        self._responses = registry.values(metrics.POD_RESPONSES)
        self._rerouted = registry.values(metrics.REROUTED)
        self._failures = registry.values(metrics.ENDPOINT_FAILURES)
        self._by_model = registry.values(metrics.MODEL_REQUESTS)
        self._realised_requests = registry.values(metrics.REALISED_REQUESTS)
        self._realised_prompt = registry.values(metrics.REALISED_PROMPT_TOKENS)
        self._realised_predicted = registry.values(metrics.REALISED_PREDICTED_TOKENS)
        self._realised_cached = registry.values(metrics.REALISED_CACHED_TOKENS)
        self._realised_regret = registry.values(metrics.REALISED_REGRET_TOKENS)
        self._prediction_error = registry.histograms(metrics.PREDICTION_ERROR)
        self._alert_hit_ratio = registry.values(metrics.ALERT_HIT_RATIO).of()
        self._missed = registry.values(metrics.RESPONSES_MISSED)
        self._findings = registry.values(metrics.FINDING)
        self.prefill = PrefillTelemetry(registry)
        self.shadow = ShadowTelemetry(registry)
        self._model_findings = registry.values(metrics.MODEL_FINDING)

    def phase(self, name: str, seconds: float, *, trace_id: str = "") -> None:
        """Record how long one phase of a pick took; `trace_id`: of its request, "" where it is not traced."""
        self._phases[name].observe(seconds, trace_id)
        if self.extension is not None and name == DECIDE:
            self.extension.scheduling.decided(seconds)

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
        anything; `seconds_a_token`: what computing a prompt's token costs at the endpoint; `promised_seconds`: the
        time to the first token that the pick expects.
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
        self._routed.value += 1
        self._picks.of(endpoint).value += 1
        self._bookings.of(endpoint).value += 1
        self._prompt_tokens.value += prompt_tokens
        self._predicted.value += matched_tokens
        if best_matched_tokens > matched_tokens:
            self._regret.value += best_matched_tokens - matched_tokens
        for missing in degraded:
            self._degraded.of(missing).value += 1

    def rerouted(self, *, picked: str, served_by: str) -> None:
        """Count one request that a retry took to another pod than the one picked."""
        self._bookings.of(picked).value -= 1
        self._bookings.of(served_by).value += 1
        self._rerouted.of(picked).value += 1

    def refused(self, reason: str) -> None:
        """Count one request that the picker answered itself."""
        self._outcomes.of(reason).value += 1

    def exchange_ended(
        self,
        *,
        endpoint: str,
        status: int,
        model: str = "",
        arm: str = "",
        seconds: float | None = None,
        trace_id: str = "",
    ) -> None:
        """Count the end of a routed request; `status` is the pod's, 0 where none came; names are configured ones.

        `seconds`: since it was booked; `trace_id`: "" where it is not traced.
        """
        if seconds is not None:
            self.models.ended(model, arm, seconds=seconds, trace_id=trace_id)
        outcome = f"{status // 100}xx" if status else "none"
        self._bookings.of(endpoint).value -= 1
        self._responses.of(endpoint, outcome).value += 1
        if model:
            self._by_model.of(model, arm, outcome).value += 1

    def endpoint_failed(self, endpoint: str) -> None:
        """Count one request that an endpoint failed."""
        self._failures.of(endpoint).value += 1

    def queued(self, seconds: float) -> None:
        """Count the time that a request spent in the queue."""
        self._phases[QUEUE].observe(seconds)

    def realised(self, comparison: Comparison, *, seconds_a_token: float = 0.0) -> None:
        """Count one response's usage beside what was predicted; `seconds_a_token` as in `routed`."""
        self.models.realised(comparison, seconds_a_token=seconds_a_token)
        model = comparison.model
        self._realised_requests.of(model).value += 1
        self._realised_prompt.of(model).value += comparison.prompt_tokens
        self._realised_predicted.of(model).value += comparison.predicted_tokens
        self._realised_cached.of(model).value += comparison.realised_tokens
        self._realised_regret.of(model).value += comparison.regret_tokens
        self._prediction_error.of(model).observe(comparison.error_tokens)

    def response_missed(self, why: str) -> None:
        """Count one response that was to be read or changed and was not; `why` is of a closed set."""
        self._missed.of(why).value += 1

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that is gone: new pods come with new addresses for ever."""
        for family in (self._picks, self._bookings, self._rerouted, self._failures, self._responses, self._findings):
            family.drop("endpoint", (endpoint,))
        self.prefill.forget(endpoint)
        if self.extension is not None:
            self.extension.scheduling.forget(endpoint)

    def reconfigure(self, policy: PickPolicy) -> None:
        """Go by another policy from now on: its tenants, its price, its targets."""
        self._alert_hit_ratio.value = policy.alert_hit_ratio
        self.models.reconfigure(policy.observability)
        self.tenants.know(policy.priorities.quotas)
        self.slo.know(policy.priorities.classes)
        self.shadow.know(is_shadow=policy.shadow)

    def show(self, view: EndpointView) -> None:
        """Show the endpoints as the picker sees them, at each scrape; to be called once."""
        self.latencies.role_of = view.role_of
        self.registry.read(lambda: endpoint_metrics(view))

    def show_token_sources(self, counts: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Show, at each scrape, the requests by model and source of their tokens; to be called once."""
        self.registry.read(lambda: [(metrics.TOKEN_SOURCES, counts().items())])

    def show_token_states(self, states: Callable[[], Mapping[tuple[str, str], float]]) -> None:
        """Show, at each scrape, what is known of the folders' tokens, by model and verdict; to be called once."""
        self.registry.read(lambda: [(metrics.TOKEN_STATES, states().items())])

    def finding(self, *, endpoint: str, reason: str, stands: bool) -> None:
        """Show that a finding has appeared or healed."""
        self._findings.of(reason, endpoint).value = stands

    def model_finding(self, *, model: str, reason: str, stands: bool) -> None:
        """Show that a finding about a model has appeared or healed."""
        self._model_findings.of(reason, model).value = stands

    async def page(self, *, ready: bool = False, form: Form = Form.TEXT) -> bytes:
        """Return all metrics, those of the process at the end; `ready`: traffic may come."""
        page = MetricsPage(form)
        await page.add(self.registry)
        return page.text() + process_text(ready=ready, form=form)


@dataclass(slots=True, kw_only=True)
class _Arm:
    """One model as clients ask for it, and one arm of its split."""

    requests: Histogram
    first_tokens: Histogram
    prompt_tokens: Value
    predicted_tokens: Value
    generated_tokens: Value
    usages: Value


@dataclass(slots=True, kw_only=True)
class _Served:
    """One model as the pods serve it."""

    name: str
    expected: Histogram
    saved_seconds: Value
    realised_seconds: Value


class ModelTelemetry:
    """What is counted of each model and arm of a split: prompts, predicted and generated tokens, times, savings."""

    def __init__(self, registry: Registry, *, most_models: int = MOST_MODELS) -> None:
        self._requests = registry.histograms(metrics.MODEL_REQUEST_SECONDS)
        self._first_tokens = registry.histograms(metrics.MODEL_FIRST_TOKEN_SECONDS)
        self._expected = registry.histograms(metrics.EXPECTED_TTFT)
        self._prompt_tokens = registry.values(metrics.MODEL_PROMPT_TOKENS)
        self._predicted_tokens = registry.values(metrics.MODEL_PREDICTED_TOKENS)
        self._generated_tokens = registry.values(metrics.MODEL_GENERATED_TOKENS)
        self._usages = registry.values(metrics.MODEL_USAGES)
        self._saved_seconds = registry.values(metrics.SAVED_SECONDS)
        self._realised_seconds = registry.values(metrics.REALISED_SAVED_SECONDS)
        self._money = registry.values(metrics.SAVED_MONEY)
        self._price = registry.values(metrics.GPU_HOUR_PRICE)
        self._most_models = most_models
        self._arms: dict[tuple[str, str], _Arm] = {}
        self._served: dict[str, _Served] = {}
        self._price_a_second, self._currency = 0.0, ""

    def reconfigure(self, policy: ObservabilityPolicy) -> None:
        """Count money by this price from now on."""
        self._price_a_second = policy.gpu_hour_price / SECONDS_AN_HOUR
        self._currency = policy.currency
        self._price.series.clear()
        if policy.gpu_hour_price:
            self._price.of(policy.currency).value = policy.gpu_hour_price

    def routed(
        self,
        model: str,
        arm: str,
        *,
        served: str,
        prompt: int,
        cached: int,
        seconds_a_token: float,
        promised_seconds: float | None = None,
    ) -> None:
        """Count one routed request: its prompt's tokens, and what computing the cached ones would have taken.

        `promised_seconds`: the TTFT that the pick expects.
        """
        counts = self._arms.get((model, arm)) or self._new_arm(model, arm)
        counts.prompt_tokens.value += prompt
        counts.predicted_tokens.value += cached
        of_served = self._served.get(served)
        if promised_seconds is not None:
            of_served = of_served or self._new_served(served)
            of_served.expected.observe(promised_seconds)
        if cached:
            of_served = of_served or self._new_served(served)
            seconds = cached * seconds_a_token
            of_served.saved_seconds.value += seconds
            if self._price_a_second:
                self._money.of(of_served.name, self._currency).value += seconds * self._price_a_second

    def ended(self, model: str, arm: str, *, seconds: float, trace_id: str = "") -> None:
        """Count how long an exchange took."""
        (self._arms.get((model, arm)) or self._new_arm(model, arm)).requests.observe(seconds, trace_id)

    def realised(self, comparison: Comparison, *, seconds_a_token: float) -> None:
        """Count a response whose usage was read."""
        served = self._served.get(comparison.model) or self._new_served(comparison.model)
        served.realised_seconds.value += comparison.realised_tokens * seconds_a_token
        names = (comparison.requested, comparison.arm)
        counts = self._arms.get(names) or self._new_arm(*names)
        counts.generated_tokens.value += comparison.generated_tokens
        counts.usages.value += 1
        if comparison.first_token_seconds is not None:
            counts.first_tokens.observe(comparison.first_token_seconds, comparison.trace_id)

    def _new_served(self, model: str) -> _Served:
        if len(self._served) >= self._most_models:
            model = metrics.OTHER
        return self._served.setdefault(
            model,
            _Served(
                name=model,
                expected=self._expected.of(model),
                saved_seconds=self._saved_seconds.of(model),
                realised_seconds=self._realised_seconds.of(model),
            ),
        )

    def _new_arm(self, model: str, arm: str) -> _Arm:
        if len(self._arms) >= self._most_models:
            model = arm = metrics.OTHER
        names = (model, arm)
        return self._arms.setdefault(
            names,
            _Arm(
                requests=self._requests.of(*names),
                first_tokens=self._first_tokens.of(*names),
                prompt_tokens=self._prompt_tokens.of(*names),
                predicted_tokens=self._predicted_tokens.of(*names),
                generated_tokens=self._generated_tokens.of(*names),
                usages=self._usages.of(*names),
            ),
        )

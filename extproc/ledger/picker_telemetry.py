"""The picker's counts of its requests, and its metrics page. Only the event loop's thread may count.

An endpoint's series are removed with it; all other label values are closed sets of ours or configured names.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from extproc.answers.realised import Comparison
from extproc.choosing.decision import Decision
from extproc.ledger import metrics
from extproc.ledger.endpoint_telemetry import EndpointView, LatencyTelemetry, endpoint_metrics
from extproc.ledger.facts import (
    Decided,
    DecisionRecord,
    Ended,
    EndpointFailed,
    EndpointRemoved,
    Read,
    RequestOutcome,
    Rerouted,
)
from extproc.ledger.feature_telemetry import PrefillTelemetry, ShadowTelemetry, TenantTelemetry
from extproc.ledger.pool_history import PoolHistory
from extproc.ledger.process_telemetry import process_text
from extproc.ledger.slo_telemetry import SloTelemetry
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.values import ObservabilityPolicy, PickPolicy
from kvmesh.metrics.exposition import Form
from kvmesh.metrics.registry import Histogram, MetricsPage, Registry, Value

RECENT_DECISIONS = 200
QUEUE, DECIDE = "queue", "decide"
STREAM_FAILED = "stream-failed"  # in place of the status, where an error followed good headers
MOST_MODELS = 100  # models and arms of splits with their own series; all others are `other`
SECONDS_AN_HOUR = 3600.0
PHASES = ("parse", "tokenize", "lookup", DECIDE, QUEUE)


class PickerTelemetry:
    """The registry and the counters of one picker."""

    def __init__(self, *, most_recent: int = RECENT_DECISIONS) -> None:
        self.recent: deque[DecisionRecord] = deque(maxlen=most_recent)  # the newest first
        self.registry = registry = Registry()
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
        self.prefill = PrefillTelemetry(registry)
        self.shadow = ShadowTelemetry(registry)
        self._model_findings = registry.values(metrics.MODEL_FINDING)
        self._pace = LatencyEstimates().pace  # `show` replaces it

    def decided(self, fact: Decided) -> None:
        """Count a decision."""
        outcome, kind, trace_id = fact.record.outcome, fact.outcome_kind, fact.arrival.trace_id
        for name, seconds in fact.phases.items():
            self._phases[name].observe(seconds, trace_id)
        if isinstance(outcome, Decision):
            self._count_routed(fact, outcome)
        elif kind is RequestOutcome.REFUSED:
            self.recent.appendleft(fact.record)
            self._outcomes.of(outcome.reason).value += 1
            self.history.load.refused(now=fact.at)
        elif kind is RequestOutcome.FAILED_OPEN:
            self._outcomes.of(kind.value).value += 1
        if fact.record.shadow:
            self.shadow.decided(fact)
        if fact.promise is not None or fact.ignored_targets:
            self.slo.decided(fact)

    def _count_routed(self, fact: Decided, decision: Decision) -> None:
        endpoint, asked = decision.endpoints[0], fact.record.asked
        prompt, cached = decision.prompt_tokens, decision.matched_tokens
        assert asked is not None, "only what was read is routed"
        self.recent.appendleft(fact.record)
        self.history.load.routed(prompt_tokens=prompt, cached_tokens=cached, now=fact.at)
        self.models.routed(
            fact.label,
            asked.arm,
            served=fact.served,
            prompt=prompt,
            cached=cached,
            seconds_a_token=fact.seconds_a_token,
            promised_seconds=fact.expected_ttft_seconds,
        )
        self.tenants.routed(asked.request_class.tenant, asked.request_class.class_name, prompt=prompt, cached=cached)
        self._routed.value += 1
        self._picks.of(endpoint).value += 1
        self._bookings.of(endpoint).value += 1
        self._prompt_tokens.value += prompt
        self._predicted.value += cached
        if decision.best_matched_tokens > cached:
            self._regret.value += decision.best_matched_tokens - cached
        if fact.record.prefill is not None:
            self.prefill.planned(fact.record.prefill)
        for missing in decision.degraded:
            self._degraded.of(missing).value += 1

    def rerouted(self, fact: Rerouted) -> None:
        """Count one request that a retry moved from the picked pod to another one."""
        self._bookings.of(fact.picked).value -= 1
        self._bookings.of(fact.served_by).value += 1
        self._rerouted.of(fact.picked).value += 1

    def ended(self, fact: Ended) -> None:
        """Count the end of an exchange."""
        if fact.booked_on is None:  # it was sent without a decision
            return
        model, arm = fact.label, fact.arm
        self.models.ended(model, arm, seconds=fact.booked_seconds, trace_id=fact.arrival.trace_id)
        outcome = STREAM_FAILED if fact.stream_failed else f"{fact.status // 100}xx" if fact.status else "none"
        self._bookings.of(fact.booked_on).value -= 1
        self._responses.of(fact.booked_on, outcome).value += 1
        if model:
            self._by_model.of(model, arm, outcome).value += 1
        if fact.promise is not None:
            self.slo.ended(fact)

    def endpoint_failed(self, fact: EndpointFailed) -> None:
        """Count one request that an endpoint failed."""
        self._failures.of(fact.endpoint).value += 1

    def queued(self, seconds: float) -> None:
        """Count a request's time in the queue."""
        self._phases[QUEUE].observe(seconds)

    def read(self, fact: Read) -> None:
        """Count the facts of one response."""
        for why in fact.missed:
            self._missed.of(why.value).value += 1
        if fact.comparison is not None:
            self._realised(fact.comparison)
        if (judged := fact.judged) is not None:
            self.slo.judged(judged)
            answer = judged.answer
            key = answer.promise.class_name, answer.promise.model
            self.history.measured(key, judged.measured, weight=answer.weight, now=time.monotonic())

    def _realised(self, comparison: Comparison) -> None:
        self.models.realised(comparison, seconds_a_token=self._pace(comparison.endpoint).prefill.seconds_a_token)
        model = comparison.model
        self._realised_requests.of(model).value += 1
        self._realised_prompt.of(model).value += comparison.prompt_tokens
        self._realised_predicted.of(model).value += comparison.predicted_tokens
        self._realised_cached.of(model).value += comparison.realised_tokens
        self._realised_regret.of(model).value += comparison.regret_tokens
        self._prediction_error.of(model).observe(comparison.error_tokens)

    def removed(self, fact: EndpointRemoved) -> None:
        """Drop the series of a removed endpoint: every new pod brings a new address."""
        self.registry.drop("endpoint", (fact.endpoint,))

    def reconfigure(self, policy: PickPolicy) -> None:
        """Use another policy's tenants, price and targets from now on."""
        self._alert_hit_ratio.value = policy.alert_hit_ratio
        self.models.reconfigure(policy.observability)
        self.tenants.know(policy.priorities.quotas)
        self.slo.know(policy.priorities.classes)
        self.shadow.know(is_shadow=policy.shadow)

    def show(self, view: EndpointView) -> None:
        """Show the picker's view of the endpoints at each scrape; call it once."""
        self.latencies.role_of, self._pace = view.role_of, view.estimates.pace
        self.registry.read(lambda: endpoint_metrics(view))

    def show_token_sources(self, counts: Callable[[], Mapping[tuple[str, str], int]]) -> None:
        """Show the requests by model and token source at each scrape; call it once."""
        self.registry.read(lambda: [(metrics.TOKEN_SOURCES, counts().items())])

    def show_token_states(self, states: Callable[[], Mapping[tuple[str, str], float]]) -> None:
        """Show the verdicts on the tokenizer folders by model at each scrape; call it once."""
        self.registry.read(lambda: [(metrics.TOKEN_STATES, states().items())])

    def model_finding(self, *, model: str, reason: str, stands: bool) -> None:
        """Show that a finding about a model has appeared or disappeared."""
        self._model_findings.of(reason, model).value = stands

    async def page(self, *, ready: bool = False, form: Form = Form.TEXT) -> bytes:
        """Return all metrics, with the process's at the end; `ready`: the picker may get traffic."""
        page = MetricsPage(form)
        await page.add(self.registry)
        return page.text() + process_text(ready=ready, form=form)


@dataclass(slots=True, kw_only=True)
class _Arm:
    """One model by the clients' name, and one arm of its split."""

    requests: Histogram
    first_tokens: Histogram
    prompt_tokens: Value
    predicted_tokens: Value
    generated_tokens: Value
    usages: Value


@dataclass(slots=True, kw_only=True)
class _Served:
    """One model by the pods' name."""

    name: str
    expected: Histogram
    saved_seconds: Value
    realised_seconds: Value


class ModelTelemetry:
    """Counts by model and arm of a split: prompts, predicted and generated tokens, times, savings."""

    def __init__(self, registry: Registry) -> None:
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
        self._arms: dict[tuple[str, str], _Arm] = {}
        self._served: dict[str, _Served] = {}
        self._price_a_second, self._currency = 0.0, ""

    def reconfigure(self, policy: ObservabilityPolicy) -> None:
        """Use this price from now on."""
        self._price_a_second = policy.pod_hour_price / SECONDS_AN_HOUR
        self._currency = policy.currency

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
        """Count one routed request: its prompt's tokens, and the compute time saved by the cached ones.

        `promised_seconds` is the TTFT that the pick expects.
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
        """Count the duration of an exchange."""
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
        if len(self._served) >= MOST_MODELS:
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
        if len(self._arms) >= MOST_MODELS:
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

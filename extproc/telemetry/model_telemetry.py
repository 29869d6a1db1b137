"""What is counted of each model and arm of a split: prompts, predicted and generated tokens, times, what caches save.

Names are configured ones; beyond a bound all are `other`.
"""

from dataclasses import dataclass

from extproc.policy.observability import ObservabilityPolicy
from extproc.responses.realised import Comparison
from extproc.telemetry import metrics
from kvmesh.metrics.registry import Histogram, Registry, Value

MOST_SERIES = 100  # models and arms with series of their own
SECONDS_AN_HOUR = 3600.0


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
    """All models of a pool."""

    def __init__(self, registry: Registry, *, most_models: int = MOST_SERIES) -> None:
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

    def ended(self, model: str, arm: str, *, seconds: float) -> None:
        """Count how long an exchange took."""
        (self._arms.get((model, arm)) or self._new_arm(model, arm)).requests.observe(seconds)

    def realised(self, comparison: Comparison, *, seconds_a_token: float) -> None:
        """Count a response whose usage was read."""
        served = self._served.get(comparison.model) or self._new_served(comparison.model)
        served.realised_seconds.value += comparison.realised_tokens * seconds_a_token
        names = (comparison.requested, comparison.arm)
        counts = self._arms.get(names) or self._new_arm(*names)
        counts.generated_tokens.value += comparison.generated_tokens
        counts.usages.value += 1
        if comparison.first_token_seconds is not None:
            counts.first_tokens.observe(comparison.first_token_seconds)

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

"""What is counted of each model and arm of a split: prompts, predicted and generated tokens, times, what caches save.

Part of `telemetry`. Names are configured ones; beyond a bound all are `other`. A pick costs two look-ups and a few
additions: sums are kept in plain fields and become metrics when somebody asks. Only the event loop's thread.
"""

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.policy.values import ObservabilityPolicy
from extproc.responses.realised import Comparison
from extproc.telemetry.histogram_telemetry import MOST_SERIES, OTHER, Times, TimesHistogram
from extproc.telemetry.latency_telemetry import TTFT_SECONDS

SECONDS_AN_HOUR = 3600.0
MODEL_ARM = ("model", "arm")


class _Arm:
    """One model as clients ask for it, and one arm of its split."""

    __slots__ = ("cached_tokens", "first_tokens", "generated_tokens", "prompt_tokens", "requests", "usages")

    def __init__(self, requests: Times, first_tokens: Times) -> None:
        self.requests, self.first_tokens = requests, first_tokens
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.usages = 0


class _Served:
    """One model as the pods serve it."""

    __slots__ = ("expected", "money", "realised_seconds", "saved_seconds")

    def __init__(self, expected: Times) -> None:
        self.expected = expected
        self.saved_seconds = self.realised_seconds = 0.0
        self.money: dict[str, float] = {}  # currency -> amount


class ModelTelemetry(Collector):
    """All models of a pool."""

    def __init__(self, registry: CollectorRegistry, *, most_models: int = MOST_SERIES) -> None:
        self._requests = TimesHistogram(
            "kvmesh_model_request_seconds",
            "Time from the pick to the end of the exchange, by model as the client asked for it and arm.",
            MODEL_ARM,
            bounds=TTFT_SECONDS,
            registry=registry,
        )
        self._first_tokens = TimesHistogram(
            "kvmesh_model_first_token_seconds",
            "Time from the pick to the first bytes of a stream's body, of those that were read (a sample).",
            MODEL_ARM,
            bounds=TTFT_SECONDS,
            registry=registry,
        )
        self._expected = TimesHistogram(
            "kvmesh_expected_ttft_seconds",
            "Time to the first token that each pick expected at its endpoint, by model as it is served.",
            ("model",),
            bounds=TTFT_SECONDS,
            registry=registry,
        )
        self._most_models = most_models
        self._arms: dict[tuple[str, str], _Arm] = {}
        self._served: dict[str, _Served] = {}
        self._price_a_second, self._currency = 0.0, ""
        registry.register(self)

    def reconfigure(self, policy: ObservabilityPolicy) -> None:
        """Count money by this price from now on."""
        self._price_a_second = policy.gpu_hour_price / SECONDS_AN_HOUR
        self._currency = policy.currency

    def promised(self, served: str, *, seconds: float) -> None:
        """Count the TTFT that a pick expects."""
        self._of_served(served).expected.observe(seconds)

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

        `promised_seconds`: the TTFT that the pick expects, where nobody calls `promised` for it.
        """
        line = self._arms.get((model, arm)) or self._new_arm(model, arm)
        line.prompt_tokens += prompt
        line.cached_tokens += cached
        if promised_seconds is not None:
            (self._served.get(served) or self._of_served(served)).expected.observe(promised_seconds)
        if cached:
            saved = self._served.get(served) or self._of_served(served)
            seconds = cached * seconds_a_token
            saved.saved_seconds += seconds
            if self._price_a_second:
                money = saved.money
                money[self._currency] = money.get(self._currency, 0.0) + seconds * self._price_a_second

    def ended(self, model: str, arm: str, *, seconds: float) -> None:
        """Count how long an exchange took."""
        (self._arms.get((model, arm)) or self._new_arm(model, arm)).requests.observe(seconds)

    def realised(self, comparison: Comparison, *, seconds_a_token: float) -> None:
        """Count a response whose usage was read."""
        self._of_served(comparison.model).realised_seconds += comparison.realised_tokens * seconds_a_token
        names = (comparison.requested, comparison.arm)
        line = self._arms.get(names) or self._new_arm(*names)
        line.generated_tokens += comparison.generated_tokens
        line.usages += 1
        if comparison.first_token_seconds is not None:
            line.first_tokens.observe(comparison.first_token_seconds)

    def describe(self) -> Iterator[Metric]:
        """Yield the names."""
        yield from self._families().values()

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        families = self._families()
        for names, arm in self._arms.items():
            families["prompt"].add_metric(names, arm.prompt_tokens)
            families["cached"].add_metric(names, arm.cached_tokens)
            families["generated"].add_metric(names, arm.generated_tokens)
            families["usages"].add_metric(names, arm.usages)
        for model, served in self._served.items():
            families["saved"].add_metric((model,), served.saved_seconds)
            families["realised"].add_metric((model,), served.realised_seconds)
            for currency, amount in served.money.items():
                families["money"].add_metric((model, currency), amount)
        if self._price_a_second:
            families["price"].add_metric((self._currency,), self._price_a_second * SECONDS_AN_HOUR)
        yield from families.values()

    @staticmethod
    def _families() -> Mapping[str, CounterMetricFamily | GaugeMetricFamily]:
        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(name, text, labels=labels)

        return {
            "prompt": counter("kvmesh_model_prompt_tokens", "Tokens of routed prompts, by model and arm.", *MODEL_ARM),
            "cached": counter(
                "kvmesh_model_predicted_cached_tokens",
                "Prompt tokens that the endpoint was expected to hold, by model and arm.",
                *MODEL_ARM,
            ),
            "generated": counter(
                "kvmesh_model_generated_tokens",
                "Generated tokens of the responses whose usage was read (a sample), by model and arm.",
                *MODEL_ARM,
            ),
            "usages": counter("kvmesh_model_usages", "Responses whose usage was read, by model and arm.", *MODEL_ARM),
            "saved": counter(
                "kvmesh_saved_prefill_seconds",
                "What computing the predicted cached tokens would have taken, at the endpoint's learned pace.",
                "model",
            ),
            "realised": counter(
                "kvmesh_realised_saved_prefill_seconds",
                "What computing the tokens that pods found cached would have taken, of compared responses (a sample).",
                "model",
            ),
            "money": counter(
                "kvmesh_saved_money",
                "kvmesh_saved_prefill_seconds_total at the price of a GPU hour in the policy of that time.",
                *("model", "currency"),
            ),
            "price": GaugeMetricFamily(
                "kvmesh_gpu_hour_price", "Price of an endpoint's hour in the policy.", labels=("currency",)
            ),
        }

    def _of_served(self, model: str) -> _Served:
        served = self._served.get(model)
        if served is None:
            if len(self._served) >= self._most_models:
                model = OTHER
            served = self._served.setdefault(model, _Served(self._expected.of(model)))
        return served

    def _new_arm(self, model: str, arm: str) -> _Arm:
        if len(self._arms) >= self._most_models:
            model = arm = OTHER
        names = (model, arm)
        if names not in self._arms:
            self._arms[names] = _Arm(self._requests.of(model, arm), self._first_tokens.of(model, arm))
        return self._arms[names]

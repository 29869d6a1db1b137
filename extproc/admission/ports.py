"""What the use case needs from outside, as protocols: adapters implement them, tests put fakes in their place."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from extproc.admission.degradation import Measures
from extproc.models.models import ServedModel
from extproc.pods.endpoint import EndpointStatus
from extproc.policy.request_class import RequestClass
from extproc.prefixes.prompt_match import IndexHits
from extproc.prompts.token_ids import PromptTokens, TokenizedPrompt
from extproc.quotas.quota import QuotaAsk, QuotaKey
from extproc.requests.request import InferenceRequest


class PrefixIndex(Protocol):
    """The global prefix index, and with it what the other replicas have booked."""

    async def lookup(
        self,
        prompts: Sequence[TokenizedPrompt],
        *,
        model: str,
        adapter: str | None = None,
        cache_salt: str | None = None,
        session: str | None = None,
        quota: QuotaAsk | None = None,
    ) -> IndexHits:
        """Find who holds the leading blocks of each prompt, all within one deadline.

        Never raises: a slow index must not delay a request, and `IndexHits.degraded` says what is missing. `session`
        and `adapter` are asked for among the other replicas' placements; `quota` is decided in the same round trip.
        """


class PromptSource(Protocol):
    """The models' tokenizers and chat templates, and what stands in for them."""

    async def prompts(
        self,
        request: InferenceRequest,
        body: bytes | None,
        *,
        model: ServedModel,
        limit: int,
        adapter: str | None = None,
    ) -> PromptTokens:
        """Return the tokens of the first `limit` prompts, or what else predicts a shared prefix.

        `body` is what the pod will get, decoded. Raise PromptTokensError for a model that was not set up.
        """


class Endpoints(Protocol):
    """The pods that may serve, and their load."""

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every configured endpoint as it is known at `now` (monotonic seconds)."""

    @property
    def learned_adapters(self) -> Mapping[str, str]:
        """LoRA adapter -> its base model's name, as the pods tell."""


class Pressure(Protocol):
    """What the load has taken from the classes."""

    def measures(self, request_class: RequestClass, *, pool: str) -> Measures:
        """Return what is taken from a request of the class now; raise RequestShedError where it is refused at once."""


class Quotas(Protocol):
    """What tenants may use."""

    def match(self, tenant: str, model: str | None) -> QuotaKey | None:
        """Return the quota that the request falls under, None for most."""

    def ask(self, key: QuotaKey, *, prompt_tokens: int, most_generated: int | None) -> QuotaAsk:
        """Return the question that goes with the index lookup; it must end in `settle` or `cancel`."""

    def cancel(self, ask: QuotaAsk) -> None:
        """Give back what was taken for a request that goes nowhere."""


class Telemetry(Protocol):
    """Where the use case reports what it did."""

    def phase(self, name: str, seconds: float) -> None:
        """Record how long one phase of a pick took."""

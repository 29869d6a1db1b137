"""What the use case needs from outside, as protocols: adapters implement them, tests put fakes in their place."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from extproc.core.endpoint import EndpointStatus
from extproc.core.models import ServedModel
from extproc.core.prompt_match import IndexHits
from extproc.core.prompt_tokens import PromptTokens, TokenizedPrompt
from extproc.core.request import InferenceRequest


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
    ) -> IndexHits:
        """Find who holds the leading blocks of each prompt, all within one deadline.

        Never raises: a slow index must not delay a request, and `IndexHits.degraded` says what is missing. `session`
        and `adapter` are asked for among the other replicas' placements.
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


class Telemetry(Protocol):
    """Where the use case reports what it did."""

    def phase(self, name: str, seconds: float) -> None:
        """Record how long one phase of a pick took."""

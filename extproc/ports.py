"""What the use case needs from outside, as protocols: adapters implement them, tests put fakes in their place."""

from collections.abc import Sequence
from typing import Protocol

from extproc.core.endpoint import EndpointStatus
from extproc.core.prompt_match import IndexHits
from extproc.core.request import InferenceRequest


class PrefixIndex(Protocol):
    """The global prefix index."""

    async def lookup(self, prompts: Sequence[bytes], *, model: str, cache_salt: str | None) -> IndexHits:
        """Find who holds the leading blocks of each prompt (little-endian uint32), all within one deadline.

        Raise PrefixIndexError: a slow index must not delay a request.
        """


class TokenSource(Protocol):
    """A model's tokenizer and chat template."""

    async def tokens(self, request: InferenceRequest, *, limit: int) -> Sequence[bytes]:
        """Return one buffer of little-endian uint32 token ids a prompt, for the first `limit` prompts.

        Raise PromptTokensError.
        """


class Endpoints(Protocol):
    """The pods that may serve, and their load."""

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every configured endpoint as it is known at `now` (monotonic seconds)."""


class Telemetry(Protocol):
    """Where the use case reports what it did."""

    def phase(self, name: str, seconds: float) -> None:
        """Record how long one phase of a pick took."""

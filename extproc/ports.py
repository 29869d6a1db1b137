"""What the use case needs from outside, as protocols: adapters implement them, tests put fakes in their place."""

from collections.abc import Sequence
from typing import Protocol

from extproc.core.endpoint import EndpointStatus
from extproc.core.prompt_match import BlockHits
from extproc.core.request import InferenceRequest


class PrefixIndex(Protocol):
    """The global prefix index."""

    async def lookup(self, tokens: bytes, *, model: str, cache_salt: str | None) -> BlockHits:
        """Find who holds the leading blocks of the prompt (little-endian uint32). Raise PrefixIndexUnavailableError."""


class TokenSource(Protocol):
    """A model's tokenizer and chat template."""

    async def tokens(self, request: InferenceRequest) -> Sequence[bytes]:
        """Return one buffer of little-endian uint32 token ids a prompt. Raise TokenizerError or ChatTemplateError."""


class Endpoints(Protocol):
    """The pods that may serve, and their load."""

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every configured endpoint as it is known at `now` (monotonic seconds)."""


class Telemetry(Protocol):
    """Where the use case reports what it did."""

    def phase(self, name: str, seconds: float) -> None:
        """Record how long one phase of a pick took."""

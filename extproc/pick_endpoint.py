"""The use case, and the page to read first: a request's bytes + index + load + policy -> a decision.

Called by `service` for every exchange and by the admin page's /explain; books nothing and changes nothing. Each input
but the endpoints may be missing: the pick is then made on the rest, and `Decision.degraded` names what was missing.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extproc.core.admission import admit
from extproc.core.decision import Decision, decide
from extproc.core.endpoint import Candidate
from extproc.core.exchange import RequestFacts
from extproc.core.inflight import Bookings
from extproc.core.policy import PickPolicy
from extproc.core.prompt_match import BlockHits, PromptMatch, match_prompts
from extproc.core.request import InferenceRequest
from extproc.errors import PrefixIndexUnavailableError, PromptTokensError, UnknownModelError
from extproc.ports import Endpoints, PrefixIndex, Telemetry, TokenSource
from extproc.wire.openai import parse_request

# a batch of prompts in one request is looked up this far: the rest changes the pick little and the delay much
MAX_PROMPTS_LOOKED_UP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """A decision and the request it was made for."""

    request: InferenceRequest
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPicker:
    """All that a pick depends on; one instance serves all requests."""

    endpoints: Endpoints
    bookings: Bookings
    index: PrefixIndex | None
    tokens: TokenSource | None
    model: str | None  # the model that `tokens` and the index speak of
    known_models: frozenset[str]  # empty: every model is accepted
    policy: PickPolicy
    index_timeout_seconds: float
    telemetry: Telemetry
    clock: Callable[[], float]  # monotonic seconds
    random: Callable[[], float]  # breaks ties

    async def pick(self, facts: RequestFacts, body: bytes) -> Picked:
        """Decide where the request goes. Raise PickError with the answer for the client where it goes nowhere."""
        started = self.clock()
        request = parse_request(path=facts.path, body=body)
        if self.known_models and request.model is not None and request.model not in self.known_models:
            raise UnknownModelError(
                f"the model {request.model!r} is not served here; there are {', '.join(sorted(self.known_models))}"
            )
        parsed = self.clock()
        self.telemetry.phase("parse", parsed - started)
        degraded: list[str] = []
        prompts = await self._prompt_tokens(request, degraded)
        tokenized = self.clock()
        self.telemetry.phase("tokenize", tokenized - parsed)
        hits = await self._lookup(prompts, request, degraded)
        match = match_prompts([len(tokens) // 4 for tokens in prompts], hits)
        looked_up = self.clock()
        self.telemetry.phase("lookup", looked_up - tokenized)
        candidates = self._candidates(match, now=looked_up)
        if any(candidate.load is None for candidate in candidates):
            degraded.append("load-unknown")
        admit(candidates, objective=facts.objective, policy=self.policy)
        decision = decide(
            candidates,
            policy=self.policy,
            prompt_tokens=match.prompt_tokens,
            degraded=degraded,
            tie_break=self.random,
        )
        self.telemetry.phase("decide", self.clock() - looked_up)
        return Picked(request=request, decision=decision)

    async def _prompt_tokens(self, request: InferenceRequest, degraded: list[str]) -> Sequence[bytes]:
        """Return the prompts' tokens, or nothing and a word why."""
        if request.unsupported_reason is not None:
            degraded.append("prompt-unsupported")
            return ()
        if not request.prompts:
            return ()
        if self.tokens is None:
            degraded.append("no-tokenizer")
            return ()
        if request.model is not None and request.model != self.model:
            degraded.append("no-tokenizer-for-model")
            return ()
        try:
            return await self.tokens.tokens(request)
        except PromptTokensError as error:
            degraded.append(error.reason)
            return ()

    async def _lookup(
        self, prompts: Sequence[bytes], request: InferenceRequest, degraded: list[str]
    ) -> Sequence[BlockHits]:
        """Look the prompts up within one deadline, or return nothing: a slow index must not delay a request."""
        if not prompts:
            return ()
        if self.index is None or self.model is None:
            degraded.append("prefix-index-disabled")
            return ()
        try:
            async with asyncio.timeout(self.index_timeout_seconds):
                return [
                    await self.index.lookup(tokens, model=self.model, cache_salt=request.cache_salt)
                    for tokens in prompts[:MAX_PROMPTS_LOOKED_UP]
                ]
        except TimeoutError:
            degraded.append("prefix-index-timeout")
        except PrefixIndexUnavailableError:
            degraded.append("prefix-index-unavailable")
        return ()

    def _candidates(self, match: PromptMatch, *, now: float) -> list[Candidate]:
        return [
            Candidate(
                address=status.address,
                reachability=status.reachability,
                load=status.load,
                booked_requests=self.bookings.booked_since(
                    status.address, since=status.load.reported_at if status.load else float("-inf")
                ),
                matched_tokens=match.matched_tokens.get(status.address, 0),
                prompt_tokens=match.prompt_tokens,
            )
            for status in self.endpoints.snapshot(now=now)
        ]

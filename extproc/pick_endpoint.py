"""The use case, and the page to read first: a request's bytes + index + load + policy -> a decision.

Called by `service` for every exchange and by the admin page's /explain; books nothing and changes nothing. Each input
but the endpoints may be missing: the pick is then made on the rest, and `Decision.degraded` names what was missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from extproc.core.admission import admit
from extproc.core.decision import Decision, decide
from extproc.core.endpoint import Candidate
from extproc.core.exchange import RequestFacts
from extproc.core.inflight import Bookings
from extproc.core.policy import PickPolicy
from extproc.core.prompt_match import NO_HITS, IndexHits, PromptMatch, match_prompts
from extproc.core.request import InferenceRequest
from extproc.errors import PrefixIndexError, PromptTokensError, UnknownModelError
from extproc.ports import Endpoints, PrefixIndex, Telemetry, TokenSource
from extproc.wire.openai import parse_request

# a batch of prompts in one request is looked up this far: the rest changes the pick little and the delay much
MAX_PROMPTS_LOOKED_UP = 16


class Picked(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and the request it was made for."""

    request: InferenceRequest
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPicker:
    """All that a pick depends on; one instance serves all requests."""

    endpoints: Endpoints
    bookings: Bookings
    index: PrefixIndex
    tokens: TokenSource | None
    model: str | None  # the model that `tokens` and the index speak of; given whenever `tokens` is
    known_models: frozenset[str]  # empty: every model is accepted
    policy: PickPolicy
    telemetry: Telemetry
    clock: Callable[[], float]  # monotonic seconds
    random: Callable[[], float]  # breaks ties

    async def pick(self, facts: RequestFacts, body: bytes | None) -> Picked:
        """Decide where the request goes; `body` is None where Envoy does not send it.

        Raise PickError with the answer for the client where it goes nowhere.
        """
        started = self.clock()
        request = parse_request(method=facts.method, path=facts.path, body=body)
        self._require_known(request.model)
        parsed = self.clock()
        self.telemetry.phase("parse", parsed - started)
        degraded: dict[str, str] = {}  # word -> what happened, for people
        prompts = await self._prompt_tokens(request, degraded)
        tokenized = self.clock()
        self.telemetry.phase("tokenize", tokenized - parsed)
        hits = await self._lookup(prompts, request, degraded)
        match = match_prompts([len(tokens) // 4 for tokens in prompts], hits)
        looked_up = self.clock()
        self.telemetry.phase("lookup", looked_up - tokenized)
        candidates = self.candidates(match, now=looked_up)
        unknown = [candidate.address for candidate in candidates if candidate.load is None]
        if unknown:
            degraded["load-unknown"] = f"no recent report of {', '.join(unknown)}"
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

    def candidates(self, match: PromptMatch, *, now: float) -> list[Candidate]:
        """Return every endpoint as a request with this match sees it at `now`."""
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

    def _require_known(self, model: str | None) -> None:
        if self.known_models and model is not None and model not in self.known_models:
            raise UnknownModelError(
                f"the model {model[:100]!r} is not served here; there are {', '.join(sorted(self.known_models))}"
            )

    async def _prompt_tokens(self, request: InferenceRequest, degraded: dict[str, str]) -> Sequence[bytes]:
        """Return the tokens of the first prompts, or nothing and a word why."""
        if request.unsupported_reason is not None:
            degraded["prompt-unsupported"] = request.unsupported_reason
        elif request.prompts and self.tokens is None:
            degraded["no-tokenizer"] = "the picker was started without --tokenizer"
        elif request.prompts and request.model is not None and request.model != self.model:
            degraded["no-tokenizer-for-model"] = f"--tokenizer belongs to the model {self.model!r}"
        elif request.prompts and self.tokens is not None:
            try:
                return await self.tokens.tokens(request, limit=MAX_PROMPTS_LOOKED_UP)
            except PromptTokensError as error:
                degraded[error.reason] = str(error)
        return ()

    async def _lookup(self, prompts: Sequence[bytes], request: InferenceRequest, degraded: dict[str, str]) -> IndexHits:
        """Ask the index, or return nothing and a word why."""
        if not prompts:
            return NO_HITS
        assert self.model is not None, "a tokenizer belongs to a model"
        try:
            hits = await self.index.lookup(prompts, model=self.model, cache_salt=request.cache_salt)
        except PrefixIndexError as error:
            degraded[error.reason] = str(error)
            return NO_HITS
        if hits.stale_reason is not None:
            degraded["prefix-index-stale"] = hits.stale_reason
        return hits

"""The use case, and the page to read first: a request's bytes + index + load + policy -> a decision.

Called by `service` for every exchange and by the admin page's explain; books nothing. Each input but the endpoints may
be missing: the pick is then made on the rest, and `Decision.degraded` names what was missing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from extproc.core.admission import admit
from extproc.core.candidates import candidates_of
from extproc.core.decision import Decision, apply_filters, decide
from extproc.core.endpoint import Ask, Candidate, EndpointStatus
from extproc.core.exchange import RequestFacts
from extproc.core.health import EndpointHealth
from extproc.core.hotspot import HotPrefixes
from extproc.core.inflight import Bookings
from extproc.core.model_rules import ResolvedModel, fall_back, resolve
from extproc.core.models import ModelTable, ServedModel
from extproc.core.policy import PickPolicy
from extproc.core.prompt_match import (
    NO_HITS,
    NO_MATCH,
    IndexHits,
    PromptKeys,
    PromptMatch,
    indexed_tokens,
    match_prompts,
)
from extproc.core.prompt_tokens import TOKEN_BYTES, PromptTokens
from extproc.core.request import InferenceRequest
from extproc.core.routing_memory import RoutingMemory
from extproc.core.spread_hot_prefix import copy_of_hot_prefix
from extproc.errors import NoReadyEndpointError, PromptTokensError, UnknownModelError
from extproc.ports import Endpoints, PrefixIndex, PromptSource, Telemetry
from extproc.wire.content_encoding import UnknownContentEncodingError, decoded_body
from extproc.wire.json_edit import replace_top_level
from extproc.wire.openai import parse_request

# a batch of prompts in one request is looked up this far: the rest changes the pick little and the delay much
MAX_PROMPTS_LOOKED_UP = 16
# who the request belongs to, the most telling first; clients that keep a conversation together send one of them
SESSION_HEADERS = ("x-session-id", "session-id", "x-session-affinity", "x-claude-code-session-id")
LONGEST_SESSION = 200  # characters; longer ones are remembered by their hash: clients choose them
CONTENT_ENCODING = "content-encoding"
NO_PROMPTS = PromptTokens()
ANY_MODEL = ServedModel(name="")  # in place of one that nobody configured: its prompts are known as text only
MODEL_FILTER = frozenset({"model"})
NO_FILTER: frozenset[str] = frozenset()


class Picked(msgspec.Struct, frozen=True, kw_only=True):
    """A decision, the request it was made for, and what the books need of it."""

    request: InferenceRequest
    resolved: ResolvedModel
    decision: Decision
    body: bytes | None = None  # in place of the client's; None: unchanged
    removed_headers: tuple[str, ...] = ()  # that would not be true of the new body
    prompts: Sequence[PromptKeys] = ()
    session: str | None = None
    session_moved: bool = False  # the other replicas have another place for it than the winner, or none
    is_comparable: bool = False  # one prompt of known tokens: vLLM's usage tells the cached tokens of one prompt only


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    """What the pod gets: `plain` without content-encoding, None where nobody can read it."""

    plain: bytes | None
    changed: bytes | None = None
    removed_headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPicker:
    """All that a pick depends on; one instance serves all requests."""

    endpoints: Endpoints
    bookings: Bookings
    index: PrefixIndex
    prompts: PromptSource
    models: ModelTable
    known_models: frozenset[str]  # empty: every model is accepted
    policy: PickPolicy
    health: EndpointHealth
    memory: RoutingMemory
    hot: HotPrefixes
    telemetry: Telemetry
    clock: Callable[[], float]  # monotonic seconds
    random: Callable[[], float]  # breaks ties
    turns: Callable[[str | None], int]  # model -> requests for it so far
    max_body_bytes: int

    async def pick(self, facts: RequestFacts, body: bytes | None) -> Picked:
        """Decide where the request goes; `body` is None where Envoy does not send it.

        Raise PickError with the answer for the client where it goes nowhere.
        """
        started = self.clock()
        request = parse_request(
            method=facts.method,
            path=facts.path,
            body=body,
            content_type=facts.headers.get("content-type"),
            content_encoding=facts.headers.get(CONTENT_ENCODING),
            max_decoded_bytes=self.max_body_bytes,
        )
        self._require_known(request.model)
        resolved = resolve(
            request.model,
            table=self.models,
            user=request.user,
            headers=facts.headers,
            draw=self.random(),
            learned=self.endpoints.learned_adapters,
        )
        self.telemetry.phase("parse", self.clock() - started)
        notes: list[str] = []
        while True:
            try:
                return await self._route(facts, body, request, resolved, notes)
            except NoReadyEndpointError as refusal:
                if not resolved.fallbacks:
                    raise
                following = resolved.fallbacks[0]
                notes.append(f"{following} in place of {resolved.model}: {refusal.message}")
                resolved = fall_back(following, table=self.models, of=resolved, learned=self.endpoints.learned_adapters)

    async def _route(
        self,
        facts: RequestFacts,
        body: bytes | None,
        request: InferenceRequest,
        resolved: ResolvedModel,
        notes: list[str],
    ) -> Picked:
        """Decide for one model; raise NoReadyEndpointError where nobody serves it."""
        began = self.clock()
        degraded: dict[str, str] = {}  # word -> what happened, for people
        sent = _body(facts, body, request, resolved, max_bytes=self.max_body_bytes, degraded=degraded)
        tokens = await self._prompt_tokens(request, sent.plain, resolved, degraded)
        tokenized = self.clock()
        self.telemetry.phase("tokenize", tokenized - began)
        session = _session(facts, resolved)
        hits = await self._lookup(tokens, request, resolved, session)
        if hits.degraded:
            degraded.update(hits.degraded)
        looked_up = self.clock()
        self.telemetry.phase("lookup", looked_up - tokenized)
        prompts = _keys(tokens, hits)
        statuses = self.endpoints.snapshot(now=looked_up)
        match = self._match(tokens, prompts, hits, statuses, now=looked_up)
        ask = self._ask(facts, request, resolved, tokens)
        strict = MODEL_FILTER if resolved.fallbacks else NO_FILTER
        candidates = self._candidates(statuses, match, hits, session=session, adapter=resolved.adapter, now=looked_up)
        unknown = [candidate.address for candidate in candidates if candidate.load is None]
        if unknown:
            degraded["load-unknown"] = f"no recent report of {', '.join(unknown)}"
        self._admit(candidates, facts, ask, strict)
        candidates, copy = copy_of_hot_prefix(
            candidates, prompts, hot=self.hot, policy=self.policy, now=looked_up, ask=ask, strict=strict
        )
        decision = decide(
            candidates,
            policy=self.policy,
            ask=ask,
            prompt_tokens=match.prompt_tokens,
            degraded=degraded,
            tie_break=self.random,
            strict=strict,
            notes=notes,
        )
        if copy is not None and decision.endpoints[0] == copy.endpoint:  # other scorers may have had their way
            self.hot.copied(copy.prefix, endpoint=copy.endpoint, now=looked_up)
            decision = msgspec.structs.replace(decision, notes=(*decision.notes, copy.words))
        self.telemetry.phase("decide", self.clock() - looked_up)
        view = hits.view
        return Picked(
            request=request,
            resolved=resolved,
            decision=decision,
            body=sent.changed,
            removed_headers=sent.removed_headers,
            prompts=prompts,
            session=session,
            session_moved=view is not None and view.session_read and view.session_endpoint != decision.endpoints[0],
            # an index that did not answer has predicted nothing
            is_comparable=len(tokens.prompts) == 1 and len(request.prompts) <= 1 and bool(hits.prompts),
        )

    def candidates(self, *, now: float) -> Sequence[Candidate]:
        """Return every endpoint as a request that nobody has seen before sees it at `now`."""
        return self._candidates(
            self.endpoints.snapshot(now=now), NO_MATCH, NO_HITS, session=None, adapter=None, now=now
        )

    def _candidates(
        self,
        statuses: Sequence[EndpointStatus],
        match: PromptMatch,
        hits: IndexHits,
        *,
        session: str | None,
        adapter: str | None,
        now: float,
    ) -> Sequence[Candidate]:
        return candidates_of(
            statuses,
            match,
            hits,
            bookings=self.bookings,
            memory=self.memory,
            health=self.health,
            policy=self.policy,
            session=session,
            adapter=adapter,
            now=now,
        )

    def _admit(self, candidates: Sequence[Candidate], facts: RequestFacts, ask: Ask, strict: frozenset[str]) -> None:
        """Raise RequestShedError where the request may be refused and all that could serve it are saturated."""
        if facts.objective in self.policy.sheddable_classes:
            kept, _ = apply_filters(candidates, ask=ask, strict=strict)
            admit(kept, objective=facts.objective, policy=self.policy)

    def _require_known(self, model: str | None) -> None:
        if self.known_models and model is not None and model not in self.known_models:
            raise UnknownModelError(
                f"the model {model[:100]!r} is not served here; there are {', '.join(sorted(self.known_models))}"
            )

    async def _prompt_tokens(
        self, request: InferenceRequest, body: bytes | None, resolved: ResolvedModel, degraded: dict[str, str]
    ) -> PromptTokens:
        """Return the tokens of the first prompts, or what else is known of them and a word why."""
        if resolved.base is None and self.models.served and request.prompts:
            names = ", ".join(served.name for served in self.models.served)
            degraded["no-tokenizer-for-model"] = f"the tokenizers here belong to {names}"
        try:
            tokens = await self.prompts.prompts(
                request,
                body,
                model=resolved.base or ANY_MODEL,
                limit=MAX_PROMPTS_LOOKED_UP,
                adapter=resolved.adapter if resolved.base is not None else resolved.model,
            )
        except PromptTokensError as error:
            degraded[error.reason] = str(error)
            return NO_PROMPTS
        if tokens.degraded is not None and "no-tokenizer-for-model" not in degraded:
            degraded[tokens.degraded] = tokens.degraded_why
        return tokens

    async def _lookup(
        self, tokens: PromptTokens, request: InferenceRequest, resolved: ResolvedModel, session: str | None
    ) -> IndexHits:
        """Ask the index, and the other replicas with it."""
        return await self.index.lookup(
            tokens.prompts if resolved.base is not None else (),
            model=resolved.base.name if resolved.base is not None else "",
            adapter=resolved.adapter,
            cache_salt=request.cache_salt,
            session=session,
        )

    def _match(
        self,
        tokens: PromptTokens,
        prompts: Sequence[PromptKeys],
        hits: IndexHits,
        statuses: Sequence[EndpointStatus],
        *,
        now: float,
    ) -> PromptMatch:
        """Merge what the index knows with what was routed lately."""
        addresses = [status.address for status in statuses] if prompts else ()
        states = {} if tokens.chunks else hits.states  # no event tells of text
        indexed = indexed_tokens(hits.prompts[0]) if len(prompts) == len(hits.prompts) == 1 else {}
        recent = (
            self.memory.matches(prompts, states=states, endpoints=addresses, indexed=indexed, now=now)
            if prompts
            else ()
        )
        return match_prompts(
            tokens.estimated_tokens, hits.prompts, recent=recent, tier_weights=self.policy.tier_weights
        )

    def _ask(
        self, facts: RequestFacts, request: InferenceRequest, resolved: ResolvedModel, tokens: PromptTokens
    ) -> Ask:
        return Ask(
            model=resolved.model,
            adapter=resolved.adapter,
            prompt_tokens=_longest(tokens) if len(request.prompts) > 1 else tokens.estimated_tokens,
            subset=facts.subset,
            max_model_len=resolved.base.max_model_len if resolved.base is not None else None,
            turn=self.turns(resolved.model),
        )


def _body(
    facts: RequestFacts,
    body: bytes | None,
    request: InferenceRequest,
    resolved: ResolvedModel,
    *,
    max_bytes: int,
    degraded: dict[str, str],
) -> _Body:
    """Return what the pod gets: the client's bytes, but for the model where a rule changes it.

    Raise MalformedRequestError for a body in which the model would have to be changed and cannot.
    """
    encoding = facts.headers.get(CONTENT_ENCODING)
    plain = body
    if body and encoding is not None:
        if not request.prompts and not request.has_media and not resolved.is_rewritten:
            return _Body(plain=None)  # nobody reads it
        try:
            plain = decoded_body(body, content_encoding=encoding, max_bytes=max_bytes)
        except UnknownContentEncodingError:
            return _Body(plain=None)
    if not resolved.is_rewritten:
        return _Body(plain=plain)
    if not plain or resolved.model is None:
        degraded["model-not-rewritten"] = f"the body cannot be changed, the pod gets the model {resolved.requested!r}"
        return _Body(plain=plain)
    changed = replace_top_level(plain, {"model": msgspec.json.encode(resolved.model)})
    return _Body(plain=changed, changed=changed, removed_headers=(CONTENT_ENCODING,) if plain is not body else ())


def _session(facts: RequestFacts, resolved: ResolvedModel) -> str | None:
    """Return a name for the conversation that is unique over models, or None where the client gives none."""
    headers = facts.headers
    for header in SESSION_HEADERS:
        if value := headers.get(header):
            name = f"{resolved.model}\0{value}"
            if len(name) <= LONGEST_SESSION:
                return name
            return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return None


def _longest(tokens: PromptTokens) -> int:
    """Return the tokens of a batch's longest prompt: each has the model's context for itself."""
    return max([len(prompt.tokens) // TOKEN_BYTES for prompt in tokens.prompts], default=0)


def _keys(tokens: PromptTokens, hits: IndexHits) -> Sequence[PromptKeys]:
    if tokens.chunks:
        return (PromptKeys(keys=tokens.chunks, tokens_each=tokens.chunk_tokens),)
    return hits.keys

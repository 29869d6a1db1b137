"""The use case, and the page to read first: a request's bytes + index + load + policy -> a decision.

In three steps: `prepare` reads the request and asks the index; `survey` looks at the endpoints as they are now;
`choose` decides between those that may have it. The last two do not wait, so that `admit_request` can repeat them for
a request that waits until an endpoint has room. Books nothing. Each input but the endpoints may be missing: the pick is
then made on the rest, and `Decision.degraded` names what was missing.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

import msgspec

from extproc.admission.classify import asked_model, charged_model, classify, policy_needs_bodies
from extproc.admission.degradation import Measures, may_change_model
from extproc.admission.ports import Endpoints, PrefixIndex, Pressure, PromptSource, Quotas, Telemetry
from extproc.admission.prepared_request import (
    CONTENT_ENCODING,
    Prepared,
    asked_for,
    longest_prompt,
    most_generated,
    pool_of,
    prompt_keys,
    require_within_limit,
    sent_body,
    session_of,
)
from extproc.choosing.candidates import candidates_of
from extproc.choosing.decision import Decision, decide, require_some
from extproc.choosing.health import EndpointHealth
from extproc.choosing.hotspot import HotPrefixes
from extproc.choosing.spread_hot_prefix import copy_of_hot_prefix
from extproc.errors import (
    NoReadyEndpointError,
    PickError,
    PromptTokensError,
    QuotaExceededError,
    TokenQuotaExceededError,
    UnknownModelError,
)
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.model_rules import ResolvedModel, fall_back, resolve, stand_in
from extproc.models.models import ModelTable, ServedModel
from extproc.pods.endpoint import Ask, Candidate, EndpointStatus
from extproc.pods.inflight import Bookings
from extproc.policy.request_class import RequestClass
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import (
    NO_HITS,
    NO_MATCH,
    IndexHits,
    PromptKeys,
    PromptMatch,
    indexed_tokens,
    match_prompts,
)
from extproc.prefixes.recent_routes import NOTHING_HELD
from extproc.prefixes.routing_memory import RecentHits, RoutingMemory
from extproc.prompts.token_ids import PromptTokens
from extproc.quotas.quota import QuotaAsk, QuotaVerdict
from extproc.replicas.shared_load import EndpointBookings, SharedView
from extproc.requests.openai import parse_request
from extproc.requests.request import InferenceRequest

# a batch of prompts in one request is looked up this far: the rest changes the pick little and the delay much
MAX_PROMPTS_LOOKED_UP = 16
NO_PROMPTS = PromptTokens()
ANY_MODEL = ServedModel(name="")  # in place of one that nobody configured: its prompts are known as text only
MODEL_FILTER = frozenset({"model"})
NO_FILTER: frozenset[str] = frozenset()


class Survey(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints as one request sees them at one time."""

    kept: Sequence[Candidate]  # those that may serve it; at least one
    rejected: Mapping[str, str]  # address -> filter and its words
    ask: Ask
    match: PromptMatch
    degraded: Mapping[str, str]
    at: float  # monotonic seconds


class Picked(msgspec.Struct, frozen=True, kw_only=True):
    """A decision and the request that it was made for."""

    prepared: Prepared
    decision: Decision

    @property
    def session_moved(self) -> bool:
        """Whether the other replicas have another place for the session than the winner, or none."""
        view = self.prepared.hits.view
        return view is not None and view.session_read and view.session_endpoint != self.decision.endpoints[0]

    @property
    def is_comparable(self) -> bool:
        """Whether vLLM's usage tells what came true: one prompt of known tokens, and an index that answered."""
        prepared = self.prepared
        return len(prepared.tokens.prompts) == 1 and len(prepared.request.prompts) <= 1 and bool(prepared.hits.prompts)


Gate = Callable[[RequestFacts, ResolvedModel, RequestClass], None]  # the model that it goes to, as the load allows now


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
    pressure: Pressure
    quotas: Quotas
    health: EndpointHealth
    memory: RoutingMemory
    hot: HotPrefixes
    telemetry: Telemetry
    clock: Callable[[], float]  # monotonic seconds
    random: Callable[[], float]  # breaks ties
    turns: Callable[[str | None], int]  # model -> requests for it so far
    max_body_bytes: int
    needs_bodies: bool = field(init=False)  # what cannot be read is refused

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_bodies", policy_needs_bodies(self.policy.priorities, self.models))

    async def pick(self, facts: RequestFacts, body: bytes | None) -> Picked:
        """Decide where the request would go were there room everywhere, as an explanation shows it.

        Raise PickError with the answer for the client where it goes nowhere.
        """
        prepared = await self.prepare(facts, body)
        while True:
            try:
                survey = self.survey(prepared, now=self.clock())
            except NoReadyEndpointError as refusal:
                prepared = await self.fall_back(prepared, refusal)
            else:
                return self.choose(prepared, survey, kept=survey.kept, rejected=survey.rejected)

    async def prepare(self, facts: RequestFacts, body: bytes | None, *, gate: Gate | None = None) -> Prepared:
        """Read the request and ask the index; `body` is None where Envoy does not send it.

        `gate` raises for those with whose prompt nothing shall be done. Raise PickError with the answer for the client
        where it goes nowhere.
        """
        started = self.clock()
        request = parse_request(
            method=facts.method,
            path=facts.path,
            body=body,
            content_type=facts.headers.get("content-type"),
            content_encoding=facts.headers.get(CONTENT_ENCODING),
            max_decoded_bytes=self.max_body_bytes,
            require_readable=self.needs_bodies,
        )
        self._require_known(request.model)
        request_class = classify(facts, model=asked_model(request.model, self.models), policy=self.policy.priorities)
        resolved = resolve(
            request.model,
            table=self.models,
            user=request.user,
            headers=facts.headers,
            draw=self.random(),
            learned=self.endpoints.learned_adapters,
        )
        # before the load may put another model in its place
        charged = charged_model(self.policy.priorities.quotas, tenant=request_class.tenant, resolved=resolved)
        self.telemetry.phase("parse", self.clock() - started)
        try:
            return await self._prepare_at_once(facts, body, request, resolved, request_class, charged, gate)
        except PickError as refusal:
            refusal.asked = asked_for(request, resolved, request_class)
            raise

    def _prepare_at_once(
        self,
        facts: RequestFacts,
        body: bytes | None,
        request: InferenceRequest,
        resolved: ResolvedModel,
        request_class: RequestClass,
        charged: str | None,
        gate: Gate | None,
    ) -> Awaitable[Prepared]:
        """Prepare as the load allows now. Its own errors come before anything is awaited."""
        measures = self.pressure.measures(request_class, pool=pool_of(resolved))
        notes: tuple[str, ...] = ()
        smaller = measures.model
        if smaller is not None and smaller != resolved.model and may_change_model(request, adapter=resolved.adapter):
            notes = (f"{smaller} in place of {resolved.model}: class {request_class.class_name!r} is under pressure",)
            learned = self.endpoints.learned_adapters
            resolved = stand_in(smaller, table=self.models, of=resolved, learned=learned)
        if gate is not None:
            gate(facts, resolved, request_class)
        return self._prepare(facts, body, request, resolved, request_class, measures, notes, charged, None)

    async def fall_back(self, prepared: Prepared, refusal: NoReadyEndpointError) -> Prepared:
        """Prepare the request for the next model that may stand in; raise the refusal where there is none."""
        if not prepared.resolved.fallbacks:
            raise refusal
        following = prepared.resolved.fallbacks[0]
        note = f"{following} in place of {prepared.resolved.model}: {refusal.message}"
        return await self._prepare(
            prepared.facts,
            prepared.body,
            prepared.request,
            fall_back(following, table=self.models, of=prepared.resolved, learned=self.endpoints.learned_adapters),
            prepared.request_class,
            prepared.measures,
            (*prepared.notes, note),
            None,
            prepared,
        )

    async def _prepare(
        self,
        facts: RequestFacts,
        body: bytes | None,
        request: InferenceRequest,
        resolved: ResolvedModel,
        request_class: RequestClass,
        measures: Measures,
        notes: tuple[str, ...],
        charged: str | None,
        before: Prepared | None,
    ) -> Prepared:
        """Prepare for one model, which quotas count as `charged`; `before`: for another one, which has asked them."""
        began = self.clock()
        degraded: dict[str, str] = {}
        sent = sent_body(
            facts,
            body,
            request,
            resolved,
            request_class=request_class,
            measures=measures,
            engine_priority=self.policy.priorities.engine_priority,
            max_bytes=self.max_body_bytes,
            degraded=degraded,
        )
        tokens = await self._prompt_tokens(request, sent.plain, resolved, degraded)
        require_within_limit(tokens, measures=measures, class_name=request_class.class_name)
        tokenized = self.clock()
        self.telemetry.phase("tokenize", tokenized - began)
        session = session_of(facts, resolved)
        quota = None
        if before is None:
            quota = self._quota(request_class, charged, tokens, most_generated(request, sent, measures))
        hits = await self._lookup(tokens, request, resolved, session, quota)
        if hits.degraded:
            degraded.update(hits.degraded)
        self.telemetry.phase("lookup", self.clock() - tokenized)
        return Prepared(
            facts=facts,
            body=body,
            request=request,
            resolved=resolved,
            request_class=request_class,
            measures=measures,
            sent=sent,
            tokens=tokens,
            hits=hits,
            prompts=prompt_keys(tokens, hits),
            session=session,
            degraded=degraded,
            notes=notes,
            turn=self.turns(resolved.model),
            # the first model that is tried has a note only where it is not the one asked for
            has_smaller_model=before is None and bool(notes),
            quota=quota if before is None else before.quota,
            verdict=hits.quota if before is None else before.verdict,
        )

    def survey(self, prepared: Prepared, *, now: float, others: Mapping[str, EndpointBookings] | None = None) -> Survey:
        """Look at the endpoints as they are at `now`; `others`: what other replicas have booked, newer than the lookup.

        Raise NoReadyEndpointError where nobody may serve the request.
        """
        hits, resolved, prompts = prepared.hits, prepared.resolved, prepared.prompts
        if others is not None:
            view = msgspec.structs.replace(hits.view or SharedView(), others=others)
            hits = msgspec.structs.replace(hits, view=view)
        statuses = self.endpoints.snapshot(now=now)
        match = self._match(prepared.tokens, prompts, hits, statuses, now=now)
        ask = self._ask(prepared)
        candidates = self._candidates(
            statuses, match, hits, session=prepared.session, adapter=resolved.adapter, now=now
        )
        degraded = prepared.degraded
        unknown = [candidate.address for candidate in candidates if candidate.load is None]
        if unknown:
            degraded = {**degraded, "load-unknown": f"no recent report of {', '.join(unknown)}"}
        kept, rejected = require_some(candidates, ask=ask, strict=MODEL_FILTER if resolved.fallbacks else NO_FILTER)
        return Survey(kept=kept, rejected=rejected, ask=ask, match=match, degraded=degraded, at=now)

    def choose(
        self,
        prepared: Prepared,
        survey: Survey,
        *,
        kept: Sequence[Candidate],
        rejected: Mapping[str, str],
        reserve: Sequence[str] = (),
    ) -> Picked:
        """Decide between `kept`, which are all of the survey's, or those with room; `reserve` are the others of it."""
        kept, copy = copy_of_hot_prefix(kept, prepared.prompts, hot=self.hot, policy=self.policy, now=survey.at)
        decision = decide(
            kept,
            rejected=rejected,
            policy=self.policy,
            ask=survey.ask,
            prompt_tokens=survey.match.prompt_tokens,
            degraded=survey.degraded,
            tie_break=self.random,
            notes=prepared.notes,
            reserve=reserve,
        )
        if copy is not None and decision.endpoints[0] == copy.endpoint:  # other scorers may have had their way
            self.hot.copied(copy.prefix, endpoint=copy.endpoint, now=survey.at)
            decision = msgspec.structs.replace(decision, notes=(*decision.notes, copy.words))
        self.telemetry.phase("decide", self.clock() - survey.at)
        return Picked(prepared=prepared, decision=decision)

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

    def _quota(
        self, request_class: RequestClass, charged: str | None, tokens: PromptTokens, most: int | None
    ) -> QuotaAsk | None:
        key = self.quotas.match(request_class.tenant, charged)
        if key is None:
            return None
        return self.quotas.ask(key, prompt_tokens=tokens.estimated_tokens, most_generated=most)

    def _lookup(
        self,
        tokens: PromptTokens,
        request: InferenceRequest,
        resolved: ResolvedModel,
        session: str | None,
        quota: QuotaAsk | None,
    ) -> Awaitable[IndexHits]:
        """Ask the index, and the other replicas and the tenant's quota with it; what is awaited: see `_allowed`."""
        hits = self.index.lookup(
            tokens.prompts if resolved.base is not None else (),
            model=resolved.base.name if resolved.base is not None else "",
            adapter=resolved.adapter,
            cache_salt=request.cache_salt,
            session=session,
            quota=quota,
        )
        return hits if quota is None else self._allowed(hits, quota)

    async def _allowed(self, lookup: Awaitable[IndexHits], quota: QuotaAsk) -> IndexHits:
        """Await the lookup that asks for the quota, too; raise QuotaExceededError."""
        try:
            hits = await lookup
            if hits.quota is not None and not hits.quota.allowed:
                raise _quota_exceeded(hits.quota)
        except BaseException:  # a client that leaves, too
            self.quotas.cancel(quota)
            raise
        return hits

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
        indexed = indexed_tokens(hits.prompts[0]) if len(hits.prompts) == 1 else None
        recent: Sequence[RecentHits] = ()
        if prompts:
            states = {} if tokens.chunks else hits.states  # no event tells of text
            addresses = [status.address for status in statuses]
            recent = self.memory.matches(
                prompts,
                states=states,
                endpoints=addresses,
                indexed=indexed if indexed is not None and len(prompts) == 1 else NOTHING_HELD,
                now=now,
            )
        return match_prompts(
            tokens.estimated_tokens, hits.prompts, recent=recent, tier_weights=self.policy.tier_weights, indexed=indexed
        )

    def _ask(self, prepared: Prepared) -> Ask:
        resolved, tokens = prepared.resolved, prepared.tokens
        return Ask(
            model=resolved.model,
            adapter=resolved.adapter,
            prompt_tokens=longest_prompt(tokens) if len(prepared.request.prompts) > 1 else tokens.estimated_tokens,
            subset=prepared.facts.subset,
            max_model_len=resolved.base.max_model_len if resolved.base is not None else None,
            turn=prepared.turn,
        )


def _quota_exceeded(verdict: QuotaVerdict) -> QuotaExceededError:
    kind = TokenQuotaExceededError if verdict.error_type == "tokens" else QuotaExceededError
    return kind(verdict.message, retry_after_seconds=ceil(max(verdict.wait_seconds, 1.0)), headers=verdict.headers)

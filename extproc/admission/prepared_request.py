"""A tokenized request with its prefix hits: everything that does not change while it waits for an endpoint."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from extproc.admission.asked_request import AskedFor, AskedRequest, SentBody
from extproc.admission.degradation import NO_MEASURES, took, words_of
from extproc.answers.answer_lengths import UNKNOWN_LENGTH, AnswerKind, AnswerLength
from extproc.choosing.choose import Choice, Query
from extproc.choosing.decision import Decision
from extproc.choosing.room import Room
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.errors import PromptTokensError, ResponseGoneError, UnknownResponseError
from extproc.ext_proc.exchange import NO_HEADERS
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import Ask
from extproc.pods.pod_ranks import pinned, pod_of
from extproc.policy.priority import StepKind
from extproc.policy.shadow import Withheld
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from extproc.prompts.tokenized_prompt import TOKEN_BYTES, PromptTokens, TokenizedPrompt
from extproc.requests.request import RANKED_APIS, InferenceRequest
from extproc.requests.responses_api import LONGEST_ID, is_owned, owner_in
from extproc.shared.quota import QuotaAsk, QuotaVerdict
from kvmesh.index.prefix_match import whole_pods

# the conversation that a request belongs to, the most specific header first; clients that track one send one of them
SESSION_HEADERS = ("x-session-id", "session-id", "x-session-affinity", "x-claude-code-session-id")
LONGEST_SESSION = 200  # characters; longer names, chosen by clients, are replaced by their hash
DEGRADED_HEADER = "x-kvmesh-degraded"
# prompts of a batch to look up: more would add much delay and hardly change the pick
MAX_PROMPTS_LOOKED_UP = 16
NO_PROMPTS = PromptTokens()
# stands for any unconfigured model: its prompts are known only as text, as no pod can be asked to tokenize for it
ANY_MODEL = ServedModel(name="", tokens_from=TokensFrom.TEXT)
NOT_FOR_MODEL, NO_MODELS = "no-tokenizer-for-model", "models-unknown"
MODEL_FILTER = frozenset({"model"})
NO_FILTER: frozenset[str] = frozenset()


class PromptSource(Protocol):
    """The models' tokenizers and chat templates, or substitutes for them."""

    async def prompts(
        self,
        request: InferenceRequest,
        body: bytes | None,
        *,
        model: ServedModel,
        limit: int,
        adapter: str | None = None,
        tenant: str = "",
    ) -> PromptTokens:
        """Return the tokens of the first `limit` prompts, or another predictor of a shared prefix.

        `body` is the decoded body for the pod. Raise PromptTokensError for a model that was not set up.
        """


class PrefixIndex(Protocol):
    """The global prefix index, together with the other replicas' bookings."""

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
        """Find the pods that hold the leading blocks of each prompt, all within one deadline.

        Never raises, as a slow index must not delay a request: `IndexHits.degraded` names the missing parts. The other
        replicas' placements of `session` and `adapter`, and the decision on `quota`, come in the same round trip.
        """


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one model, ready to be placed."""

    asked: AskedRequest
    sent: SentBody
    tokens: PromptTokens
    query: Query
    answer_kind: AnswerKind | None = None  # None if it generates none
    quota: QuotaAsk | None = None  # its charge on the tenant's quota, to be settled or cancelled
    verdict: QuotaVerdict | None = None  # the quota's answer

    @property
    def taken(self) -> tuple[StepKind, ...]:
        """The degradation steps that changed this request."""
        asked = self.asked
        if asked.measures is NO_MEASURES:
            return ()
        return took(asked.measures, capped=self.sent.capped, model_changed=asked.has_smaller_model)

    @property
    def is_coded(self) -> bool:
        """Whether the body for the pod still has the client's content-encoding."""
        sent, body = self.sent, self.asked.body
        return sent.changed is None and body is not None and sent.plain is not body.raw

    @property
    def held_bytes(self) -> int:
        """The waiting request's memory, about: its body as received, decoded, parsed and edited, and its tokens."""
        sent, asked = self.sent, self.asked
        raw = asked.body.raw if asked.body is not None else b""
        forms = {id(form): len(form) for form in (raw, sent.plain, sent.changed) if form}
        read = len(sent.plain or raw) if asked.request.prompts else 0
        return sum(forms.values()) + read + sum(len(prompt.tokens) for prompt in self.tokens.prompts)

    @property
    def summary(self) -> AskedFor:
        """The request's facts without its prompt."""
        prompts = self.query.prompts
        return self.asked.summary(
            block_tokens=prompts[0].tokens_each if prompts else 0,
            taken=self.taken,
            prompt_tokens=self.tokens.estimated_tokens,
            ask=self.query.ask,
        )

    @property
    def response_headers(self) -> Mapping[str, str]:
        """The headers that report quota and degradation to the client."""
        headers = self.verdict.headers if self.verdict is not None else NO_HEADERS
        kinds = self.taken
        return {**headers, DEGRADED_HEADER: words_of(kinds)} if kinds else headers


class Picked(msgspec.Struct, frozen=True, kw_only=True):
    """A request and its choice."""

    prepared: Prepared
    choice: Choice
    prefill: PrefillPlan | None = None  # None if no other pod can compute its prompt
    withheld: tuple[Withheld, ...] = ()  # in shadow mode: all skipped actions

    @property
    def uncached_tokens(self) -> int:
        """The tokens that the endpoint is expected to compute; it only fetches the ones computed by a prefill pod."""
        decision = self.choice.decision
        if self.prefill is not None and self.prefill.is_remote:
            return 1
        return max(decision.prompt_tokens - decision.matched_tokens, 1) if decision.prompt_tokens else 0

    @property
    def decision(self) -> Decision:
        """The request's placement, with its reasons."""
        return self.choice.decision

    def sent_to(self, ranks: Mapping[str, Sequence[int]], most: int | None) -> tuple[Sequence[str], dict[str, str]]:
        """Return at most so many endpoints for Envoy, and the header that chooses the rank (`ranks`: by pod)."""
        endpoints = self.decision.endpoints[:most]
        is_pinned = bool(ranks) and self.prepared.asked.request.api in RANKED_APIS
        return pinned(endpoints, ranks) if is_pinned else (endpoints, {})

    @property
    def session_moved(self) -> bool:
        """Whether the other replicas know another endpoint than the winner for the session, or none."""
        view = self.prepared.query.hits.view
        return view is not None and view.session_read and view.session_endpoint != self.decision.endpoints[0]

    @property
    def is_comparable(self) -> bool:
        """Whether vLLM's usage can verify the decision: one prompt with known tokens, and an answer from the index.

        With several choices, usage has the hits of the last one only, whose prompt the first one has cached.
        """
        prepared = self.prepared
        one_prompt = len(prepared.tokens.prompts) == 1 and len(prepared.asked.request.prompts) <= 1
        return one_prompt and prepared.asked.request.sequences == 1 and bool(prepared.query.hits.prompts)


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The fate of a request if it came now; for explanations."""

    verdict: str  # "go", "wait" or "refuse"
    rooms: Mapping[str, Room]  # by endpoint
    expected_ttft_seconds: float
    waiting_requests: int  # queued requests of the same or a higher priority


async def prompt_tokens(
    asked: AskedRequest, sent: SentBody, source: PromptSource, *, models: ModelTable, degraded: dict[str, str]
) -> PromptTokens:
    """Return the tokens of the first prompts, or substitutes for them, with the reason in `degraded`."""
    request, resolved = asked.request, asked.resolved
    of_no_model = resolved.base is None and request.prompts
    if of_no_model and models.served:
        names = ", ".join(served.name for served in models.served)
        degraded[NOT_FOR_MODEL] = f"the tokenizers here belong to {names}"
    elif of_no_model:
        degraded[NO_MODELS] = "no model is configured, and no pod has told its models yet (GET /v1/models)"
    try:
        tokens = await source.prompts(
            request,
            sent.plain,
            model=resolved.base or ANY_MODEL,
            limit=MAX_PROMPTS_LOOKED_UP,
            adapter=resolved.adapter if resolved.base is not None else resolved.model,
            tenant=asked.request_class.tenant,
        )
    except PromptTokensError as error:
        degraded[error.reason] = str(error)
        return NO_PROMPTS
    if tokens.degraded is not None and not of_no_model:
        degraded[tokens.degraded] = tokens.degraded_why
    return tokens


async def prefix_hits(
    asked: AskedRequest, tokens: PromptTokens, index: PrefixIndex, *, session: str | None, quota: QuotaAsk | None
) -> IndexHits:
    """Return the holders of the prompts' prefixes, with the replicas' bookings and the quota, in one round trip."""
    base = asked.resolved.base
    hits = await index.lookup(
        tokens.prompts if base is not None and not asked.request.skips_cache else (),
        model=base.name if base is not None else "",
        adapter=asked.resolved.adapter,
        cache_salt=asked.request.cache_salt,
        session=session,
        quota=quota,
    )
    if asked.request.api in RANKED_APIS or not any(lookup.ranked for lookup in hits.prompts):
        return hits
    # its pod gives it to any rank, so that nothing is expected there later either
    return msgspec.structs.replace(hits, prompts=[whole_pods(lookup) for lookup in hits.prompts], keys=())


def query_of(
    asked: AskedRequest,
    tokens: PromptTokens,
    hits: IndexHits,
    *,
    session: str | None,
    degraded: Mapping[str, str],
    answer: AnswerLength = UNKNOWN_LENGTH,
) -> Query:
    """Return the part of the request that a choice depends on."""
    resolved = asked.resolved
    prompts = hits.keys
    if tokens.chunks and not asked.request.skips_cache:
        prompts = (PromptKeys(keys=tokens.chunks, tokens_each=tokens.chunk_tokens),)
    return Query(
        ask=Ask(
            model=resolved.model,
            adapter=resolved.adapter,
            prompt_tokens=_longest_prompt(tokens) if len(asked.request.prompts) > 1 else tokens.estimated_tokens,
            subset=asked.facts.subset,
            max_model_len=resolved.base.max_model_len if resolved.base is not None else None,
            class_name=asked.request_class.class_name,
            answer_tokens=answer.tokens,
            answer_spread=answer.spread,
        ),
        hits=hits,
        prompts=prompts,
        are_chunks=bool(tokens.chunks) and not asked.request.skips_cache,
        estimated_tokens=tokens.estimated_tokens,
        session=session,
        degraded={**degraded, **hits.degraded} if hits.degraded else degraded,
        notes=asked.notes,
        strict=MODEL_FILTER if resolved.fallbacks else NO_FILTER,
    )


def with_note(prepared: Prepared, note: str) -> Prepared:
    """Return the request with a note in its decision, once."""
    notes = prepared.query.notes
    if note in notes:
        return prepared
    return msgspec.structs.replace(prepared, query=msgspec.structs.replace(prepared.query, notes=(*notes, note)))


def session_of(asked: AskedRequest) -> str | None:
    """Return the conversation's name, unique across models, or None if the client gives none.

    A request that refers to a response kept by a pod belongs to that response's session.
    """
    facts, request = asked.facts, asked.request
    if request.kept_response is not None:
        return response_session(request.kept_response)
    headers = facts.headers
    for header in SESSION_HEADERS:
        if value := headers.get(header):
            return _session_name(asked.resolved.model, value)
    return None if request.session is None else _session_name(asked.resolved.model, request.session)


def response_session(response_id: str) -> str:
    """Return the name of the session that is placed on the pod keeping a response."""
    return _session_name("\0response", response_id)


def _session_name(model: str | None, value: str) -> str:
    name = f"{model}\0{value}"
    if len(name) <= LONGEST_SESSION:
        return name
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def to_keeper(
    asked: AskedRequest, hits: IndexHits, *, endpoints: Sequence[str], remembered: str | None, key: bytes
) -> AskedRequest:
    """Restrict a request that refers to a kept response to the pod that keeps it.

    `remembered` is the pod that this picker knows; `key` is the ids'. Raise ResponseGoneError if the pod has gone, and
    UnknownResponseError if no pod is known and there are several to choose from.
    """
    response_id = asked.request.kept_response
    assert response_id is not None, "only these are kept anywhere"
    placed = (hits.view.session_endpoint if hits.view is not None else None) or remembered
    if placed is None and is_owned(response_id):
        placed = owner_in(response_id, endpoints, key=key) or ""
    if placed is None:
        if len(endpoints) <= 1:
            return asked  # the only pod can tell, and its own error message is better than ours
        raise UnknownResponseError(
            f"Response with id {response_id[:LONGEST_ID]!r} not found: no pod is known to keep it."
        )
    if placed not in endpoints:
        raise ResponseGoneError(
            f"Response with id {response_id[:LONGEST_ID]!r} is gone: the pod that kept it is no more. "
            "Send the conversation again, without previous_response_id."
        )
    subset = asked.facts.subset
    is_allowed = subset is None or placed in subset or pod_of(placed) in subset
    only = frozenset((placed,) if is_allowed else ())
    return msgspec.structs.replace(asked, facts=msgspec.structs.replace(asked.facts, subset=only))


def _longest_prompt(tokens: PromptTokens) -> int:
    """Return the tokens of a batch's longest prompt: each prompt may fill the model's context."""
    return max([len(prompt.tokens) // TOKEN_BYTES for prompt in tokens.prompts], default=0)

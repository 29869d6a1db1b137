"""A request with all that stays as it is while it waits for an endpoint: what it asks, and who holds its prefix."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from extproc.admission.asked_request import AskedRequest, SentBody
from extproc.admission.degradation import NO_MEASURES, took, words_of
from extproc.choosing.choose import Choice, Query
from extproc.choosing.decision import Decision
from extproc.choosing.room import Room
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.errors import PromptTokensError, ResponseGoneError, UnknownResponseError
from extproc.ext_proc.exchange import NO_HEADERS
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import Ask
from extproc.policy.priority import StepKind
from extproc.policy.shadow import Withheld
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from extproc.prompts.token_ids import TOKEN_BYTES, PromptTokens, TokenizedPrompt
from extproc.quotas.quota import QuotaAsk, QuotaVerdict
from extproc.records.request_events import AskedFor
from extproc.requests.kept_responses import LONGEST_ID, tag_in, tag_of
from extproc.requests.request import InferenceRequest

# who the request belongs to, the most telling first; clients that keep a conversation together send one of them
SESSION_HEADERS = ("x-session-id", "session-id", "x-session-affinity", "x-claude-code-session-id")
LONGEST_SESSION = 200  # characters; longer ones are remembered by their hash: clients choose them
DEGRADED_HEADER = "x-kvmesh-degraded"
# a batch of prompts in one request is looked up this far: the rest changes the pick little and the delay much
MAX_PROMPTS_LOOKED_UP = 16
NO_PROMPTS = PromptTokens()
# in place of one that is not configured: its prompts are known as text only, as no pod can be asked about no model
ANY_MODEL = ServedModel(name="", tokens_from=TokensFrom.TEXT)
NOT_FOR_MODEL, NO_MODELS = "no-tokenizer-for-model", "models-unknown"
MODEL_FILTER = frozenset({"model"})
NO_FILTER: frozenset[str] = frozenset()


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
        tenant: str = "",
    ) -> PromptTokens:
        """Return the tokens of the first `limit` prompts, or what else predicts a shared prefix.

        `body` is what the pod will get, decoded. Raise PromptTokensError for a model that was not set up.
        """


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


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one model, ready to be sent somewhere."""

    asked: AskedRequest
    sent: SentBody
    tokens: PromptTokens
    query: Query
    quota: QuotaAsk | None = None  # what was taken from its tenant's quota; to be settled or cancelled
    verdict: QuotaVerdict | None = None  # what the quota has answered
    withheld: tuple[Withheld, ...] = ()  # in shadow: what would have been done to it by now

    @property
    def taken(self) -> tuple[StepKind, ...]:
        """What the load has taken from this very request."""
        asked = self.asked
        if asked.measures is NO_MEASURES:
            return ()
        return took(asked.measures, capped=self.sent.capped, model_changed=asked.has_smaller_model)

    @property
    def is_coded(self) -> bool:
        """Whether the client's body has a content-encoding that is still to be taken off."""
        sent, body = self.sent, self.asked.body
        return sent.changed is None and body is not None and sent.plain is not body.raw

    @property
    def held_bytes(self) -> int:
        """About the memory that it takes while it waits: its body as it came, decoded, read and changed; its tokens."""
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
        )

    @property
    def response_headers(self) -> Mapping[str, str]:
        """What the client is told of its quota and of what the load has taken."""
        headers = self.verdict.headers if self.verdict is not None else NO_HEADERS
        kinds = self.taken
        return {**headers, DEGRADED_HEADER: words_of(kinds)} if kinds else headers


class Picked(msgspec.Struct, frozen=True, kw_only=True):
    """A request and the choice that was made for it."""

    prepared: Prepared
    choice: Choice
    prefill: PrefillPlan | None = None  # None: there is nobody else to compute its prompt
    withheld: tuple[Withheld, ...] = ()  # in shadow: all that would have been done to it

    @property
    def uncached_tokens(self) -> int:
        """The tokens that the endpoint is expected to compute; what comes from a prefill pod, it only fetches."""
        decision = self.choice.decision
        if self.prefill is not None and self.prefill.is_remote:
            return 1
        return max(decision.prompt_tokens - decision.matched_tokens, 1) if decision.prompt_tokens else 0

    @property
    def decision(self) -> Decision:
        """Where it goes, and why."""
        return self.choice.decision

    @property
    def session_moved(self) -> bool:
        """Whether the other replicas have another place for the session than the winner, or none."""
        view = self.prepared.query.hits.view
        return view is not None and view.session_read and view.session_endpoint != self.decision.endpoints[0]

    @property
    def is_comparable(self) -> bool:
        """Whether vLLM's usage tells what came true: one prompt of known tokens, and an index that answered."""
        prepared = self.prepared
        one_prompt = len(prepared.tokens.prompts) == 1 and len(prepared.asked.request.prompts) <= 1
        return one_prompt and bool(prepared.query.hits.prompts)


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """What would become of a request that came now; for explanations."""

    verdict: str  # "go", "wait" or "refuse"
    rooms: Mapping[str, Room]  # by endpoint
    expected_ttft_seconds: float
    waiting_requests: int  # of the same or a higher priority, in the queue


async def prompt_tokens(
    asked: AskedRequest, sent: SentBody, source: PromptSource, *, models: ModelTable, degraded: dict[str, str]
) -> PromptTokens:
    """Return the tokens of the first prompts, or what else is known of them; `degraded` takes a word why."""
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
    """Return who holds the prompts' beginnings, and in the same round trip the replicas' bookings and the quota."""
    base = asked.resolved.base
    return await index.lookup(
        tokens.prompts if base is not None else (),
        model=base.name if base is not None else "",
        adapter=asked.resolved.adapter,
        cache_salt=asked.request.cache_salt,
        session=session,
        quota=quota,
    )


def query_of(
    asked: AskedRequest, tokens: PromptTokens, hits: IndexHits, *, session: str | None, degraded: Mapping[str, str]
) -> Query:
    """Return what a choice reads of the request."""
    resolved = asked.resolved
    prompts = hits.keys
    if tokens.chunks:
        prompts = (PromptKeys(keys=tokens.chunks, tokens_each=tokens.chunk_tokens),)
    return Query(
        ask=Ask(
            model=resolved.model,
            adapter=resolved.adapter,
            prompt_tokens=_longest_prompt(tokens) if len(asked.request.prompts) > 1 else tokens.estimated_tokens,
            subset=asked.facts.subset,
            max_model_len=resolved.base.max_model_len if resolved.base is not None else None,
            class_name=asked.request_class.class_name,
        ),
        hits=hits,
        prompts=prompts,
        are_chunks=bool(tokens.chunks),
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
    """Return a name for the conversation that is unique over models, or None where the client gives none.

    A request that needs a response which a pod keeps belongs to that response's session.
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
    """Return the name of the session whose place is the pod that keeps a response."""
    return _session_name("\0response", response_id)


def _session_name(model: str | None, value: str) -> str:
    name = f"{model}\0{value}"
    if len(name) <= LONGEST_SESSION:
        return name
    return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def to_keeper(
    asked: AskedRequest, hits: IndexHits, *, endpoints: Sequence[str], remembered: str | None
) -> AskedRequest:
    """Return a request that needs a kept response for the pod that keeps it, and no other.

    `remembered`: where this picker knows the response to be. Raise ResponseGoneError where that pod is no more, and
    UnknownResponseError where nobody knows it and there are several to choose from.
    """
    response_id = asked.request.kept_response
    assert response_id is not None, "only these are kept anywhere"
    placed = (hits.view.session_endpoint if hits.view is not None else None) or remembered
    if placed is None and (tag := tag_in(response_id)) is not None:
        placed = next((endpoint for endpoint in endpoints if tag_of(endpoint) == tag), "")
    if placed is None:
        if len(endpoints) <= 1:
            return asked  # it is there or nowhere, and its answer is the better one
        raise UnknownResponseError(
            f"Response with id {response_id[:LONGEST_ID]!r} not found: no pod is known to keep it."
        )
    if placed not in endpoints:
        raise ResponseGoneError(
            f"Response with id {response_id[:LONGEST_ID]!r} is gone: the pod that kept it is no more. "
            "Send the conversation again, without previous_response_id."
        )
    subset = asked.facts.subset
    only = frozenset((placed,)) if subset is None else subset & {placed}
    return msgspec.structs.replace(asked, facts=msgspec.structs.replace(asked.facts, subset=only))


def _longest_prompt(tokens: PromptTokens) -> int:
    """Return the tokens of a batch's longest prompt: each has the model's context for itself."""
    return max([len(prompt.tokens) // TOKEN_BYTES for prompt in tokens.prompts], default=0)

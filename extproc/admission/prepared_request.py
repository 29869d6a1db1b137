"""A request with all that stays as it is while it waits for an endpoint: what it asks, and who holds its prefix.

Made by `pick`, kept by `admit_request`. The pure parts of preparing are here, too.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import msgspec

from extproc.admission.degradation import NO_MEASURES, Measures, took, words_of
from extproc.admission.output_cap import PREFILLER_HEADERS, body_changes, caps, removed_headers
from extproc.errors import PickError, PromptLimitError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.model_rules import ResolvedModel
from extproc.policy.priority import StepKind
from extproc.policy.request_class import RequestClass
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from extproc.prompts.token_ids import TOKEN_BYTES, PromptTokens
from extproc.quotas.quota import QuotaAsk, QuotaVerdict
from extproc.records.request_story import AskedFor
from extproc.requests.content_encoding import UnknownContentEncodingError, decoded_body
from extproc.requests.json_edit import JsonObject
from extproc.requests.request import ApiKind, InferenceRequest

# who the request belongs to, the most telling first; clients that keep a conversation together send one of them
SESSION_HEADERS = ("x-session-id", "session-id", "x-session-affinity", "x-claude-code-session-id")
LONGEST_SESSION = 200  # characters; longer ones are remembered by their hash: clients choose them
CONTENT_ENCODING = "content-encoding"
DEGRADED_HEADER = "x-kvmesh-degraded"
PRIORITY_HEADER = "x-kvmesh-priority"  # of a refusal: the class of its request
_OPAQUE = frozenset((ApiKind.OTHER, ApiKind.TOKENIZE))  # routed whatever their bodies are
NOTHING_TOLD: Mapping[str, str] = {}
LONGEST_NAME = 200  # characters of a model's name that are remembered: clients write what they like


class SentBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the pod gets: `plain` without content-encoding, None where nobody can read it."""

    plain: bytes | None
    changed: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    capped: bool = False  # the output, below what the client asked for


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one model, ready to be sent somewhere."""

    facts: RequestFacts
    body: bytes | None  # the client's
    request: InferenceRequest
    resolved: ResolvedModel
    request_class: RequestClass
    measures: Measures = NO_MEASURES
    sent: SentBody
    tokens: PromptTokens
    hits: IndexHits
    prompts: Sequence[PromptKeys]
    session: str | None
    degraded: Mapping[str, str]  # word -> what happened, for people
    notes: tuple[str, ...]
    turn: int  # counts requests
    has_smaller_model: bool = False  # the load has put it in the place of the one asked for
    quota: QuotaAsk | None = None  # what was taken from its tenant's quota; to be settled or cancelled
    verdict: QuotaVerdict | None = None  # what the quota has answered

    @property
    def taken(self) -> tuple[StepKind, ...]:
        """Return what the load has taken from this very request."""
        if self.measures is NO_MEASURES:  # nearly always
            return ()
        named = not self.facts.headers.keys().isdisjoint(PREFILLER_HEADERS)
        kinds = took(self.measures, capped=self.sent.capped, model_changed=self.has_smaller_model)
        return tuple(kind for kind in kinds if named or kind is not StepKind.NO_REMOTE_PREFILL)

    @property
    def asked(self) -> AskedFor:
        """Return the request's facts without its prompt."""
        block_tokens = self.prompts[0].tokens_each if self.prompts else 0
        return asked_for(self.request, self.resolved, self.request_class, block_tokens=block_tokens, taken=self.taken)

    @property
    def told(self) -> Mapping[str, str]:
        """Return what the response's headers tell the client of its quota and of what the load has taken."""
        told = self.verdict.headers if self.verdict is not None else NOTHING_TOLD
        kinds = self.taken
        return {**told, DEGRADED_HEADER: words_of(kinds)} if kinds else told

    @property
    def pool(self) -> str:
        """Return the model whose endpoints it competes for; adapters compete with their base."""
        return pool_of(self.resolved)


def pool_of(resolved: ResolvedModel) -> str:
    """Return the name under which requests compete for the same endpoints.

    One name for all models that nobody has configured: clients invent them, and they may be sent to the same endpoints.
    """
    return resolved.base.name if resolved.base is not None else ""


def sent_body(
    facts: RequestFacts,
    body: bytes | None,
    request: InferenceRequest,
    resolved: ResolvedModel,
    *,
    request_class: RequestClass,
    measures: Measures,
    engine_priority: bool,
    max_bytes: int,
    degraded: dict[str, str],
) -> SentBody:
    """Return what the pod gets: the client's bytes, but for the fields that a rule, a step or the class changes.

    Raise MalformedRequestError for a body in which something would have to be changed and cannot.
    """
    is_changed = resolved.is_rewritten or engine_priority or measures is not NO_MEASURES
    removed = removed_headers(measures)
    plain = _plain_body(facts, body, request, is_changed=is_changed, max_bytes=max_bytes)
    if body and plain is None:
        return SentBody(plain=None, removed_headers=removed)
    if not is_changed:
        return SentBody(plain=plain)
    changes: dict[str, bytes] = {}
    fields = JsonObject(plain or b"")
    if plain:
        priority = request_class.priority_class.priority if engine_priority else None
        changes.update(body_changes(request, fields, measures=measures, priority=priority))
    if resolved.is_rewritten:
        if plain and resolved.model is not None:
            changes["model"] = msgspec.json.encode(resolved.model)
        else:
            degraded["model-not-rewritten"] = (
                f"the body cannot be changed, the pod gets the model {resolved.requested!r}"
            )
    if not changes or not plain:
        return SentBody(plain=plain, removed_headers=removed)
    changed = fields.replaced(changes)
    if plain is not body:
        removed = (CONTENT_ENCODING, *removed)
    return SentBody(plain=changed, changed=changed, removed_headers=removed, capped=caps(changes))


def _plain_body(
    facts: RequestFacts, body: bytes | None, request: InferenceRequest, *, is_changed: bool, max_bytes: int
) -> bytes | None:
    """Return the body without content-encoding, None where nobody reads it, or can."""
    encoding = facts.headers.get(CONTENT_ENCODING)
    if not body or encoding is None:
        return body
    if not request.prompts and not request.has_media and not is_changed:
        return None
    try:
        return decoded_body(body, content_encoding=encoding, max_bytes=max_bytes)
    except UnknownContentEncodingError:
        return None
    except PickError:
        if request.api not in _OPAQUE:
            raise
        return None


def require_within_limit(tokens: PromptTokens, *, measures: Measures, class_name: str) -> None:
    """Raise PromptLimitError for a prompt that is longer than the class may send now."""
    limit = measures.prompt_tokens
    if limit is not None and tokens.estimated_tokens > limit:
        about = "" if tokens.prompts else "about "
        raise PromptLimitError(
            f"under the present load requests of class {class_name!r} may have {limit} prompt tokens, and this one has "
            f"{about}{tokens.estimated_tokens}; shorten the prompt or try again later",
            headers={PRIORITY_HEADER: class_name},
        )


def most_generated(request: InferenceRequest, sent: SentBody, measures: Measures) -> int | None:
    """Return the output tokens that the pod is asked for at most; None: as many as the model gives."""
    if sent.capped and measures.output_tokens is not None:
        return min(request.max_tokens or measures.output_tokens, measures.output_tokens)
    return request.max_tokens


def session_of(facts: RequestFacts, resolved: ResolvedModel) -> str | None:
    """Return a name for the conversation that is unique over models, or None where the client gives none."""
    headers = facts.headers
    for header in SESSION_HEADERS:
        if value := headers.get(header):
            name = f"{resolved.model}\0{value}"
            if len(name) <= LONGEST_SESSION:
                return name
            return blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return None


def longest_prompt(tokens: PromptTokens) -> int:
    """Return the tokens of a batch's longest prompt: each has the model's context for itself."""
    return max([len(prompt.tokens) // TOKEN_BYTES for prompt in tokens.prompts], default=0)


def asked_for(
    request: InferenceRequest,
    resolved: ResolvedModel,
    request_class: RequestClass,
    *,
    block_tokens: int = 0,
    taken: Sequence[StepKind] = (),
) -> AskedFor:
    """Return the request's facts without its prompt."""
    return AskedFor(
        api=request.api.value,
        model=_short(request.model),
        served_model=_short(resolved.model),
        adapter=resolved.adapter,
        arm=resolved.arm,
        prompts=len(request.prompts),
        stream=request.stream,
        max_tokens=request.max_tokens,
        block_tokens=block_tokens,
        request_class=request_class,
        steps=tuple(kind.value for kind in taken),
    )


def _short(name: str | None) -> str | None:
    return name if name is None else name[:LONGEST_NAME]


def prompt_keys(tokens: PromptTokens, hits: IndexHits) -> Sequence[PromptKeys]:
    """Return what each prompt is remembered by."""
    if tokens.chunks:
        return (PromptKeys(keys=tokens.chunks, tokens_each=tokens.chunk_tokens),)
    return hits.keys

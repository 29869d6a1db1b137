"""A parsed request: its class, its model after all rules, and the edited body for the pod.

Reading changes no state. The measures of degradation in force are an argument.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from extproc.admission.classify import asked_model, charged_model, classify, policy_needs_bodies
from extproc.admission.degradation import NO_MEASURES, Measures, may_change_model
from extproc.admission.output_cap import body_changes, caps
from extproc.answers.answer_lengths import AnswerKind
from extproc.answers.promise import (
    SLO_HEADERS,
    IgnoredTarget,
    TokenTargets,
    asked_targets,
    targets_of,
    words_of_ignored,
)
from extproc.disaggregation.transfer_protocols import removed_headers
from extproc.errors import NoReadyEndpointError, PickError, PromptLimitError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ResolvedModel, fall_back, resolve, stand_in
from extproc.pods.endpoint import NOTHING_ASKED, Ask
from extproc.pods.inflight import MOST_SEQUENCES
from extproc.policy.priority import StepKind
from extproc.policy.request_class import PriorityPolicy, RequestClass
from extproc.prompts.tokenized_prompt import PromptTokens
from extproc.requests.client_body import ClientBody, FieldsNotRemovedError
from extproc.requests.form_body import FormNotReadError, is_form, with_model
from extproc.requests.json_body import UnknownContentEncodingError
from extproc.requests.json_edit import JsonObject
from extproc.requests.openai import parse_request
from extproc.requests.request import TEXT_APIS, ApiKind, InferenceRequest
from extproc.requests.responses_api import UNOWNED_ID

CONTENT_ENCODING, ACCEPT_ENCODING = "content-encoding", "accept-encoding"
PRIORITY_HEADER = "x-kvmesh-priority"  # of a refusal: the class of its request
LONGEST_NAME = 200  # characters kept of a model's name: clients choose it
UNOWNED_ID_FIELD = {"request_id": msgspec.json.encode(UNOWNED_ID)}
_OPAQUE = frozenset((ApiKind.OTHER, ApiKind.TOKENIZE))  # routed even with an unreadable body


class AskedFor(msgspec.Struct, frozen=True, kw_only=True):
    """The remembered facts of a request; no part of its prompt."""

    api: str
    model: str | None  # as the client wrote it
    served_model: str | None  # as sent to the pod
    adapter: str | None
    arm: str
    prompts: int
    stream: bool
    max_tokens: int | None
    block_tokens: int  # 0 where tokens are unknown
    request_class: RequestClass
    steps: tuple[str, ...] = ()  # degradation levels that changed it
    prompt_tokens: int = 0  # 0: unknown, for example if refused before the lookup
    costs_gpu: bool = True
    answer_tokens: float = 0.0  # expected length of all its answers; 0 if unknown
    answer_spread: float = 0.0  # its standard deviation


class AskedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one model."""

    facts: RequestFacts
    body: ClientBody | None  # None if Envoy does not send it
    request: InferenceRequest
    resolved: ResolvedModel
    request_class: RequestClass
    charged: str | None  # the model name that quotas count it under
    measures: Measures = NO_MEASURES
    notes: tuple[str, ...] = ()  # for people: model replacements, ignored headers
    has_smaller_model: bool = False  # the step smaller-model replaced the requested model
    asked_targets: TokenTargets | None = None  # from its headers, tighter than the class's
    ignored_targets: tuple[IgnoredTarget, ...] = ()  # why target headers do not count

    @property
    def pool(self) -> str:
        """The model whose endpoints the request competes for; an adapter competes with its base.

        All unconfigured models share the name "": clients invent them, and they may go to the same endpoints.
        """
        return self.resolved.base.name if self.resolved.base is not None else ""

    @property
    def group(self) -> str:
        """The adapter and the subset that narrow the endpoints within the pool.

        When no endpoint has room for one group, one may have room for another.
        """
        adapter, subset = self.resolved.adapter, self.facts.subset
        name = adapter if self.resolved.base is not None else self.resolved.model  # may be served by some pods only
        if name is None and subset is None:
            return ""
        return f"{name or ''}\0{','.join(sorted(subset)) if subset is not None else '*'}"

    def answer_kind(self, session: str | None) -> AnswerKind | None:
        """Return what its answer's length depends on, None if it generates none."""
        if self.request.api not in TEXT_APIS or not self.request.costs_gpu:
            return None
        return AnswerKind(
            model=self.pool,
            adapter=self.resolved.adapter or "",
            class_name=self.request_class.class_name,
            tenant=self.request_class.tenant,
            session=session or "",
            choices=min(self.request.sequences, MOST_SEQUENCES),  # a client may ask for any number
        )

    @property
    def promised_class(self) -> str:
        """Its class, if the class has an inter-token target that counts for it; else ""."""
        has_target = self.request_class.priority_class.inter_token_seconds is not None
        return self.request_class.class_name if has_target and self.request.api in TEXT_APIS else ""

    def digest(self, seed: int) -> int | None:
        """Return the digest of its body, None if it computes nothing or Envoy does not send it."""
        return self.body.digest(seed) if self.body is not None and self.request.costs_gpu else None

    def summary(
        self, *, block_tokens: int = 0, taken: Sequence[StepKind] = (), prompt_tokens: int = 0, ask: Ask = NOTHING_ASKED
    ) -> AskedFor:
        """Return the request's facts without its prompt. `taken` are the degradation steps that changed it."""
        request, resolved = self.request, self.resolved
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
            request_class=self.request_class,
            steps=tuple(kind.value for kind in taken) if taken else (),
            prompt_tokens=prompt_tokens,
            costs_gpu=request.costs_gpu,
            answer_tokens=ask.answer_tokens,
            answer_spread=ask.answer_spread,
        )


class SentBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body for the pod. `plain` is without content-encoding, or None if unreadable or not needed."""

    plain: bytes | None
    changed: bytes | None = None  # replaces the client's body; None keeps it
    removed_headers: tuple[str, ...] = ()
    capped: bool = False  # the output limit is below the client's
    has_response_id: bool = False  # `changed` ends with UNOWNED_ID, to be replaced by the chosen pod's id


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Parses and edits requests by the policy in force and the served models."""

    models: ModelTable
    policy: PriorityPolicy
    max_body_bytes: int
    needs_bodies: bool = field(init=False)  # unreadable bodies are refused

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_bodies", policy_needs_bodies(self.policy, self.models))

    def body_of(self, facts: RequestFacts, raw: bytes | None) -> ClientBody | None:
        """Return a request's body, or None if Envoy does not send it."""
        if raw is None:
            return None
        return ClientBody(raw, content_encoding=facts.headers.get(CONTENT_ENCODING), max_bytes=self.max_body_bytes)

    def parse(self, facts: RequestFacts, body: ClientBody | None) -> InferenceRequest:
        """Parse the body. Raise PickError, with the answer for the client, if no pod could serve the request."""
        return parse_request(
            method=facts.method,
            path=facts.path,
            body=body.raw if body is not None else None,
            content_type=facts.headers.get("content-type"),
            require_readable=self.needs_bodies,
            is_two_way=body is None and facts.is_two_way,
            coded=body,
        )

    def ask(
        self,
        facts: RequestFacts,
        body: ClientBody | None,
        request: InferenceRequest,
        *,
        draw: float,
        adapters: Mapping[str, str],
    ) -> AskedRequest:
        """Return the request with its class and its model. Raise PickError if it cannot be served.

        `draw` is uniform in [0, 1), for weighted models. `adapters` maps each LoRA adapter to its base model, as
        reported by the pods.
        """
        model = request.model
        request_class = classify(facts, model=asked_model(model, self.models), policy=self.policy)
        resolved = resolve(
            model, table=self.models, user=request.user, headers=facts.headers, draw=draw, learned=adapters
        )
        asked = AskedRequest(
            facts=facts,
            body=body,
            request=request,
            resolved=resolved,
            request_class=request_class,
            # taken before `under` may put a smaller model in its place
            charged=charged_model(self.policy.quotas, tenant=request_class.tenant, resolved=resolved),
        )
        return asked if SLO_HEADERS.isdisjoint(facts.headers) else _with_targets(asked)

    def under(self, asked: AskedRequest, measures: Measures, *, adapters: Mapping[str, str]) -> AskedRequest:
        """Return the request under the measures in force, with the smaller model if one of them asks for it."""
        if measures is NO_MEASURES:
            return asked
        resolved, smaller = asked.resolved, measures.model
        if smaller is None or smaller == resolved.model:
            return msgspec.structs.replace(asked, measures=measures)
        if not may_change_model(asked.request, adapter=resolved.adapter):
            return msgspec.structs.replace(asked, measures=measures)
        class_name = asked.request_class.class_name
        return msgspec.structs.replace(
            asked,
            measures=measures,
            resolved=stand_in(smaller, table=self.models, of=resolved, learned=adapters),
            notes=(*asked.notes, f"{smaller} in place of {resolved.model}: class {class_name!r} is under pressure"),
            has_smaller_model=True,
        )

    def fall_back(
        self, asked: AskedRequest, refusal: NoReadyEndpointError, *, adapters: Mapping[str, str]
    ) -> AskedRequest:
        """Return the request for the next fallback model; raise `refusal` if none is left."""
        if not asked.resolved.fallbacks:
            raise refusal
        following = asked.resolved.fallbacks[0]
        return msgspec.structs.replace(
            asked,
            resolved=fall_back(following, table=self.models, of=asked.resolved, learned=adapters),
            notes=(*asked.notes, f"{following} in place of {asked.resolved.model}: {refusal.message}"),
            has_smaller_model=False,
        )

    def changes(self, asked: AskedRequest) -> bool:
        """Tell whether `edit` has to change the client's bytes."""
        is_measured = asked.measures is not NO_MEASURES
        is_cleaned = asked.body is not None and asked.body.cleaned is not None
        is_asked_for = is_measured or asked.request.wants_response_id or is_cleaned
        return asked.resolved.is_rewritten or self.policy.engine_priority or is_asked_for

    def edit(self, asked: AskedRequest, *, degraded: dict[str, str]) -> SentBody:
        """Return the body for the pod: the client's bytes, with the changes by model rule, degradation step and class.

        Record in `degraded` a model name that could not be changed. Raise MalformedRequestError if another required
        change fails.
        """
        request, resolved, measures = asked.request, asked.resolved, asked.measures
        body, cleaned = (asked.body.raw, asked.body.cleaned) if asked.body is not None else (None, None)
        engine_priority = self.policy.engine_priority
        is_changed = self.changes(asked)
        removed = removed_headers(asked.facts.headers)
        content_type = asked.facts.headers.get("content-type", "")
        if body and is_changed and resolved.is_rewritten and resolved.model is not None and is_form(content_type):
            with suppress(FormNotReadError):
                form = with_model(body, content_type, resolved.model)
                return SentBody(plain=form, changed=form, removed_headers=removed)
        plain = self._plain_body(asked, is_changed=is_changed)
        if body and plain is None:
            return SentBody(plain=None, removed_headers=removed)
        if not is_changed:
            return SentBody(plain=plain, removed_headers=removed)
        changes: dict[str, bytes] = {}
        fields = JsonObject(plain or b"")
        if plain:
            priority = asked.request_class.priority_class.priority if engine_priority else None
            changes.update(body_changes(request, fields, measures=measures, priority=priority))
        if resolved.is_rewritten:
            if plain and resolved.model is not None:
                changes["model"] = msgspec.json.encode(resolved.model)
            else:
                degraded["model-not-rewritten"] = (
                    f"the body cannot be changed, the pod gets the model {resolved.requested!r}"
                )
        named = None
        if request.wants_response_id and plain:
            with suppress(PickError):  # a body that cannot be edited: the id is optional
                named = fields.replaced({**changes, **UNOWNED_ID_FIELD})
        changed = named or (fields.replaced(changes) if changes and plain else cleaned)
        if changed is None:
            return SentBody(plain=plain, removed_headers=removed)
        return SentBody(
            plain=changed,
            changed=changed,
            removed_headers=_with_coding(removed, asked.facts, is_coded=plain is not body)
            # the model's name is changed back in the answer, which therefore must not be compressed
            + ((ACCEPT_ENCODING,) if resolved.is_rewritten else ()),
            capped=caps(changes),
            has_response_id=named is not None,
        )

    def unread(self, facts: RequestFacts, body: ClientBody | None) -> SentBody:
        """Return the body for the pod if the request was not parsed: no rule changes it. Raise as `parse`."""
        removed = removed_headers(facts.headers)
        try:
            plain = body.plain() if body is not None else None
        except FieldsNotRemovedError:
            raise
        except (UnknownContentEncodingError, PickError):  # cannot be unpacked: passes as it is
            plain = None
        changed = body.cleaned if body is not None else None
        if changed is not None:
            removed = _with_coding(removed, facts, is_coded=True)
        return SentBody(plain=plain, changed=changed, removed_headers=removed)

    def _plain_body(self, asked: AskedRequest, *, is_changed: bool) -> bytes | None:
        body, request = asked.body, asked.request
        if body is None:
            return None
        if CONTENT_ENCODING in asked.facts.headers and not request.prompts and not request.has_media and not is_changed:
            return None
        try:
            return body.plain()
        except UnknownContentEncodingError:
            return None
        except PickError:
            if request.api not in _OPAQUE:
                raise
            return None


def _with_coding(removed: tuple[str, ...], facts: RequestFacts, *, is_coded: bool) -> tuple[str, ...]:
    return (CONTENT_ENCODING, *removed) if is_coded and CONTENT_ENCODING in facts.headers else removed


def require_within_limit(asked: AskedRequest, tokens: PromptTokens, measures: Measures) -> None:
    """Raise PromptLimitError if the prompt is longer than these measures allow the class."""
    limit, class_name = measures.prompt_tokens, asked.request_class.class_name
    if limit is not None and tokens.estimated_tokens > limit:
        about = "" if tokens.prompts else "about "
        raise PromptLimitError(
            f"under the present load requests of class {class_name!r} may have {limit} prompt tokens, and this one has "
            f"{about}{tokens.estimated_tokens}; shorten the prompt or try again later",
            headers={PRIORITY_HEADER: class_name},
        )


def most_generated(asked: AskedRequest, sent: SentBody) -> int | None:
    """Return the output limit of all the request's sequences in tokens, or None without a limit."""
    cap, limit = asked.measures.output_tokens, asked.request.max_tokens
    if sent.capped and cap is not None:
        limit = min(limit or cap, cap)
    return None if limit is None else limit * asked.request.sequences


def _with_targets(asked: AskedRequest) -> AskedRequest:
    headers, targets = asked.facts.headers, targets_of(asked.request_class.priority_class)
    found, ignored = asked_targets(headers, targets)
    return msgspec.structs.replace(
        asked,
        asked_targets=found,
        ignored_targets=tuple(ignored.values()),
        notes=(*asked.notes, *words_of_ignored(headers, ignored, targets)),
    )


def _short(name: str | None) -> str | None:
    return name if name is None else name[:LONGEST_NAME]

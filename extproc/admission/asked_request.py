"""A request as it is read: its class, its model after all rules, and the body that the pod gets in place of its own.

Reading changes nothing. What the load takes from a request, its measures, is an argument.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from extproc.admission.classify import asked_model, charged_model, classify, policy_needs_bodies
from extproc.admission.degradation import NO_MEASURES, Measures, may_change_model
from extproc.admission.output_cap import body_changes, caps
from extproc.disaggregation.transfer_protocols import given_fields, removed_headers
from extproc.errors import NoReadyEndpointError, PickError, PromptLimitError, UnknownModelError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.model_rules import ResolvedModel, fall_back, resolve, stand_in
from extproc.models.models import ModelTable
from extproc.policy.priority import PriorityPolicy, StepKind
from extproc.policy.request_class import RequestClass
from extproc.policy.shadow import Withheld
from extproc.prompts.token_ids import PromptTokens
from extproc.records.request_events import AskedFor
from extproc.requests.json_body import ClientBody, UnknownContentEncodingError
from extproc.requests.json_edit import JsonObject
from extproc.requests.kept_responses import UNOWNED_ID
from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind, InferenceRequest
from extproc.slo.promise import SLO_HEADERS, IgnoredTarget, TokenTargets, asked_targets, targets_of, words_of_ignored

CONTENT_ENCODING = "content-encoding"
PRIORITY_HEADER = "x-kvmesh-priority"  # of a refusal: the class of its request
LONGEST_NAME = 200  # characters of a model's name that are remembered: clients write what they like
UNOWNED_ID_FIELD = {"request_id": msgspec.json.encode(UNOWNED_ID)}
_OPAQUE = frozenset((ApiKind.OTHER, ApiKind.TOKENIZE))  # routed whatever their bodies are


class AskedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request for one model."""

    facts: RequestFacts
    body: ClientBody | None  # None: Envoy does not send it
    request: InferenceRequest
    resolved: ResolvedModel
    request_class: RequestClass
    charged: str | None  # the name of the model under which quotas count it
    measures: Measures = NO_MEASURES
    would_take: Measures = NO_MEASURES  # in shadow: what the load would take, and does not
    withheld: tuple[Withheld, ...] = ()  # in shadow: what follows of it
    notes: tuple[str, ...] = ()  # which model stands in for which, and what of its headers is ignored; for people
    has_smaller_model: bool = False  # the load has put it in the place of the one asked for
    asked_targets: TokenTargets | None = None  # tighter than its class's, by its headers
    ignored_targets: tuple[IgnoredTarget, ...] = ()  # why headers that ask for targets do not count

    @property
    def pool(self) -> str:
        """The model whose endpoints it competes for; adapters compete with their base.

        One name for all models that are not configured: clients invent them, and they may be sent to the same
        endpoints.
        """
        return self.resolved.base.name if self.resolved.base is not None else ""

    @property
    def group(self) -> str:
        """What narrows the endpoints within the pool: where this one does not fit, one of another group may."""
        adapter, subset = self.resolved.adapter, self.facts.subset
        name = adapter if self.resolved.base is not None else self.resolved.model  # some pods may know it
        if name is None and subset is None:
            return ""
        return f"{name or ''}\0{','.join(sorted(subset)) if subset is not None else '*'}"

    def summary(self, *, block_tokens: int = 0, taken: Sequence[StepKind] = (), prompt_tokens: int = 0) -> AskedFor:
        """Return the request's facts without its prompt; `taken`: the steps that changed it."""
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
            steps=tuple(kind.value for kind in taken),
            prompt_tokens=prompt_tokens,
        )


class SentBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the pod gets: `plain` without content-encoding, None where it cannot be read."""

    plain: bytes | None
    changed: bytes | None = None  # in place of the client's; None: the client's own
    removed_headers: tuple[str, ...] = ()
    capped: bool = False  # the output, below what the client asked for
    has_response_id: bool = False  # `changed` ends with UNOWNED_ID, in whose place the chosen pod's id comes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReader:
    """Reads requests by the policy in force and the models that are served."""

    models: ModelTable
    known_models: frozenset[str]  # empty: every model is accepted
    policy: PriorityPolicy
    max_body_bytes: int
    transfer_fields: tuple[str, ...] = ()  # by which the pool's pods fetch blocks: only the picker may give them any
    needs_bodies: bool = field(init=False)  # what cannot be read is refused

    def __post_init__(self) -> None:
        object.__setattr__(self, "needs_bodies", policy_needs_bodies(self.policy, self.models))

    def body_of(self, facts: RequestFacts, raw: bytes | None) -> ClientBody | None:
        """Return a request's body; None: Envoy does not send it."""
        if raw is None:
            return None
        return ClientBody(raw, content_encoding=facts.headers.get(CONTENT_ENCODING), max_bytes=self.max_body_bytes)

    def parse(self, facts: RequestFacts, body: ClientBody | None) -> InferenceRequest:
        """Return what the body says. Raise PickError with the answer for the client where no pod could answer it."""
        return parse_request(
            method=facts.method,
            path=facts.path,
            body=body.raw if body is not None else None,
            content_type=facts.headers.get("content-type"),
            content_encoding=facts.headers.get(CONTENT_ENCODING),
            max_decoded_bytes=self.max_body_bytes,
            require_readable=self.needs_bodies,
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
        """Return the request with its class and its model. Raise PickError where it cannot be served.

        `draw`: uniform in [0, 1), for weighted models. `adapters`: LoRA adapter -> its base model, as the pods tell.
        """
        model = request.model
        if self.known_models and model is not None and model not in self.known_models:
            raise UnknownModelError(
                f"the model {model[:100]!r} is not served here; there are {', '.join(sorted(self.known_models))}"
            )
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
            # before the load may put another model in its place
            charged=charged_model(self.policy.quotas, tenant=request_class.tenant, resolved=resolved),
        )
        return asked if SLO_HEADERS.isdisjoint(facts.headers) else _with_targets(asked)

    def under(self, asked: AskedRequest, measures: Measures, *, adapters: Mapping[str, str]) -> AskedRequest:
        """Return the request as the measures in force leave it: perhaps for a smaller model."""
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
        """Return the request for the next model that may stand in; raise the refusal where there is none."""
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
        """Tell whether the pod gets other bytes than the client's, if they can be changed."""
        is_measured = asked.measures is not NO_MEASURES
        is_asked_for = is_measured or asked.request.wants_response_id
        return asked.resolved.is_rewritten or self.policy.engine_priority or is_asked_for or bool(self.transfer_fields)

    def edit(self, asked: AskedRequest, *, degraded: dict[str, str]) -> SentBody:
        """Return what the pod gets: the client's bytes, but for what a rule, a step or the class changes.

        Say in `degraded` what could not be changed. Raise MalformedRequestError for a body in which something has to be
        changed and cannot.
        """
        request, resolved, measures = asked.request, asked.resolved, asked.measures
        body = asked.body.raw if asked.body is not None else None
        engine_priority = self.policy.engine_priority
        is_changed = self.changes(asked)
        removed = removed_headers(asked.facts.headers)
        plain = self._plain_body(asked, is_changed=is_changed)
        if body and plain is None:
            return SentBody(plain=None, removed_headers=removed)
        if not is_changed:
            return SentBody(plain=plain)
        changes: dict[str, bytes] = {}
        fields = JsonObject(plain or b"")
        if plain:
            priority = asked.request_class.priority_class.priority if engine_priority else None
            changes.update(body_changes(request, fields, measures=measures, priority=priority))
        if self.transfer_fields:
            changes.update(dict.fromkeys(given_fields(fields, self.transfer_fields), b"null"))
        if resolved.is_rewritten:
            if plain and resolved.model is not None:
                changes["model"] = msgspec.json.encode(resolved.model)
            else:
                degraded["model-not-rewritten"] = (
                    f"the body cannot be changed, the pod gets the model {resolved.requested!r}"
                )
        named = None
        if request.wants_response_id and plain:
            with suppress(PickError):  # a form in which nothing can be changed, and nothing has to be
                named = fields.replaced({**changes, **UNOWNED_ID_FIELD})
        if (not changes and named is None) or not plain:
            return SentBody(plain=plain, removed_headers=removed)
        changed = named or fields.replaced(changes)
        if plain is not body:
            removed = (CONTENT_ENCODING, *removed)
        return SentBody(
            plain=changed,
            changed=changed,
            removed_headers=removed,
            capped=caps(changes),
            has_response_id=named is not None,
        )

    def _plain_body(self, asked: AskedRequest, *, is_changed: bool) -> bytes | None:
        """Return the body without content-encoding, None where it is not needed or cannot be read."""
        body, request = asked.body, asked.request
        if body is None or not body.raw or CONTENT_ENCODING not in asked.facts.headers:
            return None if body is None else body.raw
        if not request.prompts and not request.has_media and not is_changed:
            return None
        try:
            return body.plain()
        except UnknownContentEncodingError:
            return None
        except PickError:
            if request.api not in _OPAQUE:
                raise
            return None


def require_within_limit(asked: AskedRequest, tokens: PromptTokens, measures: Measures) -> None:
    """Raise PromptLimitError for a prompt that is longer than the class may send now, by these measures."""
    limit, class_name = measures.prompt_tokens, asked.request_class.class_name
    if limit is not None and tokens.estimated_tokens > limit:
        about = "" if tokens.prompts else "about "
        raise PromptLimitError(
            f"under the present load requests of class {class_name!r} may have {limit} prompt tokens, and this one has "
            f"{about}{tokens.estimated_tokens}; shorten the prompt or try again later",
            headers={PRIORITY_HEADER: class_name},
        )


def most_generated(asked: AskedRequest, sent: SentBody) -> int | None:
    """Return the output tokens that the pod is asked for at most; None: as many as the model gives."""
    cap = asked.measures.output_tokens
    if sent.capped and cap is not None:
        return min(asked.request.max_tokens or cap, cap)
    return asked.request.max_tokens


def _with_targets(asked: AskedRequest) -> AskedRequest:
    """Return the request with the targets that its headers ask for, and with a word about those that do not count."""
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

"""The changes of top-level fields that lower a request's output limit, for each API, and that set its engine priority.

Fields and defaults are vLLM 0.32's. Never raises a limit, and never turns a valid request into one that vLLM
refuses.
"""

import json
from collections.abc import Mapping
from typing import Any

from extproc.admission.degradation import Measures
from extproc.errors import MalformedRequestError
from extproc.requests.json_edit import JsonObject
from extproc.requests.openai_bodies import COMPLETION_MAX_TOKENS
from extproc.requests.request import ApiKind, InferenceRequest
from extproc.requests.request_fields import count

LEAST_THINKING_TOKENS = 1024  # Anthropic's API accepts no smaller budget

_CHAT_LIMITS = ("max_completion_tokens", "max_tokens")  # the first one present counts
_LIMITS: Mapping[ApiKind, tuple[str, ...]] = {
    ApiKind.CHAT_COMPLETIONS: _CHAT_LIMITS,
    ApiKind.COMPLETIONS: ("max_tokens",),
    ApiKind.RESPONSES: ("max_output_tokens",),
    ApiKind.MESSAGES: ("max_tokens",),
    ApiKind.GENERATE: ("max_tokens",),  # in sampling_params
}
_SAMPLING, _LEAST, _THINKING = "sampling_params", "min_tokens", "thinking"
_CONSTRAINTS = "structured_outputs"
_FORMATS = ("response_format", "text", "output_config")
_READ = frozenset((*_CHAT_LIMITS, "max_output_tokens", _LEAST, _THINKING, _CONSTRAINTS, *_FORMATS))
_READ |= {"tools", "tool_choice"}
_CAPPING = frozenset((*_CHAT_LIMITS, "max_output_tokens", _SAMPLING, _THINKING))


def body_changes(
    request: InferenceRequest, plain: JsonObject, *, measures: Measures, priority: int | None
) -> Mapping[str, bytes]:
    """Return the fields (name -> JSON) changed by the steps in force and the class; mostly none.

    `plain` is the body without content codings. `priority` is the class's, or None if pods do not schedule by it.
    """
    changes: Mapping[str, bytes] = {}
    if measures.output_tokens is not None:
        changes = capped(request, plain, tokens=measures.output_tokens)
    if priority is not None:
        changes = {**changes, **engine_priority(request, plain, priority=priority)}
    return changes


def caps(changes: Mapping[str, bytes]) -> bool:
    """Tell whether these changes lower the request's output limit."""
    return not _CAPPING.isdisjoint(changes)


def capped(request: InferenceRequest, plain: JsonObject, *, tokens: int) -> Mapping[str, bytes]:
    """Return the fields (name -> JSON) that limit each choice to `tokens`; none if the limit is low enough already.

    As in the API, the limit is for each of the `n` choices. Answers that are worthless when cut are not limited:
    structured output, and answers to requests with tools. Raise MalformedRequestError for an object that cannot be
    searched, as vLLM may still be able to read it.
    """
    limits = _LIMITS.get(request.api)
    if limits is None:
        return {}
    if not plain.may_be_object:
        return {}  # the pod refuses it
    if request.api is ApiKind.GENERATE:
        return _capped_sampling(plain, limits, tokens=tokens)
    values = _Values(plain.values(_READ))
    if values.must_not_be_cut():
        return {}
    if request.api is ApiKind.MESSAGES:
        return _capped_messages(values, tokens=tokens)
    default = COMPLETION_MAX_TOKENS if request.api is ApiKind.COMPLETIONS else None
    return _lowered(values, limits, tokens=tokens, default=default)


class _Values:
    __slots__ = ("_raw",)

    def __init__(self, raw: Mapping[str, bytes]) -> None:
        self._raw = raw

    def raw(self, name: str) -> bytes:
        return self._raw.get(name, b"null")

    def get(self, name: str) -> Any:
        raw = self._raw.get(name)
        try:
            return None if raw is None else json.loads(raw)
        except (ValueError, RecursionError):
            return None

    def must_not_be_cut(self) -> bool:
        if self.get(_CONSTRAINTS) is not None:
            return True
        if any(_is_format(self.get(name)) for name in _FORMATS):
            return True
        # not parsed: the tools may be 100 kB
        if self.raw("tools").translate(None, b" \t\r\n") in (b"null", b"[]"):
            return False
        choice = self.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        return bool(kind != "none")


def _is_format(value: Any) -> bool:
    """Tell whether `response_format`, Responses' `text` or Messages' `output_config` asks for structured output."""
    if not isinstance(value, dict):
        return False
    inner = value.get("format")
    kind = inner.get("type", "json_schema") if isinstance(inner, dict) else value.get("type", "text")
    return bool(kind != "text")


def _capped_sampling(plain: JsonObject, limits: tuple[str, ...], *, tokens: int) -> Mapping[str, bytes]:
    sampling = JsonObject(plain.values(frozenset((_SAMPLING,))).get(_SAMPLING, b"null"))
    try:
        values = _Values(sampling.values(_READ))
    except MalformedRequestError:
        return {}  # the pod refuses it
    if values.must_not_be_cut():
        return {}
    changes = _lowered(values, limits, tokens=tokens, default=None)
    return {_SAMPLING: sampling.replaced(changes)} if changes else {}


def _capped_messages(values: _Values, *, tokens: int) -> Mapping[str, bytes]:
    """Anthropic's API requires `max_tokens`, above a thinking budget: lower it to the budget plus `tokens`."""
    limit = count(values.get("max_tokens"))
    thinking = values.get(_THINKING)
    if limit is None or not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return {} if limit is None else _lowered(values, ("max_tokens",), tokens=tokens, default=None)
    budget = count(thinking.get("budget_tokens"))
    if budget is None or budget >= limit:
        return {}  # the pod refuses it
    lowered = min(budget, max(tokens, LEAST_THINKING_TOKENS))
    changes = {}
    if limit > lowered + tokens:
        changes["max_tokens"] = b"%d" % (lowered + tokens)
    if budget > lowered:
        changes[_THINKING] = JsonObject(values.raw(_THINKING)).replaced({"budget_tokens": b"%d" % lowered})
    return changes


def _lowered(values: _Values, limits: tuple[str, ...], *, tokens: int, default: int | None) -> dict[str, bytes]:
    """Return the changes for the limit in effect. `default` applies if the request has none; None is no limit."""
    given = [name for name in limits if values.get(name) is not None]
    limit = count(values.get(given[0])) if given else default
    if (given and limit is None) or (limit is not None and limit <= tokens):
        return {}
    changes = {given[0] if given else limits[-1]: b"%d" % tokens}
    least = count(values.get(_LEAST))
    if least is not None and least > tokens:
        changes[_LEAST] = b"%d" % tokens  # vLLM refuses min_tokens above the limit
    return changes


PRIORITY_FIELD = "priority"
# all generating and pooling APIs of vLLM 0.32 except Anthropic's, whose fields vLLM does not pass on
_APIS = frozenset(
    (
        *(ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.GENERATE),
        *(ApiKind.EMBEDDINGS, ApiKind.POOLING, ApiKind.SCORE, ApiKind.RERANK),
    )
)
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1  # vLLM answers 400 outside this range


def engine_priority(request: InferenceRequest, plain: JsonObject, *, priority: int) -> Mapping[str, bytes]:
    """Return the field (name -> JSON) for a class's priority, replacing the client's; none if nothing changes.

    vLLM serves the lower number first, while a class with a higher one is more important: the sign is inverted. On an
    unknown path the field is only replaced, never added. Raise MalformedRequestError for an object that may have the
    field and cannot be searched, as vLLM may still be able to read it.
    """
    is_known = request.api in _APIS
    if not is_known and request.api is not ApiKind.OTHER:
        return {}
    # 0 is vLLM's default: edit the body only if the client may have set another value
    if (priority == 0 or not is_known) and not plain.may_name(PRIORITY_FIELD):
        return {}
    if not request.prompts and not request.has_media and not plain.may_be_object:
        return {}  # another application's body on a path like /score
    if not is_known and not plain.values(frozenset((PRIORITY_FIELD,))):
        return {}
    return {PRIORITY_FIELD: b"%d" % min(max(-priority, _LOWEST), _HIGHEST)}

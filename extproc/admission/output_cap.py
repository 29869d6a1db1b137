"""Lower how many tokens a request may generate: which top-level fields of its body change, API by API.

Fields and defaults are vLLM 0.32's. Never raises a limit, and never makes a request that vLLM takes one that it
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

LEAST_THINKING_TOKENS = 1024  # Anthropic's API takes no smaller budget

_CHAT_LIMITS = ("max_completion_tokens", "max_tokens")  # the first one that is given counts
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
    """Return the fields (name -> JSON) that the steps in force and the class change; mostly none.

    `plain` is the body without content codings; `priority` the class's, None where pods do not schedule by it.
    """
    changes: Mapping[str, bytes] = {}
    if measures.output_tokens is not None:
        changes = capped(request, plain, tokens=measures.output_tokens)
    if priority is not None:
        changes = {**changes, **engine_priority(request, plain, priority=priority)}
    return changes


def caps(changes: Mapping[str, bytes]) -> bool:
    """Tell whether these changes lower what the request may generate."""
    return not _CAPPING.isdisjoint(changes)


def capped(request: InferenceRequest, plain: JsonObject, *, tokens: int) -> Mapping[str, bytes]:
    """Return the fields (name -> JSON) that keep each answer within `tokens`; none where nothing is to be lowered.

    Each of `n` choices has the limit for itself, as in the API. Not for answers that are worth nothing when they are
    cut: those in a demanded format, and those of requests with tools. Raise MalformedRequestError for an object that
    cannot be searched: vLLM may be able to.
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
    """Raw JSON values by name, parsed as they are asked for."""

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
        # not parsed: they may be of a hundred kilobytes
        if self.raw("tools").translate(None, b" \t\r\n") in (b"null", b"[]"):
            return False
        choice = self.get("tool_choice")
        kind = choice.get("type") if isinstance(choice, dict) else choice
        return bool(kind != "none")


def _is_format(value: Any) -> bool:
    """Tell whether `response_format`, Responses' `text` or Messages' `output_config` ask for a form."""
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
    """Lower `max_tokens`, which must be there, and a thinking budget, which must stay below it: each to `tokens`."""
    limit = _tokens(values.get("max_tokens"))
    thinking = values.get(_THINKING)
    if limit is None or not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        return {} if limit is None else _lowered(values, ("max_tokens",), tokens=tokens, default=None)
    budget = _tokens(thinking.get("budget_tokens"))
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
    """Return the changes for the limit that counts; `default`: what it is where none is given, None for no limit."""
    given = [name for name in limits if values.get(name) is not None]
    limit = _tokens(values.get(given[0])) if given else default
    if (given and limit is None) or (limit is not None and limit <= tokens):
        return {}
    changes = {given[0] if given else limits[-1]: b"%d" % tokens}
    least = _tokens(values.get(_LEAST))
    if least is not None and least > tokens:
        changes[_LEAST] = b"%d" % tokens  # vLLM refuses min_tokens above the limit
    return changes


def _tokens(value: Any) -> int | None:
    """Return a number of tokens in any form that pydantic takes for one; None for what the pod refuses."""
    try:
        if isinstance(value, str):
            value = float(value) if "." in value else int(value)
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number == value else None


PRIORITY_FIELD = "priority"
# all of vLLM 0.32's APIs that generate or pool, but Anthropic's, whose fields are not passed on
_APIS = frozenset(
    (
        *(ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.GENERATE),
        *(ApiKind.EMBEDDINGS, ApiKind.POOLING, ApiKind.SCORE, ApiKind.RERANK),
    )
)
_LOWEST, _HIGHEST = -(2**63), 2**63 - 1  # outside them vLLM answers 400


def engine_priority(request: InferenceRequest, plain: JsonObject, *, priority: int) -> Mapping[str, bytes]:
    """Return the field (name -> JSON) for a class's priority, over what the client wrote; none where nothing changes.

    vLLM serves the lower number first, and a class with the higher one is more important: the sign turns. On a path
    that we do not know only what the client wrote is replaced. Raise MalformedRequestError for an object that may have
    the field and cannot be searched: vLLM may be able to.
    """
    is_known = request.api in _APIS
    if not is_known and request.api is not ApiKind.OTHER:
        return {}
    # 0 is vLLM's own: the body is copied only where the client may have written another one
    if (priority == 0 or not is_known) and not plain.may_name(PRIORITY_FIELD):
        return {}
    if not request.prompts and not request.has_media and not plain.may_be_object:
        return {}  # another application's body on a path like /score
    if not is_known and not plain.values(frozenset((PRIORITY_FIELD,))):
        return {}
    return {PRIORITY_FIELD: b"%d" % min(max(-priority, _LOWEST), _HIGHEST)}

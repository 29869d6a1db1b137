"""What the two requests of a prefill leg look like, protocol by protocol. Pure.

The fields are vLLM 0.32's NixlConnector's in pull mode (`kv_connector/v1/nixl/pull_scheduler.py`): the prefill pod
computes the prompt and one token, keeps the blocks for the decode pod until that has fetched them or 30 s have passed,
and its answer says where they are. These parameters are worth one fetch: the decode pod's notice frees the blocks, and
a second fetch reads whatever has taken their place, without an error anywhere.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from extproc.requests.json_edit import JsonObject
from extproc.requests.request import ApiKind, InferenceRequest

KV_PARAMETERS = "kv_transfer_params"
# by which a client would choose pods or blocks itself; llm-d's sidecar goes by the first three
PREFILLER_HEADER = "x-prefiller-host-port"
CLIENT_HEADERS = (PREFILLER_HEADER, "x-encoder-hosts-ports", "x-kv-cache-source-host-port")
# of the decode pod's request, as the prefill pod's answer says them
_REQUIRED = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host", "remote_port")
_ASK_NIXL = msgspec.json.encode(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)
_ONE, _NO, _NOTHING = b"1", b"false", b"null"
# the limits of an answer: the first is always set, the others where the client has them
_LIMITS: Mapping[ApiKind, tuple[str, ...]] = {
    ApiKind.CHAT_COMPLETIONS: ("max_tokens", "max_completion_tokens", "min_tokens"),
    ApiKind.COMPLETIONS: ("max_tokens", "min_tokens"),
}
# what makes the leg's answer long and is of no use in it, or is refused without a stream
_LEFT_OUT: Mapping[str, bytes] = {
    "stream_options": _NOTHING,
    "echo": _NO,
    "return_token_ids": _NO,
    "logprobs": _NOTHING,
    "top_logprobs": _NOTHING,
}
# a request with another value of these cannot be taken apart: several sequences would fetch the same blocks, or vLLM
# computes the prompt itself to answer
_WHOLE: Mapping[str, tuple[bytes, ...]] = {
    "n": (_NOTHING, _ONE),
    "best_of": (_NOTHING, _ONE),
    "use_beam_search": (_NOTHING, _NO),
    "prompt_logprobs": (_NOTHING,),
    "echo": (_NOTHING, _NO),
}
_LOOKED_AT = frozenset((*_WHOLE, *_LEFT_OUT, KV_PARAMETERS)).union(*_LIMITS.values())


class LegOutcome(StrEnum):
    """How a prefill leg has ended; a metric's label."""

    ANSWERED = "answered"
    FULL = "full"  # 503: the pod has no room
    REFUSED = "refused"  # 4xx: the decode pod would say the same, and to the client
    FAILED = "failed"  # 5xx, a redirect, or no answer at all
    TIMED_OUT = "timed-out"
    UNREADABLE = "unreadable"  # 200, and does not say where the blocks are
    CLIENT_LEFT = "client-left"


class LegAnswerError(Exception):
    """A prefill pod's answer cannot be used; the words say why."""


class TransferParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What the prefill pod's answer says, ready for the decode pod's request."""

    raw: bytes  # the JSON object, unchanged
    cached_tokens: int | None = None  # of the prompt, that the prefill pod held; None: it does not say


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _LegAnswer(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: _Usage | None = None


def removed_headers(headers: Mapping[str, str]) -> tuple[str, ...]:
    """Return those of a client's headers that no pod gets: by them it would choose pods and hosts itself."""
    return tuple([name for name in CLIENT_HEADERS if name in headers])


def cannot_be_split(request: InferenceRequest, body: JsonObject) -> str | None:
    """Return why the request has to be computed where it is decoded, None where it need not be.

    Raise MalformedRequestError for a body in which no field can be replaced.
    """
    if request.api not in _LIMITS:
        return f"requests of {request.api.value} have no prefill leg"
    if len(request.prompts) != 1 and not (request.has_media and not request.prompts):
        return "it has not exactly one prompt"
    values = body.values(_LOOKED_AT)
    for name, harmless in _WHOLE.items():
        if (value := values.get(name)) is not None and value not in harmless:
            return f"it has {name}"
    return None


def has_parameters(body: JsonObject) -> bool:
    """Tell whether the client has put parameters of its own into the body: they name others' blocks, and hosts.

    Raise MalformedRequestError where there may be some and no field can be found.
    """
    return body.may_name(KV_PARAMETERS) and KV_PARAMETERS in body.values(frozenset((KV_PARAMETERS,)))


def prefill_body(request: InferenceRequest, body: JsonObject) -> bytes:
    """Return what the prefill pod gets: one token, no stream, and that its blocks will be fetched."""
    given = body.values(_LOOKED_AT)
    limit, *others = _LIMITS[request.api]
    changes = {limit: _ONE, **{name: _ONE for name in others if name in given}, "stream": _NO}
    changes |= {name: value for name, value in _LEFT_OUT.items() if name in given}
    return body.replaced({**changes, KV_PARAMETERS: _ASK_NIXL})


def decode_body(body: JsonObject, parameters: TransferParameters) -> bytes:
    """Return what the decode pod gets: the client's body and where the prompt's blocks are."""
    return body.replaced({KV_PARAMETERS: parameters.raw})


def read_answer(content: bytes) -> TransferParameters:
    """Read the prefill pod's answer. Raise LegAnswerError where it says not, or not all, where the blocks are."""
    try:
        answer = msgspec.json.decode(content, type=_LegAnswer)
        said: Any = msgspec.json.decode(answer.kv_transfer_params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LegAnswerError(f"its answer cannot be read: {error}") from error
    if not isinstance(said, dict):
        raise LegAnswerError(f"its answer has no {KV_PARAMETERS}: it runs without a connector, or with another one")
    missing = [name for name in _REQUIRED if said.get(name) is None]
    if missing or said.get("do_remote_prefill") is not True:
        raise LegAnswerError(f"its answer's {KV_PARAMETERS} lack {', '.join(missing) or 'do_remote_prefill'}")
    if said.get("transfer_mode", "pull") != "pull":
        raise LegAnswerError(f"it hands its cache over in mode {str(said['transfer_mode'])[:40]!r}; pull is understood")
    details = answer.usage.prompt_tokens_details if answer.usage is not None else None
    return TransferParameters(
        raw=bytes(answer.kv_transfer_params), cached_tokens=details.cached_tokens if details is not None else None
    )

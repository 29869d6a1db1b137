"""What requests can be taken apart, and what the prefill pod gets of one. Pure.

The limits are those of vLLM 0.32's APIs, which all take transfer parameters and return them: `/v1/chat/completions`,
`/v1/completions`, `/v1/responses`, Anthropic's `/v1/messages` and `/inference/v1/generate`.
"""

from collections.abc import Mapping

import msgspec

from extproc.disaggregation.transfer_protocols import LegNames, TransferProtocol
from extproc.requests.json_edit import JsonObject
from extproc.requests.request import ApiKind, InferenceRequest

_ONE, _NO, _NOTHING = b"1", b"false", b"null"
SAMPLING = "sampling_params"  # where /inference/v1/generate has its limits
TOOLS = "tools"
# the limits of an answer: the first is always set, the others where the client has them
_LIMITS: Mapping[ApiKind, tuple[str, ...]] = {
    ApiKind.CHAT_COMPLETIONS: ("max_tokens", "max_completion_tokens", "min_tokens"),
    ApiKind.COMPLETIONS: ("max_tokens", "min_tokens"),
    ApiKind.RESPONSES: ("max_output_tokens",),
    ApiKind.MESSAGES: ("max_tokens",),
    ApiKind.GENERATE: ("max_tokens", "min_tokens"),  # in SAMPLING
}
# what makes the leg's answer long and is of no use in it, or is refused without a stream
_LEFT_OUT: Mapping[str, bytes] = {
    "stream_options": _NOTHING,
    "echo": _NO,
    "return_token_ids": _NO,
    "logprobs": _NOTHING,
    "top_logprobs": _NOTHING,
}
# a request with another value of these cannot be taken apart: several sequences would fetch the same blocks, vLLM
# computes the prompt itself to answer, answers before it has, or knows the conversation on one pod alone
_WHOLE: Mapping[str, tuple[bytes, ...]] = {
    "n": (_NOTHING, _ONE),
    "best_of": (_NOTHING, _ONE),
    "use_beam_search": (_NOTHING, _NO),
    "prompt_logprobs": (_NOTHING,),
    "echo": (_NOTHING, _NO),
    "background": (_NOTHING, _NO),
    "previous_response_id": (_NOTHING,),
}
_LOOKED_AT = frozenset((*_WHOLE, *_LEFT_OUT, SAMPLING, TOOLS)).union(*_LIMITS.values())
_FUNCTION = "function"


class _Tool(msgspec.Struct):
    type: str = ""


_TOOLS = msgspec.json.Decoder(list[_Tool] | None)


def cannot_be_split(request: InferenceRequest, body: JsonObject, protocol: TransferProtocol) -> str | None:
    """Return why the request has to be computed where it is decoded, None where it need not be.

    Raise MalformedRequestError for a body in which no field can be replaced.
    """
    if request.api not in protocol.apis:
        return f"requests of {request.api.value} have no prefill leg"
    values = body.values(_LOOKED_AT)
    if not protocol.decode_pods_prefill:
        return None
    if len(request.prompts) != 1 and not (request.has_media and not request.prompts):
        return "it has not exactly one prompt"
    if request.api is ApiKind.GENERATE and (sampling := values.get(SAMPLING)) is not None and _is_object(sampling):
        values = {**values, **JsonObject(sampling).values(_LOOKED_AT)}
    for name, harmless in _WHOLE.items():
        if (value := values.get(name)) is not None and value not in harmless:
            return f"it has {name}"
    if request.api is ApiKind.RESPONSES and not _has_functions_alone(values.get(TOOLS)):
        # vLLM repeats the request with what its tool has said, and the parameters are in each of these
        return f"it has {TOOLS} that the pod uses itself"
    return None


def prefill_body(request: InferenceRequest, body: JsonObject, protocol: TransferProtocol, names: LegNames) -> bytes:
    """Return what the prefill pod gets: no stream, one token if it asks for that, and what the protocol says."""
    asked, given = {"stream": _NO, **protocol.ask(names)}, body.values(_LOOKED_AT)
    if request.api is ApiKind.RESPONSES:
        asked["store"] = _NO  # else the pod keeps the leg's response, for ever
    if not protocol.is_one_token:
        return body.replaced(asked | ({"stream_options": _NOTHING} if "stream_options" in given else {}))
    changes = {name: value for name, value in _LEFT_OUT.items() if name in given}
    if request.api is not ApiKind.GENERATE:
        changes |= _limits(request.api, given)
    else:
        sampling = JsonObject(raw if _is_object(raw := given.get(SAMPLING, b"")) else b"{}")
        inner = sampling.values(_LOOKED_AT)
        left_out = {name: value for name, value in _LEFT_OUT.items() if name in inner}
        changes[SAMPLING] = sampling.replaced(left_out | _limits(request.api, inner))
    return body.replaced(changes | asked)


def decode_body(body: JsonObject, fields: Mapping[str, bytes]) -> bytes:
    """Return what the decode pod gets: the client's body and what the protocol says of the prompt's blocks."""
    return body.replaced(fields) if fields else body.raw


def _limits(api: ApiKind, given: Mapping[str, bytes]) -> dict[str, bytes]:
    limit, *others = _LIMITS[api]
    return {limit: _ONE, **{name: _ONE for name in others if name in given}}


def _has_functions_alone(tools: bytes | None) -> bool:
    """Tell whether the client uses all tools itself."""
    if tools is None:
        return True
    try:
        return all(tool.type == _FUNCTION for tool in _TOOLS.decode(tools) or ())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _is_object(raw: bytes) -> bool:
    return raw.startswith(b"{")

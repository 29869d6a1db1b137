"""Which requests can be split into prefill and decode, and the bodies of both. Pure.

The rules are for vLLM 0.32's APIs, which all accept and return transfer parameters: `/v1/chat/completions`,
`/v1/completions`, `/v1/responses`, Anthropic's `/v1/messages` and `/inference/v1/generate`.
"""

from collections.abc import Mapping

import msgspec

from extproc.disaggregation.transfer_protocols import LegNames, TransferProtocol
from extproc.requests.json_edit import JsonObject
from extproc.requests.request import ApiKind, InferenceRequest

_ONE, _NO, _NOTHING = b"1", b"false", b"null"
SAMPLING = "sampling_params"  # holds the limits in /inference/v1/generate
TOOLS = "tools"
# the fields that limit an answer: the first is always set, the others only if the client set them
_LIMITS: Mapping[ApiKind, tuple[str, ...]] = {
    ApiKind.CHAT_COMPLETIONS: ("max_tokens", "max_completion_tokens", "min_tokens"),
    ApiKind.COMPLETIONS: ("max_tokens", "min_tokens"),
    ApiKind.RESPONSES: ("max_output_tokens",),
    ApiKind.MESSAGES: ("max_tokens",),
    ApiKind.GENERATE: ("max_tokens", "min_tokens"),  # in SAMPLING
}
# fields that only make the leg's answer longer, or that are refused without a stream
_LEFT_OUT: Mapping[str, bytes] = {
    "stream_options": _NOTHING,
    "echo": _NO,
    "return_token_ids": _NO,
    "logprobs": _NOTHING,
    "top_logprobs": _NOTHING,
}
# Any other value of these fields prevents a split: several sequences would fetch the same blocks, vLLM needs to compute
# the prompt itself, it answers before computing, or only one pod knows the conversation.
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
    """Return why the decode pod must compute the prompt, or None if the request can be split.

    Raise MalformedRequestError for a body whose fields cannot be replaced.
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
        # vLLM repeats the request with the tool's result, and each repetition contains the transfer parameters
        return f"it has {TOOLS} that the pod uses itself"
    return None


def prefill_body(request: InferenceRequest, body: JsonObject, protocol: TransferProtocol, names: LegNames) -> bytes:
    """Return the prefill pod's body: not streamed, one token if the protocol needs that, and the protocol's fields."""
    asked, given = {"stream": _NO, **protocol.ask(names)}, body.values(_LOOKED_AT)
    if request.api is ApiKind.RESPONSES:
        asked["store"] = _NO  # else the pod stores the leg's response forever
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
    """Return the decode pod's body: the client's body with the protocol's fields for the prompt's blocks."""
    return body.replaced(fields) if fields else body.raw


def _limits(api: ApiKind, given: Mapping[str, bytes]) -> dict[str, bytes]:
    limit, *others = _LIMITS[api]
    return {limit: _ONE, **{name: _ONE for name in others if name in given}}


def _has_functions_alone(tools: bytes | None) -> bool:
    """Tell whether all tools are functions, which the client runs."""
    if tools is None:
        return True
    try:
        return all(tool.type == _FUNCTION for tool in _TOOLS.decode(tools) or ())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


def _is_object(raw: bytes) -> bool:
    return raw.startswith(b"{")

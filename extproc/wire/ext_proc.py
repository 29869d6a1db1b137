"""Between Envoy's ext_proc protobuf messages and the exchange's events and steps; no I/O.

Messages come from `xds-protos` (protobuf upb). Answers leave as bytes: those without content are encoded once.
Field semantics: https://www.envoyproxy.io/docs/envoy/latest/api-v3/service/ext_proc/v3/external_processor.proto
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any
from urllib.parse import unquote

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from extproc.core.exchange import (
    Answer,
    AskForResponse,
    BodyChunk,
    BodyMode,
    BodyWithPick,
    ChangedResponse,
    HeadersWithPick,
    RequestFacts,
    Step,
    TellClient,
)
from extproc.core.response_plan import ResponsePlan
from extproc.errors import PickError
from extproc.wire.ext_proc_bytes import body_chunk, noted, told_client, visible
from extproc.wire.jwt_claims import NO_CLAIMS, verified_claims
from extproc.wire.response_note import NOTE_KEY, NOTE_NAMESPACE, decode_note

DESTINATION_HEADER = "x-gateway-destination-endpoint"
OBJECTIVE_HEADER = "x-gateway-inference-objective"
REASON_HEADER = "x-kvmesh-reason"
UPSTREAM_ADDRESS = "upstream.address"  # an Envoy attribute: host:port, IPv6 bracketed
CODE_DETAILS = "response.code_details"  # an Envoy attribute: who made the response, and why
CLUSTER_NAME = "xds.cluster_name"  # an Envoy attribute: the cluster of the request's route
VIA_UPSTREAM = "via_upstream"  # a pod made it
SUBSET_NAMESPACE, SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
LOAD_BALANCING_NAMESPACE = "envoy.lb"

PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

_MODES: Mapping[int, BodyMode] = {int(mode): mode for mode in BodyMode}
_OWN_HEADERS = frozenset({":method", ":path", "x-request-id", "traceparent", OBJECTIVE_HEADER})
# what the picker reads of a request besides: the body's form, and what names a session
FURTHER_HEADERS = frozenset(
    {
        *("content-type", "content-encoding", "x-prefiller-host-port"),
        *("x-session-id", "session-id", "x-session-affinity", "x-claude-code-session-id"),
    }
)
_RESPONSE_HEADERS = frozenset({":status", "content-type", "content-encoding", "content-length"})

_EMPTY_ANSWERS: Mapping[Answer, bytes] = {
    Answer.REQUEST_HEADERS: ProcessingResponse(request_headers=HeadersResponse()).SerializeToString(),
    Answer.REQUEST_BODY: ProcessingResponse(request_body=BodyResponse()).SerializeToString(),
    Answer.REQUEST_TRAILERS: ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString(),
    Answer.RESPONSE_HEADERS: ProcessingResponse(response_headers=HeadersResponse()).SerializeToString(),
    Answer.RESPONSE_BODY: ProcessingResponse(response_body=BodyResponse()).SerializeToString(),
    Answer.RESPONSE_TRAILERS: ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString(),
}


parse_message = ProcessingRequest.FromString


def request_facts(
    message: ProcessingRequest, *, further: frozenset[str] = FURTHER_HEADERS, claims: frozenset[str] = frozenset()
) -> RequestFacts:
    """Take the few headers that the picker needs, the route's candidates, and these claims of a verified JWT.

    The path is unquoted, as vLLM's server does it; the query stays as it came.
    """
    found = _found(message.request_headers, _wanted(further))
    return RequestFacts(
        method=found.pop(":method", ""),
        path=_path(found.pop(":path", "")),
        objective=found.pop(OBJECTIVE_HEADER, None),
        request_id=found.pop("x-request-id", ""),
        traceparent=found.pop("traceparent", None),
        headers=found,
        subset=_subset(message),
        claims=verified_claims(message.metadata_context.filter_metadata, claims) if claims else NO_CLAIMS,
    )


def _path(target: str) -> str:
    if "%" not in target:
        return target
    path, mark, query = target.partition("?")
    # a "?" of the path itself stays quoted: what follows would pass for a query
    return "%3F".join(unquote(part) for part in re.split("%3[Ff]", path)) + mark + query


@cache
def _wanted(further: frozenset[str]) -> frozenset[str]:
    return _OWN_HEADERS | further


def _found(headers: HttpHeaders, wanted: frozenset[str]) -> dict[str, str]:
    # Envoy fills `raw_value`, other data planes `value`
    return {
        header.key: (header.raw_value.decode("utf-8", "replace") or header.value)
        for header in headers.headers.headers
        if header.key in wanted
    }


def _subset(message: ProcessingRequest) -> frozenset[str] | None:
    """Return the addresses that the route allows: a list, or one text with commas; None where it says nothing."""
    metadata = message.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET_KEY not in metadata[SUBSET_NAMESPACE].fields:
        return None
    value = metadata[SUBSET_NAMESPACE].fields[SUBSET_KEY]
    if value.WhichOneof("kind") == "list_value":
        texts = [item.string_value for item in value.list_value.values]
    else:
        texts = value.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())


def cluster_name(message: ProcessingRequest) -> str:
    """Return the cluster that Envoy has dealt the request to, "" where its filter is not set up to tell.

    On a route with weighted backends only this tells which of them the request is for: metadata is the route's.
    """
    for attributes in message.attributes.values():
        if CLUSTER_NAME in attributes.fields:
            return str(attributes.fields[CLUSTER_NAME].string_value)
    return ""


class ResponseHead(msgspec.Struct, frozen=True, kw_only=True):
    """What the response headers say."""

    status: int  # 0: not there
    content_type: str
    content_encoding: str
    content_length: int | None


def response_head(headers: HttpHeaders) -> ResponseHead:
    """Take the few response headers that matter to whoever reads the body."""
    found = _found(headers, _RESPONSE_HEADERS)
    status, length = found.get(":status", ""), found.get("content-length", "")
    return ResponseHead(
        status=int(status) if status.isdecimal() else 0,
        content_type=found.get("content-type", ""),
        content_encoding=found.get("content-encoding", ""),
        content_length=int(length) if length.isdecimal() else None,
    )


def response_status(headers: HttpHeaders) -> int:
    """Return the pod's HTTP status, or 0 if it is not there."""
    for header in headers.headers.headers:
        if header.key == ":status":
            text = header.raw_value.decode("ascii", "replace") or header.value
            return int(text) if text.isdigit() else 0
    return 0


def content_type(headers: HttpHeaders) -> str:
    """Return the response's `content-type`, or ""."""
    for header in headers.headers.headers:
        if header.key == "content-type":
            return header.raw_value.decode("ascii", "replace") or str(header.value)
    return ""


def response_plan(message: ProcessingRequest) -> ResponsePlan | None:
    """Return the plan that a pick left for the filter that sees the response."""
    metadata = message.metadata_context.filter_metadata
    if NOTE_NAMESPACE not in metadata or NOTE_KEY not in metadata[NOTE_NAMESPACE].fields:
        return None
    return decode_note(metadata[NOTE_NAMESPACE].fields[NOTE_KEY].string_value)


def response_origin(message: ProcessingRequest) -> tuple[str | None, bool]:
    """Return the address of the pod that answered, after retries, and whether it was a pod and not Envoy in its place.

    None and True unless `response_attributes` asks for both.
    """
    served_by, from_pod = None, True
    attributes = message.attributes
    for name in attributes:
        fields = attributes[name].fields
        if UPSTREAM_ADDRESS in fields:
            served_by = fields[UPSTREAM_ADDRESS].string_value or None
        if CODE_DETAILS in fields:
            from_pod = fields[CODE_DETAILS].string_value == VIA_UPSTREAM
    return served_by, from_pod


def request_body_mode(message: ProcessingRequest) -> BodyMode:
    """Return how the request body will come; Envoy before 1.34 does not tell, and there only BUFFERED is usable."""
    if not message.HasField("protocol_config"):
        return BodyMode.BUFFERED
    return _mode(message.protocol_config.request_body_mode)


def response_body_mode(message: ProcessingRequest) -> BodyMode:
    """Return how the response body will come, if Envoy is set up to send it; only the first message tells."""
    return _mode(message.protocol_config.response_body_mode)


def _mode(number: int) -> BodyMode:
    return _MODES.get(number, BodyMode.NONE)


def encode_step(step: Step) -> bytes:
    """Encode one answer for Envoy."""
    if isinstance(step, Answer):
        return _EMPTY_ANSWERS[step]
    if isinstance(step, BodyChunk):
        return b"".join(body_chunk(step))
    if isinstance(step, HeadersWithPick):
        encoded = _pick(tuple(step.endpoints), with_body=False)
        is_more = step.removed_headers or step.set_headers or step.note is not None
        return encoded + _further_headers(step) if is_more else encoded
    if isinstance(step, BodyWithPick):
        encoded = _pick(tuple(step.endpoints), with_body=True)
        is_more = step.removed_headers or step.set_headers or step.body is not None
        return encoded + _changed_body(step) if is_more else encoded
    return _encode_response_step(step)


def _encode_response_step(step: Step) -> bytes:
    if isinstance(step, TellClient):
        return told_client(step.headers)
    if isinstance(step, AskForResponse):
        encoded = _ASK_TO_CHANGE if step.changes else _ASK_TO_READ
        return encoded + told_client(step.headers) if step.headers else encoded
    if isinstance(step, ChangedResponse):
        return _changed_response(step.body)
    raise TypeError(f"{type(step).__name__} is not an answer")


@lru_cache(maxsize=4096)  # the same few orders of pods come again and again
def _pick(endpoints: tuple[str, ...], *, with_body: bool) -> bytes:
    response = (
        ProcessingResponse(request_body=BodyResponse(response=_with_pick(endpoints)))
        if with_body
        else ProcessingResponse(request_headers=HeadersResponse(response=_with_pick(endpoints)))
    )
    # a string, not a list: override_host ignores anything else; it must equal the header
    response.dynamic_metadata.CopyFrom(_destination_metadata(endpoints))
    encoded: bytes = response.SerializeToString()
    return encoded


# What is appended to an encoded message is merged with it: lists grow, fields are set.


def _further_headers(step: HeadersWithPick) -> bytes:
    encoded = b"" if step.note is None else noted(step.note)
    if step.removed_headers or step.set_headers:
        change = CommonResponse(header_mutation=_mutation(step))
        encoded += ProcessingResponse(request_headers=HeadersResponse(response=change)).SerializeToString()
    return encoded


def _mutation(step: HeadersWithPick | BodyWithPick) -> HeaderMutation:
    return HeaderMutation(
        remove_headers=step.removed_headers,
        set_headers=[_set(name, visible(value)) for name, value in step.set_headers.items()],
    )


def _changed_body(step: BodyWithPick) -> bytes:
    change = CommonResponse(header_mutation=_mutation(step))
    if step.body is not None:
        change.body_mutation.body = step.body
        # Envoy answers 500 where it does not agree with the body
        change.header_mutation.set_headers.append(_set("content-length", str(len(step.body))))
    encoded: bytes = ProcessingResponse(request_body=BodyResponse(response=change)).SerializeToString()
    return encoded


def encode_refusal(error: PickError) -> bytes:
    """Encode the answer that ends the request here: an OpenAI error object with the error's status and reason."""
    headers = {**error.headers, "content-type": "application/json", REASON_HEADER: error.reason}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(error.retry_after_seconds)
    encoded: bytes = ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.status),
            headers=HeaderMutation(set_headers=[_set(name, visible(value)) for name, value in headers.items()]),
            body=error_body(error),
            details=f"kvmesh_{error.reason.replace('-', '_')}",
        )
    ).SerializeToString()
    return encoded


def error_body(error: PickError) -> bytes:
    """Return the OpenAI error object as JSON."""
    return msgspec.json.encode(
        {
            "error": {
                "message": error.message,
                "type": error.error_type,
                "param": None,
                "code": error.error_code,
            }
        }
    )


def _with_pick(endpoints: Sequence[str]) -> CommonResponse:
    # set, not added: what a client sent under this name is gone
    return CommonResponse(header_mutation=HeaderMutation(set_headers=[_set(DESTINATION_HEADER, ",".join(endpoints))]))


def _destination_metadata(endpoints: Sequence[str]) -> Any:
    metadata = Struct()
    metadata.fields[LOAD_BALANCING_NAMESPACE].struct_value.fields[DESTINATION_HEADER].string_value = ",".join(endpoints)
    return metadata


def _set(name: str, value: str) -> HeaderValueOption:
    # `raw_value`: Envoy ignores `value` here and would set an empty header
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _ask(*, changes: bool) -> bytes:
    response = ProcessingResponse(
        response_headers=HeadersResponse(),
        # response trailers as the filter has them: their message keeps the stream open to the end of the exchange
        mode_override=ProcessingMode(
            response_header_mode=ProcessingMode.SEND,
            response_body_mode=ProcessingMode.STREAMED,
            response_trailer_mode=ProcessingMode.SEND,
        ),
    )
    if changes:
        # left in place it would cut the client short, or make Envoy refuse the change
        response.response_headers.response.header_mutation.remove_headers.append("content-length")
    encoded: bytes = response.SerializeToString()
    return encoded


_ASK_TO_READ, _ASK_TO_CHANGE = _ask(changes=False), _ask(changes=True)


def _changed_response(body: bytes) -> bytes:
    mutation = BodyMutation(body=body) if body else BodyMutation(clear_body=True)
    response = ProcessingResponse(response_body=BodyResponse(response=CommonResponse(body_mutation=mutation)))
    encoded: bytes = response.SerializeToString()
    return encoded

"""Between Envoy's ext_proc protobuf messages and the exchange's events and steps; no I/O.

Messages come from `xds-protos` (protobuf upb). Answers leave as bytes: those without content are encoded once.
Field semantics: https://www.envoyproxy.io/docs/envoy/latest/api-v3/service/ext_proc/v3/external_processor.proto
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
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
    BodyChunk,
    BodyMode,
    BodyWithPick,
    HeadersWithPick,
    RequestFacts,
    Step,
)
from extproc.errors import PickError

DESTINATION_HEADER = "x-gateway-destination-endpoint"
OBJECTIVE_HEADER = "x-gateway-inference-objective"
REASON_HEADER = "x-kvmesh-reason"
UPSTREAM_ADDRESS = "upstream.address"  # an Envoy attribute: host:port, IPv6 bracketed
LOAD_BALANCING_NAMESPACE = "envoy.lb"

PROCESSOR_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

_MODES: Mapping[int, BodyMode] = {int(mode): mode for mode in BodyMode}
_WANTED_HEADERS = frozenset({":method", ":path", "x-request-id", "traceparent", OBJECTIVE_HEADER})

_EMPTY_ANSWERS: Mapping[Answer, bytes] = {
    Answer.REQUEST_HEADERS: ProcessingResponse(request_headers=HeadersResponse()).SerializeToString(),
    Answer.REQUEST_BODY: ProcessingResponse(request_body=BodyResponse()).SerializeToString(),
    Answer.REQUEST_TRAILERS: ProcessingResponse(request_trailers=TrailersResponse()).SerializeToString(),
    Answer.RESPONSE_HEADERS: ProcessingResponse(response_headers=HeadersResponse()).SerializeToString(),
    Answer.RESPONSE_BODY: ProcessingResponse(response_body=BodyResponse()).SerializeToString(),
    Answer.RESPONSE_TRAILERS: ProcessingResponse(response_trailers=TrailersResponse()).SerializeToString(),
}


parse_message = ProcessingRequest.FromString


def request_facts(headers: HttpHeaders) -> RequestFacts:
    """Take the few headers that the picker needs. Envoy fills `raw_value`, other data planes `value`."""
    found = {
        header.key: (header.raw_value.decode("utf-8", "replace") or header.value)
        for header in headers.headers.headers
        if header.key in _WANTED_HEADERS
    }
    return RequestFacts(
        method=found.get(":method", ""),
        path=found.get(":path", ""),
        objective=found.get(OBJECTIVE_HEADER),
        request_id=found.get("x-request-id", ""),
        traceparent=found.get("traceparent"),
    )


def response_status(headers: HttpHeaders) -> int:
    """Return the pod's HTTP status, or 0 if it is not there."""
    for header in headers.headers.headers:
        if header.key == ":status":
            text = header.raw_value.decode("ascii", "replace") or header.value
            return int(text) if text.isdigit() else 0
    return 0


def served_by(message: ProcessingRequest) -> str | None:
    """Return the address of the pod that answered, after retries; None unless `response_attributes` asks for it."""
    for attributes in message.attributes.values():
        if UPSTREAM_ADDRESS in attributes.fields:
            return str(attributes.fields[UPSTREAM_ADDRESS].string_value) or None
    return None


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
        return _body_chunk(step)
    if isinstance(step, HeadersWithPick | BodyWithPick):
        return _pick(tuple(step.endpoints), with_body=isinstance(step, BodyWithPick))
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


def encode_refusal(error: PickError) -> bytes:
    """Encode the answer that ends the request here: an OpenAI error object with the error's status and reason."""
    headers = {"content-type": "application/json", REASON_HEADER: error.reason}
    if error.retry_after_seconds is not None:
        headers["retry-after"] = str(error.retry_after_seconds)
    encoded: bytes = ProcessingResponse(
        immediate_response=ImmediateResponse(
            status=HttpStatus(code=error.http_status),
            headers=HeaderMutation(set_headers=[_set(name, value) for name, value in headers.items()]),
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


# Protobuf's tags: a field's number shifted by 3, plus 2 for what has a length. A test compares with its own encoding.
_CONTENT_TAG, _END_OF_STREAM = b"\x0a", b"\x10\x01"  # StreamedBodyResponse.body, and .end_of_stream = true
# BodyMutation.streamed_response, CommonResponse.body_mutation, BodyResponse.response
_AROUND = (b"\x1a", b"\x1a", b"\x0a")
_AROUND_REQUEST = (*_AROUND, b"\x1a")  # ProcessingResponse.request_body
_AROUND_RESPONSE = (*_AROUND, b"\x22")  # ProcessingResponse.response_body


def _body_chunk(chunk: BodyChunk) -> bytes:
    """Encode a part of a body: four messages, one in the other, around bytes. By hand in a third of protobuf's time."""
    body = chunk.body
    tail = _END_OF_STREAM if chunk.end_of_stream else b""
    head = _CONTENT_TAG + _varint(len(body)) if body else b""
    size = len(body) + len(tail)
    for tag in _AROUND_RESPONSE if chunk.response else _AROUND_REQUEST:
        head = tag + _varint(len(head) + size) + head
    return b"".join((head, body, tail))


def _varint(number: int) -> bytes:
    """Encode a length, seven bits a byte, the lowest first."""
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    return bytes((number & 0x7F | 0x80,)) + _varint(number >> 7)

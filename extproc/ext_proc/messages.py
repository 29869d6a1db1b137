"""Reads Envoy's messages on an ext_proc stream (headers, body chunks, trailers), and encodes the frequent answers.

The messages of every exchange are parsed by hand. With one request at a time the protobuf library's code is in no CPU
cache, and reading a request's headers takes 110 us with it, 45 us by hand (docs/decisions/0005-hot-path.md). Any
message that does not have exactly Envoy's form is left to the library. Fields:
https://www.envoyproxy.io/docs/envoy/latest/api-v3/service/ext_proc/v3/external_processor.proto
"""

from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Any

import msgspec
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest
from google.protobuf.message import DecodeError

from extproc.answers.response_plan import ResponsePlan
from extproc.ext_proc.exchange import BodyChunk, BodyMode

# Dynamic metadata with a response's plan, which Envoy carries to any picker that gets the response. Clients cannot set
# dynamic metadata; Envoy forwards the namespace only to the response filter (envoy/local.yaml).
NOTE_NAMESPACE = "kvmesh"
NOTE_KEY = "response"  # a string

encode_note = msgspec.json.Encoder().encode  # one line of text, in UTF-8
_decode = msgspec.json.Decoder(ResponsePlan).decode


def decode_note(text: str) -> ResponsePlan | None:
    """Return the plan, or None if another version of the picker wrote it in an unknown form."""
    try:
        return _decode(text)
    except msgspec.DecodeError:
        return None


# Protobuf's tags: a field's number shifted by 3, plus 2 (length-delimited). A test compares with protobuf's encoding.
_CONTENT_TAG, _END_OF_STREAM = b"\x0a", b"\x10\x01"  # StreamedBodyResponse.body, and .end_of_stream = true
# BodyMutation.streamed_response, CommonResponse.body_mutation, BodyResponse.response
_AROUND = (b"\x1a", b"\x1a", b"\x0a")
_AROUND_REQUEST = (*_AROUND, b"\x1a")  # ProcessingResponse.request_body
_AROUND_RESPONSE = (*_AROUND, b"\x22")  # ProcessingResponse.response_body


def body_chunk(chunk: BodyChunk) -> tuple[bytes, bytes]:
    """Encode a chunk of a body, four nested messages around bytes. Return the encoding before the bytes, and the bytes.

    The bytes, tens of kilobytes per request, are not copied; they come last, as the order of fields is free.
    """
    body = chunk.body
    head = _END_OF_STREAM if chunk.end_of_stream else b""
    if body:
        head += _CONTENT_TAG + _varint(len(body))
    size = len(body)
    for tag in _AROUND_RESPONSE if chunk.response else _AROUND_REQUEST:
        head = tag + _varint(len(head) + size) + head
    return head, body


# CommonResponse.header_mutation, HeadersResponse.response, ProcessingResponse.response_headers
_AROUND_HEADERS = (b"\x12", b"\x0a", b"\x12")
_LONG_HEADER = 0x80 - 4  # bytes of key and value; from here on a length takes two bytes
_OVERWRITE = b"\x18\x02"  # HeaderValueOption.append_action: OVERWRITE_IF_EXISTS_OR_ADD


def set_response_headers(headers: Mapping[str, str]) -> bytes:
    """Encode an answer to the response headers that sets these headers; with quotas every response has six."""
    encoded = b"".join([_option(name, value) for name, value in headers.items()])
    for tag in _AROUND_HEADERS:
        encoded = _field(tag, encoded)
    return encoded


def _option(name: str, value: str) -> bytes:
    """Encode HeaderMutation.set_headers: a HeaderValueOption with a HeaderValue of key and raw_value."""
    key, content = _header_name(name), visible(value).encode()
    size = len(key) + len(content) + 2
    if size < _LONG_HEADER:  # nearly always, and three times faster: each of the three lengths is one byte
        return b"%b%b%b%b%b" % (
            bytes((0x0A, size + 4, 0x0A, size)),
            key,
            bytes((0x1A, len(content))),
            content,
            _OVERWRITE,
        )
    return _field(b"\x0a", _field(b"\x0a", key + _field(b"\x1a", content)) + _OVERWRITE)


@lru_cache(maxsize=256)
def _header_name(name: str) -> bytes:
    return _field(b"\x0a", name.encode())  # HeaderValue.key


# Struct.fields is a map: entries (field 1) of key (1) and value (2). Value.string_value is 3, Value.struct_value 5
_NAMESPACE_ENTRY = b"\x0a" + bytes((len(NOTE_NAMESPACE),)) + NOTE_NAMESPACE.encode()
_NOTE_ENTRY = b"\x0a" + bytes((len(NOTE_KEY),)) + NOTE_KEY.encode()


def noted(plan: ResponsePlan) -> bytes:
    """Encode dynamic metadata {namespace: {key: note}}; most non-streaming requests have one."""
    fields = _field(b"\x0a", _NOTE_ENTRY + _field(b"\x12", _field(b"\x1a", encode_note(plan))))
    namespaces = _field(b"\x0a", _NAMESPACE_ENTRY + _field(b"\x12", _field(b"\x2a", fields)))
    return _field(b"\x42", namespaces)  # ProcessingResponse.dynamic_metadata


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


@lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    return bytes((number & 0x7F | 0x80,)) + _varint(number >> 7)


def visible(value: str) -> str:
    """Replace control characters in a header's value: Envoy would refuse the whole answer for one (503)."""
    return value if value.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in value)


RESPONSE_HEADERS = frozenset({":status", "content-type", "content-encoding", "content-length"})
NO_TEXTS: Mapping[str, str] = {}

_MODES: Mapping[int, BodyMode] = {int(mode): mode for mode in BodyMode}
# Protobuf's tags: a field's number shifted by 3, plus 2 (length-delimited). Of ProcessingRequest:
_REQUEST_HEADERS, _RESPONSE_HEADERS, _REQUEST_BODY, _RESPONSE_BODY = 0x12, 0x1A, 0x22, 0x2A
_REQUEST_TRAILERS, _RESPONSE_TRAILERS = 0x32, 0x3A
_METADATA = 0x42
_NO_METADATA = b"\x42\x00"  # empty; Envoy ends nearly every part of a body with it
_BESIDE = b"\x42\x4a\x5a"  # metadata_context, attributes, protocol_config
_HEADER_MAP, _HEADERS_END = 0x0A, b"\x18\x01"  # HttpHeaders.headers and .end_of_stream = true
_HEADER, _KEY, _RAW_VALUE = 0x0A, 0x0A, 0x1A  # HeaderMap.headers, HeaderValue.key and .raw_value
_BODY, _BODY_END = 0x0A, b"\x10\x01"  # HttpBody.body and .end_of_stream = true
_MOST_IN_A_BYTE = 0x7F  # the largest length in one byte
_MOST_LENGTH_BYTES = 5  # of an encoded length below 2 GiB
_MOST_KNOWN, _MOST_KNOWN_BYTES = 1024, 48  # headers remembered for a set of names, and bytes of each: no request ids
_MOST_KEPT_BYTES = 512  # of the fields behind the metadata; longer ones contain attributes filled by clients


class HeadersMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The wanted headers of a request or a response, and the rest of their message."""

    is_response: bool
    headers: Mapping[str, str]  # lowercase name -> text; only wanted ones
    end_of_stream: bool
    attributes: Mapping[str, str] = NO_TEXTS  # Envoy's; "" for values other than texts
    metadata: bytes = b""  # the encoded envoy.config.core.v3.Metadata
    request_mode: BodyMode = BodyMode.BUFFERED  # Envoy before 1.34 does not send it, and supports no other
    response_mode: BodyMode = BodyMode.NONE  # only the first message of a stream has it


class BodyPart(msgspec.Struct, frozen=True):
    """A received chunk of a body."""

    content: bytes
    end_of_stream: bool
    is_response: bool  # of the response's body


class TrailersMessage(msgspec.Struct, frozen=True):
    """Trailers, whose content is not read, or an unknown message."""

    is_response: bool


Message = HeadersMessage | BodyPart | TrailersMessage


def read_message(message: bytes, wanted: frozenset[str]) -> Message:
    """Read a ProcessingRequest, with the wanted headers of a request or `RESPONSE_HEADERS` of a response.

    Raise google.protobuf.message.DecodeError if it is none.
    """
    kind = message[0] if message else 0
    try:
        if kind in (_REQUEST_BODY, _RESPONSE_BODY):
            return _body(message)
        if kind in (_REQUEST_HEADERS, _RESPONSE_HEADERS):
            return _headers(message, _names(RESPONSE_HEADERS if kind == _RESPONSE_HEADERS else wanted))
        if kind in (_REQUEST_TRAILERS, _RESPONSE_TRAILERS):
            size, at = _length(message, 1)
            if _is_all(message, at + size):
                return TrailersMessage(kind == _RESPONSE_TRAILERS)
    except (_UnusualError, IndexError):  # IndexError: the message is cut off
        pass
    return _by_library(message, wanted)


class _UnusualError(Exception):
    """The message is not in the form that is parsed by hand, but may be valid."""


def _headers(message: bytes, names: "_Names") -> HeadersMessage:
    """Read headers. Raise _UnusualError or IndexError."""
    size, at = _length(message, 1)
    end = at + size
    headers: Mapping[str, str] = NO_TEXTS
    if size and message[at] == _HEADER_MAP:
        size, at = _length(message, at + 1)
        headers = _header_map(message, at, at + size, names)
        at += size
    ends = at != end
    if ends and message[at:end] != _HEADERS_END:
        raise _UnusualError
    metadata = b""
    if end < len(message) and message[end] == _METADATA:
        size, start = _length(message, end + 1)
        end = start + size
        metadata = message[start:end]
    if end > len(message):
        raise _UnusualError
    rest = message[end:]
    about = _cached_about if len(rest) <= _MOST_KEPT_BYTES else _about
    attributes, request_mode, response_mode = about(rest)
    return HeadersMessage(
        is_response=message[0] == _RESPONSE_HEADERS,
        headers=headers,
        end_of_stream=ends,
        attributes=attributes,
        metadata=metadata,
        request_mode=request_mode,
        response_mode=response_mode,
    )


def _about(rest: bytes) -> tuple[Mapping[str, str], BodyMode, BodyMode]:
    """Return attributes and body modes from the fields behind the metadata. Raise _UnusualError."""
    try:
        message = ProcessingRequest.FromString(rest)
    except DecodeError:
        raise _UnusualError from None
    if message.WhichOneof("request") is not None or message.HasField("metadata_context"):
        raise _UnusualError  # a repeated field: protobuf merges the two
    return _attributes(message), *_modes(message)


_cached_about = lru_cache(maxsize=1024)(_about)  # without clients' attributes the same bytes recur


def _header_map(message: bytes, at: int, stop: int, names: "_Names") -> dict[str, str]:
    """Return the wanted headers; of several with one name the last."""
    headers: dict[str, str] = {}
    known = names.known
    while at < stop:
        entry = message[at : at + 2 + message[at + 1]]  # of most headers: their length is one byte
        header = known.get(entry)
        if header is None:
            entry, header = names.read(message, at)
        at += len(entry)
        if header:
            headers[header[0]] = header[1]
    if at != stop:
        raise _UnusualError
    return headers


class _Names:
    """The wanted names, and short headers read lately: most are as in the requests before."""

    def __init__(self, wanted: frozenset[str]) -> None:
        # an invalid Unicode name, from a policy document, matches no header
        self._wanted = {name.encode("utf-8", "surrogatepass"): name for name in wanted}
        self.known: dict[bytes, tuple[str, ...]] = {}  # HeaderMap.headers -> name and text, () if not wanted

    def read(self, message: bytes, at: int) -> tuple[bytes, tuple[str, ...]]:
        """Return the encoding and the content of the header that begins there. Raise _UnusualError or IndexError."""
        size, start = _length(message, at + 1)
        if message[at] != _HEADER or size == 0 or message[start] != _KEY or message[start + 1] > _MOST_IN_A_BYTE:
            raise _UnusualError
        entry, value = message[at : start + size], start + 2 + message[start + 1]
        name = self._wanted.get(message[start + 2 : value])
        header: tuple[str, ...] = () if name is None else (name, _text(message, value, start + size))
        if len(entry) <= _MOST_KNOWN_BYTES:
            if len(self.known) >= _MOST_KNOWN:
                self.known.clear()
            self.known[entry] = header
        return entry, header


def _text(message: bytes, at: int, stop: int) -> str:
    """Return the value of a header: the fields behind its key."""
    if at == stop:
        return ""
    if message[at] != _RAW_VALUE:  # other data planes send `value`
        raise _UnusualError
    size, at = _length(message, at + 1)
    if at + size != stop:
        raise _UnusualError
    return message[at:stop].decode("utf-8", "replace")


_names = cache(_Names)  # policies and defaults make only a few sets


def _attributes(message: ProcessingRequest) -> dict[str, str]:
    # "" for an attribute other than a text, not absent: `response_origin` then recognizes Envoy's own answers
    return {
        name: value.string_value
        for attributes in message.attributes.values()
        for name, value in attributes.fields.items()
    }


def _modes(message: ProcessingRequest) -> tuple[BodyMode, BodyMode]:
    protocol = message.protocol_config
    request = _mode(protocol.request_body_mode) if message.HasField("protocol_config") else BodyMode.BUFFERED
    return request, _mode(protocol.response_body_mode)


def _mode(number: int) -> BodyMode:
    return _MODES.get(number, BodyMode.NONE)


def _body(message: bytes) -> BodyPart:
    """Read a chunk of a body. Most received bytes come this way. Raise _UnusualError or IndexError."""
    size, at = _length(message, 1)
    stop = at + size
    if message[stop:] != _NO_METADATA and not _is_all(message, stop):
        raise _UnusualError
    start = end = at
    if size and message[at] == _BODY:
        size, start = _length(message, at + 1)
        end = start + size
    rest = message[end:stop]
    if end > stop or rest not in (b"", _BODY_END):
        raise _UnusualError
    return BodyPart(message[start:end], bool(rest), message[0] == _RESPONSE_BODY)


def _is_all(message: bytes, at: int) -> bool:
    """Tell whether only metadata, attributes and the protocol's configuration follow."""
    while at < len(message):
        if message[at] not in _BESIDE:
            return False
        size, at = _length(message, at + 1)
        at += size
    return at == len(message)


def _length(message: bytes, at: int) -> tuple[int, int]:
    """Return a length and the offset behind it. Raise _UnusualError or IndexError."""
    if (first := message[at]) <= _MOST_IN_A_BYTE:
        return first, at + 1
    if (second := message[at + 1]) <= _MOST_IN_A_BYTE:  # up to 16 KiB
        return first & 0x7F | second << 7, at + 2
    length = 0
    for number, byte in enumerate(message[at : at + _MOST_LENGTH_BYTES]):
        length |= (byte & 0x7F) << 7 * number
        if byte <= _MOST_IN_A_BYTE:
            return length, at + number + 1
    raise _UnusualError


def _by_library(encoded: bytes, wanted: frozenset[str]) -> Message:
    message = ProcessingRequest.FromString(encoded)
    kind = message.WhichOneof("request")
    if kind in ("request_headers", "response_headers"):
        is_response = kind == "response_headers"
        part = message.response_headers if is_response else message.request_headers
        request_mode, response_mode = _modes(message)
        return HeadersMessage(
            is_response=is_response,
            headers=_found(part, RESPONSE_HEADERS if is_response else wanted),
            end_of_stream=part.end_of_stream,
            attributes=_attributes(message),
            metadata=message.metadata_context.SerializeToString(),
            request_mode=request_mode,
            response_mode=response_mode,
        )
    if kind in ("request_body", "response_body"):
        body: Any = message.response_body if kind == "response_body" else message.request_body
        return BodyPart(body.body, body.end_of_stream, kind == "response_body")
    return TrailersMessage(kind != "request_trailers")


def _found(headers: HttpHeaders, wanted: frozenset[str]) -> dict[str, str]:
    # Envoy fills `raw_value`, other data planes `value`
    return {
        header.key: (header.raw_value.decode("utf-8", "replace") or header.value)
        for header in headers.headers.headers
        if header.key in wanted
    }

"""Those answers to Envoy that most requests get, as protobuf by hand: in a third of the library's time.

Called by `ext_proc` and by `ext_proc_call`. Fields: external_processor.proto, as there.
"""

from collections.abc import Mapping
from functools import lru_cache

from extproc.ext_proc.exchange import BodyChunk
from extproc.ext_proc.response_note import NOTE_KEY, NOTE_NAMESPACE, encode_note
from extproc.responses.response_plan import ResponsePlan

# Protobuf's tags: a field's number shifted by 3, plus 2 for what has a length. A test compares with its own encoding.
_CONTENT_TAG, _END_OF_STREAM = b"\x0a", b"\x10\x01"  # StreamedBodyResponse.body, and .end_of_stream = true
# BodyMutation.streamed_response, CommonResponse.body_mutation, BodyResponse.response
_AROUND = (b"\x1a", b"\x1a", b"\x0a")
_AROUND_REQUEST = (*_AROUND, b"\x1a")  # ProcessingResponse.request_body
_AROUND_RESPONSE = (*_AROUND, b"\x22")  # ProcessingResponse.response_body


def body_chunk(chunk: BodyChunk) -> tuple[bytes, bytes]:
    """Encode a part of a body: four messages, one in the other, around bytes. Return what stands before them, and them.

    They are tens of kilobytes of each request, so they are not copied, and come last: the order of fields is free.
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
_AROUND_TOLD = (b"\x12", b"\x0a", b"\x12")
_OVERWRITE = b"\x18\x02"  # HeaderValueOption.append_action: OVERWRITE_IF_EXISTS_OR_ADD


def told_client(headers: Mapping[str, str]) -> bytes:
    """Encode an answer to the response headers that sets these; with quotas every request has six."""
    encoded = b"".join([_option(name, value) for name, value in headers.items()])
    for tag in _AROUND_TOLD:
        encoded = _field(tag, encoded)
    return encoded


def _option(name: str, value: str) -> bytes:
    header = _header_name(name) + _field(b"\x1a", visible(value).encode())  # HeaderValue.raw_value
    return _field(b"\x0a", _field(b"\x0a", header) + _OVERWRITE)  # HeaderMutation.set_headers of HeaderValueOption


@lru_cache(maxsize=256)
def _header_name(name: str) -> bytes:
    return _field(b"\x0a", name.encode())  # HeaderValue.key


# Struct.fields is a map: entries (field 1) of key (1) and value (2). Value.string_value is 3, Value.struct_value 5
_NAMESPACE_ENTRY = b"\x0a" + bytes((len(NOTE_NAMESPACE),)) + NOTE_NAMESPACE.encode()
_NOTE_ENTRY = b"\x0a" + bytes((len(NOTE_KEY),)) + NOTE_KEY.encode()


def noted(plan: ResponsePlan) -> bytes:
    """Encode dynamic metadata {namespace: {key: note}}; most requests that do not stream have one."""
    fields = _field(b"\x0a", _NOTE_ENTRY + _field(b"\x12", _field(b"\x1a", encode_note(plan))))
    namespaces = _field(b"\x0a", _NAMESPACE_ENTRY + _field(b"\x12", _field(b"\x2a", fields)))
    return _field(b"\x42", namespaces)  # ProcessingResponse.dynamic_metadata


def _field(tag: bytes, content: bytes) -> bytes:
    return tag + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    """Encode a length, seven bits a byte, the lowest first."""
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    return bytes((number & 0x7F | 0x80,)) + _varint(number >> 7)


def visible(value: str) -> str:
    """Return a header's value that Envoy takes: for a control character it would refuse the whole answer (503)."""
    return value if value.isprintable() else "".join(sign if sign.isprintable() else "?" for sign in value)

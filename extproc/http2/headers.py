"""Header blocks of one connection: bounded HPACK decoding, and the rules of HTTP/2 and gRPC for requests. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpack import Decoder, HPACKError, OversizedHeaderListError

from extproc.http2.frames import ErrorCode, Http2ConnectionError, Http2StreamError, literal
from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcStatus, trailers

Fields = Sequence[tuple[bytes, bytes]]

# An Envoy repeats one block for all its streams, or a few where its routes differ.
REMEMBERED_BLOCKS = 64
REMEMBERED_BLOCK_BYTES = 1024
# RFC 7541, section 4.2: one for the smallest size since the last block, one for the final size
SIZE_UPDATES_PER_BLOCK = 2
_PSEUDO = (b":method", b":scheme", b":path")
_CONNECTION_FIELDS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_UPPER_CASE = bytes(range(ord("A"), ord("Z") + 1))
_UNITS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_TIMEOUT_DIGITS = 8
POOL_METADATA = b"x-kvmesh-pool"  # set by the EnvoyFilter's grpc_initial_metadata
_GRPC = b"application/grpc"
# complete answers to requests that are not valid gRPC: header blocks that end the stream
_NOT_POST = literal(b":status", b"405")
_NOT_GRPC = literal(b":status", b"415")
_BAD_TIMEOUT = RESPONSE_HEADERS + trailers(GrpcStatus.INTERNAL, "grpc-timeout cannot be read")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcRequest:
    """The head of one request."""

    path: bytes  # /service/method
    timeout_seconds: float | None
    refusal: bytes | None = None  # a header block that ends the stream, if the request is not valid gRPC
    pool: str = ""  # from POOL_METADATA, or ""
    authority: str = ""  # `:authority`: any text, as Envoy puts a cluster's name there


class HeaderBlocks:
    """Decodes one connection's header blocks, in order."""

    def __init__(self, *, max_list_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=max_list_bytes)
        self._seen: dict[bytes, GrpcRequest] = {}

    def request(self, block: bytes) -> GrpcRequest:
        """Decode and interpret a request's block. Raise Http2ConnectionError, or Http2StreamError if it is malformed.

        A block that does not change the dynamic table is cached with its result. That is safe: the result depends
        only on the bytes and the table, and any block that may change the table empties the cache. It saves 65 µs per
        stream: Envoy never indexes `:path`, and the library decodes Huffman codes in Python.
        """
        known = self._seen.get(block)
        if known is not None:
            return known
        fields = self.fields(block)
        check_request(fields)
        request = grpc_request(fields)
        if len(block) <= REMEMBERED_BLOCK_BYTES and keeps_table(block):
            if len(self._seen) >= REMEMBERED_BLOCKS:
                self._seen.clear()
            self._seen[block] = request
        return request

    def fields(self, block: bytes) -> Fields:
        """Decode any block, e.g. trailers. Raise Http2ConnectionError: then the table cannot be trusted any more."""
        if self._seen and not keeps_table(block):
            self._seen.clear()
        _check_size_updates(block)
        try:
            return list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large") from error
        except (HPACKError, ValueError, IndexError) as error:  # the library does not convert the latter two
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "the header block cannot be decoded") from error


def keeps_table(block: bytes) -> bool:
    """Tell whether the block certainly leaves the dynamic table unchanged (RFC 7541, section 6).

    True for indexed fields and literals without indexing. False for all other fields, for numbers of more than one
    byte, and for a field cut off by the end of the block.
    """
    position, end = 0, len(block)
    while position < end:
        first = block[position]
        position += 1
        if first >= 0x80:
            if first == 0xFF:
                return False
            continue
        if first >= 0x20 or first & 0x0F == 0x0F:
            return False
        for _ in range(1 if first & 0x0F else 2):  # the value, preceded by the name if that has no index
            if position >= end or block[position] & 0x7F == 0x7F:
                return False
            position += 1 + (block[position] & 0x7F)
    return position == end


def _check_size_updates(block: bytes) -> None:
    """Refuse blocks with many changes of the table's size: each costs the peer a byte and us a resize."""
    position = updates = 0
    while position < len(block) and block[position] & 0xE0 == 0x20:
        updates += 1
        if updates > SIZE_UPDATES_PER_BLOCK:
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "too many changes of the header table's size")
        continued = block[position] & 0x1F == 0x1F
        position += 1
        while continued and position < len(block):
            continued = block[position] & 0x80 != 0
            position += 1


def check_request(fields: Fields) -> None:
    """Raise Http2StreamError unless these are the headers of a well-formed request (RFC 9113, sections 8.2 and 8.3)."""
    pseudo: set[bytes] = set()
    regular = False
    for name, value in fields:
        if name.startswith(b":"):
            if regular or name in pseudo or name not in (*_PSEUDO, b":authority"):
                raise _malformed("a pseudo-header that is unknown, late or doubled")
            pseudo.add(name)
            continue
        regular = True
        if not name or name != name.translate(None, _UPPER_CASE):
            raise _malformed("a field name that is empty or not in lower case")
        if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
            raise _malformed("a field that belongs to HTTP/1.1 connections")
    if not pseudo.issuperset(_PSEUDO):
        raise _malformed("a pseudo-header is missing")


def _malformed(reason: str) -> Http2StreamError:
    return Http2StreamError(ErrorCode.PROTOCOL_ERROR, reason)


def grpc_request(fields: Fields) -> GrpcRequest:
    """Interpret the fields of a well-formed request."""
    found = dict(fields)
    path = found[b":path"]
    refusal = None
    timeout_seconds = None
    if found[b":method"] != b"POST":
        refusal = _NOT_POST
    elif not _is_grpc(found.get(b"content-type", b"")):
        refusal = _NOT_GRPC
    elif (timeout := found.get(b"grpc-timeout")) is not None:
        timeout_seconds = parse_timeout(timeout)
        refusal = _BAD_TIMEOUT if timeout_seconds is None else None
    pool = found.get(POOL_METADATA, b"").decode("ascii", "replace").strip()
    authority = found.get(b":authority", b"").decode("ascii", "replace")
    return GrpcRequest(path=path, timeout_seconds=timeout_seconds, refusal=refusal, pool=pool, authority=authority)


def _is_grpc(content_type: bytes) -> bool:
    """Tell whether the type is application/grpc, perhaps with a format (+proto) or parameters."""
    return content_type.startswith(_GRPC) and content_type[len(_GRPC) : len(_GRPC) + 1] in (b"", b"+", b";")


def parse_timeout(value: bytes) -> float | None:
    """Return the seconds in `grpc-timeout` (at most eight digits and a unit), or None if it cannot be read."""
    number, unit = value[:-1], value[-1:]
    if not number.isdigit() or len(number) > _TIMEOUT_DIGITS or unit not in _UNITS:
        return None
    return int(number) * _UNITS[unit]

"""Header blocks of one connection: bounded HPACK decoding, and the rules that every request's headers obey. Pure.

Called by `http2.session` once a header block; what the fields mean for gRPC, `http2.grpc_requests` knows.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError

from extproc.http2.frames import ErrorCode, Http2ConnectionError, Http2StreamError

Fields = Sequence[tuple[bytes, bytes]]
Request = TypeVar("Request")

# An Envoy repeats one block for all its streams; several of them, where its routes differ.
REMEMBERED_BLOCKS = 64
REMEMBERED_BLOCK_BYTES = 1024
# RFC 7541, section 4.2: the smallest size since the last block, and the last one
SIZE_UPDATES_PER_BLOCK = 2
_PSEUDO = (b":method", b":scheme", b":path")
_CONNECTION_FIELDS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_UPPER_CASE = bytes(range(ord("A"), ord("Z") + 1))


class HeaderBlocks(Generic[Request]):
    """Decodes one connection's header blocks, in order; `interpret` turns the fields of a request into what it asks."""

    def __init__(self, interpret: Callable[[Fields], Request], *, max_list_bytes: int) -> None:
        self._decoder = Decoder(max_header_list_size=max_list_bytes)
        self._interpret = interpret
        self._seen: dict[bytes, Request] = {}

    def request(self, block: bytes) -> Request:
        """Decode and interpret a request's block. Raise Http2ConnectionError, or Http2StreamError if it is malformed.

        A block that leaves the dynamic table as it is, is remembered with what it meant. That is safe: its meaning
        depends on its bytes and on the table alone, and any block that may change the table empties the memory. It
        saves 65 µs a stream: Envoy never indexes `:path`, and the library takes Huffman codes apart in Python.
        """
        known = self._seen.get(block)
        if known is not None:
            return known
        fields = self.fields(block)
        check_request(fields)
        request = self._interpret(fields)
        if len(block) <= REMEMBERED_BLOCK_BYTES and keeps_table(block):
            if len(self._seen) >= REMEMBERED_BLOCKS:
                self._seen.clear()
            self._seen[block] = request
        return request

    def fields(self, block: bytes) -> Fields:
        """Decode any block, as trailers; or raise Http2ConnectionError, after which the table cannot be trusted."""
        if self._seen and not keeps_table(block):
            self._seen.clear()
        _check_size_updates(block)
        try:
            return list(self._decoder.decode(block, raw=True))
        except OversizedHeaderListError as error:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "the header list is too large") from error
        except (HPACKError, ValueError, IndexError) as error:  # the library lets the latter two slip through
            raise Http2ConnectionError(ErrorCode.COMPRESSION_ERROR, "the header block cannot be decoded") from error


def keeps_table(block: bytes) -> bool:
    """Return whether the block certainly leaves the dynamic table as it is (RFC 7541, section 6).

    True for indexed fields and for literals that are not to be indexed; False for all others, for numbers that need
    more than one byte, and for what does not end where the block does.
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
        for _ in range(1 if first & 0x0F else 2):  # the value, and before it the name where it has no index
            if position >= end or block[position] & 0x7F == 0x7F:
                return False
            position += 1 + (block[position] & 0x7F)
    return position == end


def _check_size_updates(block: bytes) -> None:
    """Refuse blocks with many changes of the table's size: a byte each for the peer, a resize each for us."""
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

"""The messages with which podsim's pods transfer KV: JSON lines over TCP, and one reply per message.

The format is podsim's own. vLLM makes its handshake over ZMQ and reads memory through NIXL; only the time this takes is
simulated. `podsim.side_channel` sends these messages.
"""

from collections.abc import Sequence

import msgspec

LONGEST_LINE_BYTES = 16 * 1024 * 1024  # a read names every block of a prompt


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Asks, once before the first read from an engine, whether it is the expected one and its KV fits."""

    engine_id: str
    model: str
    block_size: int  # tokens


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Asks for the KV of blocks; the reply comes when all of it has been sent."""

    engine_id: str
    request_id: str  # of the prefill request
    first_block: int  # position of the first block in the reader's prompt
    block_ids: Sequence[int]
    prompt_tokens: int
    prompt_checksum: int  # of the reader's prompt, see `podsim.core.generate.prompt_seed`


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """Tells that the prefill request's blocks are no longer needed."""

    engine_id: str
    request_id: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """Tells that the blocks of these prefill requests will still be read."""

    engine_id: str
    request_ids: Sequence[str]


Message = Hello | Read | Release | Heartbeat


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A reply. `error` refuses; `valid` tells if a read got its prompt's KV, or if a released lease still existed."""

    error: str | None = None
    valid: bool = True


_encoder = msgspec.json.Encoder()
_message_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_reply_decoder = msgspec.json.Decoder(Reply)


def encode_line(content: Message | Reply) -> bytes:
    """Encode one line, with its newline."""
    return _encoder.encode(content) + b"\n"


def decode_message(line: bytes) -> Message:
    """Decode a reader's message; raise msgspec.DecodeError if it is none of the above."""
    return _message_decoder.decode(line)


def decode_reply(line: bytes) -> Reply:
    """Decode the other pod's reply; raise msgspec.DecodeError if it is not one."""
    return _reply_decoder.decode(line)

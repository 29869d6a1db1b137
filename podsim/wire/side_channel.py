"""What podsim's pods say to each other to hand over KV: JSON lines over TCP, a reply for each message.

The format is podsim's own. vLLM shakes hands over ZMQ and reads memory by NIXL; nothing of that is simulated but the
time it takes. `podsim.side_channel` sends these.
"""

from collections.abc import Sequence

import msgspec

LONGEST_LINE_BYTES = 16 * 1024 * 1024  # a read names every block of a prompt


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Once before the first read of an engine: is it the one, and does its KV fit?"""

    engine_id: str
    model: str
    block_size: int  # tokens


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read"):
    """Send the KV of blocks; the reply comes when all of it is sent."""

    engine_id: str
    request_id: str  # the prefill leg's
    first_block: int  # position of the first of the blocks in the reader's prompt
    block_ids: Sequence[int]
    prompt_tokens: int
    prompt_checksum: int  # of the reader's prompt, see `podsim.core.generate.prompt_seed`


class Release(msgspec.Struct, frozen=True, kw_only=True, tag="release"):
    """The prefill leg's blocks are not needed any more."""

    engine_id: str
    request_id: str


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, tag="heartbeat"):
    """The blocks of these prefill legs are still to be read."""

    engine_id: str
    request_ids: Sequence[str]


Message = Hello | Read | Release | Heartbeat


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """`error` refuses. `valid` says of a read that it got its prompt's KV, of a release that there was a lease."""

    error: str | None = None
    valid: bool = True


_encoder = msgspec.json.Encoder()
_message_decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_reply_decoder = msgspec.json.Decoder(Reply)


def encode_line(content: Message | Reply) -> bytes:
    """One line, with its end."""
    return _encoder.encode(content) + b"\n"


def decode_message(line: bytes) -> Message:
    """What a reader asks; msgspec.DecodeError if it is none of the above."""
    return _message_decoder.decode(line)


def decode_reply(line: bytes) -> Reply:
    """What the other pod answers; msgspec.DecodeError if it is no reply."""
    return _reply_decoder.decode(line)

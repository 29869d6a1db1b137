"""Reads the fields of an event from raw msgpack into their normal form. Pure.

Fields are decoded one by one and by type, so that unread fields build no objects. A malformed field costs its event, an
unknown field costs nothing, and a small payload cannot grow into a large object.
"""

import sys
from array import array
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from kvmesh.blocks.block_keys import held_digest, held_name

UINT64 = 0xFFFF_FFFF_FFFF_FFFF
UINT32 = 0xFFFF_FFFF
NAME_LIMIT = 256  # characters of a tier, a group's kind and similar names
FEATURES_LIMIT = 1 << 20  # bytes of an event's extra keys, which may be nested to any depth
UNREADABLE = (msgspec.DecodeError, RecursionError, UnicodeDecodeError, ValueError, TypeError)
ABSENT = msgspec.Raw(b"\xc0")  # msgpack's nil
_MAP_BYTES = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))  # first bytes of a msgpack map

# Why an event cannot be read: all values of the metric's label, because the type checker accepts no other.
Fault = Literal[
    "bad-block-hash",
    "bad-block-size",
    "bad-cache-salt",
    "bad-extra-keys",
    "bad-group",
    "bad-kind",
    "bad-locality",
    "bad-lora",
    "bad-medium",
    "bad-mm-keys",
    "bad-ownership",
    "bad-token-ids",
    "bad-window",
    "event-without-type",
    "too-few-fields",
    "undecodable-event",
    "unknown-event-type",
]
T = TypeVar("T")
Raw = msgspec.Raw
Features = tuple[tuple[Any, ...] | None, ...]  # one entry per block

_Unsigned = Annotated[int, msgspec.Meta(ge=0)]
_ShortName = Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)] | None
_Item = dict[str, Raw]  # of TRT-LLM's mm_keys

_uint64s = Decoder(tuple[_Unsigned, ...])
_any_hashes: Decoder[list[int | bytes]] = Decoder(list[int | bytes])
_any_hash: Decoder[int | bytes | None] = Decoder(int | bytes | None)
_integers = Decoder(list[int])
_any_tokens = Decoder(list[int | str])
_pairs = Decoder(list[tuple[int, int]])
_block_size: Decoder[int] = Decoder(Annotated[int, msgspec.Meta(ge=0, le=UINT32)])
_integer: Decoder[int | None] = Decoder(int | None)
_unsigned: Decoder[int | None] = Decoder(_Unsigned | None)
_short_name: Decoder[str | None] = Decoder(_ShortName)
_text: Decoder[str | None] = Decoder(str | None)
_no_features: Decoder[tuple[None, ...] | None] = Decoder(tuple[None, ...] | None)
_features: Decoder[list[Any]] = Decoder(list[Any])
_items: Decoder[list[_Item] | None] = Decoder(list[_Item] | None)
_item_id: Decoder[str | int | None] = Decoder(str | int | None)
_metadata = Decoder(dict[str, Raw])


class BadEventError(Exception):
    """One event cannot be read; the reason is the metric's label."""

    def __init__(self, reason: Fault) -> None:
        super().__init__(reason)
        self.reason: Fault = reason


def _read(decoder: Decoder[T], raw: Raw, reason: Fault) -> T:
    try:
        return decoder.decode(raw)
    except UNREADABLE:
        raise BadEventError(reason) from None


def unsigned_hash(value: int | bytes) -> int:
    """Return an engine hash as unsigned 64 bit: integers modulo 2^64; of bytes the last 8, big-endian.

    vLLM's own integers are the last 8 bytes of the digest, so both forms of one hash agree.
    """
    if isinstance(value, int):
        return value & UINT64
    if not value:
        raise BadEventError("bad-block-hash")
    return int.from_bytes(value[-8:], "big")


def hashes(raw: Raw) -> tuple[int, ...]:
    """Read a list of engine hashes."""
    try:
        return _uint64s.decode(raw)  # the form of nearly all publishers, which needs no conversion
    except UNREADABLE:
        spelled = _read(_any_hashes, raw, "bad-block-hash")
    return tuple(map(unsigned_hash, spelled))


def parent_hash(raw: Raw) -> int | None:
    """Read the parent's hash; None at the start of a prompt (llm-d-inference-sim may write 0)."""
    value = _read(_any_hash, raw, "bad-block-hash")
    return (unsigned_hash(value) or None) if value is not None else None


def tokens(raw: Raw) -> bytes:
    """Read token ids into little-endian uint32.

    TRT-LLM may write them as strings. SGLang with EAGLE writes pairs, each token with its successor; the first of each
    pair is the prompt's token. Such a block is hit only if the next token matches too, so for the last block of a
    prefix we may predict a hit that does not come.
    """
    try:
        ids: list[Any] = _integers.decode(raw)
    except UNREADABLE:
        ids = _odd_tokens(raw)
    try:
        return packed_tokens(ids)
    except (TypeError, OverflowError):
        raise BadEventError("bad-token-ids") from None


def packed_tokens(ids: list[int]) -> bytes:
    """Return token ids as little-endian uint32. Raise TypeError, OverflowError."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _odd_tokens(raw: Raw) -> list[int]:
    try:
        pairs = _pairs.decode(raw)
    except UNREADABLE:
        try:
            return [int(token) for token in _any_tokens.decode(raw)]
        except UNREADABLE:
            raise BadEventError("bad-token-ids") from None
    if any(left[1] != right[0] for left, right in pairwise(pairs)):
        raise BadEventError("bad-token-ids")  # pairs, but not of neighbours: their meaning is unknown
    return [token for token, _ in pairs]


def block_size(raw: Raw) -> int:
    """Read the block size in tokens; 0 for an offload placeholder."""
    return _read(_block_size, raw, "bad-block-size")


def medium(raw: Raw) -> str:
    """Read the tier of the blocks, in upper case; GPU if absent."""
    return tier(_read(_short_name, raw, "bad-medium"))


def tier(written: str | None) -> str:
    """Return the tier of the blocks, in upper case; GPU if empty."""
    return (written or "GPU").upper()


def integer(raw: Raw, reason: Fault) -> int | None:
    """Read a whole number."""
    return None if raw is ABSENT else _read(_integer, raw, reason)


def unsigned(raw: Raw, reason: Fault) -> int | None:
    """Read a non-negative whole number."""
    return None if raw is ABSENT else _read(_unsigned, raw, reason)


def short_name(raw: Raw, reason: Fault) -> str | None:
    """Read a short string, one of a few known names."""
    return None if raw is ABSENT else _read(_short_name, raw, reason)


def name(raw: Raw, reason: Fault) -> str | None:
    """Read a name chosen by a user, in its stored form (see `held_name`)."""
    chosen = None if raw is ABSENT else _read(_text, raw, reason)
    return held_name(chosen) if chosen else chosen


def session(raw: Raw) -> str | None:
    """Read the session; it identifies no block, so a malformed one does not cost the event."""
    try:
        chosen = None if raw is ABSENT else _text.decode(raw)
    except UNREADABLE:
        return None
    return held_name(chosen) if chosen else chosen


def adapter(chosen: Raw, number: Raw) -> tuple[str | None, int | None]:
    """Read the adapter's name and number."""
    lora_name, lora_id = name(chosen, "bad-lora"), _read(_integer, number, "bad-lora")
    return named_adapter(lora_name, lora_id), lora_id


def named_adapter(lora_name: str | None, lora_id: int | None) -> str | None:
    """Return the adapter's name.

    Before vLLM 0.14 an adapter has only a number. It gets a name that no request can have, because its blocks must not
    pass for the base model's; so these blocks match no request.
    """
    return f"\0lora-id:{lora_id}" if lora_id and not lora_name else lora_name


def is_map(raw: Raw | bytes) -> bool:
    """Tell whether this is a map; an exception for everything else would cost more than all other work."""
    return bool(raw) and memoryview(raw)[0] in _MAP_BYTES


def metadata(raw: Raw) -> Mapping[str, Raw] | None:
    """Read SGLang's map of further fields, or return None if something else is in its position."""
    return _read(_metadata, raw, "bad-lora") if is_map(raw) else None


def features(raw: Raw) -> Features | None:
    """Read the extra keys, all that identifies a block besides its tokens, in vLLM's form (see `blocks.block_keys`)."""
    try:
        return _no_features.decode(raw)  # of a plain prompt
    except UNREADABLE:
        pass
    if len(memoryview(raw)) > FEATURES_LIMIT:
        raise BadEventError("bad-extra-keys")
    entries = _read(_features, raw, "bad-extra-keys")
    return feature_entries(entries)


def feature_entries(entries: Sequence[Any]) -> Features:
    """Return the extra keys of each block in their stored form. Raise BadEventError."""
    return tuple(map(_entry, entries))


def _entry(entry: Any) -> tuple[Any, ...] | None:
    if entry is None:
        return None
    if isinstance(entry, list):
        return tuple(tuple(map(_short, part)) if isinstance(part, list) else _short(part) for part in entry)
    if isinstance(entry, str | bytes):
        return (_short(entry),)
    raise BadEventError("bad-extra-keys")


def _short(part: Any) -> Any:
    """Return the stored form of a name or a digest; numbers, and parts that cannot be folded, stay as they are."""
    if isinstance(part, str):
        return held_name(part)
    return held_digest(part) if isinstance(part, bytes) else part


def items(raw: Raw, *, blocks: int) -> Features | None:
    """Read TRT-LLM's multimodal items `{"hash", "start_offset", "uuid"}` of all blocks of an event.

    They do not name their blocks, so all are folded into the first one. That keeps the chain apart from every other,
    and costs hits at most.
    """
    found = _read(_items, raw, "bad-mm-keys")
    if not found:
        return None
    if not blocks:
        raise BadEventError("bad-mm-keys")
    return (tuple(map(_feature, found)), *(None,) * (blocks - 1))


def _feature(item: _Item) -> tuple[str, int]:
    identifier = _read(_item_id, item.get("uuid", ABSENT), "bad-mm-keys")
    if identifier is None:
        identifier = _read(_item_id, item.get("hash", ABSENT), "bad-mm-keys")
    offset = _read(_integer, item.get("start_offset", ABSENT), "bad-mm-keys")
    if identifier is None or abs(offset or 0) >> 63:
        raise BadEventError("bad-mm-keys")
    return held_name(str(identifier)), offset or 0

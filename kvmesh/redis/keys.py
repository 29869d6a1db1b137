"""Names and encodings of everything in Redis; `docs/reference/redis.md` describes them. Pure.

All keys have one versioned prefix, which is also one hash tag: they live in one Redis Cluster slot, so scripts may
touch them together. A change of any encoding, block keys included, is a new prefix. It is short because every block
pays for it.
"""

from binascii import crc_hqx
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeVar

import msgspec

from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.blocks.cache_groups import CacheGroup, is_of_group, read_tier
from kvmesh.blocks.index_changes import Clear, IndexChange, Operation, Remove, Store
from kvmesh.blocks.source import (
    NOT_FOLLOWED,
    Claim,
    Registry,
    SlotRecord,
    SourceState,
    Stream,
    StreamPosition,
    StreamRecord,
)

PREFIX = b"{kv2}"
KEY_SLOT = crc_hqx(PREFIX.strip(b"{}"), 0) % 16384  # of every key, by the Redis Cluster specification
REGISTRY = PREFIX + b"registry"
PULSES = PREFIX + b"pulses"
PICKERS = PREFIX + b"picker:"  # shared by the picker replicas; the index neither reads nor writes it
MAX_SLOTS = 4096  # registry.lua assigns no more
SNAPSHOT_PARTS = 5  # of the answer of snapshot.lua; see `parse_registry`
SLOT_FIELDS, STREAM_FIELDS = 3, 13  # values per record in the answer of snapshot.lua
UNKNOWN_STATE = "unknown-state"  # the reason of a stream whose state a newer version wrote
SHOWN_LIMIT = 120  # characters of foreign text in our messages
_BLOCK_NAME = b"$%d\r\n%sb" % (len(PREFIX) + 1 + KEY_BYTES, PREFIX)
_BLOCK_ARGUMENT = _BLOCK_NAME + bytes(KEY_BYTES) + b"\r\n"

Record = TypeVar("Record")
_groups_json = msgspec.json.Decoder(dict[int, CacheGroup])


class _SlotJson(msgspec.Struct):
    endpoint: str
    rank: int
    tier: str
    epoch: int
    block_size: int
    state: str


_slot_json = msgspec.json.Decoder(_SlotJson)


def pack_mget(keys: bytes) -> bytes:
    """Return the MGET command for packed 8-byte block keys, in the Redis protocol.

    Written by hand: all names have one length, so eight strided copies (every key's first byte, second byte, …) replace
    a client library's work argument by argument (0.01 ms against 0.5 ms for 512 keys).
    """
    count = len(keys) // KEY_BYTES
    arguments = bytearray(_BLOCK_ARGUMENT) * count
    for at in range(KEY_BYTES):
        arguments[len(_BLOCK_NAME) + at :: len(_BLOCK_ARGUMENT)] = keys[at::KEY_BYTES]
    return b"*%d\r\n$4\r\nMGET\r\n" % (count + 1) + arguments


def group_suffix(group: int) -> bytes:
    """Return the bytes after an engine hash in a source's hash: none for group 0, else one."""
    return bytes([group]) if group else b""


def engine_field(engine_hash: int, group: int) -> bytes:
    """Return the field of a source's hash for one engine hash in one KV cache group."""
    return engine_hash.to_bytes(8, "big") + group_suffix(group)


def change_arguments(claim: Claim, change: IndexChange) -> list[bytes | str | int]:
    """Return one change's arguments of apply.lua."""
    arguments: list[bytes | str | int] = [
        claim.stream.name,
        claim.fence,
        change.epoch,
        change.previous_seq,
        change.last_seq,
        repr(change.last_ts),
        change.last_crc,
        change.events,
        b"" if change.groups is None else msgspec.json.encode(change.groups),
        change.degraded,
        change.previous_part,
        change.part,
    ]
    for operation in change.operations:
        arguments += _operation_arguments(operation)
    return arguments


def _operation_arguments(operation: Operation) -> tuple[bytes | str | int, ...]:
    match operation:
        case Store():
            suffix = group_suffix(operation.group)
            kind = "F" if operation.set_only else "S"
            return kind, operation.tier, operation.block_size, suffix, operation.hashes, operation.keys
        case Remove():
            return "R", operation.tier, 0, group_suffix(operation.group), operation.hashes, b""
        case Clear():
            return "C", "", 0, b"", b"", b""


def parse_position(reply: Sequence[Any]) -> StreamPosition | None:
    """Read a stream's hash, as returned by HGETALL; None if there is none. Raise ValueError if it is malformed."""
    fields = dict(zip(reply[::2], reply[1::2], strict=True))
    if not fields:
        return None
    missing = [name for name in ("epoch", "last_seq", "last_ts", "last_crc", "degraded") if name.encode() not in fields]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    crc, started_at = fields[b"last_crc"], fields.get(b"started_at")
    return StreamPosition(
        epoch=int(fields[b"epoch"]),
        last_seq=int(fields[b"last_seq"]),
        part=int(fields.get(b"part", b"0")),
        last_ts=_finite(fields[b"last_ts"]),
        last_crc=int(crc) if crc else None,
        degraded=fields[b"degraded"].decode(),
        block_sizes={name[5:].decode(): int(size) for name, size in fields.items() if name.startswith(b"size:")},
        groups=_parse_groups(fields.get(b"groups")),
        started_at=_finite(started_at) if started_at else None,
        state=_known_state(fields.get(b"state")),
        reason=fields.get(b"reason", b"").decode(),
        namespace=fields.get(b"namespace", b"").decode(),
    )


def _known_state(text: bytes | None) -> SourceState | None:
    try:
        return SourceState(str(text or b"", "utf-8"))
    except ValueError:
        return None


def _parse_groups(text: bytes | None) -> Mapping[int, CacheGroup]:
    try:
        return _groups_json.decode(text) if text else {}
    except msgspec.MsgspecError as error:
        raise ValueError(f"groups: {error}") from error


def parse_version(reply: Sequence[bytes | None]) -> bytes:
    """Join the registry's random nonce and its counter: an emptied and refilled Redis never repeats a version."""
    nonce, counter = reply
    return b"%s.%s" % (nonce or b"", counter or b"0")


def parse_registry(reply: Sequence[Any], is_whole: bool = True) -> Registry:
    """Read the answer of snapshot.lua: nonce, counter, heartbeat, then flat lists of slots and streams.

    Another version or another tenant may have written anything: an unreadable record is left out and named, and so is a
    slot without its stream. The content of a record never raises. If the reply is not `is_whole`, that is, not of one
    instant, such a slot is left out silently.
    """
    nonce, counter, heartbeat, slots, streams = reply
    unreadable: list[str] = []
    stream_records = _readable("stream", _parse_stream, streams, STREAM_FIELDS, unreadable)
    slot_records = _readable("slot", _parse_slot, slots, SLOT_FIELDS, unreadable)
    epochs = {record.stream: record.epoch for record in stream_records}
    believed = []
    for slot in slot_records:
        if epochs.get(slot.stream) == slot.epoch:
            believed.append(slot)
        elif is_whole:
            unreadable.append(f"slot {slot.slot}: belongs to no readable stream's epoch")
    return Registry(
        version=parse_version((nonce, counter)),
        streams=tuple(stream_records),
        slots=tuple(believed),
        indexer_alive=bool(heartbeat),
        unreadable=tuple(unreadable),
    )


def _readable(
    kind: str, parse: Callable[..., Record | None], flat: Sequence[Any], width: int, unreadable: list[str]
) -> list[Record]:
    records = []
    for at in range(0, len(flat), width):
        try:
            record = parse(*flat[at : at + width])
        except (ValueError, TypeError, msgspec.MsgspecError, RecursionError) as error:
            name = flat[at][:SHOWN_LIMIT].decode(errors="backslashreplace")
            unreadable.append(f"{kind} {name}: {str(error)[:SHOWN_LIMIT]}")
        else:
            if record is not None:
                records.append(record)
    return records


def _parse_slot(slot: bytes, record: bytes, blocks: int) -> SlotRecord | None:
    value = _slot_json.decode(record)
    number = int(slot)
    if value.state == "sweeping":
        return None
    of_group = is_of_group(value.tier)  # readers from before groups were indexed leave such a slot out
    checks = (
        (value.state != ("group" if of_group else "live"), f"unknown state {value.state!r}"),
        (of_group and _group_size(value.tier) != value.block_size, "another block size than its group's"),
        (b"%d" % number != slot or not 0 <= number < MAX_SLOTS, f"not a number from 0 to {MAX_SLOTS - 1}"),
        (value.block_size < 1, f"a block size of {value.block_size}"),
        (blocks < 0, "its blocks are not a hash"),
    )
    for failed, why in checks:
        if failed:
            raise ValueError(why)
    return SlotRecord(
        slot=number,
        endpoint=value.endpoint,
        dp_rank=value.rank,
        tier=value.tier,
        epoch=value.epoch,
        block_size=value.block_size,
        blocks=blocks,
    )


def _group_size(tier: str) -> int:
    _, group = read_tier(tier)
    return group.block_size if group is not None else 0


def live_slots(reply: Sequence[bytes]) -> list[bytes]:
    """Return the live slots, from their records as returned by HGETALL; unreadable ones are left out."""
    flat = [part for slot, record in zip(reply[::2], reply[1::2], strict=True) for part in (slot, record, 0)]
    return [b"%d" % record.slot for record in _readable("slot", _parse_slot, flat, SLOT_FIELDS, [])]


def _parse_stream(name: bytes, *fields: Any) -> StreamRecord:
    endpoint, rank, epoch, last_seq, last_ts, state, reason = _present(fields[:7])
    owner, fence, applied_at, events, leased = fields[7:]
    stream = Stream(endpoint=str(endpoint, "utf-8"), dp_rank=int(rank))
    if stream.name.encode() != name:
        raise ValueError(f"describes {stream.name}")
    # the follower writes the state: without one, the last state is stale
    known_state, known_reason = _parse_state(state, reason) if leased else (SourceState.LOST, NOT_FOLLOWED)
    return StreamRecord(
        endpoint=stream.endpoint,
        dp_rank=stream.dp_rank,
        epoch=int(epoch),
        last_seq=int(last_seq),
        last_ts=_finite(last_ts),
        state=known_state,
        reason=known_reason,
        owner=str(owner or b"", "utf-8") if leased else "",
        fence=int(fence or 0),
        applied_at=_finite(applied_at or b"0"),
        events=int(events or 0),
    )


def _present(fields: Sequence[bytes | None]) -> list[bytes]:
    present = [field for field in fields if field is not None]
    if len(present) < len(fields):
        raise ValueError("is missing, no hash, or lacks fields")
    return present


def _parse_state(state: bytes, reason: bytes) -> tuple[SourceState, str]:
    try:
        return SourceState(str(state, "utf-8")), str(reason, "utf-8")
    except ValueError:
        return SourceState.DEGRADED, UNKNOWN_STATE  # its blocks may well be right, but perhaps incomplete


def _finite(text: bytes) -> float:
    number = float(text)
    if not isfinite(number):
        raise ValueError(f"a time of {number}")
    return number

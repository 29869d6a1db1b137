"""Reads everything under our prefix in Redis without trusting it, and checks the records against each other. Pure.

A block key in Redis names the slots that hold it, and a slot's hash names its blocks: each must mirror the other.
Lookups trust the first, removals the second. `redis.keys` writes and reads the same format for the hot paths; this is
an independent second reader of the format in `docs/reference/redis.md`.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.blocks.cache_groups import DENSE_KINDS
from kvmesh.redis.keys import MAX_SLOTS, PREFIX

HASH_BYTES = 8
BLOCKS = PREFIX + b"b"
HELD = PREFIX + b"h"
STREAM = PREFIX + b"stream:"
BITMAP = b"B"
# all other keys that we write
FIXED_KEYS = frozenset(
    PREFIX + name for name in (b"registry", b"slots", b"streams", b"heartbeat", b"indexers", b"pulses", b"findings")
)
KINDS = {
    "extra": "a block key names a source without the block: requests go there in vain",
    "missing": "a source has a block whose key does not name it: a lost hit",
    "leftover": "a block key names a slot without a source, left by the sweep",
    "holders": "an unreadable value of a block key",
    "entry": "an unreadable entry of a source",
    "orphan-slot": "a slot with blocks and without a record; an idle sweep removes it within a minute",
    "unnamed-slot": "a live slot that its stream does not name: its blocks would stay",
    "wrong-slot": "a stream names a slot that is another's, being swept, or missing",
    "stream": "a stream's record is missing or not registered",
    "counter": "a counter is behind its issued numbers: an epoch or a fence could come twice",
    "type": "a key of a wrong type",
    "foreign": "an unknown key under our prefix",
    "unreadable": "a record that readers ignore",
    "unchecked": "too many suspects to check again: mostly differences, or very fast changes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBlock:
    """One field of a source: an engine hash in one group, with its block."""

    block_key: bytes
    in_first_group: bool
    fault: str = ""  # why the entry cannot be correct, or ""


def block_key_of(name: bytes) -> bytes | None:
    """Return the block key in a Redis key's name, or None if it is no block's."""
    return name[len(BLOCKS) :] if name.startswith(BLOCKS) and len(name) == len(BLOCKS) + KEY_BYTES else None


def slot_of(name: bytes) -> int | None:
    """Return the slot in the name of a Redis key for a slot's blocks, or None for any other key."""
    return slot_number(name[len(HELD) :]) if name.startswith(HELD) else None


def slot_number(text: bytes) -> int | None:
    """Read a slot in decimal; only the canonical form counts."""
    if not text.isdigit() or len(text) > 4 or int(text) >= MAX_SLOTS or b"%d" % int(text) != text:
        return None
    return int(text)


def read_holders(value: bytes) -> tuple[frozenset[int], str]:
    """Return the slots that hold a block, and the fault of the value, or ""."""
    slot = slot_number(value)
    if slot is not None:
        return frozenset((slot,)), ""
    if value[:1] != BITMAP:
        return frozenset(), "neither a slot nor a bitmap"
    bits = value[1:]
    slots = frozenset(8 * at + bit for at, byte in enumerate(bits) if byte for bit in range(8) if byte & 0x80 >> bit)
    if any(slot >= MAX_SLOTS for slot in slots):
        return frozenset(slot for slot in slots if slot < MAX_SLOTS), "a bit beyond the last slot"
    if len(slots) < 2:
        return slots, "a bitmap for fewer than two slots"
    return slots, ""


def read_held(field: bytes, value: bytes) -> HeldBlock:
    """Read one field of a source's hash: 8 bytes of engine hash [and a group] -> 8 bytes of block key [and a count]."""
    key, count = value[:KEY_BYTES], value[KEY_BYTES:]
    fault = ""
    if len(field) not in (HASH_BYTES, HASH_BYTES + 1) or field[HASH_BYTES:] == b"\0":
        fault = (
            f"its name has {len(field)} bytes and no group that we know" if len(field) != HASH_BYTES + 1 else "group 0"
        )
    elif len(key) < KEY_BYTES:
        fault = f"its value has only {len(key)} bytes"
    elif count and (not count.isdigit() or count[:1] == b"0" or int(count[:20]) < 2):
        fault = f"a reference count of {count[:20]!r}"
    return HeldBlock(block_key=key, in_first_group=len(field) == HASH_BYTES, fault=fault)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Difference:
    """One inconsistency."""

    kind: str  # a key of KINDS
    where: str
    detail: str = ""


@dataclass(slots=True, kw_only=True)
class Differences:
    """Inconsistencies: all are counted, the first ones listed."""

    limit: int  # on the listed ones
    listed: list[Difference] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, where: str, detail: str = "") -> None:
        """Count one, and list it if there is room."""
        self.counts[kind] += 1
        if len(self.listed) < self.limit:
            self.listed.append(Difference(kind=kind, where=where, detail=detail))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotOwner:
    """The content of a slot's record."""

    stream: str  # HOST:PORT#RANK
    tier: str
    epoch: int
    live: bool

    @property
    def label(self) -> str:
        """Return the source's name for people."""
        return f"{self.stream} {self.tier}" + ("" if self.live else " (waits for its sweep)")


def read_owner(record: bytes) -> SlotOwner | None:
    """Read a slot's record, or return None if it is malformed."""
    try:
        value = json.loads(record)
        owner = SlotOwner(
            stream=f"{value['endpoint']}#{int(value['rank'])}",
            tier=str(value["tier"]),
            epoch=int(value["epoch"]),
            live=value["state"] in {"live", "group"},
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return owner if owner.live or value["state"] == "sweeping" else None


def holds_several_groups(stream: Mapping[str, str]) -> bool:
    """Tell whether several indexed KV cache groups hold the stream's blocks.

    Then the first group that drops a block clears the bit in its block key, while the others still hold it.
    """
    try:
        groups = json.loads(stream.get("groups") or "{}")
        return sum(group.get("kind") in {None, *DENSE_KINDS} for group in groups.values()) > 1
    except (ValueError, AttributeError, TypeError, RecursionError):
        return False


def judge_records(
    *,
    slots: Mapping[int, SlotOwner],
    streams: Mapping[str, Mapping[str, str]],
    held: Mapping[int, int],
    counters: Mapping[str, str],
) -> Iterator[Difference]:
    """Compare the records of slots and streams with each other. `held`: non-empty slot -> its fields, or -1."""
    named: dict[int, set[str]] = {}
    for name, fields in streams.items():
        if "epoch" not in fields:
            yield Difference(kind="stream", where=name, detail="registered, but has no record")
        for slot, tier in _named_slots(fields):
            named.setdefault(slot, set()).add(name)
            yield from _judge_named(name, fields, slot, tier, slots.get(slot))
    for slot, owner in slots.items():
        if owner.live and owner.stream not in named.get(slot, ()):
            yield Difference(kind="unnamed-slot", where=f"{owner.label}, slot {slot}")
    for slot, count in held.items():
        if count < 0:
            yield Difference(kind="type", where=f"slot {slot}", detail="its blocks are not a hash")
        elif slot not in slots:
            yield Difference(kind="orphan-slot", where=f"slot {slot}", detail=f"{count} blocks")
    yield from _judge_counters(streams, counters)


def _judge_counters(streams: Mapping[str, Mapping[str, str]], counters: Mapping[str, str]) -> Iterator[Difference]:
    for counter, of_stream in (("epochs", "epoch"), ("fences", "fence")):
        greatest = max((_number(fields.get(of_stream)) for fields in streams.values()), default=0)
        if _number(counters.get(counter)) < greatest:
            detail = f"{counters.get(counter, 'missing')}, but a stream has {greatest}"
            yield Difference(kind="counter", where=counter, detail=detail)


def _named_slots(fields: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    for field_name, value in fields.items():
        kind, colon, tier = field_name.partition(":")
        if colon and kind in {"slot", "old"}:
            yield _number(value, otherwise=-1), tier


def _judge_named(
    name: str, fields: Mapping[str, str], slot: int, tier: str, owner: SlotOwner | None
) -> Iterator[Difference]:
    if owner is None:
        fault = "has no readable record"
    elif not owner.live:
        fault = "waits for its sweep"
    elif (owner.stream, owner.tier) != (name, tier):
        fault = f"belongs to {owner.label}"
    elif owner.epoch != _number(fields.get("epoch")):
        fault = f"is of epoch {owner.epoch}, the stream of {fields.get('epoch')}"
    else:
        return
    yield Difference(kind="wrong-slot", where=f"{name} {tier}, slot {slot}", detail=fault)


def _number(text: str | None, *, otherwise: int = 0) -> int:
    return int(text) if text and text.isdecimal() and len(text) < 20 else otherwise

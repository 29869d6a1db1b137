"""What is under our prefix in Redis, read key by key without believing any of it. Used by `inspect_index`; no I/O.

`redis_keys` writes and reads the same format for the hot paths; this is a second reading of `docs/redis.md`, for those
who check whether what is there is true.
"""

from dataclasses import dataclass

from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.redis.keys import MAX_SLOTS, PREFIX

HASH_BYTES = 8
BLOCKS = PREFIX + b"b"
HELD = PREFIX + b"h"
STREAM = PREFIX + b"stream:"
BITMAP = b"B"
# everything else that we write
FIXED_KEYS = frozenset(
    PREFIX + name for name in (b"registry", b"slots", b"streams", b"heartbeat", b"indexers", b"findings")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One field of a source: an engine hash in one group, with its block."""

    block_key: bytes
    in_first_group: bool
    fault: str = ""  # why the entry cannot be right, or ""


def block_key_of(name: bytes) -> bytes | None:
    """Return the block key that a Redis key stands for, or None if it stands for something else."""
    return name[len(BLOCKS) :] if name.startswith(BLOCKS) and len(name) == len(BLOCKS) + KEY_BYTES else None


def slot_of(name: bytes) -> int | None:
    """Return the slot whose blocks a Redis key holds, or None if it stands for something else."""
    return slot_number(name[len(HELD) :]) if name.startswith(HELD) else None


def slot_number(text: bytes) -> int | None:
    """Read a slot in decimal, in the one form that counts."""
    if not text.isdigit() or len(text) > 4 or int(text) >= MAX_SLOTS or b"%d" % int(text) != text:
        return None
    return int(text)


def read_holders(value: bytes) -> tuple[frozenset[int], str]:
    """Return the slots that hold a block, and what is wrong with the value, or ""."""
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


def read_held(field: bytes, value: bytes) -> Held:
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
    return Held(block_key=key, in_first_group=len(field) == HASH_BYTES, fault=fault)

"""What Redis really holds, counted from raw keys by the format in docs/reference/redis.md alone."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import redis

PREFIX = b"{kv2}"
GROUP_BYTES = KEY_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """The whole index."""

    held: dict[str, Counter[int]]  # stream -> engine hash -> references, over all of its tiers
    unlike: list[str]  # where block keys and sources contradict each other


def recount(connection: redis.Redis) -> Recount:
    """Read every key of the index."""
    client: Any = connection  # its types are for both text and bytes
    by_source: dict[bytes, set[int]] = {}  # block key -> slots that should hold it
    held: dict[str, Counter[int]] = {}
    for name in client.smembers(PREFIX + b"streams"):
        fields = client.hgetall(PREFIX + b"stream:" + name)
        counts: Counter[int] = held.setdefault(name.decode(), Counter())
        for field, slot in fields.items():
            if not field.startswith((b"slot:", b"old:")):
                continue
            for engine, value in client.hgetall(PREFIX + b"h" + slot).items():
                counts[int.from_bytes(engine[:GROUP_BYTES], "big")] += int(value[KEY_BYTES:] or b"1")
                by_source.setdefault(value[:KEY_BYTES], set()).add(int(slot))
    in_blocks = {key[len(PREFIX) + 1 :]: _slots(client.get(key)) for key in client.scan_iter(PREFIX + b"b" + b"*")}
    in_blocks = {key: slots for key, slots in in_blocks.items() if len(key) == KEY_BYTES}
    unlike = [
        f"{key.hex()}: held by {sorted(by_source.get(key, ()))}, but marked {sorted(in_blocks.get(key, ()))}"
        for key in by_source.keys() | in_blocks.keys()
        if by_source.get(key) != in_blocks.get(key)
    ]
    return Recount(held=held, unlike=sorted(unlike))


def _slots(value: bytes | None) -> set[int]:
    if value is None:  # removed since it was listed; whoever waits for a quiet index counts again
        return set()
    if value.isdigit():
        return {int(value)}
    bits = value[1:]
    return {place for place in range(len(bits) * 8) if bits[place // 8] & 0x80 >> place % 8}

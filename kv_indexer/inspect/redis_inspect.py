"""Reads Redis key by key for the commands `kvmesh index …`, in bounded slices; and clears a stream by hand.

Unlike the reader and the writer it trusts no record. Each slice takes Redis a fraction of a millisecond, so that an
index in use can be inspected.
"""

from collections.abc import AsyncIterator, Mapping, Sequence

from kvmesh.blocks.source import Registry
from kvmesh.redis.keys import MAX_SLOTS, PREFIX, REGISTRY, parse_registry
from kvmesh.redis.link import Argument, RedisCalls, checked, pack
from kvmesh.redis.protocol import unless_other_type
from kvmesh.redis.scripts import ADMIN_CLEAR
from kvmesh.redis.snapshot import read_snapshot

SLICE = 500  # keys or fields per call: at most a millisecond of Redis


class RedisInspector:
    """One connection for one command. Raise RedisUrlError; every method raises IndexUnavailableError."""

    def __init__(self, url: str, *, timeout_seconds: float = 5.0) -> None:
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds)

    async def registry(self) -> Registry:
        """Return the registry as the index records it."""
        return parse_registry(*await read_snapshot(self._redis.request))

    async def now(self) -> float:
        """Return Redis' clock, in unix seconds."""
        return await self._redis.now()

    async def registry_counts(self) -> Mapping[str, str]:
        """Return the counters of the registry."""
        return _texts(await self._hash(REGISTRY))

    async def slot_records(self) -> Mapping[bytes, bytes]:
        """Return the raw records of all slots."""
        return await self._hash(PREFIX + b"slots")

    async def stream_records(self) -> Mapping[str, Mapping[str, str]]:
        """Return the raw fields of all registered streams."""
        names = await self._redis.call("SMEMBERS", PREFIX + b"streams")
        return {_text(name): _texts(await self._hash(PREFIX + b"stream:" + name)) for name in sorted(names)}

    async def marks(self, stream: str | None) -> Sequence[bytes | None]:
        """Return values that change with the blocks of a stream, or with the slots that wait for their sweep."""
        changes = await self._redis.call("HMGET", PREFIX + b"stream:" + (stream or "").encode(), "epoch", "last_seq")
        return [*changes, await self._redis.call("HGET", REGISTRY, "swept")]

    async def held_slots(self) -> Mapping[int, int]:
        """Return the non-empty slots with their number of fields; -1 if the key is not a hash."""
        found = {}
        for first in range(0, MAX_SLOTS, SLICE):
            slots = range(first, min(first + SLICE, MAX_SLOTS))
            commands = b"".join(pack("HLEN", PREFIX + b"h%d" % slot) for slot in slots)
            for slot, count in zip(slots, await self._redis.request(commands, replies=len(slots)), strict=True):
                if count != 0:
                    found[slot] = count if isinstance(count, int) else -1
        return found

    async def keys(self) -> AsyncIterator[list[bytes]]:
        """Yield all key names under our prefix, in slices; one that exists throughout comes at least once."""
        await self._redis.call("EXISTS", REGISTRY)  # in a Cluster: finds the node that has our keys
        cursor: bytes = b"0"
        while True:
            cursor, names = await self._redis.call("SCAN", cursor, "MATCH", PREFIX + b"*", "COUNT", SLICE)
            if names:
                yield names
            if cursor == b"0":
                return

    async def held(self, slot: int) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield all fields of a source, in slices; one that exists throughout comes at least once."""
        cursor: bytes = b"0"
        while True:
            page = unless_other_type(await self._redis.ask("HSCAN", PREFIX + b"h%d" % slot, cursor, "COUNT", SLICE))
            cursor, flat = page or (b"0", [])
            yield list(zip(flat[::2], flat[1::2], strict=True))
            if cursor == b"0":
                return

    async def values(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the strings at these keys; None for a key without one."""
        found: list[bytes | None] = []
        for at in range(0, len(names), SLICE):
            found += await self._redis.call("MGET", *names[at : at + SLICE])
        return found

    async def types(self, names: Sequence[bytes]) -> list[str]:
        """Return the type of each key; `none` if it does not exist."""
        replies = await self._redis.request(b"".join(pack("TYPE", name) for name in names), replies=len(names))
        return [str(checked(reply), "ascii") for reply in replies]

    async def field_and_value(self, slot: int, field: bytes, name: bytes) -> tuple[bytes | None, bytes | None]:
        """Return a source's field and a key's string, both at the same instant."""
        commands = pack("MULTI") + pack("HGET", PREFIX + b"h%d" % slot, field) + pack("GET", name) + pack("EXEC")
        *_, answer = await self._redis.request(commands, replies=4)
        one, other = checked(answer)
        return unless_other_type(one), unless_other_type(other)

    async def sizes(self, names: Sequence[bytes], *, samples: int = 0) -> list[int]:
        """Return the size of each key in bytes, by MEMORY USAGE; 0 if it does not exist."""
        extra: tuple[Argument, ...] = ("SAMPLES", samples) if samples else ()
        commands = b"".join(pack("MEMORY", "USAGE", name, *extra) for name in names)
        return [checked(reply) or 0 for reply in await self._redis.request(commands, replies=len(names))]

    async def some_blocks(self, slot: int, *, count: int) -> list[bytes]:
        """Return up to `count` block keys of a source, picked at random."""
        flat = await self._redis.call("HRANDFIELD", PREFIX + b"h%d" % slot, count, "WITHVALUES")
        return [value[:8] for value in flat[1::2]]

    async def used_memory_bytes(self) -> int:
        """Return the memory use of Redis in total, including other programs' data."""
        text = str(await self._redis.call("INFO", "memory"), "utf-8", "replace")
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return int(facts.get("used_memory", "0"))

    async def clear(self, stream: str) -> int | None:
        """Begin a new epoch of a stream, whichever indexer follows it; return it, or None if the stream is unknown."""
        epoch: int = await self._redis.run(ADMIN_CLEAR, stream)
        return epoch or None

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()

    async def _hash(self, name: bytes) -> Mapping[bytes, bytes]:
        flat = unless_other_type(await self._redis.ask("HGETALL", name)) or []
        return dict(zip(flat[::2], flat[1::2], strict=True))


def _text(value: bytes) -> str:
    return str(value, "utf-8", "backslashreplace")


def _texts(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {_text(name): _text(value) for name, value in fields.items()}

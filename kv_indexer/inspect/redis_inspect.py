"""Reads Redis key by key for the commands `kvmesh index …`, in bounded slices; and clears a stream by hand.

Unlike reader and writer it believes nothing that it finds. Each slice is a fraction of a millisecond for Redis, so that
an index that is in use can be looked at.
"""

from collections.abc import AsyncIterator, Mapping, Sequence

from kvmesh.blocks.source import Registry
from kvmesh.redis.address import RedisAccess
from kvmesh.redis.keys import MAX_SLOTS, PREFIX, REGISTRY, parse_registry
from kvmesh.redis.link import Argument, RedisCalls, checked, pack
from kvmesh.redis.protocol import unless_other_type
from kvmesh.redis.scripts import ADMIN_CLEAR
from kvmesh.redis.snapshot import read_snapshot

SLICE = 500  # keys or fields a call: a millisecond of Redis or less


class RedisInspector:
    """One connection for one command. Raise RedisUrlError; every method raises IndexUnavailableError."""

    def __init__(self, url: RedisAccess | str, *, timeout_seconds: float = 5.0) -> None:
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds)

    async def registry(self) -> Registry:
        """Return what the index says of itself."""
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
        """Return the raw fields of all streams that are registered."""
        names = await self._redis.call("SMEMBERS", PREFIX + b"streams")
        return {_text(name): _texts(await self._hash(PREFIX + b"stream:" + name)) for name in sorted(names)}

    async def marks(self, stream: str | None) -> Sequence[bytes | None]:
        """Return what changes whenever the blocks of a stream do, or those that wait for their sweep."""
        changes = await self._redis.call("HMGET", PREFIX + b"stream:" + (stream or "").encode(), "epoch", "last_seq")
        return [*changes, await self._redis.call("HGET", REGISTRY, "swept")]

    async def held_slots(self) -> Mapping[int, int]:
        """Return the slots that hold anything, with the number of fields; -1 where the key is no hash."""
        found = {}
        for first in range(0, MAX_SLOTS, SLICE):
            slots = range(first, min(first + SLICE, MAX_SLOTS))
            commands = b"".join(pack("HLEN", PREFIX + b"h%d" % slot) for slot in slots)
            for slot, count in zip(slots, await self._redis.request(commands, replies=len(slots)), strict=True):
                if count != 0:
                    found[slot] = count if isinstance(count, int) else -1
        return found

    async def keys(self) -> AsyncIterator[list[bytes]]:
        """Yield all key names under our prefix, in slices; one that is there all along comes at least once."""
        await self._redis.call("EXISTS", REGISTRY)  # in a Cluster: settles which node has our keys
        cursor: bytes = b"0"
        while True:
            cursor, names = await self._redis.call("SCAN", cursor, "MATCH", PREFIX + b"*", "COUNT", SLICE)
            if names:
                yield names
            if cursor == b"0":
                return

    async def held(self, slot: int) -> AsyncIterator[list[tuple[bytes, bytes]]]:
        """Yield all fields of a source, in slices; one that is there all along comes at least once."""
        cursor: bytes = b"0"
        while True:
            page = unless_other_type(await self._redis.ask("HSCAN", PREFIX + b"h%d" % slot, cursor, "COUNT", SLICE))
            cursor, flat = page or (b"0", [])
            yield list(zip(flat[::2], flat[1::2], strict=True))
            if cursor == b"0":
                return

    async def values(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the strings at these keys; None for a key that is none."""
        found: list[bytes | None] = []
        for at in range(0, len(names), SLICE):
            found += await self._redis.call("MGET", *names[at : at + SLICE])
        return found

    async def types(self, names: Sequence[bytes]) -> list[str]:
        """Return the type of each key; `none` where it is gone."""
        replies = await self._redis.request(b"".join(pack("TYPE", name) for name in names), replies=len(names))
        return [str(checked(reply), "ascii") for reply in replies]

    async def field_and_value(self, slot: int, field: bytes, name: bytes) -> tuple[bytes | None, bytes | None]:
        """Return a source's field and a key's string as they are at one instant."""
        commands = pack("MULTI") + pack("HGET", PREFIX + b"h%d" % slot, field) + pack("GET", name) + pack("EXEC")
        *_, answer = await self._redis.request(commands, replies=4)
        one, other = checked(answer)
        return unless_other_type(one), unless_other_type(other)

    async def sizes(self, names: Sequence[bytes], *, samples: int = 0) -> list[int]:
        """Return the bytes that each key takes, by MEMORY USAGE; 0 where it is gone."""
        extra: tuple[Argument, ...] = ("SAMPLES", samples) if samples else ()
        commands = b"".join(pack("MEMORY", "USAGE", name, *extra) for name in names)
        return [checked(reply) or 0 for reply in await self._redis.request(commands, replies=len(names))]

    async def some_blocks(self, slot: int, *, count: int) -> list[bytes]:
        """Return block keys of a source, picked at random; fewer where it has fewer."""
        flat = await self._redis.call("HRANDFIELD", PREFIX + b"h%d" % slot, count, "WITHVALUES")
        return [value[:8] for value in flat[1::2]]

    async def used_memory_bytes(self) -> int:
        """Return what Redis uses in all, for data of anyone."""
        text = str(await self._redis.call("INFO", "memory"), "utf-8", "replace")
        facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        return int(facts.get("used_memory", "0"))

    async def clear(self, stream: str) -> int | None:
        """Begin a new epoch of a stream, whichever indexer follows it; return it, None for an unknown stream."""
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

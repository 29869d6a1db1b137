"""Writes the index in Redis: implements `ports.IndexWriter`.

The Lua files of `kvmesh.redis` ensure atomicity, order, claims and slots; `docs/reference/redis.md` describes the
stored data.
"""

import asyncio
import random
import secrets
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import product
from typing import Any, TypeVar

from kv_indexer.apply.change_plan import cost_of
from kv_indexer.apply.gathered_changes import GatheredChanges
from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.blocks.index_changes import Applied, IndexChange, pack_hashes
from kvmesh.blocks.source import Claim, Registry, SourceState, Stream, StreamPosition
from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.keys import PREFIX, change_arguments, engine_field, live_slots, parse_position, parse_registry
from kvmesh.redis.link import Argument, RedisCalls, raise_if_fenced
from kvmesh.redis.scripts import APPLY, BEGIN_EPOCH, FIND_ELSEWHERE, SET_NAMESPACE, SET_STARTED_AT, SET_STATE, SWEEP
from kvmesh.redis.snapshot import read_snapshot

MAX_BLOCKS_PER_SOURCE = 4_000_000
TIER_TTL_SECONDS = 3600.0
# of a search among other streams: 16 sources times 32 hashes block Redis for about a millisecond
SLOTS_A_CALL, HASHES_A_CALL = 16, 32
SLOTS_A_SEARCH = 256  # in a large index; the next search takes a new sample
SEARCH_PAUSE = 4  # times the duration of the last call: lookups come first
FIELDS_A_CALL = 1000  # of one source: takes half a millisecond

Name = TypeVar("Name")


class RedisIndexWriter:
    """Writes the index; one instance serves all streams of a process. Raise RedisUrlError.

    A source holds `max_blocks_per_source` at most. Blocks of a tier that never reports removals expire after one to two
    times `tier_ttl_seconds`, unless they are stored again.
    """

    def __init__(
        self,
        *,
        url: str,
        timeout_seconds: float = 5.0,
        max_blocks_per_source: int = MAX_BLOCKS_PER_SOURCE,
        tier_ttl_seconds: float = TIER_TTL_SECONDS,
    ) -> None:
        self._redis = RedisCalls(url=url, timeout_seconds=timeout_seconds)
        self._tier_ttl = tier_ttl_seconds
        self._changes = GatheredChanges(partial(self._redis.run, APPLY, max_blocks_per_source, repr(tier_ttl_seconds)))
        self._sweep_cursor: Argument = "0"
        self._sweeper = secrets.token_hex(8)
        self._snapshot: tuple[Sequence[Any], bool] = (), False
        self._registry: Registry | None = None  # parsed from the snapshot

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        return _position(stream, await self._redis.call("HGETALL", _stream_key(stream)))

    async def find_block_keys(self, stream: Stream, hashes: AbstractSet[tuple[int, int]]) -> Mapping[int, bytes]:
        """See `ports.IndexWriter`; the blocks may be in any tier."""
        wanted = sorted(hashes)
        fields = await self._redis.call("HGETALL", _stream_key(stream))
        is_slot = (b"slot:", b"old:")
        slots = [slot for name, slot in zip(fields[::2], fields[1::2], strict=True) if name.startswith(is_slot)]
        names = [engine_field(engine_hash, group) for engine_hash, group in wanted]
        found: dict[int, bytes] = {}
        for slot, at in product(slots, range(0, len(names), FIELDS_A_CALL)):
            values = await self._redis.call("HMGET", PREFIX + b"h" + slot, *names[at : at + FIELDS_A_CALL])
            for (engine_hash, _), key in _block_keys(wanted[at : at + FIELDS_A_CALL], values):
                found.setdefault(engine_hash, key)
        return found

    async def find_block_keys_elsewhere(
        self, stream: Stream, hashes: AbstractSet[int]
    ) -> Mapping[Stream, Mapping[int, bytes]]:
        """See `ports.IndexWriter`; asks in slices, so that lookups need not wait."""
        found: dict[Stream, dict[int, bytes]] = {}
        every = sorted(hashes)
        slots = live_slots(await self._redis.call("HGETALL", PREFIX + b"slots")) if every else []
        if len(slots) > SLOTS_A_SEARCH:
            slots = random.sample(slots, SLOTS_A_SEARCH)
        clock = asyncio.get_running_loop().time
        for first, at in product(range(0, len(slots), SLOTS_A_CALL), range(0, len(every), HASHES_A_CALL)):
            wanted, where = every[at : at + HASHES_A_CALL], slots[first : first + SLOTS_A_CALL]
            began = clock()
            reply = await self._redis.run(FIND_ELSEWHERE, stream.name, pack_hashes(wanted), *where)
            for endpoint, rank, values in reply:
                holder = Stream(endpoint=str(endpoint, "utf-8", "replace"), dp_rank=rank)
                for engine_hash, key in _block_keys(wanted, values):
                    found.setdefault(holder, {}).setdefault(engine_hash, key)
            await asyncio.sleep((clock() - began) * SEARCH_PAUSE)
        return found

    async def apply(self, claim: Claim, change: IndexChange) -> Applied | None:
        """See `ports.IndexWriter`."""
        reply = await self._changes.write(change_arguments(claim, change), cost=cost_of(change.operations))
        raise_if_fenced(claim, reply)
        if reply[0] != 1:
            return None
        left_out = {str(reason, "ascii"): count for reason, count in zip(reply[2][::2], reply[2][1::2], strict=True)}
        return Applied(epoch=reply[1], left_out=left_out)

    async def begin_epoch(
        self, claim: Claim, *, expected_epoch: int, last_seq: int, degraded: str
    ) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        reply = await self._redis.run_claimed(BEGIN_EPOCH, claim, expected_epoch, last_seq, degraded)
        return _position(claim.stream, reply[1])

    async def set_state(self, claim: Claim, *, epoch: int, state: SourceState, reason: str = "") -> None:
        """See `ports.IndexWriter`."""
        await self._redis.run_claimed(SET_STATE, claim, epoch, state.value, reason)

    async def set_started_at(self, claim: Claim, *, started_at: float) -> None:
        """See `ports.IndexWriter`."""
        await self._redis.run_claimed(SET_STARTED_AT, claim, repr(started_at))

    async def set_namespace(self, claim: Claim, *, namespace: str) -> None:
        """See `ports.IndexWriter`."""
        await self._redis.run_claimed(SET_NAMESPACE, claim, namespace)

    async def sweep(self, *, fields: int) -> bool:
        """See `ports.IndexWriter`."""
        reply = await self._redis.run(SWEEP, self._sweep_cursor, fields, repr(self._tier_ttl), self._sweeper)
        self._sweep_cursor = reply[1] if reply else "0"
        return bool(reply)

    async def read_registry(self) -> Registry:
        """See `ports.IndexWriter`."""
        snapshot = await read_snapshot(self._redis.request)
        if self._registry is None or snapshot != self._snapshot:  # with thousands of quiet streams it rarely changes
            self._snapshot, self._registry = snapshot, parse_registry(*snapshot)
        return self._registry

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()
        await self._changes.close()


def _stream_key(stream: Stream) -> bytes:
    return PREFIX + b"stream:" + stream.name.encode()


def _block_keys(names: Sequence[Name], values: Sequence[bytes | None]) -> list[tuple[Name, bytes]]:
    pairs = zip(names, values, strict=True)
    return [(name, value[:KEY_BYTES]) for name, value in pairs if value is not None and len(value) >= KEY_BYTES]


def _position(stream: Stream, reply: Sequence[Any]) -> StreamPosition | None:
    try:
        return parse_position(reply)
    except ValueError as error:
        # perhaps written by a newer version: do not overwrite it
        raise IndexUnavailableError(f"Redis has a record of {stream.name} that cannot be read: {error}") from error

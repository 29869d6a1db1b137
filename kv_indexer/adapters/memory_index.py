"""The whole index in one process's memory: the twin of the Redis reader and writer, held to the same contract suite.

For tests, for experiments, and as the plain statement of what the Lua scripts must do. Not shared, not durable.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from kv_indexer.core.block_keys import TOKEN_BYTES, block_keys, split_keys
from kv_indexer.core.index_changes import Clear, IndexChange, Remove, Store
from kv_indexer.core.prefix_match import PrefixLookup, match_table, prefix_lookup, runs_of, usable_tokens
from kv_indexer.core.source import (
    IndexStatus,
    Registry,
    SlotRecord,
    SourceState,
    SourceStatus,
    Stream,
    StreamPosition,
    StreamRecord,
)
from kv_indexer.ports import Applied

Field = tuple[bytes, int]  # (engine hash, group)


@dataclass(slots=True, kw_only=True)
class _Slot:
    stream: Stream
    tier: str
    epoch: int
    block_size: int
    live: bool = True
    held: dict[Field, tuple[bytes, int]] = field(default_factory=dict)  # -> (block key, references)


@dataclass(slots=True, kw_only=True)
class _Entry:
    position: StreamPosition
    state: SourceState = SourceState.REPLAYING
    reason: str = ""
    slots: dict[str, int] = field(default_factory=dict)  # tier -> slot


class MemoryPrefixIndex:
    """Implements `ports.IndexWriter` and the reader's methods; `indexer_alive` may be set at any time."""

    def __init__(self, *, hash_seed: str = "kvmesh", indexer_alive: bool = True) -> None:
        self.hash_seed = hash_seed
        self.indexer_alive = indexer_alive
        self._streams: dict[Stream, _Entry] = {}
        self._slots: dict[int, _Slot] = {}
        self._bitmaps: dict[bytes, bytearray] = {}
        self._epochs = 0
        self._version = 0

    async def lookup(self, tokens: bytes, *, root: bytes) -> PrefixLookup:
        """See `PrefixIndexReader`."""
        table = match_table(await self.read_registry())
        usable = memoryview(tokens)[: usable_tokens(tokens) * TOKEN_BYTES]
        runs = {}
        for size in table.masks:
            keys = split_keys(block_keys(usable, block_size=size, parent=root))
            runs[size] = runs_of(bytes(self._bitmaps.get(key, b"")) for key in keys)
        return prefix_lookup(table, runs)

    async def sources(self) -> list[SourceStatus]:
        """See `PrefixIndexReader`."""
        return (await self.read_registry()).sources()

    async def status(self) -> IndexStatus:
        """See `PrefixIndexReader`."""
        return (await self.read_registry()).status()

    async def close(self) -> None:
        """Do nothing."""

    async def heartbeat(self) -> None:
        """Say that an indexer is alive; here it stays so until `indexer_alive` is set."""
        self.indexer_alive = True

    async def open_stream(self, stream: Stream) -> StreamPosition:
        """See `ports.IndexWriter`."""
        if stream not in self._streams:
            self._epochs += 1
            self._streams[stream] = _Entry(position=StreamPosition(epoch=self._epochs))
            self._version += 1
        return self._streams[stream].position

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        entry = self._streams.get(stream)
        return entry.position if entry else None

    async def find_block_keys(self, stream: Stream, hashes: AbstractSet[tuple[int, int]]) -> Mapping[int, bytes]:
        """See `ports.IndexWriter`."""
        found: dict[int, bytes] = {}
        entry = self._streams.get(stream)
        for slot in entry.slots.values() if entry else ():
            held = self._slots[slot].held
            for engine_hash, group in hashes:
                value = held.get((engine_hash.to_bytes(8, "big"), group))
                if value is not None:
                    found.setdefault(engine_hash, value[0])
        return found

    async def apply(self, stream: Stream, change: IndexChange) -> Applied | None:
        """See `ports.IndexWriter`."""
        entry = self._streams.get(stream)
        if entry is None or (entry.position.epoch, entry.position.last_seq) != (change.epoch, change.previous_seq):
            return None
        for operation in change.operations:
            match operation:
                case Store():
                    self._store(stream, entry, operation)
                case Remove():
                    self._remove(entry, operation)
                case Clear():
                    self._new_epoch(entry, last_seq=change.previous_seq)
        entry.position = replace(
            entry.position, last_seq=change.last_seq, last_ts=change.last_ts, last_crc=change.last_crc
        )
        return Applied(epoch=entry.position.epoch, left_out=0)

    async def begin_epoch(
        self, stream: Stream, *, expected_epoch: int, last_seq: int, degraded: str
    ) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        entry = self._streams.get(stream)
        if entry is None:
            return None
        if entry.position.epoch == expected_epoch:
            self._new_epoch(entry, last_seq=last_seq)
            entry.position = replace(entry.position, degraded=degraded)
        return entry.position

    async def set_state(
        self, stream: Stream, *, epoch: int, state: SourceState, reason: str = "", degraded: str = ""
    ) -> None:
        """See `ports.IndexWriter`."""
        entry = self._streams.get(stream)
        if entry is None or entry.position.epoch != epoch:
            return
        if degraded:
            entry.position = replace(entry.position, degraded=degraded)
        entry.state, entry.reason = state, reason
        self._version += 1

    async def drop_stream(self, stream: Stream) -> None:
        """See `ports.IndexWriter`."""
        entry = self._streams.pop(stream, None)
        if entry is not None:
            self._retire(entry)

    async def sweep(self, *, fields: int) -> bool:
        """See `ports.IndexWriter`."""
        number = next((number for number in sorted(self._slots) if not self._slots[number].live), None)
        if number is None:
            return False
        held = self._slots[number].held
        for name in list(held)[:fields]:
            self._clear_bit(held.pop(name)[0], number)
        if not held:
            del self._slots[number]
        return True

    async def read_registry(self) -> Registry:
        """See `ports.IndexWriter`."""
        return Registry(
            version=b"%d" % self._version,
            streams=tuple(_stream_record(stream, entry) for stream, entry in self._streams.items()),
            slots=tuple(_slot_record(number, slot) for number, slot in sorted(self._slots.items()) if slot.live),
            indexer_alive=self.indexer_alive,
        )

    def _store(self, stream: Stream, entry: _Entry, operation: Store) -> None:
        number = entry.slots.get(operation.tier)
        if number is None:
            number = next(free for free in range(len(self._slots) + 1) if free not in self._slots)
            self._slots[number] = _Slot(
                stream=stream,
                tier=operation.tier,
                epoch=entry.position.epoch,
                block_size=operation.block_size,
            )
            entry.slots[operation.tier] = number
            sizes = {**entry.position.block_sizes, operation.tier: operation.block_size}
            entry.position = replace(entry.position, block_sizes=sizes)
            self._version += 1
        held = self._slots[number].held
        for engine_hash, key in zip(split_keys(operation.hashes), split_keys(operation.keys), strict=True):
            name = (engine_hash, operation.group)
            if name in held:
                held[name] = (held[name][0], held[name][1] + 1)
            else:
                held[name] = (key, 1)
                bitmap = self._bitmaps.setdefault(key, bytearray())
                bitmap.extend(bytes(max(number // 8 + 1 - len(bitmap), 0)))
                bitmap[number // 8] |= 0x80 >> number % 8

    def _remove(self, entry: _Entry, operation: Remove) -> None:
        number = entry.slots.get(operation.tier)
        if number is None:
            return
        held = self._slots[number].held
        for engine_hash in split_keys(operation.hashes):
            name = (engine_hash, operation.group)
            key, references = held.get(name, (b"", 0))
            if references > 1:
                held[name] = (key, references - 1)
            elif references == 1:
                del held[name]
                self._clear_bit(key, number)

    def _clear_bit(self, key: bytes, number: int) -> None:
        bitmap = self._bitmaps.get(key)
        if bitmap is None or len(bitmap) <= number // 8:
            return
        bitmap[number // 8] &= ~(0x80 >> number % 8) & 0xFF
        if not any(bitmap):
            del self._bitmaps[key]

    def _new_epoch(self, entry: _Entry, *, last_seq: int) -> None:
        self._retire(entry)
        self._epochs += 1
        entry.position = StreamPosition(epoch=self._epochs, last_seq=last_seq)

    def _retire(self, entry: _Entry) -> None:
        for number in entry.slots.values():
            self._slots[number].live = False
        entry.slots.clear()
        self._version += 1


def _stream_record(stream: Stream, entry: _Entry) -> StreamRecord:
    return StreamRecord(
        endpoint=stream.endpoint,
        dp_rank=stream.dp_rank,
        epoch=entry.position.epoch,
        last_seq=entry.position.last_seq,
        last_ts=entry.position.last_ts,
        state=entry.state,
        reason=entry.reason,
    )


def _slot_record(number: int, slot: _Slot) -> SlotRecord:
    return SlotRecord(
        slot=number,
        endpoint=slot.stream.endpoint,
        dp_rank=slot.stream.dp_rank,
        tier=slot.tier,
        epoch=slot.epoch,
        block_size=slot.block_size,
        blocks=len(slot.held),
    )

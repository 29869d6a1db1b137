"""The whole index in one process's memory: the twin of the index in Redis.

Both pass the same contract suite. For tests, and as a plain statement of the Lua scripts' effect.
Not shared, not durable. `kv_memory_leases` is the twin of the indexers' leases.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvmesh.blocks.block_keys import TOKEN_BYTES, BlockExtras, block_keys, split_keys
from kvmesh.blocks.cache_groups import read_tier
from kvmesh.blocks.index_changes import Applied, Clear, IndexChange, Operation, Remove, Store
from kvmesh.blocks.source import (
    NOT_FOLLOWED,
    Claim,
    IndexStatus,
    Registry,
    SlotRecord,
    SourceState,
    SourceStatus,
    Stream,
    StreamPosition,
    StreamRecord,
)
from kvmesh.errors import LeaseLostError
from kvmesh.index.prefix_match import (
    GPU,
    MatchTable,
    PrefixLookup,
    PrefixWalk,
    held_runs,
    match_table,
    prefix_lookup,
    runs_of,
    usable_tokens,
)

Field = tuple[bytes, int]  # (engine hash, group)
FOR_GOOD = float("inf")
SOURCE_FULL, NO_FREE_SLOT, SLOT_SHARE = "source-full", "no-free-slot", "slot-share"


@dataclass(slots=True, kw_only=True)
class _Slot:
    stream: Stream
    tier: str
    epoch: int
    block_size: int
    live: bool = True
    held: dict[Field, tuple[bytes, int]] = field(default_factory=dict)  # -> (block key, references)


@dataclass(slots=True, kw_only=True)
class _Tier:
    """A tier's slots: the current one for stores, and the generation before it."""

    slot: int | None = None
    old: int | None = None
    since: float = 0.0  # the twin's clock
    removes: bool = False  # a removal was seen in this epoch

    def slots(self) -> list[int]:
        return [slot for slot in (self.slot, self.old) if slot is not None]


@dataclass(slots=True, kw_only=True)
class _Entry:
    position: StreamPosition
    state: SourceState = SourceState.REPLAYING
    reason: str = ""
    owner: str = ""
    fence: int = 0
    lease_until: float = 0.0
    applied_at: float = 0.0
    events: int = 0
    tiers: dict[str, _Tier] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedIndexer:
    """An indexer's last record: until when it is alive, which pods it lists, and which streams it could follow."""

    until: float
    endpoints: frozenset[str]
    streams: frozenset[Stream]


class MemoryPrefixIndex:
    """Implements `ports.IndexWriter` and the reader's methods; `indexer_alive` may be set at any time."""

    def __init__(
        self,
        *,
        hash_seed: str = "kvmesh",
        indexer_alive: bool = True,
        clock: Callable[[], float] = lambda: 0.0,
        max_blocks_per_source: int = 4_000_000,
        tier_ttl_seconds: float = 3600.0,
        max_slots: int = 4096,
        slots_a_pod: int = 64,
    ) -> None:
        """`clock` (seconds) stands for Redis' clock: leases and generations are judged by it.

        Once half of the slots are taken, a pod that has `slots_a_pod` gets no more.
        """
        self.hash_seed = hash_seed
        self.indexer_alive = indexer_alive
        self.swept = 0  # blocks of retired slots cleaned so far
        self.clock = clock
        self.entries: dict[Stream, _Entry] = {}
        self.indexers: dict[str, ListedIndexer] = {}  # written by the lease books
        self.pulses: dict[str, float] = {}  # indexer -> until when it counts as alive; without an entry it is alive
        self._max_blocks = max_blocks_per_source
        self._tier_ttl = tier_ttl_seconds
        self._max_slots = max_slots
        self._slots_a_pod = slots_a_pod
        self._slots: dict[int, _Slot] = {}
        self._holders: dict[bytes, set[int]] = {}  # block key -> slots
        self._epochs = self._fences = self._version = 0

    async def lookup(self, tokens: bytes, *, root: bytes, extra: BlockExtras | None = None) -> PrefixLookup:
        """See `PrefixIndexReader`; without Redis there are no commands to pass through."""
        table = match_table(await self.read_registry())
        usable = memoryview(tokens)[: usable_tokens(tokens) * TOKEN_BYTES]
        keys = {
            size: block_keys(usable, block_size=size, parent=root, extra=extra(size) if extra else None)
            for size in table.masks.keys() | table.apart
        }
        values = {
            size: [bitmap(self._holders.get(key, ())) for key in split_keys(packed)] for size, packed in keys.items()
        }
        return match_prompt(table, values, keys={size: keys[size] for size in table.masks})

    async def sources(self) -> list[SourceStatus]:
        """See `PrefixIndexReader`."""
        return (await self.read_registry()).sources()

    async def status(self) -> IndexStatus:
        """See `PrefixIndexReader`."""
        return (await self.read_registry()).status()

    async def close(self) -> None:
        """Do nothing."""

    async def claim(self, stream: Stream) -> Claim:
        """Take a stream for ever and mark it live, as an indexer does for two seconds; for tests and experiments."""
        claim = self.take(stream, owner="memory", until=FOR_GOOD)
        self.entries[stream].state = SourceState.LIVE
        return claim

    def register(self, stream: Stream) -> None:
        """Register the stream."""
        if stream not in self.entries:
            self._epochs += 1
            self.entries[stream] = _Entry(position=StreamPosition(epoch=self._epochs), lease_until=self.clock())
            self._version += 1

    def take(self, stream: Stream, *, owner: str, until: float) -> Claim:
        """Give the stream to `owner` under a fence greater than all before."""
        self.register(stream)
        entry = self.entries[stream]
        self._fences += 1
        entry.owner, entry.fence, entry.lease_until = owner, self._fences, until
        if entry.state is not SourceState.LOST:  # its claims are stale until the new follower reports otherwise
            entry.state, entry.reason = SourceState.REPLAYING, ""
            self._version += 1
        return Claim(stream=stream, fence=entry.fence)

    def held_until(self, entry: _Entry, *, by_itself: str = "") -> float:
        """Return until when a stream is its owner's: a lease ends with the owner's pulse, unless the owner asks."""
        beats_until = FOR_GOOD if entry.owner == by_itself else self.pulses.get(entry.owner, FOR_GOOD)
        return min(entry.lease_until, beats_until)

    def lose(self, stream: Stream, reason: str) -> None:
        """Mark a stream that no indexer follows."""
        entry = self.entries[stream]
        entry.state, entry.reason = SourceState.LOST, reason
        self._version += 1

    def drop(self, stream: Stream) -> None:
        """Forget the stream and void its claims."""
        entry = self.entries.pop(stream, None)
        if entry is not None:
            self._retire(entry)

    def held_by(self, claim: Claim) -> _Entry:
        """Return the claim's stream entry. Raise LeaseLostError."""
        entry = self.entries.get(claim.stream)
        if entry is None or entry.fence != claim.fence or entry.lease_until <= self.clock():
            raise LeaseLostError(f"{claim.stream.name} is not ours any more (fence {claim.fence})")
        return entry

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        entry = self.entries.get(stream)
        return _position(entry) if entry else None

    async def find_block_keys(self, stream: Stream, hashes: AbstractSet[tuple[int, int]]) -> Mapping[int, bytes]:
        """See `ports.IndexWriter`."""
        found: dict[int, bytes] = {}
        entry = self.entries.get(stream)
        for number in [slot for tier in entry.tiers.values() for slot in tier.slots()] if entry else ():
            held = self._slots[number].held
            for engine_hash, group in hashes:
                value = held.get((engine_hash.to_bytes(8, "big"), group))
                if value is not None:
                    found.setdefault(engine_hash, value[0])
        return found

    async def find_block_keys_elsewhere(
        self, stream: Stream, hashes: AbstractSet[int]
    ) -> Mapping[Stream, Mapping[int, bytes]]:
        """See `ports.IndexWriter`."""
        wanted = {(engine_hash, 0) for engine_hash in hashes}
        found = {other: await self.find_block_keys(other, wanted) for other in self.entries if other != stream}
        return {other: keys for other, keys in found.items() if keys}

    async def apply(self, claim: Claim, change: IndexChange) -> Applied | None:
        """See `ports.IndexWriter`."""
        entry = self.held_by(claim)
        at = entry.position
        if (at.epoch, at.last_seq, at.part) != (change.epoch, change.previous_seq, change.previous_part):
            return None
        left_out: dict[str, int] = {}
        doubt = ""
        for operation in change.operations:
            reason = self._operate(claim.stream, entry, operation, change)
            doubt = "" if isinstance(operation, Clear) else doubt or reason
            if reason:
                left_out[reason] = left_out.get(reason, 0) + 1
        self._mark(entry, change.degraded or doubt)
        entry.position = replace(
            entry.position,
            last_seq=change.last_seq,
            part=change.part,
            last_ts=change.last_ts,
            last_crc=change.last_crc,
            groups=entry.position.groups if change.groups is None else dict(change.groups),
        )
        entry.applied_at, entry.events = self.clock(), entry.events + change.events
        return Applied(epoch=entry.position.epoch, left_out=left_out)

    async def begin_epoch(
        self, claim: Claim, *, expected_epoch: int, last_seq: int, degraded: str
    ) -> StreamPosition | None:
        """See `ports.IndexWriter`."""
        entry = self.held_by(claim)
        if entry.position.epoch == expected_epoch:
            self._new_epoch(entry, last_seq=last_seq)
            entry.position = replace(entry.position, degraded=degraded, groups={})
        return _position(entry)

    async def set_state(self, claim: Claim, *, epoch: int, state: SourceState, reason: str = "") -> None:
        """See `ports.IndexWriter`."""
        entry = self.held_by(claim)
        if entry.position.epoch != epoch:
            return
        entry.state, entry.reason = state, reason
        self._version += 1

    async def set_started_at(self, claim: Claim, *, started_at: float) -> None:
        """See `ports.IndexWriter`."""
        entry = self.held_by(claim)
        entry.position = replace(entry.position, started_at=started_at)

    async def set_namespace(self, claim: Claim, *, namespace: str) -> None:
        """See `ports.IndexWriter`."""
        entry = self.held_by(claim)
        entry.position = replace(entry.position, namespace=namespace)

    async def sweep(self, *, fields: int) -> bool:
        """See `ports.IndexWriter`."""
        self._age()
        number = next((number for number in sorted(self._slots) if not self._slots[number].live), None)
        if number is None:
            return False
        held = self._slots[number].held
        for name in list(held)[:fields]:
            self._release_block(held.pop(name)[0], number)
            self.swept += 1
        if not held:
            del self._slots[number]
        return True

    async def read_registry(self) -> Registry:
        """See `ports.IndexWriter`."""
        now = self.clock()
        return Registry(
            version=b"%d" % self._version,
            streams=tuple(
                _stream_record(stream, entry, is_followed=self.held_until(entry) > now)
                for stream, entry in self.entries.items()
            ),
            slots=tuple(_slot_record(number, slot) for number, slot in sorted(self._slots.items()) if slot.live),
            indexer_alive=self.indexer_alive,
        )

    def _mark(self, entry: _Entry, doubt: str) -> None:
        """Mark this epoch as inexact, until the next one."""
        if doubt and not entry.position.degraded:
            entry.position = replace(entry.position, degraded=doubt)
            if entry.state is SourceState.LIVE:
                entry.state, entry.reason = SourceState.DEGRADED, doubt
                self._version += 1

    def _operate(self, stream: Stream, entry: _Entry, operation: Operation, change: IndexChange) -> str:
        """Apply one operation; return why it was left out, in part or completely, or ''."""
        match operation:
            case Store():
                tier = entry.tiers.setdefault(operation.tier, _Tier())
                self._rotate_if_due(tier, operation.tier)
                if tier.slot is None:
                    if reason := self._refuse_slot(stream):
                        return reason
                    tier.slot, tier.since = self._take_slot(stream, entry, operation), self.clock()
                return self._store(tier.slot, operation)
            case Remove():
                self._remove(entry.tiers.setdefault(operation.tier, _Tier()), operation)
            case Clear():
                self._new_epoch(entry, last_seq=change.previous_seq)
        return ""

    def _refuse_slot(self, stream: Stream) -> str:
        """Return why a stream gets no more slots, or ''; Redis need not be asked again within a second."""
        if len(self._slots) >= self._max_slots:
            return NO_FREE_SLOT
        own = sum(slot.stream.endpoint == stream.endpoint for slot in self._slots.values())
        return SLOT_SHARE if len(self._slots) >= self._max_slots // 2 and own >= self._slots_a_pod else ""

    def _take_slot(self, stream: Stream, entry: _Entry, operation: Store) -> int:
        number = next(free for free in range(len(self._slots) + 1) if free not in self._slots)
        epoch = entry.position.epoch
        self._slots[number] = _Slot(stream=stream, tier=operation.tier, epoch=epoch, block_size=operation.block_size)
        sizes = {**entry.position.block_sizes, operation.tier: operation.block_size}
        entry.position = replace(entry.position, block_sizes=sizes)
        self._version += 1
        return number

    def _store(self, number: int, operation: Store) -> str:
        held, reason = self._slots[number].held, ""
        for engine_hash, key in zip(split_keys(operation.hashes), split_keys(operation.keys), strict=True):
            name = (engine_hash, operation.group)
            if name in held:
                held[name] = (held[name][0], held[name][1] + (not operation.set_only))
            elif len(held) >= self._max_blocks:
                reason = SOURCE_FULL
            else:
                held[name] = (key, 1)
                self._holders.setdefault(key, set()).add(number)
        return reason

    def _remove(self, tier: _Tier, operation: Remove) -> None:
        tier.removes = True
        if tier.old is not None:  # it never saw removals, so it is void from now on
            self._slots[tier.old].live = False
            tier.old = None
            self._version += 1
        if tier.slot is None:
            return
        held = self._slots[tier.slot].held
        for engine_hash in split_keys(operation.hashes):
            name = (engine_hash, operation.group)
            key, references = held.get(name, (b"", 0))
            if references > 1:
                held[name] = (key, references - 1)
            elif references == 1:
                del held[name]
                self._release_block(key, tier.slot)

    def _rotate_if_due(self, tier: _Tier, name: str) -> None:
        if read_tier(name)[0] == GPU or tier.removes or tier.slot is None or self.clock() - tier.since < self._tier_ttl:
            return
        if tier.old is not None:
            self._slots[tier.old].live = False
            self._version += 1
        tier.old, tier.slot, tier.since = tier.slot, None, self.clock()

    def _age(self) -> None:
        """Age tiers that never report removals, even if nothing is stored any more."""
        for entry in self.entries.values():
            for name, tier in entry.tiers.items():
                is_idle = tier.slot is None and tier.old is not None and not tier.removes
                if is_idle and self.clock() - tier.since >= self._tier_ttl:
                    self._slots[tier.old].live = False  # type: ignore[index]
                    tier.old = None
                    self._version += 1
                self._rotate_if_due(tier, name)

    def _release_block(self, key: bytes, number: int) -> None:
        holders = self._holders.get(key, set())
        holders.discard(number)
        if not holders:
            self._holders.pop(key, None)

    def _new_epoch(self, entry: _Entry, *, last_seq: int) -> None:
        self._retire(entry)
        self._epochs += 1
        before = entry.position
        entry.position = StreamPosition(
            epoch=self._epochs,
            last_seq=last_seq,
            groups=before.groups,
            started_at=before.started_at,
            namespace=before.namespace,
        )

    def _retire(self, entry: _Entry) -> None:
        for number in [slot for tier in entry.tiers.values() for slot in tier.slots()]:
            self._slots[number].live = False
        entry.tiers.clear()
        self._version += 1


def bitmap(slots: AbstractSet[int] | tuple[()]) -> bytes | None:
    """Return Redis' value for a block that these slots hold."""
    if len(slots) < 2:
        return b"%d" % min(slots) if slots else None
    value = bytearray(max(slots) // 8 + 1)
    for slot in slots:
        value[slot // 8] |= 0x80 >> slot % 8
    return b"B" + value


def _position(entry: _Entry) -> StreamPosition:
    return replace(entry.position, state=entry.state, reason=entry.reason)


def _stream_record(stream: Stream, entry: _Entry, *, is_followed: bool) -> StreamRecord:
    return StreamRecord(
        endpoint=stream.endpoint,
        dp_rank=stream.dp_rank,
        epoch=entry.position.epoch,
        last_seq=entry.position.last_seq,
        last_ts=entry.position.last_ts,
        state=entry.state if is_followed else SourceState.LOST,
        reason=entry.reason if is_followed else NOT_FOLLOWED,
        owner=entry.owner if is_followed else "",
        fence=entry.fence,
        applied_at=entry.applied_at,
        events=entry.events,
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


def match_prompt(
    table: MatchTable, values: Mapping[int, Sequence[bytes | None]], *, keys: Mapping[int, bytes] | None = None
) -> PrefixLookup:
    """Match a prompt with all values at hand (`values`: block size -> values)."""
    walks = {
        size: PrefixWalk(streams, width=table.width, has_groups=size in table.grouped)
        for size, streams in table.masks.items()
    }
    for size, walk in walks.items():
        walk.feed(runs_of(values.get(size, ())))
    apart = {size: held_runs(runs_of(values.get(size, ())), width=table.width) for size in table.apart}
    return prefix_lookup(table, walks, keys=keys or {}, apart=apart)

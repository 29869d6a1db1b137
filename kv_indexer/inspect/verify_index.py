"""Is every claim of the index backed by the sources' records, and the other way round?

Everything is read from raw keys, in bounded slices, and each pass covers a part of the block keys: so neither Redis nor
this process is strained by a large index. The index may be in use: an apparent difference is read again until it is
certain or gone. Nothing is changed.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_indexer.inspect.index_audit import (
    BLOCKS,
    FIXED_KEYS,
    STREAM,
    Difference,
    Differences,
    SlotOwner,
    block_key_of,
    holds_several_groups,
    judge_records,
    read_held,
    read_holders,
    read_owner,
    slot_number,
    slot_of,
)
from kv_indexer.inspect.redis_inspect import RedisInspector
from kvmesh.redis.keys import PICKERS

LISTED = 100  # differences
FIELDS_A_PASS = 1_000_000  # about 200 MB of our memory
CANDIDATES = 20_000  # differences to read again; any more are counted as they are
ROUNDS = 10  # readings that a difference must survive if nothing proves it at once
PAUSE_SECONDS = 0.05  # between two readings

Candidate = tuple[bytes, int]  # (block key, slot)


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The extent of a recount, and the inconsistencies found."""

    sources: int
    block_keys: int
    held_blocks: int  # of all sources, including slots that wait for their sweep
    waiting_for_sweep: int  # slots
    partial_blocks: int  # held by some of a source's KV cache groups only: rightly not named by their block key
    passes: int
    looked_at_again: int  # apparent differences, most of them because the index was in use
    counts: Mapping[str, int]  # kind -> differences
    listed: Sequence[Difference]  # the first differences


@dataclass(slots=True, kw_only=True)
class _Suspects:
    pairs: list[Candidate] = field(default_factory=list)
    surplus: int = 0  # beyond those to read again

    def add(self, pair: Candidate) -> None:
        if len(self.pairs) < CANDIDATES:
            self.pairs.append(pair)
        else:
            self.surplus += 1


class IndexVerifier:
    """One recount of one index."""

    def __init__(
        self,
        index: RedisInspector,
        *,
        listed: int = LISTED,
        fields_a_pass: int = FIELDS_A_PASS,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._index = index
        self._differences = Differences(limit=listed)
        self._fields_a_pass = fields_a_pass
        self._pause = pause
        self._progress = progress
        self._owners: dict[int, SlotOwner] = {}
        self._several_groups: set[int] = set()  # slots whose blocks are held by several KV cache groups
        self._block_keys = 0
        self._held_blocks = 0
        self._partial = 0
        self._looked_at_again = 0

    async def verify(self) -> Audit:
        """Recount everything. Raise IndexUnavailableError."""
        await self._verify_records()
        held = await self._index.held_slots()
        passes = max(1, -(-sum(count for count in held.values() if count > 0) // self._fields_a_pass))
        for number in range(passes):
            self._progress(f"pass {number + 1} of {passes}")
            suspects = await self._compare(sorted(held), number, passes)
            await self._look_again(suspects)
        return Audit(
            sources=sum(owner.live for owner in self._owners.values()),
            block_keys=self._block_keys,
            held_blocks=self._held_blocks,
            waiting_for_sweep=sum(not owner.live for owner in self._owners.values()),
            partial_blocks=self._partial,
            passes=passes,
            looked_at_again=self._looked_at_again,
            counts=dict(sorted(self._differences.counts.items())),
            listed=tuple(self._differences.listed),
        )

    async def _verify_records(self) -> None:
        """Check the records of slots and streams; only lasting differences count: they are not read at one instant."""
        lasting = set(await self._judge_records())
        for _ in range(ROUNDS - 1):
            if not lasting:
                return
            await self._pause(PAUSE_SECONDS)
            lasting &= set(await self._judge_records())
        for difference in sorted(lasting):
            self._differences.add(difference.kind, difference.where, difference.detail)

    async def _judge_records(self) -> list[Difference]:
        streams = await self._index.stream_records()
        held = await self._index.held_slots()
        await self._read_owners()
        self._several_groups |= {
            slot for slot, owner in self._owners.items() if holds_several_groups(streams.get(owner.stream, {}))
        }
        unreadable = (await self._index.registry()).unreadable
        return [
            *judge_records(
                slots=self._owners, streams=streams, held=held, counters=await self._index.registry_counts()
            ),
            *(Difference(kind="unreadable", where=text) for text in unreadable),
        ]

    async def _read_owners(self) -> None:
        records = await self._index.slot_records()
        pairs = ((slot_number(slot), read_owner(record)) for slot, record in records.items())
        self._owners = {slot: owner for slot, owner in pairs if slot is not None and owner is not None}

    async def _compare(self, slots: Sequence[int], number: int, passes: int) -> _Suspects:
        backed = await self._read_sources(slots, number, passes)
        suspects = _Suspects()
        done: set[bytes] = set()  # SCAN may return a key more than once
        async for names in self._index.keys():
            if number == 0:
                await self._judge_names(names)
            wanted = {
                key: name for name in names if (key := block_key_of(name)) is not None and _part(key, passes) == number
            }
            fresh = [(key, name) for key, name in wanted.items() if key not in done]
            done.update(key for key, _ in fresh)
            values = await self._index.values([name for _, name in fresh])
            await self._judge_types([name for (_, name), value in zip(fresh, values, strict=True) if value is None])
            for (key, _), value in zip(fresh, values, strict=True):
                if value is not None:
                    self._compare_block(key, value, backed.pop(key, frozenset()), suspects)
        for key, holders in backed.items():
            for slot in holders:
                suspects.add((key, slot))
        self._block_keys += len(done)
        return suspects

    async def _read_sources(self, slots: Sequence[int], number: int, passes: int) -> dict[bytes, frozenset[int]]:
        backed: dict[bytes, frozenset[int]] = {}
        alone = {slot: frozenset((slot,)) for slot in slots}  # nearly all blocks have one holder: they share one object
        for slot in slots:
            seen: set[bytes] = set()  # HSCAN may return a field more than once
            async for page in self._index.held(slot):
                for field_name, value in page:
                    entry = read_held(field_name, value)
                    if not entry.in_first_group:
                        self._several_groups.add(slot)
                    if number == 0 and field_name not in seen:
                        self._held_blocks += 1
                        if entry.fault:
                            where = f"{self._label(slot)}, {field_name.hex()}"
                            self._differences.add("entry", where, entry.fault)
                    seen.add(field_name)
                    if len(entry.block_key) == 8 and _part(entry.block_key, passes) == number:
                        before = backed.get(entry.block_key)
                        backed[entry.block_key] = alone[slot] if before is None else before | alone[slot]
        return backed

    def _compare_block(self, key: bytes, value: bytes, backed: frozenset[int], suspects: _Suspects) -> None:
        holders, fault = read_holders(value)
        if fault:
            self._differences.add("holders", f"block {key.hex()}", f"{fault}: {value[:40]!r}")
        for slot in holders ^ backed:
            suspects.add((key, slot))

    async def _judge_names(self, names: Sequence[bytes]) -> None:
        """Check all keys except blocks and sources; the pickers' keys are left to them."""
        others = [
            name
            for name in set(names)
            if block_key_of(name) is None and slot_of(name) is None and not name.startswith(PICKERS)
        ]
        known = await self._index.stream_records() if any(name not in FIXED_KEYS for name in others) else {}
        for name in sorted(others):
            if name.startswith(STREAM):
                stream = str(name[len(STREAM) :], "utf-8", "backslashreplace")
                if stream not in known and (await self._index.types([name])) != ["none"]:
                    self._differences.add("stream", stream, "has a record, but is not registered")
            elif name not in FIXED_KEYS:
                self._differences.add("foreign", str(name[:80], "utf-8", "backslashreplace"))

    async def _judge_types(self, names: Sequence[bytes]) -> None:
        for name, kind in zip(names, await self._index.types(names), strict=True):
            if kind not in {"none", "string"}:
                self._differences.add("type", f"block {name[len(BLOCKS) :].hex()}", f"a {kind}")

    async def _look_again(self, suspects: _Suspects) -> None:
        """Report the suspects that are certain; the index may have changed during the reading."""
        self._looked_at_again += len(suspects.pairs) + suspects.surplus
        by_slot: dict[int, set[bytes]] = {}
        for key, slot in suspects.pairs:
            by_slot.setdefault(slot, set()).add(key)
        for slot, keys in sorted(by_slot.items()):
            extra = await self._look_again_at(slot, keys)
            if extra:
                used = slot in self._owners or slot in await self._index.held_slots()
                kind = "extra" if used else "leftover"
                for key in sorted(extra):
                    self._differences.add(kind, self._label(slot), f"block {key.hex()}")
        if suspects.surplus:
            self._differences.add("unchecked", f"{suspects.surplus} blocks")

    async def _look_again_at(self, slot: int, keys: set[bytes]) -> set[bytes]:
        """Report blocks that the slot holds but their keys do not name; return the opposite case.

        The first case is seen at one instant. The second takes a full reading of the source: it is certain if nothing
        changed meanwhile, and practically certain if it stays the same in many readings, because a block that comes and
        goes would not look the same each time.
        """
        for number in range(ROUNDS):
            if number:
                await self._pause(PAUSE_SECONDS)
            before = await self._state_of(slot)
            named = await self._named(slot, keys)
            keys = await self._without_missing(slot, keys, await self._fields_of(slot, keys)) & named
            keys = await self._named(slot, keys)
            if not keys or before == await self._state_of(slot):
                break
        return keys

    async def _state_of(self, slot: int) -> tuple[SlotOwner | None, Sequence[bytes | None]]:
        """Return a value that differs after any change of a source."""
        await self._read_owners()
        owner = self._owners.get(slot)
        return owner, await self._index.marks(owner.stream if owner and owner.live else None)

    async def _named(self, slot: int, keys: set[bytes]) -> set[bytes]:
        names = sorted(keys)
        values = await self._index.values([BLOCKS + key for key in names])
        return {key for key, value in zip(names, values, strict=True) if slot in read_holders(value or b"")[0]}

    async def _fields_of(self, slot: int, keys: set[bytes]) -> dict[bytes, bytes]:
        """Return block key -> a field of this source that holds it, for these blocks."""
        found: dict[bytes, bytes] = {}
        async for page in self._index.held(slot):
            found.update((value[:8], field_name) for field_name, value in page if value[:8] in keys)
        return found

    async def _without_missing(self, slot: int, keys: set[bytes], fields: Mapping[bytes, bytes]) -> set[bytes]:
        """Report blocks that the source holds but their key does not name; return the blocks that it does not hold."""
        for key in sorted(keys & fields.keys()):
            held, value = await self._index.field_and_value(slot, fields[key], BLOCKS + key)
            if held is None or held[:8] != key or slot in read_holders(value or b"")[0]:
                continue
            if slot in self._several_groups:
                self._partial += 1
            else:
                self._differences.add("missing", self._label(slot), f"block {key.hex()}")
        return keys - fields.keys()

    def _label(self, slot: int) -> str:
        owner = self._owners.get(slot)
        return f"{owner.label}, slot {slot}" if owner else f"slot {slot}"


def _part(key: bytes, passes: int) -> int:
    return key[0] * passes >> 8  # block keys are hashes: any byte is uniformly distributed

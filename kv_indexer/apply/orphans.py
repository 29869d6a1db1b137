"""Orphans: stores that wait for an unknown parent block, within their pod's share of this process's memory. Pure.

Their parents are searched in other streams: if engine hashes are content-addressed (vLLM >= 0.29 by default), another
pod's block of the same hash has the same key. A pod can report anything, so one pod's word is not enough for another's
blocks.
"""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kv_indexer.ports import IndexWriter
from kvmesh.blocks.events import BlockStored
from kvmesh.blocks.source import Stream

WITNESSES_NEEDED = 2  # hosts that must agree on a block's key
_EVENT_BYTES, _HASH_BYTES = 1024, 448  # measured cost of an entry apart from its tokens
MAX_EVENTS = 4096  # of one stream
POD_BYTES, ALL_BYTES = 8 << 20, 128 << 20

Place = tuple[str, int, int]  # (tier, group, engine hash)
Key = TypeVar("Key")
Value = TypeVar("Value")


class OrphanShares:
    """The bytes that each pod's orphans take, summed over its ranks.

    While few pods have orphans, each may take `pod_bytes`; many share `all_bytes`. A pod above its share loses its own
    oldest orphans when it adds one: no pod evicts another's.
    """

    def __init__(self, *, pod_bytes: int = POD_BYTES, all_bytes: int = ALL_BYTES) -> None:
        self._pod_bytes = pod_bytes
        self._all_bytes = all_bytes
        self._taken: dict[str, int] = {}

    def take(self, pod: str, size: int) -> None:
        """Add `size` bytes to a pod's total; negative to give back."""
        taken = self._taken.get(pod, 0) + size
        if taken:
            self._taken[pod] = taken
        else:
            self._taken.pop(pod, None)

    @property
    def share(self) -> int:
        """How many bytes each pod may take now."""
        return min(self._pod_bytes, self._all_bytes // max(len(self._taken), 1))

    def is_over(self, pod: str) -> bool:
        """Tell whether a pod takes more than its share."""
        return self._taken.get(pod, 0) > self.share


@dataclass(slots=True, kw_only=True)
class Orphan:
    """One waiting store, without the event's names and extra keys: these may be long, and `folded` has their effect."""

    event: BlockStored
    folded: tuple[bytes | None, ...] | None = None  # the extra inputs of the keys, see `fold_features`
    gone: set[int] = field(default_factory=set)  # positions of removed blocks; their children need their keys

    @property
    def size(self) -> int:
        """The approximate size in bytes."""
        extra = sum(len(each) for each in self.folded or () if each is not None)
        return _EVENT_BYTES + len(self.event.tokens) + _HASH_BYTES * len(self.event.block_hashes) + extra


class OrphanTable:
    """The orphans of one stream, by their parents' engine hashes."""

    def __init__(self, *, pod: str = "", shares: OrphanShares | None = None, max_events: int = MAX_EVENTS) -> None:
        """`pod`: the pod whose share of `shares` the orphans take."""
        self._pod = pod
        self._shares = shares or OrphanShares()
        self._max_events = max_events
        self._next = 0
        self._waiting: dict[int, Orphan] = {}  # by arrival
        self._children: dict[int, dict[int, None]] = {}  # parent's hash -> arrivals
        self._places: dict[Place, dict[tuple[int, int], None]] = {}  # -> (arrival, position in the event)

    def __len__(self) -> int:
        return len(self._waiting)

    def parents(self) -> set[int]:
        """Return the engine hashes of the missing parents."""
        return set(self._children)

    def some_parents(self, limit: int) -> set[int]:
        """Return up to `limit` of them; repeated calls rotate through all."""
        some = list(islice(self._children, limit))
        for parent in some:
            self._children[parent] = self._children.pop(parent)
        return set(some)

    def add(self, event: BlockStored, folded: tuple[bytes | None, ...] | None = None) -> int:
        """Let a store with a parent wait; return how many were dropped for it, itself included if too large."""
        orphan = Orphan(event=event, folded=folded)
        if event.parent_block_hash is None or orphan.size > self._shares.share:
            return 1
        number, self._next = self._next, self._next + 1
        self._waiting[number] = orphan
        self._shares.take(self._pod, orphan.size)
        self._children.setdefault(event.parent_block_hash, {})[number] = None
        for position, engine_hash in enumerate(event.block_hashes):
            self._places.setdefault(_place(event, engine_hash), {})[number, position] = None
        dropped = 0
        while self._waiting and (len(self._waiting) > self._max_events or self._shares.is_over(self._pod)):
            self._drop(next(iter(self._waiting)))
            dropped += 1
        return dropped

    def take(self, parents: Iterable[int]) -> list[Orphan]:
        """Take out the orphans of these parents, in order of arrival."""
        numbers = sorted(number for parent in set(parents) for number in self._children.get(parent, ()))
        return [self._drop(number) for number in numbers]

    def remove(self, *, tier: str, group: int, engine_hash: int) -> bool:
        """Remove one reference to a block; return False if none waits here."""
        places = self._places.get((tier, group, engine_hash))
        if not places:
            return False
        (number, position), _ = places.popitem()
        if not places:
            del self._places[tier, group, engine_hash]
        self._waiting[number].gone.add(position)
        return True

    def clear(self) -> None:
        """Drop all orphans: their blocks are gone."""
        self._shares.take(self._pod, -sum(orphan.size for orphan in self._waiting.values()))
        self._waiting.clear()
        self._children.clear()
        self._places.clear()

    def _drop(self, number: int) -> Orphan:
        orphan = self._waiting.pop(number)
        self._shares.take(self._pod, -orphan.size)
        event = orphan.event
        parent = event.parent_block_hash
        assert parent is not None
        _take_from(self._children, parent, number)
        for position, engine_hash in enumerate(event.block_hashes):
            if position not in orphan.gone:
                _take_from(self._places, _place(event, engine_hash), (number, position))
        return orphan


def _place(event: BlockStored, engine_hash: int) -> Place:
    return event.medium, event.group_idx or 0, engine_hash


def _take_from(entries: dict[Key, dict[Value, None]], key: Key, value: Value) -> None:
    of_key = entries[key]
    del of_key[value]
    if not of_key:
        del entries[key]


class ParentSearch:
    """Searches the index on behalf of one stream."""

    def __init__(self, *, stream: Stream, writer: IndexWriter) -> None:
        self._stream = stream
        self._writer = writer
        self._verdicts: dict[Stream, tuple[int, bool]] = {}  # other stream -> (its epoch, whether its hashes are ours)

    def forget(self) -> None:
        """Drop the verdicts: they compared blocks that the stream held before."""
        self._verdicts.clear()

    async def find(self, wanted: AbstractSet[int], witnesses: Mapping[int, bytes]) -> dict[int, bytes]:
        """Return engine hash -> block key for the wanted blocks whose key is certain.

        `witnesses` are blocks whose keys we have computed from their own tokens. A stream is trusted if it holds at
        least one of them under the same key, and none under another. Its key for a block counts if it comes from a rank
        of our own pod, or if a second host agrees; and only if no trusted stream has another key.
        """
        heard: dict[int, dict[bytes, set[str]]] = {}
        elsewhere = await self._writer.find_block_keys_elsewhere(self._stream, wanted | witnesses.keys())
        for other, keys in elsewhere.items():
            found = wanted & keys.keys()
            if found and await self._is_heard(other, keys, witnesses):
                for parent in found:
                    heard.setdefault(parent, {}).setdefault(keys[parent], set()).add(other.endpoint)
        return {
            parent: key
            for parent, said in heard.items()
            for key, endpoints in said.items()
            if len(said) == 1 and self._is_certain(endpoints)
        }

    async def _is_heard(self, other: Stream, keys: Mapping[int, bytes], witnesses: Mapping[int, bytes]) -> bool:
        position = await self._writer.read_position(other)
        if position is None:
            return False
        common = keys.keys() & witnesses.keys()
        if common:
            self._verdicts[other] = (position.epoch, all(keys[each] == witnesses[each] for each in common))
        epoch, verdict = self._verdicts.get(other, (None, False))
        return verdict and epoch == position.epoch

    def _is_certain(self, endpoints: AbstractSet[str]) -> bool:
        hosts = {endpoint.rpartition(":")[0] for endpoint in endpoints}  # one pod may have several ports
        return self._stream.endpoint in endpoints or len(hosts) >= WITNESSES_NEEDED

"""Stores whose parent block is unknown: they wait, within what their pod may take of this process's memory. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvmesh.blocks.events import BlockStored

_EVENT_BYTES, _HASH_BYTES = 1024, 448  # what an entry costs beside its tokens, measured
MAX_EVENTS = 4096  # of one stream
POD_BYTES, ALL_BYTES = 8 << 20, 128 << 20

Place = tuple[str, int, int]  # (tier, group, engine hash)
Key = TypeVar("Key")
Value = TypeVar("Value")


class OrphanShares:
    """The bytes that each pod's orphans take, all of its ranks together.

    While few pods have any, each may have `pod_bytes`; many share `all_bytes`. A pod above its share loses its own
    oldest when it adds to them: no pod pushes another's out.
    """

    def __init__(self, *, pod_bytes: int = POD_BYTES, all_bytes: int = ALL_BYTES) -> None:
        self._pod_bytes = pod_bytes
        self._all_bytes = all_bytes
        self._taken: dict[str, int] = {}

    def take(self, pod: str, size: int) -> None:
        """Note that a pod takes so many bytes more, or less."""
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
    """One store that waits, without what was read of it already: names and extra keys may be long."""

    event: BlockStored
    folded: tuple[bytes | None, ...] | None = None  # what else enters the keys, see `fold_features`
    gone: set[int] = field(default_factory=set)  # positions of blocks removed since; their children need their keys

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        extra = sum(len(each) for each in self.folded or () if each is not None)
        return _EVENT_BYTES + len(self.event.tokens) + _HASH_BYTES * len(self.event.block_hashes) + extra


class OrphanTable:
    """The stores of one stream that wait for their parents, by the parents' engine hashes."""

    def __init__(self, *, pod: str = "", shares: OrphanShares | None = None, max_events: int = MAX_EVENTS) -> None:
        """Take the `pod` whose share of `shares` they count for."""
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
        """Return the engine hashes that are waited for."""
        return set(self._children)

    def some_parents(self, limit: int) -> set[int]:
        """Return so many of these; in turn, so that each is among them some time."""
        some = list(islice(self._children, limit))
        for parent in some:
            self._children[parent] = self._children.pop(parent)
        return set(some)

    def add(self, event: BlockStored, folded: tuple[bytes | None, ...] | None = None) -> int:
        """Let a store with a parent wait; return how many had to go for it, itself included if it is too large."""
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
        """Take out what waits for these, in order of arrival."""
        numbers = sorted(number for parent in set(parents) for number in self._children.get(parent, ()))
        return [self._drop(number) for number in numbers]

    def remove(self, *, tier: str, group: int, engine_hash: int) -> bool:
        """Take one reference to a block back; False if none of it waits here."""
        places = self._places.get((tier, group, engine_hash))
        if not places:
            return False
        (number, position), _ = places.popitem()
        if not places:
            del self._places[tier, group, engine_hash]
        self._waiting[number].gone.add(position)
        return True

    def clear(self) -> None:
        """Forget all of them: the blocks are gone."""
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

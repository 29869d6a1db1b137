"""Stores whose parent block is unknown, kept until it arrives: without its key theirs cannot be told.

Used by `change_plan`. Bounded by events and bytes, oldest out first. The table lives in memory alone: a crash or a
takeover loses what waits, which costs hits (the blocks stay unindexed until they are stored again) and invents none.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from kvmesh.blocks.events import BlockStored

_EVENT_BYTES, _HASH_BYTES = 512, 256  # what an entry costs beside its tokens, roughly

Place = tuple[str, int, int]  # (tier, group, engine hash)
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True, kw_only=True)
class Orphan:
    """One store that waits."""

    event: BlockStored
    gone: set[int] = field(default_factory=set)  # positions of blocks removed since; their children need their keys

    @property
    def size(self) -> int:
        """Bytes that it takes, roughly."""
        return _EVENT_BYTES + len(self.event.tokens) + _HASH_BYTES * len(self.event.block_hashes)


class OrphanTable:
    """The stores of one stream that wait for their parents, by the parents' engine hashes."""

    def __init__(self, *, max_events: int = 4096, max_bytes: int = 16 << 20) -> None:
        self._max_events = max_events
        self._max_bytes = max_bytes
        self._bytes = 0
        self._next = 0
        self._waiting: dict[int, Orphan] = {}  # by arrival
        self._children: dict[int, dict[int, None]] = {}  # parent's hash -> arrivals
        self._places: dict[Place, dict[tuple[int, int], None]] = {}  # -> (arrival, position in the event)

    def __len__(self) -> int:
        return len(self._waiting)

    def parents(self) -> set[int]:
        """Return the engine hashes that are waited for."""
        return set(self._children)

    def add(self, event: BlockStored) -> int:
        """Let a store with a parent wait; return how many had to go for it, itself included if it is too large."""
        orphan = Orphan(event=event)
        if event.parent_block_hash is None or orphan.size > self._max_bytes:
            return 1
        number, self._next = self._next, self._next + 1
        self._waiting[number] = orphan
        self._bytes += orphan.size
        self._children.setdefault(event.parent_block_hash, {})[number] = None
        for position, engine_hash in enumerate(event.block_hashes):
            self._places.setdefault(_place(event, engine_hash), {})[number, position] = None
        dropped = 0
        while len(self._waiting) > self._max_events or self._bytes > self._max_bytes:
            self._drop(next(iter(self._waiting)))
            dropped += 1
        return dropped

    def take(self, parents: Iterable[int]) -> list[Orphan]:
        """Take out what waits for these, in order of arrival."""
        numbers = sorted(number for parent in parents for number in self._children.get(parent, ()))
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
        self._waiting.clear()
        self._children.clear()
        self._places.clear()
        self._bytes = 0

    def _drop(self, number: int) -> Orphan:
        orphan = self._waiting.pop(number)
        self._bytes -= orphan.size
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

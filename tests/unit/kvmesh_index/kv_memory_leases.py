"""The leases of indexers in one process's memory: the twin of the lease scripts in Redis."""

import math
from collections import Counter
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from functools import partial

from kvmesh.blocks.source import NOT_FOLLOWED, Claim, Stream
from tests.unit.kvmesh_index.kv_memory_index import FOR_GOOD, ListedIndexer, MemoryPrefixIndex

PULSE_OF_LEASE = 0.3
UNOWNED_SECONDS = 1.0  # after this time any capable indexer takes a free stream, whatever its share


class MemoryLeaseBook:
    """One indexer's leases; implements `share_streams.LeaseBook`."""

    def __init__(
        self,
        *,
        index: MemoryPrefixIndex,
        indexer: str = "memory",
        endpoints: Collection[str] = (),
        lease_seconds: float = 2.0,
        forget_seconds: float = 5.0,
    ) -> None:
        self._index = index
        self._indexer = indexer
        self._endpoints = frozenset(endpoints)
        self._lease = lease_seconds
        self._forget = forget_seconds

    async def tick(self, candidates: AbstractSet[Stream]) -> Mapping[Stream, Claim]:
        """See `share_streams.LeaseBook`."""
        index, now = self._index, self._index.clock()
        index.indexer_alive = True
        index.pulses[self._indexer] = now + self._lease * PULSE_OF_LEASE
        endpoints = self._endpoints.union(stream.endpoint for stream in candidates)
        own = ListedIndexer(until=now + self._lease, endpoints=endpoints, streams=frozenset(candidates))
        self._index.indexers[self._indexer] = own
        live = self._live(now)
        self._drop_unlisted()
        self._mark_unfollowed(live, now)
        for stream in sorted(candidates - index.entries.keys()):
            index.register(stream)

        held = {name: self._held(name, now) for name in live}
        for stream in held[self._indexer] - candidates:
            self._give_back(stream, now)
        held[self._indexer] &= candidates
        self._give_back_surplus(live, held, now)
        for stream in held[self._indexer]:
            index.entries[stream].lease_until = now + self._lease
        self._take(live, held, now)
        return {
            stream: Claim(stream=stream, fence=index.entries[stream].fence) for stream in sorted(held[self._indexer])
        }

    async def pulse(self) -> AbstractSet[str]:
        """See `share_streams.LeaseBook`."""
        index, now = self._index, self._index.clock()
        index.pulses[self._indexer] = now + self._lease * PULSE_OF_LEASE
        return {name for name, until in index.pulses.items() if until <= now}

    async def drop(self, claim: Claim) -> None:
        """See `share_streams.LeaseBook`."""
        self._index.held_by(claim)
        self._index.drop(claim.stream)

    async def release(self) -> None:
        """See `share_streams.LeaseBook`."""
        now = self._index.clock()
        for stream in self._held(self._indexer, now):
            self._give_back(stream, now)
        own = self._index.indexers.get(self._indexer)
        if own is not None:
            self._index.indexers[self._indexer] = ListedIndexer(until=now, endpoints=own.endpoints, streams=frozenset())

    def _live(self, now: float) -> dict[str, ListedIndexer]:
        indexers = self._index.indexers
        for name in [name for name, each in indexers.items() if each.until + self._forget <= now]:
            del indexers[name]
            self._index.pulses.pop(name, None)
        pulses = self._index.pulses
        return {name: each for name, each in indexers.items() if min(each.until, pulses.get(name, FOR_GOOD)) > now}

    def _held(self, indexer: str, now: float) -> set[Stream]:
        entries = self._index.entries.items()
        until = partial(self._index.held_until, by_itself=self._indexer)
        return {stream for stream, entry in entries if entry.owner == indexer and until(entry) > now}

    def _drop_unlisted(self) -> None:
        listed = {endpoint for each in self._index.indexers.values() for endpoint in each.endpoints}
        for stream in [stream for stream in self._index.entries if stream.endpoint not in listed]:
            self._index.drop(stream)

    def _mark_unfollowed(self, live: Mapping[str, ListedIndexer], now: float) -> None:
        could_be = {stream for each in live.values() for stream in each.streams}
        for stream, entry in self._index.entries.items():
            free_since = self._index.held_until(entry, by_itself=self._indexer)
            if stream not in could_be and free_since + UNOWNED_SECONDS < now and entry.state != "lost":
                self._index.lose(stream, NOT_FOLLOWED)

    def _give_back(self, stream: Stream, now: float) -> None:
        entry = self._index.entries[stream]
        entry.owner, entry.lease_until = "", now

    def _give_back_surplus(self, live: Mapping[str, ListedIndexer], held: dict[str, set[Stream]], now: float) -> None:
        shares = _shares(live)
        for stream in sorted(held[self._indexer], reverse=True):
            if len(held[self._indexer]) <= shares[self._indexer]:
                return
            takers = [
                name
                for name, each in live.items()
                if name != self._indexer and stream in each.streams and len(held[name]) < shares[name]
            ]
            if takers:
                self._give_back(stream, now)
                held[self._indexer].discard(stream)
                held[takers[0]].add(stream)

    def _take(self, live: Mapping[str, ListedIndexer], held: dict[str, set[Stream]], now: float) -> None:
        share = _shares(live)[self._indexer]
        for stream in sorted(live[self._indexer].streams):
            entry = self._index.entries[stream]
            free_since = self._index.held_until(entry, by_itself=self._indexer)
            is_free = free_since <= now
            if is_free and (len(held[self._indexer]) < share or free_since + UNOWNED_SECONDS < now):
                self._index.take(stream, owner=self._indexer, until=now + self._lease)
                held[self._indexer].add(stream)


def _shares(live: Mapping[str, ListedIndexer]) -> dict[str, int]:
    """Return each indexer's share: its fraction of every stream that it could follow, summed and rounded up."""
    followers = Counter(stream for each in live.values() for stream in each.streams)
    return {
        name: math.ceil(sum(1 / followers[stream] for stream in each.streams) - 1e-9) for name, each in live.items()
    }

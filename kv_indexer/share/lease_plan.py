"""Which streams an indexer takes and gives back, from the records of all indexers. Pure.

`docs/reference/redis.md` states the rule. Names of streams are bytes as in Redis: thousands are compared at every beat.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

UNOWNED_MS = 1000  # a stream that was free for so long is taken by any indexer that could follow it, share or not
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerRecord:
    """What one indexer has recorded of itself."""

    until_ms: float  # by Redis' clock; it is alive until then
    endpoints: frozenset[str]  # that it is responsible for
    streams: frozenset[bytes]  # that it could follow


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseView:
    """The leases of the streams, after this indexer has renewed what it holds."""

    held: Mapping[bytes, int]  # by this indexer: name -> fence
    free: Mapping[bytes, float]  # name -> since when, in ms by Redis' clock
    owners: Mapping[str, int]  # others -> how many they hold


class LeasePlan:
    """The rule, for one beat of the indexer `me`."""

    def __init__(self, *, me: str, records: Mapping[str, IndexerRecord], now_ms: float) -> None:
        """Take `records` of all indexers that are remembered, `me` among them."""
        self._me = me
        self._now_ms = now_ms
        self._records = records
        self._live = {name: record for name, record in records.items() if record.until_ms > now_ms}
        self._shares = _shares(self._live)

    def unlisted(self, names: Iterable[bytes]) -> list[bytes]:
        """Return the streams whose endpoint no indexer lists."""
        names = tuple(names)
        if not names:
            return []
        listed = {endpoint.encode() for record in self._records.values() for endpoint in record.endpoints}
        return [name for name in names if name.rpartition(b"#")[0] not in listed]

    def surplus(self, view: LeaseView, *, elsewhere: Mapping[str, int] | None = None) -> list[bytes]:
        """Return which of ours to give back: what exceeds our share and another would take.

        `elsewhere` says how many streams others hold that this indexer could not follow: they fill shares, too.
        """
        spare = len(view.held) - self._shares[self._me]
        holds = Counter(view.owners) + Counter(elsewhere or {})
        room = {name: self._shares[name] - holds[name] for name in self._live if name != self._me}
        given: list[bytes] = []
        for stream in sorted(view.held, reverse=True) if spare > 0 else ():
            taker = next((name for name, left in room.items() if left > 0 and stream in self._live[name].streams), None)
            if taker is not None:
                room[taker] -= 1
                given.append(stream)
            if len(given) == spare:
                break
        return given

    def wanted(self, view: LeaseView, *, held: int) -> list[bytes]:
        """Return which free streams to take while holding so many: up to our share, and those long free."""
        mine = self._records[self._me].streams
        taken: list[bytes] = []
        for name in sorted(view.free):
            is_left_over = view.free[name] + UNOWNED_MS < self._now_ms
            if name in mine and (held + len(taken) < self._shares[self._me] or is_left_over):
                taken.append(name)
        return taken

    def unfollowed(self, view: LeaseView) -> list[bytes]:
        """Return the streams that have been free for long and that no indexer could follow."""
        long_ago = [name for name, since in view.free.items() if since + UNOWNED_MS < self._now_ms]
        return [name for name in long_ago if not any(name in record.streams for record in self._live.values())]


def _shares(live: Mapping[str, IndexerRecord]) -> dict[str, int]:
    """Return how many streams each indexer should follow: its part of each stream that it could follow, rounded up."""
    if len(live) == 1:
        return {name: len(record.streams) for name, record in live.items()}
    followers = Counter(stream for record in live.values() for stream in record.streams)
    return {
        name: ceil(sum(1 / followers[each] for each in record.streams) - _ROUNDING) for name, record in live.items()
    }


def portions(names: Sequence[bytes], size: int) -> list[Sequence[bytes]]:
    """Cut names into pieces of a size."""
    return [names[at : at + size] for at in range(0, len(names), size)]

"""One pod's share of this process: its turns and its memory. All of its ranks share it."""

import asyncio
from dataclasses import dataclass, field

from kv_indexer.apply.orphans import OrphanShares
from kv_indexer.apply.stream_context import KNOWN_KEYS_LIMIT

LEAST_KNOWN_KEYS = 2048  # for each rank, however many there are
FULL_RANKS = 4  # up to this many ranks remember as much as a single one


@dataclass(slots=True, kw_only=True)
class PodShare:
    """The share of one pod."""

    streams: int = 0  # followed here
    known_keys: int = KNOWN_KEYS_LIMIT  # limit on the engine hashes remembered per rank
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one rank at a time is decoded, planned, written

    def add(self, streams: int) -> None:
        """Count more streams, or fewer if negative."""
        self.streams += streams
        self.known_keys = max(KNOWN_KEYS_LIMIT * FULL_RANKS // max(self.streams, FULL_RANKS), LEAST_KNOWN_KEYS)


class PodShares:
    """The shares of all pods."""

    def __init__(self) -> None:
        self.orphans = OrphanShares()
        self.search = asyncio.Lock()  # for missing parents; one search at a time, because each is expensive for Redis
        self._pods: dict[str, PodShare] = {}

    def join(self, pod: str) -> PodShare:
        """Return a pod's share for one more stream; `leave` gives it back."""
        share = self._pods.setdefault(pod, PodShare())
        share.add(1)
        return share

    def leave(self, pod: str) -> None:
        """Note that one of a pod's streams is no longer followed."""
        share = self._pods[pod]
        share.add(-1)
        if not share.streams:
            del self._pods[pod]

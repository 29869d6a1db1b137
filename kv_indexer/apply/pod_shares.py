"""What one pod may take of this process: its turns, its memory. All of its ranks share it."""

import asyncio
from dataclasses import dataclass, field

from kv_indexer.apply.orphans import OrphanShares
from kv_indexer.apply.stream_context import KNOWN_KEYS_LIMIT

LEAST_KNOWN_KEYS = 2048  # of each rank, however many there are
FULL_RANKS = 4  # up to so many remember as much as one alone


@dataclass(slots=True, kw_only=True)
class PodShare:
    """One pod's."""

    streams: int = 0  # that are followed here
    known_keys: int = KNOWN_KEYS_LIMIT  # engine hashes that one of its ranks may remember
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # one of its ranks at a time is decoded, planned, written

    def add(self, streams: int) -> None:
        """Count more streams, or fewer."""
        self.streams += streams
        self.known_keys = max(KNOWN_KEYS_LIMIT * FULL_RANKS // max(self.streams, FULL_RANKS), LEAST_KNOWN_KEYS)


class PodShares:
    """The shares of all pods."""

    def __init__(self) -> None:
        self.orphans = OrphanShares()
        self.search = asyncio.Lock()  # for lost parents; one at a time, since each asks Redis a great deal
        self._pods: dict[str, PodShare] = {}

    def join(self, pod: str) -> PodShare:
        """Return a pod's share for one more stream; `leave` gives it back."""
        share = self._pods.setdefault(pod, PodShare())
        share.add(1)
        return share

    def leave(self, pod: str) -> None:
        """Take note that one of a pod's streams is not followed any more."""
        share = self._pods[pod]
        share.add(-1)
        if not share.streams:
            del self._pods[pod]

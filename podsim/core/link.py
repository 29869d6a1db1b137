"""One pod's network link, whose transfers share its bandwidth equally. The caller passes in the time.

`podsim.transfer_link` does the waiting. Together, n transfers take the same time in any order.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How large a prompt's KV is and how fast pods transfer it."""

    bytes_per_token: int = 131_072  # Llama 3.1 8B: 32 layers, keys and values of 8 heads of 128 numbers of 2 bytes
    bytes_per_second: float = 12.5e9  # of a pod's link, for all its transfers together: 100 Gbit/s
    fixed_seconds: float = 0.001  # added to each transfer, whatever its size


class Link:
    """The running transfers of one link, each under a key that the caller chooses."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._share = 0.0  # bytes that a transfer would have got by now if it had run from the start
        self._now = 0.0
        self._ends: list[tuple[float, int, Hashable]] = []  # first the share at which the transfer is done
        self._begun = 0

    def begin(self, key: Hashable, size: float, *, now: float) -> None:
        """Add a transfer of `size` bytes."""
        self._advance(now)
        self._begun += 1
        heapq.heappush(self._ends, (self._share + size, self._begun, key))

    def drop(self, key: Hashable, *, now: float) -> None:
        """Remove a transfer before its end; does nothing if there is no such transfer."""
        self._advance(now)
        self._ends = [end for end in self._ends if end[2] != key]
        heapq.heapify(self._ends)

    def next_end(self) -> float | None:
        """Return the time in seconds at which the next transfer ends, or None if there is none."""
        if not self._ends:
            return None
        return self._now + max(0.0, self._ends[0][0] - self._share) * len(self._ends) / self._bytes_per_second

    def ended(self, *, now: float) -> list[Hashable]:
        """Remove and return the transfers that are done by now, in the order in which they ended."""
        done: list[Hashable] = []
        while (end := self.next_end()) is not None and end <= now:
            self._now, self._share = end, max(self._share, self._ends[0][0])
            done.append(heapq.heappop(self._ends)[2])
        self._advance(now)
        return done

    def _advance(self, now: float) -> None:
        if self._ends:
            self._share += (now - self._now) * self._bytes_per_second / len(self._ends)
        self._now = now

"""One pod's network link: every transfer on it gets an equal share of its bandwidth. Time is an argument.

`podsim.transfer_link` sleeps for it. The time that n transfers take together is the same whatever their order.
"""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """How large a prompt's KV is and how fast it gets from one pod to another."""

    bytes_per_token: int = 131_072  # Llama 3.1 8B: 32 layers, keys and values of 8 heads of 128 numbers of 2 bytes
    bytes_per_second: float = 12.5e9  # of a pod's link, all its transfers together: 100 Gbit/s
    fixed_seconds: float = 0.001  # of each transfer, whatever its size


class Link:
    """The transfers under way, each known by a key of the caller's."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._share = 0.0  # bytes that a transfer would have got by now if it had been on the link since the start
        self._now = 0.0
        self._ends: list[tuple[float, int, Hashable]] = []  # the share at which each transfer is done
        self._begun = 0

    def begin(self, key: Hashable, size: float, *, now: float) -> None:
        """Add a transfer of `size` bytes."""
        self._advance(now)
        self._begun += 1
        heapq.heappush(self._ends, (self._share + size, self._begun, key))

    def drop(self, key: Hashable, *, now: float) -> None:
        """Take a transfer away before its end; no effect if it is not there."""
        self._advance(now)
        self._ends = [end for end in self._ends if end[2] != key]
        heapq.heapify(self._ends)

    def next_end(self) -> float | None:
        """When the next transfer ends if none comes before, in seconds; None if there is none."""
        if not self._ends:
            return None
        return self._now + max(0.0, self._ends[0][0] - self._share) * len(self._ends) / self._bytes_per_second

    def ended(self, *, now: float) -> list[Hashable]:
        """Take away the transfers that are done by now, in the order of their ends."""
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

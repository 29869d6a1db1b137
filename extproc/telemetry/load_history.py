"""How much a pool had to do in the last minutes, slice by slice: requests, refusals, tokens. Pure.

Time is an argument, monotonic seconds. It costs one comparison and four additions a request, and 180 small records.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

SLICE_SECONDS = 5.0
SLICES = 180  # 15 minutes


class LoadSlice(msgspec.Struct, kw_only=True, gc=False):
    """What came in one slice of time."""

    number: int  # its beginning over the slices' length
    until: float  # monotonic seconds
    requests: int = 0  # that were routed
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, that the picked pods were expected to hold


class LoadHistory:
    """Of one pool."""

    def __init__(self, *, slice_seconds: float = SLICE_SECONDS, slices: int = SLICES) -> None:
        self.slice_seconds = slice_seconds
        self.slices = slices
        self._parts: deque[LoadSlice] = deque(maxlen=slices + 1)  # and the present one
        self._until = float("-inf")

    def routed(self, *, prompt_tokens: int, cached_tokens: int, now: float) -> None:
        """Count a request that was sent to a pod."""
        part = self._parts[-1] if now < self._until else self._begin(now)
        part.requests += 1
        part.prompt_tokens += prompt_tokens
        part.cached_tokens += cached_tokens

    def refused(self, *, now: float) -> None:
        """Count a request that the picker answered itself."""
        part = self._parts[-1] if now < self._until else self._begin(now)
        part.refused += 1

    def complete(self, *, now: float) -> Sequence[LoadSlice]:
        """Return the slices that are over, the oldest first; those in which nothing came have zeros."""
        last = int(now // self.slice_seconds) - 1
        found = {part.number: part for part in self._parts}
        return [
            found.get(number) or LoadSlice(number=number, until=(number + 1) * self.slice_seconds)
            for number in range(last - self.slices + 1, last + 1)
        ]

    def _begin(self, now: float) -> LoadSlice:
        number = int(now // self.slice_seconds)
        part = LoadSlice(number=number, until=(number + 1) * self.slice_seconds)
        self._parts.append(part)
        self._until = part.until
        return part

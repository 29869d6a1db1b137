"""Where sessions and adapters were placed, on its way to all replicas. Pure; used by `replicas.shared_state`.

A placement is a hint for later requests: losing one costs a cache hit at most, so both books are bounded by dropping
the oldest.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

MAX_PENDING = 1000  # placements that wait for their write
MAX_NOTED = 20_000  # placements that are known to be written: some 5 MB


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint under a key: the only one there, or one of several."""

    key: bytes
    endpoint: str
    placed_at: float  # unix seconds
    ttl_seconds: float
    is_one_of_several: bool  # an adapter is in several places, a session in one

    @property
    def name(self) -> bytes:
        """Return what a later placement replaces."""
        return self.key + b" " + self.endpoint.encode() if self.is_one_of_several else self.key


class PlacementBook:
    """The placements that are to be written; one that was written a while ago only is not written again."""

    def __init__(self) -> None:
        self._pending: dict[bytes, Placement] = {}
        self._noted: dict[bytes, tuple[str, float]] = {}  # name -> endpoint, unix second until which it is fresh

    def place(self, placement: Placement, *, moved: bool = False) -> bool:
        """Take a placement; tell whether it has to be written. `moved`: something else was read since we wrote it."""
        name = placement.name
        endpoint, fresh_until = self._noted.pop(name, ("", 0.0))
        is_news = moved or endpoint != placement.endpoint or placement.placed_at >= fresh_until
        if is_news:
            fresh_until = placement.placed_at + placement.ttl_seconds / 4  # long before it ends
            self._pending.pop(name, None)  # the latest goes last
            self._pending[name] = placement
            _trim(self._pending, MAX_PENDING)
        self._noted[name] = (placement.endpoint, fresh_until)
        _trim(self._noted, MAX_NOTED)
        return is_news

    def take(self) -> list[Placement]:
        """Return what is to be written now."""
        taken, self._pending = list(self._pending.values()), {}
        return taken

    def put_back(self, placements: Iterable[Placement]) -> None:
        """Take back what could not be written, unless there is something newer."""
        self._pending = {placement.name: placement for placement in placements} | self._pending
        _trim(self._pending, MAX_PENDING)


def _trim(entries: dict[bytes, Any], limit: int) -> None:
    while len(entries) > limit:
        del entries[next(iter(entries))]

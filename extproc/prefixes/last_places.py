"""Where sessions and LoRA adapters were sent last, by this replica. Bounded; time is an argument, monotonic seconds.

The replicas tell each other through Redis (`replicas.shared_state`); this is what remains without it.
"""

from collections import OrderedDict


class LastPlaces:
    """Name -> endpoint, for `ttl_seconds` after its last request; at most `limit` names."""

    def __init__(self, *, ttl_seconds: float, limit: int = 65536) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def reconfigure(self, *, ttl_seconds: float) -> None:
        """Remember for another time from now on."""
        self._ttl_seconds = ttl_seconds

    def note(self, name: str, *, endpoint: str, now: float) -> None:
        """Remember that a request of this name was sent to the endpoint."""
        self._places[name] = endpoint, now
        self._places.move_to_end(name)
        if len(self._places) > self._limit:
            self._places.popitem(last=False)

    def get(self, name: str, *, now: float) -> str | None:
        """Return where its last request was sent, or None if that is too long ago."""
        place = self._places.get(name)
        return place[0] if place is not None and now - place[1] <= self._ttl_seconds else None

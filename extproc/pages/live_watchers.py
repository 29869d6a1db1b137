"""Bounded send queues for the connections of the live feed, so that a slow reader costs others nothing."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from kvmesh.plain_text import plain_json

E = TypeVar("E", bound=msgspec.Struct)  # an event with `missed`

MOST_WAITING_BYTES = 2 << 20  # per watcher: several seconds of the largest feed
EVENTS_PER_SECOND = 20  # per kind


class Watcher:
    """The send queue of one connection. `bye` makes its last event from the reason for the end."""

    def __init__(self, bye: Callable[[str], bytes]) -> None:
        self._bye = bye
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._wake = asyncio.Event()
        self.ended: str | None = None  # the reason for the end

    def push(self, event: bytes) -> None:
        """Queue an event; if the queue of a slow reader is full, replace its contents by the end."""
        if self.ended is not None:
            return
        if self._waiting and self._bytes + len(event) > MOST_WAITING_BYTES:  # a reader with an empty queue is not slow
            self._waiting.clear()
            self.end("slow-reader")
            return
        self._add(event)

    def end(self, why: str) -> None:
        """Queue the last event, with the reason."""
        if self.ended is None:
            self.ended = why
            self._add(self._bye(why))

    async def next(self, *, within_seconds: float) -> bytes:
        """Return and clear the queue, or return b"" if nothing arrives in time."""
        if not self._waiting:
            try:
                async with asyncio.timeout(within_seconds):
                    await self._wake.wait()
            except TimeoutError:
                return b""
        content = b"".join(self._waiting)
        self._waiting.clear()
        self._bytes = 0
        self._wake.clear()
        return content

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended and its queue is empty."""
        return self.ended is not None and not self._waiting

    def _add(self, event: bytes) -> None:
        self._waiting.append(event)
        self._bytes += len(event)
        self._wake.set()


class EventNumbers:
    """Formats events as text/event-stream; ids count up per process."""

    def __init__(self) -> None:
        self._last = 0

    def event(self, name: str, data: msgspec.Struct | dict[str, Any]) -> bytes:
        """Return one event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
        self._last += 1
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self._last, name.encode(), as_json(data))


class Coalesced(Generic[E]):
    """Rate-limits events of one kind, and counts the dropped ones; the newest dropped one follows with the next tick.

    Times are monotonic seconds.
    """

    def __init__(self) -> None:
        self._since = float("-inf")
        self._passed = 0
        self._missed = 0
        self._newest: Callable[[], E] | None = None

    def offer(self, make: Callable[[], E], *, now: float) -> E | None:
        """Return the event's data with `missed`, or None if it is dropped; `make` is called only if it passes."""
        if now - self._since >= 1.0:
            self._since, self._passed = now, 0
        if self._passed >= EVENTS_PER_SECOND:
            self._missed += 1
            self._newest = make
            return None
        self._passed += 1
        return self._take(make)

    def flush(self, *, now: float) -> E | None:
        """Return the newest dropped event if no later one passed and its second is over, else None."""
        if self._newest is None or now - self._since < 1.0:
            return None
        self._since, self._passed = now, 1
        self._missed -= 1
        return self._take(self._newest)

    def _take(self, make: Callable[[], E]) -> E:
        missed, self._missed, self._newest = self._missed, 0, None
        return msgspec.structs.replace(make(), missed=missed)


def as_json(value: Any) -> bytes:
    """Return a value of the pages or the feed as JSON."""
    try:
        return plain_json(msgspec.json.encode(value))
    except UnicodeEncodeError:  # a lone surrogate, from a client
        return json.dumps(msgspec.to_builtins(value)).encode()

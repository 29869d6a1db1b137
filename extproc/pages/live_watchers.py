"""What waits to be sent to those who watch the live feed: bounded, so that a slow reader costs others nothing."""

import asyncio
import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

E = TypeVar("E", bound=msgspec.Struct)  # an event with `missed`

MOST_WAITING_BYTES = 2 << 20  # for one watcher: several seconds of the largest feed
EVENTS_PER_SECOND = 20  # of one kind


class Watcher:
    """What is to be written to one connection, in order, until its end. `bye` makes its last event of why it ends."""

    def __init__(self, bye: Callable[[str], bytes]) -> None:
        self._bye = bye
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._wake = asyncio.Event()
        self.ended: str | None = None  # why nothing more comes

    def push(self, event: bytes) -> None:
        """Have an event written; a connection that reads too slowly gets its end in place of all that waits."""
        if self.ended is not None:
            return
        if self._waiting and self._bytes + len(event) > MOST_WAITING_BYTES:  # one that has read all is not slow
            self._waiting.clear()
            self.end("slow-reader")
            return
        self._add(event)

    def end(self, why: str) -> None:
        """Have this written as the last."""
        if self.ended is None:
            self.ended = why
            self._add(self._bye(why))

    async def next(self, *, within_seconds: float) -> bytes:
        """Return all that waits, b"" where nothing has come in that time."""
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
        """Whether all is written and nothing more comes."""
        return self.ended is not None and not self._waiting

    def _add(self, event: bytes) -> None:
        self._waiting.append(event)
        self._bytes += len(event)
        self._wake.set()


class EventNumbers:
    """Writes events as text/event-stream has them; numbers count up over the process."""

    def __init__(self) -> None:
        self._last = 0

    def event(self, name: str, data: msgspec.Struct | dict[str, Any]) -> bytes:
        """Return one event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
        self._last += 1
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (self._last, name.encode(), as_json(data))


class Coalesced(Generic[E]):
    """Lets so many events of one kind pass a second and counts the others; the newest of a burst comes with the tick.

    Times are monotonic seconds.
    """

    def __init__(self, *, per_second: int = EVENTS_PER_SECOND) -> None:
        self._per_second = per_second
        self._since = float("-inf")
        self._passed = 0
        self._missed = 0
        self._newest: Callable[[], E] | None = None

    def offer(self, make: Callable[[], E], *, now: float) -> E | None:
        """Return the event's data with `missed`, None where it is left out; `make` is called for those that pass."""
        if now - self._since >= 1.0:
            self._since, self._passed = now, 0
        if self._passed >= self._per_second:
            self._missed += 1
            self._newest = make
            return None
        self._passed += 1
        return self._take(make)

    def flush(self, *, now: float) -> E | None:
        """Return the newest that was left out, where nothing has come since and its turn is here."""
        if self._newest is None or now - self._since < 1.0:
            return None
        self._since, self._passed = now, 1
        self._missed -= 1
        return self._take(self._newest)

    def _take(self, make: Callable[[], E]) -> E:
        missed, self._missed, self._newest = self._missed, 0, None
        return msgspec.structs.replace(make(), missed=missed)


def as_json(value: Any) -> bytes:
    """Return what pages and feed show as JSON."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, from a client
        return json.dumps(msgspec.to_builtins(value)).encode()

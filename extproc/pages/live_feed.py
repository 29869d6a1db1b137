"""The live feed: what a page needs of one pool at once, then what changes. Made by `service`; changes nothing.

Pods, classes and the index are looked at once a second for all who watch a pool, and only while somebody does; so long
it observes requests as well. The prefix tree is fed all the time (`picked`). Nothing that fails here reaches a request.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from typing import Any, Protocol

from extproc.admission.prepared_request import Picked
from extproc.errors import KvmeshError
from extproc.pages.admin_pages import PickerPages
from extproc.pages.live_json import (
    ended_json,
    live_classes_json,
    live_decision_json,
    live_index_json,
    of_pool,
    pods_json,
    policy_json,
    record_id,
)
from extproc.pages.live_prefixes import PrefixFacts, prefix_nodes, prefixes_json, sampled_keys
from extproc.pages.live_watchers import Coalesced, EventNumbers, Watcher
from extproc.pages.prefix_watch import HALF_LIFE_SECONDS
from extproc.pools.request_watch import RequestWatch
from extproc.prefixes.prefix_tree import TreeEdge, TreeView
from extproc.records.request_story import Decided, DecisionRecord, Ended
from kvmesh.blocks.source import IndexStatus
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.index_view import IndexLook, IndexView

log = logging.getLogger(__name__)

MOST_WATCHERS = 32
TICK_SECONDS = 1.0
TURN_SECONDS = 0.002
FRESH_SECONDS = 0.5  # a look this old serves one who has just come
PREFIX_TICKS = 5
SHOWN_DECISIONS = 20  # in the snapshot
SHOWN_PREFIXES = 100
MOST_PREFIXES = 500
MOST_OPEN = 4096  # decisions whose end is awaited
PREFIX_BYTES = 16 << 20  # of the trees of all pools together
LEAST_PREFIX_BYTES, MOST_PREFIX_BYTES = 128 << 10, 4 << 20  # of one
LONGEST_PROMPT_TEXT = 80  # characters
COMPLAINT_SECONDS = 60.0
FAREWELLS = {
    "shutdown": "this picker is stopping",
    "slow-reader": "the events were read too slowly; connect again",
    "pool-gone": "the pool is no longer served here",
}


class TooManyWatchersError(KvmeshError):
    """As many watch as may."""


class FeedPages(Protocol):
    """One pool's pages or several pools'."""

    def chosen(self, pool: str | None) -> tuple[str, PickerPages] | None:
        """Return the pool that is meant with its name; None: there are several. Raise UnknownPoolError."""

    def pages_of(self, pool: str) -> PickerPages | None:
        """Return the pages of a pool by its name."""

    def pools(self) -> list[dict[str, Any]]:
        """Return a line for each pool."""


class _Room:
    """Those who watch one pool; with no name those who watch none."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.watchers: set[Watcher] = set()
        self.decisions = Coalesced()
        self.ends = Coalesced()
        self.open: OrderedDict[int, DecisionRecord] = OrderedDict()  # number of a story -> what was decided


class LiveFeed:
    """Implements `request_story.RequestObserver` while somebody watches."""

    def __init__(
        self,
        pages: FeedPages,
        *,
        watch: RequestWatch,
        view: IndexView,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pages = pages
        self._watch = watch
        self._view = view
        self._clock = clock
        self._wall_clock = wall_clock
        self._started_at = wall_clock()
        self._process_id = secrets.token_hex(8)
        self._secret = secrets.token_bytes(16)
        self._events = EventNumbers()
        self._rooms: dict[str | None, _Room] = {}
        self._coming = 0
        self._wanted = asyncio.Event()
        self._looking = asyncio.Lock()
        self._look_prefixes = asyncio.Lock()
        self._looked: tuple[float, IndexStatus | None, str | None] = (float("-inf"), None, None)
        self._shown: dict[
            str, tuple[float, dict[str, Any]]
        ] = {}  # pool -> its prefixes as they were shown last, and when
        self._fed: set[str] = set()  # pools whose tree has had requests
        self._complained_at = float("-inf")
        self._closed = False
        self._turned_at = clock()

    # --- told by the picker ---------------------------------------------------------------------------------------

    def picked(self, pool: str, picked: Picked) -> None:
        """Take a routed request, after its answer has left."""
        pages = self._pages.pages_of(pool)
        if pages is None:
            return
        if pool not in self._fed:
            self._fed.add(pool)
            self._share_memory_out()
        pages.prefixes.routed(picked)

    def decided(self, decided: Decided, /) -> None:
        """Tell who watches the pool."""
        room, pages = self._rooms.get(decided.pool), self._pages.pages_of(decided.pool)
        if room is None or pages is None:
            return
        if decided.endpoint is not None:
            room.open[decided.number] = decided.record
            if len(room.open) > MOST_OPEN:
                room.open.popitem(last=False)
        policy = pages.policy
        self._offer(
            room,
            "decision",
            room.decisions,
            lambda: live_decision_json(decided.record, policy=policy, decided=decided),
        )

    def ended(self, ended: Ended, /) -> None:
        """Tell who watches the pool."""
        room = self._rooms.get(ended.pool)
        if room is None:
            return
        record, at = room.open.pop(ended.number, None), self._wall_clock()

        def make() -> Mapping[str, Any]:
            return ended_json(ended, decision_id=None if record is None else record_id(record), at=at)

        self._offer(room, "ended", room.ends, make)

    # --- asked by those who watch ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def watcher(self, pool: str | None) -> AsyncIterator[Watcher]:
        """Watch a pool, beginning with a snapshot. Raise UnknownPoolError, TooManyWatchersError."""
        if self._coming + sum(len(room.watchers) for room in self._rooms.values()) >= MOST_WATCHERS or self._closed:
            raise TooManyWatchersError(f"{MOST_WATCHERS} watch already; close another page, or ask again later")
        self._coming += 1
        try:
            snapshot = await self._snapshot(pool)
        finally:
            self._coming -= 1
        name = snapshot["pool"]
        watcher = Watcher()
        watcher.push(self._events.event("snapshot", snapshot), bye=self._bye)
        room = self._rooms.setdefault(name, _Room(name))
        room.watchers.add(watcher)
        self._watching()
        if self._closed:
            watcher.end("shutdown", self._bye("shutdown"))
        try:
            yield watcher
        finally:
            room.watchers.discard(watcher)
            if not room.watchers and self._rooms.get(name) is room:
                del self._rooms[name]
            self._watching()

    async def prefixes(self, pool: str | None, *, limit: int = SHOWN_PREFIXES) -> dict[str, Any]:
        """Return the prefixes that are asked for most, with who holds them. Raise UnknownPoolError."""
        chosen = self._pages.chosen(pool)
        if chosen is None:
            names = ", ".join(line["pool"] for line in islice(self._pages.pools(), 5))
            raise KvmeshError(f"there are several pools: name one of them with ?pool= ({names}, …)")
        async with self._look_prefixes:  # one at a time: each is a few milliseconds of Redis
            return await self._prefixes(*chosen, limit=min(limit, MOST_PREFIXES))

    async def run(self) -> None:
        """Tell what changes, once a second, until cancelled; sleeps while nobody watches."""
        ticks = 0
        while True:
            await self._wanted.wait()
            await asyncio.sleep(TICK_SECONDS)
            ticks += 1
            try:
                await self._tick(with_prefixes=ticks % PREFIX_TICKS == 0)
            except Exception:
                now = self._clock()
                if now - self._complained_at >= COMPLAINT_SECONDS:
                    self._complained_at = now
                    log.exception("the live feed has failed; it goes on")

    def watched(self, pool: str | None) -> int:
        """Return how many watch a pool."""
        room = self._rooms.get(pool)
        return len(room.watchers) if room is not None else 0

    def end_all(self) -> None:
        """Tell everybody that this picker stops; nobody may come any more."""
        self._closed = True
        for room in tuple(self._rooms.values()):
            for watcher in tuple(room.watchers):
                watcher.end("shutdown", self._bye("shutdown"))

    async def close(self) -> None:
        """End all, and let go of Redis."""
        self.end_all()
        await self._view.close()

    # --------------------------------------------------------------------------------------------------------------

    def _watching(self) -> None:
        """Observe requests, and look once a second, while anybody watches."""
        observers, is_watched = self._watch.observers, bool(self._rooms)
        if is_watched and self not in observers:
            observers.append(self)
        elif not is_watched and self in observers:
            observers.remove(self)
        if is_watched:
            self._wanted.set()
        else:
            self._wanted.clear()
            self._shown.clear()

    async def _snapshot(self, pool: str | None) -> dict[str, Any]:
        chosen = self._pages.chosen(pool)
        common = {
            "version": 1,
            "now": self._wall_clock(),
            "process_id": self._process_id,
            "kvmesh": version("kvmesh"),
            "pool": None if chosen is None else chosen[0],
            "pools": self._pages.pools(),
        }
        if chosen is None:
            return common
        name, pages = chosen
        status, problem = await self._status()
        prefixes = await self._shown_prefixes(name, pages)
        facts = pages.facts(pool=name)
        snapshot = common | {"policy": policy_json(pages.policy), "pods": pods_json(facts, status)}
        await self._turn()
        snapshot |= {
            "classes": live_classes_json(facts),
            "index": live_index_json(facts, of_pool(status, facts.name, facts.statuses), problem),
            "prefixes": prefixes,
        }
        decisions = []
        for record in tuple(islice(facts.recent, SHOWN_DECISIONS)):
            await self._turn()
            decisions.append(live_decision_json(record, policy=pages.policy))
        return snapshot | {"decisions": decisions}

    async def _tick(self, *, with_prefixes: bool) -> None:
        if not self._rooms:
            return
        if any(name is not None for name in self._rooms):
            await self._status()
        pools = self._pages.pools()
        for room in tuple(self._rooms.values()):
            if pools:
                self._tell(room, "pools", {"now": self._wall_clock(), "pools": pools})
            if room.name is not None:
                await self._tell_room(room, room.name, with_prefixes=with_prefixes)

    async def _tell_room(self, room: _Room, name: str, *, with_prefixes: bool) -> None:
        pages = self._pages.pages_of(name)
        if pages is None:
            for watcher in tuple(room.watchers):
                watcher.end("pool-gone", self._bye("pool-gone"))
            return
        _, status, problem = self._looked
        facts = pages.facts(pool=name)
        self._tell(room, "pods", pods_json(facts, status))
        await self._turn()
        self._tell(room, "classes", live_classes_json(facts))
        self._tell(room, "index", live_index_json(facts, of_pool(status, name, facts.statuses), problem))
        now = self._clock()
        for event, coalesced in (("decision", room.decisions), ("ended", room.ends)):
            if (data := coalesced.flush(now=now)) is not None:
                self._tell(room, event, data)
        await asyncio.sleep(0)  # milliseconds each with many pods, and requests wait for none of them
        if with_prefixes:
            self._tell(room, "prefixes", await self._shown_prefixes(name, pages))

    def _offer(self, room: _Room, name: str, coalesced: Coalesced, make: Callable[[], Mapping[str, Any]]) -> None:
        data = coalesced.offer(make, now=self._clock())
        if data is not None:
            self._tell(room, name, data)

    def _tell(self, room: _Room, name: str, data: Mapping[str, Any]) -> None:
        event = self._events.event(name, data)
        for watcher in tuple(room.watchers):
            watcher.push(event, bye=self._bye)

    def _bye(self, why: str) -> bytes:
        return self._events.event("bye", {"why": why, "message": FAREWELLS[why]})

    async def _status(self) -> tuple[IndexStatus | None, str | None]:
        """Return how the index stands, None and why where it cannot be read; one look serves all who ask at a time."""
        async with self._looking:
            at, status, problem = self._looked
            if self._clock() - at >= FRESH_SECONDS:
                try:
                    status, problem = (await self._view.look()).status, None
                except IndexUnavailableError as error:
                    status, problem = None, str(error)
                self._looked = (self._clock(), status, problem)
            return status, problem

    async def _shown_prefixes(self, name: str, pages: PickerPages) -> dict[str, Any]:
        """Return the prefixes for the feed; one look serves all who come at a time."""
        async with self._look_prefixes:
            at, page = self._shown.get(name, (float("-inf"), {}))
            # never text that must not be shown any more
            if self._clock() - at >= FRESH_SECONDS or page["text_shown"] != pages.prefixes.shows_text:
                page = await self._prefixes(name, pages, limit=SHOWN_PREFIXES)
                self._shown[name] = self._clock(), page
            return page

    async def _prefixes(self, name: str, pages: PickerPages, *, limit: int) -> dict[str, Any]:
        view = pages.prefixes.view(limit=limit)
        look = await self._look_up(view)
        facts = pages.facts(pool=name)
        addresses = {status.address for status in facts.statuses}
        cached = None
        if look is not None:
            cached = sum(line.cached_blocks for line in look.status.sources if line.endpoint in addresses)
        shown = PrefixFacts(
            name=name,
            now=self._wall_clock(),
            monotonic=self._clock(),
            since=self._started_at,
            half_life_seconds=HALF_LIFE_SECONDS,
            sampled_share=pages.prefixes.sampled_share,
            shows_text=pages.prefixes.shows_text,
            cached_blocks=cached,
            holders=look.holders if look is not None else None,
        )
        nodes = []
        for node in prefix_nodes(view, shown, name_of=self._name_of, text_of=lambda edge: _text(pages, edge)):
            nodes.append(node)
            await self._turn()
        if shown.shows_text and not pages.prefixes.shows_text:  # forbidden meanwhile
            nodes = [{**node, "text": None} for node in nodes]
            shown = replace(shown, shows_text=False)
        return prefixes_json(view, shown, nodes)

    async def _turn(self) -> None:
        """Let requests go first, if this has taken long enough: they wait for nobody who watches."""
        if self._clock() - self._turned_at >= TURN_SECONDS:
            await asyncio.sleep(0)
            self._turned_at = self._clock()

    async def _look_up(self, view: TreeView) -> IndexLook | None:
        try:
            return await self._view.look(b"".join(map(sampled_keys, view.edges)), findings=False)
        except IndexUnavailableError:
            return None  # the event `index` says why

    def _name_of(self, key: bytes) -> str:
        """Return a name that tells nobody, who has a prompt to compare, whether it was it."""
        return blake2b(key, key=self._secret, digest_size=8).hexdigest()

    def _share_memory_out(self) -> None:
        self._fed = {name for name in self._fed if self._pages.pages_of(name) is not None}
        each = min(max(PREFIX_BYTES // max(len(self._fed), 1), LEAST_PREFIX_BYTES), MOST_PREFIX_BYTES)
        for name in self._fed:
            if (pages := self._pages.pages_of(name)) is not None:
                pages.prefixes.reconfigure(most_bytes=each)


def _text(pages: PickerPages, edge: TreeEdge) -> str | None:
    try:
        text = pages.prompt_text(edge.origin.model, edge.head)
    except KvmeshError:  # ids that the model does not have: clients may send any
        return None
    return text if text is None else text[:LONGEST_PROMPT_TEXT]

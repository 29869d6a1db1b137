"""The live feed: first a snapshot of one pool for a page, then its changes. Read-only.

While any connection watches a pool, its pods, classes and index are read once a second for all of them, and requests
are observed. The prefix tree is always updated (`picked`). Failures here never affect a request.
"""

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from hashlib import blake2b
from importlib.metadata import metadata, version
from itertools import islice

from msgspec import Struct, structs

from extproc.admission.prepared_request import Picked
from extproc.errors import KvmeshError
from extproc.ledger.facts import Decided, DecisionRecord, Ended
from extproc.ledger.ledger import RequestWatch, Throttle
from extproc.pages.admin_pages import PickerPages
from extproc.pages.decision_state import decision_state, ended_state
from extproc.pages.live_watchers import Coalesced, EventNumbers, Watcher
from extproc.pages.picker_state import DecisionState, EndedEvent, PrefixesEvent, SnapshotEvent
from extproc.pages.pool_pages import PoolPages
from extproc.pages.prefix_pages import HALF_LIFE_SECONDS, index_state, prefix_nodes, sampled_keys
from extproc.pods.pod_ranks import pod_of
from extproc.prefixes.prefix_tree import TreeEdge
from kvmesh.errors import IndexUnavailableError

log = logging.getLogger(__name__)

MOST_WATCHERS = 32
TICK_SECONDS = 1.0
TURN_SECONDS = 0.002
FRESH_SECONDS = 0.5  # the maximum age of a reused index look or prefix view
PREFIX_TICKS = 5
SHOWN_DECISIONS = 20  # in the snapshot
SHOWN_CANDIDATES = 8  # per decision; GET /v1/decisions has all
SHOWN_PREFIXES = 100
MOST_PREFIXES = 500
MOST_OPEN = 4096  # decisions of requests that have not ended
PREFIX_BYTES = 16 << 20  # for the trees of all pools together
LEAST_PREFIX_BYTES, MOST_PREFIX_BYTES = 128 << 10, 4 << 20  # per tree
LONGEST_PROMPT_TEXT = 80  # characters
FAREWELLS = {
    "shutdown": "this picker is stopping",
    "slow-reader": "the events were read too slowly; connect again",
    "pool-gone": "the pool is no longer served here",
}


class TooManyWatchersError(KvmeshError):
    """The number of connections has reached its limit."""


class _Audience:
    """The connections that watch one pool, or, without a name, the list of pools."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.watchers: set[Watcher] = set()
        self.decisions = Coalesced[DecisionState]()
        self.ends = Coalesced[EndedEvent]()
        self.open: OrderedDict[int, DecisionRecord] = OrderedDict()  # request number -> its decision


class LiveFeed:
    """Implements `facts.RequestObserver` while there are connections."""

    def __init__(self, pages: PickerPages, *, watch: RequestWatch) -> None:
        self._pages = pages
        self._watch = watch
        self._started_at = time.time()
        self._process_id = secrets.token_hex(8)
        self._secret = secrets.token_bytes(16)
        self._events = EventNumbers()
        self._audiences: dict[str | None, _Audience] = {}
        self._coming = 0
        self._wanted = asyncio.Event()
        self._looking = asyncio.Lock()
        self._shown: dict[str, tuple[float, PrefixesEvent]] = {}  # pool -> time and content of its last shown prefixes
        self._fed: set[str] = set()  # pools whose tree has received requests
        self._throttle = Throttle()
        self._closed = False
        self._turned_at = time.monotonic()

    # --- reports from the picker ----------------------------------------------------------------------------------

    def picked(self, pool: str, picked: Picked) -> None:
        """Feed a routed request into the prefix tree, after its answer was sent."""
        pages = self._pages.pages_of(pool)
        if pages is None:
            return
        if pool not in self._fed:
            self._fed.add(pool)
            self._share_memory_out()
        pages.prefixes.routed(picked)

    def decided(self, decided: Decided, /) -> None:
        """Send a decision to all connections that watch its pool."""
        audience, pages = self._audiences.get(decided.arrival.pool), self._pages.pages_of(decided.arrival.pool)
        if audience is None or pages is None:
            return
        if decided.endpoint is not None:
            audience.open[decided.arrival.number] = decided.record
            if len(audience.open) > MOST_OPEN:
                audience.open.popitem(last=False)
        policy = pages.policy

        def make() -> DecisionState:
            return decision_state(decided.record, policy=policy, most=SHOWN_CANDIDATES, decided=decided)

        self._send(audience, "decision", audience.decisions.offer(make, now=time.monotonic()))

    def ended(self, ended: Ended, /) -> None:
        """Send a request's end to all connections that watch its pool."""
        audience = self._audiences.get(ended.arrival.pool)
        if audience is None:
            return
        record, at = audience.open.pop(ended.arrival.number, None), time.time()

        def make() -> EndedEvent:
            return ended_state(ended, decision_id=None if record is None else record.id, at=at)

        self._send(audience, "ended", audience.ends.offer(make, now=time.monotonic()))

    # --- requests from connections --------------------------------------------------------------------------------

    @asynccontextmanager
    async def watcher(self, pool: str | None) -> AsyncIterator[Watcher]:
        """Watch a pool, beginning with a snapshot. Raise UnknownPoolError, TooManyWatchersError."""
        watching = sum(len(audience.watchers) for audience in self._audiences.values())
        if self._coming + watching >= MOST_WATCHERS or self._closed:
            raise TooManyWatchersError(f"{MOST_WATCHERS} watch already; close another page, or ask again later")
        self._coming += 1
        try:
            pages = self._pages.chosen(pool)
            snapshot = await self._snapshot(pages)
        finally:
            self._coming -= 1
        name = None if pages is None else pages.pool.name
        watcher = Watcher(self._bye)
        watcher.push(self._events.event("snapshot", snapshot))
        audience = self._audiences.setdefault(name, _Audience(name))
        audience.watchers.add(watcher)
        self._watching()
        if self._closed:
            watcher.end("shutdown")
        try:
            yield watcher
        finally:
            audience.watchers.discard(watcher)
            if not audience.watchers and self._audiences.get(name) is audience:
                del self._audiences[name]
            self._watching()

    async def prefixes(self, pool: str | None, *, limit: int = SHOWN_PREFIXES) -> PrefixesEvent:
        """Return the most requested prefixes and their holders. Raise UnknownPoolError or BadQueryError."""
        pages = self._pages.named(pool)
        async with self._looking:  # one at a time: each is a few milliseconds of Redis
            return await self._prefixes(pages, limit=min(limit, MOST_PREFIXES))

    async def run(self) -> None:
        """Send changes once a second until cancelled; sleep while there are no connections."""
        ticks = 0
        while True:
            await self._wanted.wait()
            await asyncio.sleep(TICK_SECONDS)
            ticks += 1
            try:
                await self._tick(with_prefixes=ticks % PREFIX_TICKS == 0)
            except Exception:
                if self._throttle.passes():
                    log.exception("the live feed has failed; it goes on")

    def watched(self, pool: str | None) -> int:
        """Return the number of connections that watch a pool."""
        audience = self._audiences.get(pool)
        return len(audience.watchers) if audience is not None else 0

    def end_all(self) -> None:
        """End all connections with the reason that this picker is stopping, and accept no new ones."""
        self._closed = True
        for audience in self._audiences.values():
            self._end(audience, "shutdown")

    # --------------------------------------------------------------------------------------------------------------

    def _watching(self) -> None:
        """Observe requests and tick once a second only while there are connections."""
        observers, is_watched = self._watch.observers, bool(self._audiences)
        if is_watched and self not in observers:
            observers.append(self)
        elif not is_watched and self in observers:
            observers.remove(self)
        if is_watched:
            self._wanted.set()
        else:
            self._wanted.clear()
            self._shown.clear()

    async def _snapshot(self, pages: PoolPages | None) -> SnapshotEvent:
        snapshot = SnapshotEvent(
            version=1,
            now=time.time(),
            process_id=self._process_id,
            kvmesh=version("kvmesh"),
            pool=None if pages is None else self._pages.shown_name(pages),
            pools=self._pages.pools(),
            picker=self._pages.name,
            docs=documentation(),
        )
        if pages is None:
            return snapshot
        index = await self._pages.index(pages, fresh_seconds=FRESH_SECONDS)
        prefixes = await self._shown_prefixes(pages)
        pods = pages.endpoints(index)
        await self._turn()
        classes, shown_index = pages.classes(), pages.index(index, findings=self._pages.findings)
        decisions = []
        for record in tuple(islice(pages.pool.telemetry.recent, SHOWN_DECISIONS)):
            await self._turn()
            decisions.append(decision_state(record, policy=pages.policy, most=SHOWN_CANDIDATES))
        return structs.replace(
            snapshot,
            policy=pages.policy_state(),
            pods=pods,
            classes=classes,
            index=shown_index,
            prefixes=prefixes,
            history=await self._pages.history_of(pages),
            decisions=decisions,
        )

    async def _tick(self, *, with_prefixes: bool) -> None:
        pools = self._pages.pools()
        for audience in tuple(self._audiences.values()):
            if pools:
                self._send(audience, "pools", {"now": time.time(), "pools": pools})
            if audience.name is not None:
                await self._send_pool(audience, audience.name, with_prefixes=with_prefixes)

    async def _send_pool(self, audience: _Audience, name: str, *, with_prefixes: bool) -> None:
        pages = self._pages.pages_of(name)
        if pages is None:
            self._end(audience, "pool-gone")
            return
        index = await self._pages.index(pages, fresh_seconds=FRESH_SECONDS)
        self._send(audience, "pods", pages.endpoints(index))
        await self._turn()
        self._send(audience, "classes", pages.classes())
        self._send(audience, "index", pages.index(index, findings=self._pages.findings))
        now = time.monotonic()
        self._send(audience, "decision", audience.decisions.flush(now=now))
        self._send(audience, "ended", audience.ends.flush(now=now))
        await asyncio.sleep(0)  # each event takes milliseconds with many pods; let requests run in between
        if with_prefixes:
            self._send(audience, "history", await self._pages.history_of(pages))
            self._send(audience, "prefixes", await self._shown_prefixes(pages))

    def _send(self, audience: _Audience, name: str, data: Struct | dict[str, object] | None) -> None:
        if data is not None:
            event = self._events.event(name, data)
            for watcher in audience.watchers:
                watcher.push(event)

    def _end(self, audience: _Audience, why: str) -> None:
        for watcher in audience.watchers:
            watcher.end(why)

    def _bye(self, why: str) -> bytes:
        return self._events.event("bye", {"why": why, "message": FAREWELLS[why]})

    async def _shown_prefixes(self, pages: PoolPages) -> PrefixesEvent:
        """Return the prefixes for the feed; one view serves all concurrent connections."""
        async with self._looking:
            at, shown = self._shown.get(pages.pool.name, (float("-inf"), None))
            # never reuse a view whose text may no longer be shown
            if (
                shown is None
                or time.monotonic() - at >= FRESH_SECONDS
                or shown.text_shown != pages.prefixes.shows_text()
            ):
                shown = await self._prefixes(pages, limit=SHOWN_PREFIXES)
                self._shown[pages.pool.name] = time.monotonic(), shown
            return shown

    async def _prefixes(self, pages: PoolPages, *, limit: int) -> PrefixesEvent:
        view = pages.prefixes.view(limit=limit)
        cached_blocks = holders = None
        try:
            look = await self._pages.view.look(b"".join(map(sampled_keys, view.edges)), findings=False)
        except IndexUnavailableError:
            pass  # the event `index` shows the problem
        else:
            addresses, holders = {pod_of(status.address) for status in pages.statuses()}, look.holders
            cached_blocks = sum(line.cached_blocks for line in look.status.sources if line.endpoint in addresses)
        now, monotonic = time.time(), time.monotonic()
        nodes = []
        for node in prefix_nodes(
            view,
            holders=holders,
            cached_blocks=cached_blocks,
            unix_at=lambda seconds: now - max(monotonic - seconds, 0.0),
            name_of=self._name_of,
            text_of=lambda edge: _text(pages, edge),
        ):
            nodes.append(node)
            await self._turn()
        text_shown = pages.prefixes.shows_text()
        if not text_shown:  # the policy may have changed meanwhile
            nodes = [structs.replace(node, text=None) for node in nodes]
        return PrefixesEvent(
            now=now,
            pool=self._pages.shown_name(pages),
            since=self._started_at,
            half_life_seconds=HALF_LIFE_SECONDS,
            sampled_share=round(pages.prefixes.sampled_share, 4),
            requests=round(view.requests, 2),
            hit_tokens=round(view.hit_tokens),
            cached_blocks=cached_blocks,
            index=index_state(view, holders),
            text_shown=text_shown,
            left_out=view.left_out,
            nodes=nodes,
        )

    async def _turn(self) -> None:
        """Yield to the event loop after TURN_SECONDS of work: requests must not wait for a page."""
        if time.monotonic() - self._turned_at >= TURN_SECONDS:
            await asyncio.sleep(0)
            self._turned_at = time.monotonic()

    def _name_of(self, key: bytes) -> str:
        """Return a keyed hash of a block key, so that nobody can test whether a guessed prompt was sent."""
        return blake2b(key, key=self._secret, digest_size=8).hexdigest()

    def _share_memory_out(self) -> None:
        fed = {name: pages for name in self._fed if (pages := self._pages.pages_of(name)) is not None}
        self._fed = set(fed)
        each = min(max(PREFIX_BYTES // max(len(fed), 1), LEAST_PREFIX_BYTES), MOST_PREFIX_BYTES)
        for pages in fed.values():
            pages.prefixes.limit(most_bytes=each)


@cache
def documentation() -> str:
    """Return the documentation's URL from the package metadata, or ""."""
    urls: dict[str, str] = dict(line.split(", ", 1) for line in metadata("kvmesh").get_all("Project-URL") or ())
    return urls.get("Documentation", "")


def _text(pages: PoolPages, edge: TreeEdge) -> str | None:
    tokenizer = pages.pool.prompts.tokenizers.get(edge.origin.model)
    if tokenizer is None or not pages.prefixes.shows_text():
        return None
    try:
        text = tokenizer.text(edge.head)
    except KvmeshError:  # ids unknown to the model: clients may send any
        return None
    return text if text is None else text[:LONGEST_PROMPT_TEXT]

"""One pool's picker with its admin pages and live feed, before a real Redis: for the tests of the feed.

Requests are picked without Envoy and without pods, which nobody needs to look at.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from extproc.ext_proc.call import OpenExchange
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.admin_http import AdminServer
from extproc.pages.admin_pages import PickerPages
from extproc.pages.live_feed import LiveFeed
from extproc.pages.pool_pages import PoolPages
from extproc.pick import pick
from extproc.policy.values import PickPolicy
from extproc.pools.pool import Pool
from extproc.pools.pools import Pools
from extproc.pools.shared_resources import SharedResources
from extproc.service import static_config
from extproc.settings.config import PickerSettings
from kvmesh.index.index_view import IndexView
from operate.local.ports import pick_free_port
from tests.integration.hermetic_picker import SETTINGS

HOST = "127.0.0.1"
MODEL = "tiny"
TINY_MODEL = Path(__file__).parents[2] / "podsim" / "tiny_model"
DEADLINE_SECONDS = 15.0
PODS = ("10.0.0.1:8000", "10.0.0.2:8000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One server-sent event."""

    id: int
    name: str
    data: dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Stream:
    """A connection to the feed."""

    response: aiohttp.ClientResponse
    seen: list[Event] = field(default_factory=list)

    async def next(self, *names: str) -> Event:
        """Return the next event of these names; others before it are only kept in `seen`."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                event = await self._read()
                assert event is not None, "the stream has ended"
                if not names or event.name in names:
                    return event

    async def rest(self) -> list[Event]:
        """Return all that comes until the stream ends."""
        events = []
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (event := await self._read()) is not None:
                events.append(event)
        return events

    async def _read(self) -> Event | None:
        fields: dict[str, str] = {}
        while True:
            line = await self.response.content.readline()
            if not line:
                return None
            if line == b"\n":
                if "event" in fields:
                    break
                continue  # after a comment
            name, _, value = line.decode().rstrip("\n").partition(": ")
            fields[name] = value
        event = Event(id=int(fields["id"]), name=fields["event"], data=json.loads(fields["data"]))
        self.seen.append(event)
        return event


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePicker:
    """A pool's picker that is looked at."""

    pool: Pool
    pages: PickerPages
    resources: SharedResources
    feed: LiveFeed
    admin: str
    http: aiohttp.ClientSession

    @property
    def pool_pages(self) -> PoolPages:
        """The pool's pages."""
        found = self.pages.chosen(None)
        assert found is not None
        return found

    def facts(self, *, request_id: str = "r-1", **headers: str) -> RequestFacts:
        """Return a request's headers."""
        return RequestFacts(
            method="POST",
            path="/v1/completions?api_key=planted-secret",
            objective=None,
            request_id=request_id,
            headers={"content-type": "application/json"} | headers,
        )

    async def ask(self, text: str, *, request_id: str = "r-1", **headers: str) -> OpenExchange:
        """Have a completion with this prompt picked."""
        body = json.dumps({"model": MODEL, "prompt": text}).encode()
        return await pick(self.facts(request_id=request_id, **headers), body, self.pool.runtime)

    @asynccontextmanager
    async def watching(self, query: str = "") -> AsyncIterator[Stream]:
        """Watch; the snapshot is the first event."""
        async with self.http.get(f"{self.admin}/v1/live{query}") as response:
            assert response.status == 200, await response.text()
            yield Stream(response=response)

    async def get(self, path: str) -> tuple[int, Any]:
        """Return the status and JSON of a page."""
        async with self.http.get(self.admin + path) as response:
            return response.status, await response.json()


@asynccontextmanager
async def live_picker(
    redis_url: str, *, policy: PickPolicy | None = None, endpoints: tuple[str, ...] = PODS
) -> AsyncIterator[LivePicker]:
    """Run the pages, and the feed beside them."""
    settings = PickerSettings(
        **SETTINGS
        | {
            "grpc_port": 0,
            "admin_port": 0,
            "redis_url": redis_url,
            "endpoints": endpoints,
            "policy": policy or PickPolicy(),
        }
        | {"model": MODEL, "tokenizer_folder": TINY_MODEL}
    )
    resources = SharedResources(settings)
    resources.load_tokenizers(settings.model_table.served)
    pools = Pools(resources)
    await pools.apply({"": static_config(settings)})
    pool = pools.all[""]
    pages = PickerPages(pools, view=IndexView(url=redis_url), name=resources.name)
    feed = LiveFeed(pages, watch=resources.watch)
    resources.watch.on_picked = feed.picked
    server = AdminServer(pages, max_body_bytes=1 << 20, feed=feed)
    port = pick_free_port(host=HOST, avoid=())
    await server.start(host=HOST, port=port)
    running = asyncio.create_task(feed.run(), name="live feed")
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector) as http:
            yield LivePicker(
                pool=pool, pages=pages, resources=resources, feed=feed, admin=f"http://{HOST}:{port}", http=http
            )
    finally:
        await server.stop()
        running.cancel()
        await asyncio.wait([running])
        feed.end_all()
        await pages.close()
        await pool.close()
        await resources.close()

"""Both roles' admin servers with pages that say little, for tests of who is let in."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest

from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.admin_http import AdminServer
from extproc.pages.admin_pages import PickerPages
from kv_indexer.admin_http import AdminPages as IndexerPages
from kv_indexer.admin_http import serve_admin
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.blocks.source import IndexStatus
from kvmesh.metrics.exposition import Form
from operate.local.ports import pick_free_port

HOST = "127.0.0.1"
Door = Callable[..., AbstractAsyncContextManager[int]]


class Pages:
    """A picker's pages; `explained` keeps what was asked."""

    def __init__(self) -> None:
        self.explained: list[RequestFacts] = []

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        return True, {}

    async def metrics(self, _: Form) -> bytes:
        return b"up 1\n"

    async def state(self, *, pool: str | None = None) -> dict[str, Any]:
        return {"pool": pool}

    def pools(self) -> list[dict[str, Any]]:
        raise RuntimeError("a defect")

    async def explain(self, facts: RequestFacts, body: bytes, *, pool: str | None = None) -> dict[str, Any]:
        self.explained.append(facts)
        return {"endpoint": None}


@asynccontextmanager
async def picker_door(
    access: AdminAccess | None = None, *, host: str = HOST, pages: Pages | None = None
) -> AsyncIterator[int]:
    """Serve a picker's admin pages; give the port."""
    server = AdminServer(cast("PickerPages", pages or Pages()), max_body_bytes=1024, access=access)
    port = pick_free_port(host=HOST, avoid=())
    try:
        await server.start(host=host, port=port)
        yield port
    finally:
        await server.stop()


@asynccontextmanager
async def indexer_door(access: AdminAccess | None = None, *, host: str = HOST) -> AsyncIterator[int]:
    """Serve an indexer's admin pages; give the port."""

    async def status() -> IndexStatus:
        return cast("IndexStatus", {"sources": []})

    async def metrics(_: Form) -> bytes:
        return b"up 1\n"

    pages = IndexerPages(not_ready=dict, status=status, metrics=metrics)
    async with serve_admin(pages, host=host, port=0, access=access) as port:
        yield port


BOTH_ROLES = pytest.mark.parametrize(
    ("door", "page"), [(picker_door, "/state"), (indexer_door, "/sources")], ids=["picker", "indexer"]
)

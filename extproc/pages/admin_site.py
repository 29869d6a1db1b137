"""All that a running picker shows of itself over HTTP: the pages, the live feed, the checks of its start, the server.

`service` imports it late, and with it aiohttp and the doctor: a pick needs none of it.
"""

import asyncio
import socket
from collections.abc import Sequence

from extproc.doctor.examine import run_startup_checks
from extproc.pages.admin_http import AdminServer
from extproc.pages.admin_pages import ExplainPolicies, PickerPages
from extproc.pages.live_feed import LiveFeed
from extproc.pools.pools import Pools
from extproc.pools.shared_resources import SharedResources
from extproc.settings.shown_settings import shown_settings
from kvmesh.index.index_view import IndexView


class AdminSite:
    """The site of one picker."""

    def __init__(self, pools: Pools, resources: SharedResources, *, policies: ExplainPolicies | None) -> None:
        """`policies` explains which policies apply to a target; None: the endpoints are those of `--endpoints`."""
        settings = resources.settings
        view = IndexView(url=settings.redis_url)
        self.pages = PickerPages(pools, view=view, policies=policies, pod_key=resources.pod_key, name=resources.name)
        self._live = LiveFeed(self.pages, watch=resources.watch)
        self.pages.settings = shown_settings(settings)
        resources.watch.on_picked = self._live.picked
        self._pools = pools
        self._settings = settings
        self._checks = policies is None
        self._server = AdminServer(
            self.pages, max_body_bytes=settings.max_body_bytes, access=settings.admin_access, feed=self._live
        )

    async def run(self, listening: Sequence[socket.socket]) -> None:
        """Serve on these sockets, and look once for what is wrong though everything runs."""
        await self._server.serve(listening, host=self._settings.host)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._live.run(), name="live feed")
            if self._checks:
                tasks.create_task(self._check_once(), name="check once")

    async def close(self) -> None:
        """End open answers, close the port, and let go of Redis."""
        self._live.end_all()
        await self._server.stop()
        await self.pages.close()

    async def _check_once(self) -> None:
        (pool,) = self._pools.all.values()
        self.pages.findings = await run_startup_checks(self._settings, tokenizers=pool.prompts.tokenizers)

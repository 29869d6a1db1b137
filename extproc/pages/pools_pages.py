"""What the admin pages show where a picker serves several pools: one of them, or all in short. Changes nothing."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

from extproc.errors import PickError, UnknownPoolError
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.admin_pages import PickerPages
from extproc.pools.pool import Pool
from extproc.pools.pools import Pools
from extproc.telemetry.process_telemetry import process_text
from kvmesh.metrics.registry import MetricsPage

LISTED_ENDPOINTS = 2000  # in the state of all pools; more are in those of each


class PoolsPages:
    """Implements `admin_http.AdminPages`. `?pool=namespace/name` asks for one; without it, the only one or all."""

    def __init__(self, pools: Pools, *, policies: Callable[[str | None], Awaitable[dict[str, Any]]]) -> None:
        """`policies` explains who says what for a target."""
        self.ready = False
        self._pools = pools
        self._pages: dict[str, PickerPages] = {}  # by pool, made when first asked for
        self._policies = policies

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether traffic may come. A pool without endpoints does not count: the others are served."""
        problems: dict[str, str] = {}
        for pool in self._pools.all.values():
            problems |= pool.endpoints.problems()
        index = next((pool.index.problem for pool in self._pools.all.values() if pool.index.problem), None)
        return self.ready, {
            "pools": len(self._pools.names),
            "endpoint_problems": problems,
            "index_problem": index,
        }

    async def metrics(self) -> bytes:
        """Return Prometheus text: every series of a pool has the label `pool`; pools without requests have none."""
        page = MetricsPage()
        for name, pool in self._pools.with_requests.items():
            if pool.has_counted:
                await page.add(pool.telemetry.registry, pool=name)
        return page.text() + self._pools.registry.text(created=True) + process_text(ready=self.ready)

    async def state(self, *, pool: str | None = None) -> dict[str, Any]:
        """Return one pool's state; without a name the only one's, or that of all in short."""
        chosen = self._chosen(pool)
        if chosen is not None:
            return await self._of(chosen).state() | {"pool": chosen.name, "pools": self.pools()}
        return {"now": time.time(), "pool": None, "pools": self.pools(), "endpoints": self._endpoints()}

    def decisions(self, *, limit: int, request_id: str | None, pool: str | None = None) -> list[dict[str, Any]]:
        """Return the last decisions of a pool or of all, newest first."""
        chosen = self._chosen(pool)
        asked = [chosen] if chosen is not None else list(self._pools.all.values())
        found = [
            {"pool": each.name} | record
            for each in asked
            for record in self._of(each).decisions(limit=limit, request_id=request_id)
        ]
        return sorted(found, key=_newest_first)[:limit]

    async def explain(self, facts: RequestFacts, body: bytes, *, pool: str | None = None) -> dict[str, Any]:
        """Decide without booking, for the pool named or the one of the request's host."""
        try:
            chosen = self._chosen(pool) or self._pools.for_host(facts.headers.get("host", ""))
        except PickError as refusal:
            return {"endpoint": None, "status": refusal.status, "reason": refusal.reason, "message": refusal.message}
        return {"pool": chosen.name} | await self._of(chosen).explain(facts, body)

    def pools(self) -> list[dict[str, Any]]:
        """Return a line for each pool."""
        return [_line(pool) for pool in self._pools.all.values()]

    async def policies(self, target: str | None) -> dict[str, Any]:
        """Return who says what for a target. Raise PolicyTargetError."""
        return await self._policies(target)

    def reconfigure(self) -> None:
        """Go by the pools and policies in force."""
        known = self._pools.with_requests
        self._pages = {name: pages for name, pages in self._pages.items() if known.get(name) is pages.pool}
        for pages in self._pages.values():
            pages.reconfigure()

    # --- for the live feed ----------------------------------------------------------------------------------------

    def chosen(self, pool: str | None) -> tuple[str, PickerPages] | None:
        """Return the pool named, or the only one; None: there are several. Raise UnknownPoolError."""
        chosen = self._chosen(pool)
        return None if chosen is None else (chosen.name, self._of(chosen))

    def pages_of(self, pool: str) -> PickerPages | None:
        """Return the pages of a pool."""
        found = self._pools.pool(pool)
        return None if found is None else self._of(found)

    # --------------------------------------------------------------------------------------------------------------

    def _of(self, pool: Pool) -> PickerPages:
        pages = self._pages.get(pool.name)
        if pages is None or pages.pool is not pool:
            pages = self._pages[pool.name] = PickerPages(pool)
        return pages

    def _chosen(self, name: str | None) -> Pool | None:
        if name is not None:
            found = self._pools.pool(name)  # not `of_pool`, which counts what gateways ask for
            if found is None:
                raise UnknownPoolError(f"the pool {name[:200]!r} is not known here")
            return found
        everything = self._pools.all
        return next(iter(everything.values())) if len(everything) == 1 else None

    def _endpoints(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        lines = [
            {"pool": pool.name, "address": status.address, "state": status.reachability.value}
            for pool in self._pools.all.values()
            for status in pool.endpoints.known(now=now)
        ]
        return lines[:LISTED_ENDPOINTS]


def _line(pool: Pool) -> dict[str, Any]:
    config = pool.config
    return {
        "pool": pool.name,
        "endpoints": len(config.endpoints),
        "ready": sum(endpoint.ready and not endpoint.terminating for endpoint in config.endpoints),
        "open_requests": pool.books.open_requests,
        "waiting": sum(pool.runtime.admission.waiting.values()),
        "hosts": sorted(config.hosts),
        "model": config.model,
        "policies": sorted(set(config.origins.values())),
    }


def _newest_first(record: dict[str, Any]) -> float:
    return -float(record["at"])

"""Scrapes every endpoint's /metrics and keeps the last load of each; one named task an endpoint.

The picker reads `snapshot`. An endpoint that refuses connections is unreachable at once (nobody listens there); one
that is slow or answers nonsense keeps its last report until that is stale, and is then of unknown load: never idle.
"""

import asyncio
import errno
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

from extproc.core.endpoint import EndpointLoad, EndpointStatus, Reachability
from extproc.wire.vllm_metrics import parse_load

log = logging.getLogger(__name__)

MAX_PAGE_BYTES = 4 << 20


@dataclass(slots=True)
class _Target:
    address: str
    load: EndpointLoad | None = None
    refused: bool = False  # by the last scrape
    last_problem: str | None = None
    scraped: asyncio.Event = field(default_factory=asyncio.Event)


class MetricsScraper:
    """The endpoints and what they last said; `run` keeps it fresh."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        interval_seconds: float,
        timeout_seconds: float,
        stale_after_seconds: float,
    ) -> None:
        self._targets = {address: _Target(address) for address in addresses}
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._stale_after_seconds = stale_after_seconds

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every endpoint as it is known at `now` (monotonic seconds)."""
        return [self._status(target, now) for target in self._targets.values()]

    async def first_scrapes(self) -> None:
        """Wait until every endpoint was scraped once, with whatever outcome; each scrape has its deadline."""
        for target in self._targets.values():
            await target.scraped.wait()

    def problems(self) -> dict[str, str]:
        """Return what is wrong with each endpoint that did not report last time."""
        return {t.address: t.last_problem for t in self._targets.values() if t.last_problem is not None}

    async def run(self) -> None:
        """Scrape until cancelled."""
        timeout = aiohttp.ClientTimeout(total=self._timeout_seconds)
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        async with (
            aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
            asyncio.TaskGroup() as tasks,
        ):
            for target in self._targets.values():
                tasks.create_task(self._keep_fresh(session, target), name=f"scrape {target.address}")

    async def _keep_fresh(self, session: aiohttp.ClientSession, target: _Target) -> None:
        while True:
            await self._scrape(session, target)
            # jitter keeps replicas and endpoints from falling into step
            await asyncio.sleep(self._interval_seconds * random.uniform(0.8, 1.2))  # noqa: S311

    async def _scrape(self, session: aiohttp.ClientSession, target: _Target) -> None:
        asked_at = time.monotonic()
        try:
            async with session.get(f"http://{target.address}/metrics", allow_redirects=False) as response:
                load = parse_load(await _page(response), reported_at=asked_at) if response.status == 200 else None
            target.refused = False
            if load is None:
                self._problem(target, f"/metrics answered {response.status} without vLLM's load metrics")
            else:
                target.load = load
                self._problem(target, None)
        except Exception as error:  # whatever one pod answers must not end the scraping of all
            target.refused = _is_refusal(error)
            self._problem(target, f"no load from /metrics: {error or type(error).__name__}")
        target.scraped.set()

    def _status(self, target: _Target, now: float) -> EndpointStatus:
        if target.refused:
            return EndpointStatus(address=target.address, reachability=Reachability.UNREACHABLE, load=None)
        load = target.load
        if load is None or load.is_stale(now=now, limit_seconds=self._stale_after_seconds):
            return EndpointStatus(address=target.address, reachability=Reachability.UNKNOWN, load=None)
        return EndpointStatus(address=target.address, reachability=Reachability.READY, load=load)

    def _problem(self, target: _Target, problem: str | None) -> None:
        if problem == target.last_problem:
            return
        target.last_problem = problem
        if problem is None:
            log.info("endpoint reports its load", extra={"endpoint": target.address})
        else:
            log.warning("endpoint: %s", problem, extra={"endpoint": target.address})


async def _page(response: aiohttp.ClientResponse) -> bytes:
    """Return the whole page; raise ValueError when it is larger than any vLLM's."""
    page = bytearray()
    async for part in response.content.iter_chunked(1 << 16):
        page += part
        if len(page) > MAX_PAGE_BYTES:
            raise ValueError(f"/metrics is larger than {MAX_PAGE_BYTES} bytes")
    return bytes(page)


def _is_refusal(error: Exception) -> bool:
    """Tell whether nobody listens there; names that do not resolve or routes that fail say nothing of the pod."""
    return isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED

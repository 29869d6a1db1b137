"""Scrapes every endpoint's /metrics and keeps the last load of each; one named task an endpoint.

The picker reads `snapshot`. An endpoint that refuses connections is unreachable at once (nobody listens there); one
that is slow or answers nonsense keeps its last report until that is stale, and is then of unknown load: never idle.
"""

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from extproc.adapters.metrics_page import MetricsPage
from extproc.core.endpoint import EndpointLoad, EndpointStatus, Reachability
from extproc.wire.vllm_metrics import parse_load

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Target:
    address: str
    page: MetricsPage
    # what a pick may be told, made once a scrape and not once a pick
    unknown: EndpointStatus
    unreachable: EndpointStatus
    ready: EndpointStatus | None = None
    load: EndpointLoad | None = None  # that `ready` has
    text: bytes = b""  # that `load` was read from
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
        self._targets = {address: _target(address, timeout_seconds=timeout_seconds) for address in addresses}
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
        async with asyncio.TaskGroup() as tasks:
            for target in self._targets.values():
                tasks.create_task(self._keep_fresh(target), name=f"scrape {target.address}")

    async def _keep_fresh(self, target: _Target) -> None:
        try:
            while True:
                await self._scrape(target)
                # jitter keeps replicas and endpoints from falling into step
                await asyncio.sleep(self._interval_seconds * random.uniform(0.8, 1.2))  # noqa: S311
        finally:
            target.page.close()

    async def _scrape(self, target: _Target) -> None:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await target.page.fetch()
            load = _load(target, response.body, asked_at) if response.status == 200 else None
            target.refused = False
            if load is None:
                self._problem(target, f"/metrics answered {response.status} without vLLM's load metrics")
            else:
                target.load, target.text = load, response.body
                target.ready = EndpointStatus(address=target.address, reachability=Reachability.READY, load=load)
                self._problem(target, None)
        except Exception as error:  # whatever one pod answers must not end the scraping of all
            # nobody listens there; names that do not resolve or routes that fail say nothing of the pod
            target.refused = isinstance(error, ConnectionRefusedError)
            self._problem(target, f"no load from /metrics: {str(error) or type(error).__name__}")
        target.scraped.set()

    def _status(self, target: _Target, now: float) -> EndpointStatus:
        if target.refused:
            return target.unreachable
        load, ready = target.load, target.ready
        if load is None or ready is None or load.is_stale(now=now, limit_seconds=self._stale_after_seconds):
            return target.unknown
        return ready

    def _problem(self, target: _Target, problem: str | None) -> None:
        if problem == target.last_problem:
            return
        target.last_problem = problem
        if problem is None:
            log.info("endpoint reports its load", extra={"endpoint": target.address})
        else:
            log.warning("endpoint: %s", problem, extra={"endpoint": target.address})


def _target(address: str, *, timeout_seconds: float) -> _Target:
    return _Target(
        address=address,
        page=MetricsPage(address, timeout_seconds=timeout_seconds),
        unknown=EndpointStatus(address=address, reachability=Reachability.UNKNOWN, load=None),
        unreachable=EndpointStatus(address=address, reachability=Reachability.UNREACHABLE, load=None),
    )


def _load(target: _Target, text: bytes, asked_at: float) -> EndpointLoad | None:
    """Read the load; a page that says what the last report said is not read again."""
    if target.load is not None and text == target.text:
        return replace(target.load, reported_at=asked_at)
    return parse_load(text, reported_at=asked_at)

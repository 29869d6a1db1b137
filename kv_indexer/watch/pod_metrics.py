"""Scrapes every pod's /metrics and keeps the last report of each; one task per pod.

Callers that need a fresher report ask for it, as a stream's follower does for the pod's start time. Simultaneous
requests share one scrape, which also replaces the next regular one. This module does not judge the reports.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvmesh.pods.engine_metrics import parse_pod_report
from kvmesh.pods.metrics_page import MetricsPage, is_page, why_no_load
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_http import MAX_PAGE_BYTES, PodPages
from kvmesh.pods.pod_report import PodReport

log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 1.0  # a follower must not wait long for a start time


@dataclass(slots=True)
class _Target:
    endpoint: str
    page: MetricsPage
    report: PodReport | None = None
    scrapes: int = 0  # finished ones, successful or not
    is_ill: bool = False  # the last scrape failed, and that was logged
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # one scrape at a time
    task: asyncio.Task[None] | None = None


class PodMetrics:
    """The pods' reports; `run` keeps them fresh, and pods are asked only while it runs."""

    def __init__(
        self,
        endpoints: Collection[str],
        *,
        interval_seconds: float = 5.0,
        timeout_seconds: float = 2.0,
        slowdown: Callable[[], float] = lambda: 1.0,
        pages: PodPages | None = None,
    ) -> None:
        """`pages` if others ask the same pods; `slowdown` returns a factor on the interval."""
        self._interval_seconds = interval_seconds
        self._timeout_seconds = timeout_seconds
        self._slowdown = slowdown
        self._pages = pages or PodPages()
        self._targets = {endpoint: self._target(endpoint) for endpoint in endpoints}
        self._turns = PageTurns()
        self._tasks: asyncio.TaskGroup | None = None

    def add(self, endpoint: str) -> None:
        """Scrape this pod from now on, too."""
        if endpoint not in self._targets:
            target = self._targets[endpoint] = self._target(endpoint)
            # thousands may come at once; a caller that needs a report earlier asks for it
            self._start(target, wait_seconds=random.random() * self._interval_seconds * self._slowdown())  # noqa: S311

    def remove(self, endpoint: str) -> None:
        """Forget a pod."""
        target = self._targets.pop(endpoint, None)
        if target is not None and target.task is not None:
            target.task.cancel()
        self._pages.forget(endpoint)

    def latest(self, endpoint: str) -> PodReport | None:
        """Return the last report, however old; None without one, or if the endpoint is unknown."""
        target = self._targets.get(endpoint)
        return target.report if target else None

    async def fresh(self, endpoint: str, *, max_age_seconds: float) -> PodReport | None:
        """Return a report of at most this age, scraping if necessary; None if the pod gives none in time."""
        target = self._targets.get(endpoint)
        oldest = time.monotonic() - max_age_seconds
        if target is None:
            return None
        if target.report is None or target.report.scraped_at < oldest:
            with suppress(TimeoutError):
                async with asyncio.timeout(2 * self._timeout_seconds), target.lock:
                    if target.report is None or target.report.scraped_at < oldest:
                        await self._scrape(target)
        report = target.report
        return report if report is not None and report.scraped_at >= oldest else None

    async def started_at(self, endpoint: str, *, timeout_seconds: float = START_TIMEOUT_SECONDS) -> float | None:
        """Ask when the pod's process started, in unix seconds by its own clock; None if it does not tell in time."""
        try:
            async with asyncio.timeout(timeout_seconds):
                # asked again each time: an older report may come from a process that has died since
                report = await self.fresh(endpoint, max_age_seconds=0)
        except TimeoutError:
            return None
        return report.started_at if report else None

    async def run(self) -> None:
        """Scrape until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for target in self._targets.values():
                    self._start(target)
                await asyncio.Event().wait()  # pods may come at any time
        finally:
            self._tasks = None
            self._pages.close()

    def _target(self, endpoint: str) -> _Target:
        get = partial(self._pages.get, endpoint, timeout_seconds=self._timeout_seconds, max_body_bytes=MAX_PAGE_BYTES)
        return _Target(endpoint, MetricsPage(get))

    def _start(self, target: _Target, *, wait_seconds: float = 0.0) -> None:
        if self._tasks is not None:
            keep = self._keep_fresh(target, wait_seconds=wait_seconds)
            target.task = self._tasks.create_task(keep, name=f"scrape-{target.endpoint}")

    async def _keep_fresh(self, target: _Target, *, wait_seconds: float) -> None:
        if wait_seconds:
            await asyncio.sleep(wait_seconds)
        seen = 0
        while True:
            async with target.lock:
                others_ask = target.scrapes != seen
                if not others_ask:
                    await self._scrape(target)
            seen = target.scrapes
            # jitter keeps indexers and pods out of step; other callers at a similar pace go first
            pace = random.uniform(1.1, 1.4) if others_ask else random.uniform(0.8, 1.2)  # noqa: S311
            await asyncio.sleep(self._interval_seconds * self._slowdown() * pace)

    async def _scrape(self, target: _Target) -> None:
        asked_at = time.monotonic()
        if self._tasks is None:
            return
        problem = ""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                answer = await target.page.get()
                if is_page(answer):
                    target.report = await self._turns.read(parse_pod_report(answer.body, scraped_at=asked_at))
                    if not target.report.engines:
                        problem = "its /metrics has no request counters (--disable-log-stats?)"
                else:
                    problem = why_no_load(answer, target.page.path)
        except Exception as error:  # one pod's answer must not end the scraping of all
            problem = f"no /metrics: {str(error) or type(error).__name__}"
        if problem and not target.is_ill:
            log.warning("%s: %s; a pod that sends no events cannot be told from an idle one", target.endpoint, problem)
        elif target.is_ill and not problem:
            log.info("%s reports its counters", target.endpoint)
        target.is_ill = bool(problem)
        target.scrapes += 1

"""Scrapes every endpoint's /metrics and keeps the last load of each; one named task an endpoint.

The picker reads `snapshot`. An endpoint that refuses connections is unreachable at once: nothing listens there. One
that is slow or answers nonsense keeps its last report until that is stale, and its load is then unknown: never idle.
Its /v1/models is read as well, when it has first answered and now and then: which models and LoRA adapters it serves,
and how long a prompt may be. A pod that refuses to say so, as it wants a key, keeps the models that it has said.
A report that stays the same although it says that requests run or wait is no report: its engine is stuck or dead.
An endpoint that refused connections, is another process, or came later is new from its first report on (`ready_since`).
Endpoints come and go while it runs (`set_endpoints`); those that may get no new requests are scraped until they are
gone. A page that takes long to read waits for its turns (`page_turns`), within the same deadline as its pod.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from extproc.pods.endpoint import (
    EndpointStatus,
    EndpointTrend,
    Reachability,
    parse_served_models,
)
from extproc.pods.endpoint_samples import restarted
from extproc.pods.endpoint_trouble import EndpointTrouble
from extproc.pods.first_answers import FirstAnswers
from extproc.pods.scrape_pace import IDLE_AFTER_SECONDS, ScrapePace
from extproc.pods.scrape_target import ScrapeTarget
from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.metrics_page import is_page, why_no_load
from kvmesh.pods.page_steps import Steps
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_access import why_refused
from kvmesh.pods.pod_http import MAX_MODELS_BYTES
from kvmesh.pods.pod_key import PodKey
from kvmesh.pods.pod_report import EndpointLoad

log = logging.getLogger(__name__)

# a pod counts with each step: numbers that have changed after so long a time may stand still for so many times it again
PAUSE_FACTOR = 2.0
FROZEN = "/metrics stands still with {load.running_requests} requests running and {waiting} waiting"
CATCH_UP_SECONDS = 2.0  # until the endpoints of a pool that was idle have all been scraped again
KEPT_PAGE_BYTES = 1 << 18  # of a page, to know it again; a longer one is read each time
MODELS_INTERVAL_SECONDS = 5.0  # an adapter that a pod has just loaded is known this much later at most
MODELS_AGAIN_SECONDS = 1.0  # at least, after an answer: counters that always go back are no new process each time


class PageReader(Protocol):
    """Reads more of the pages than the load; see `endpoint_telemetry.LatencyTelemetry`."""

    def page(self, endpoint: str, text: bytes, *, load: EndpointLoad) -> Steps[None]:
        """Take a page and the load that it says. Raise UnreadablePageError."""

    def restarted(self, endpoint: str) -> None:
        """Take note that the endpoint is another process: its counters begin anew."""

    def forget(self, endpoint: str) -> None:
        """Take note that the endpoint is gone."""


class MetricsScraper:
    """The endpoints and what they last said; `run` keeps it fresh."""

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        interval_seconds: float,
        timeout_seconds: float,
        stale_after_seconds: float,
        models_interval_seconds: float = MODELS_INTERVAL_SECONDS,
        restarted: Callable[[str], None] | None = None,
        reported: Callable[[str, EndpointLoad, EndpointTrend], None] | None = None,
        changed: Callable[[], None] | None = None,
        told: Callable[[], None] | None = None,
        pace: ScrapePace | None = None,
        turns: PageTurns | None = None,
        pages: PageReader | None = None,
        key: PodKey | None = None,
    ) -> None:
        """`pace`, `turns` and `key` are shared with the other pools' scrapers; `pages` gets all good pages.

        `restarted` is called for each endpoint that is another process now, `reported` for each report, and `changed`
        for each scrape that gave none: the endpoint may be unknown or unreachable now. `told` is called when all
        endpoints that are new have been asked for their models.
        """
        self._reported, self._changed = reported, changed
        self._models_interval_seconds = models_interval_seconds
        self._restarted = restarted
        self._pages = pages
        self._learned_adapters: Mapping[str, str] = {}
        self._key = key
        self._timeout_seconds = timeout_seconds
        self._targets = {address: self._target(address) for address in addresses}
        self._answers = FirstAnswers(addresses, completed=told or (lambda: None))
        self._wanted_interval_seconds = interval_seconds
        self._wanted_stale_seconds = stale_after_seconds
        self._pace = pace or ScrapePace()
        self._turns = turns or PageTurns()
        self._pace.endpoints += len(self._targets)
        self._is_idle = self._pace.rests
        if not self._is_idle:
            self._pace.busy += len(self._targets)
        self._asked_at = float("-inf")  # monotonic seconds of the last snapshot
        self._busy = asyncio.Event()
        self._catching_up = float("-inf"), 0.0  # until when reports of the idle time count, and for how long
        self._tasks: asyncio.TaskGroup | None = None
        self._stale_after_seconds = stale_after_seconds
        self._interval_seconds = interval_seconds
        self._set_pace()

    def set_endpoints(self, endpoints: Mapping[str, Reachability | None]) -> None:
        """Know these endpoints from now on: address -> why it may get no new requests, None where it may."""
        for address in [address for address in self._targets if address not in endpoints]:
            self._remove(self._targets.pop(address))
        for address, closed in endpoints.items():
            target = self._targets.get(address)
            if target is not None and closed is None and target.closed is not None and target.is_silent:
                self._remove(target)  # it was not up when it was looked at: look again now, not when its turn comes
                target = None
            if target is None:
                target = self._targets[address] = self._target(address)
                target.is_new = self._tasks is not None
                if target.is_new:  # also before it reports: whole queues may wait for the first pod
                    target.unknown = replace(target.unknown, ready_since=time.monotonic())
                self._answers.expect(address)
                self._count(1)
                self._start(target)
            is_closed_by = target.closed.reachability if target.closed is not None else None
            if closed is not is_closed_by:
                target.closed = None if closed is None else replace(target.unreachable, reachability=closed)
                target.closed_since = time.monotonic()
                target.refuses(refused=target.refused)
        # in the order given: pages and ties go by it
        self._targets = {address: self._targets[address] for address in endpoints}
        self._learn_adapters()
        self._set_pace()

    def reconfigure(self, *, stale_after_seconds: float) -> None:
        """Believe reports for another time from now on."""
        self._wanted_stale_seconds = stale_after_seconds
        self._set_pace()

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every endpoint as it is known at `now` (monotonic seconds)."""
        self._asked_at = now
        if self._is_idle:
            self._set_busy()
        return [self._status(target, now) for target in self._targets.values()]

    def known(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return the same where no request depends on it: the pool stays idle if it is."""
        return [self._status(target, now) for target in self._targets.values()]

    @property
    def learned_adapters(self) -> Mapping[str, str]:
        """LoRA adapter -> its base model's name, as the pods say."""
        return self._learned_adapters

    @property
    def is_asking(self) -> bool:
        """Whether an endpoint is new and has not been asked for its models yet."""
        return not self._answers.is_complete

    async def first_scrapes(self) -> None:
        """Wait until every endpoint was scraped once, with whatever outcome; each scrape has its deadline."""
        for target in tuple(self._targets.values()):
            await target.scraped.wait()

    async def first_answers(self) -> None:
        """Wait until every endpoint that answers was asked for its models, for a scrape's deadline at most."""
        await self._answers.wait(seconds=self._timeout_seconds)

    def problems(self) -> dict[str, str]:
        """Return what is wrong with each endpoint that did not report last time, or refuses to list its models."""
        return {t.address: why for t in self._targets.values() if (why := t.last_problem or t.refusal) is not None}

    def troubles(self) -> Mapping[str, EndpointTrouble]:
        """Return what keeps endpoints from serving, or their load from being known; most have nothing."""
        return {
            target.address: EndpointTrouble(
                since=target.closed_since if target.closed is not None else target.problem_since,
                problem=target.last_problem,
                asked_every_seconds=self._interval_seconds,
            )
            for target in self._targets.values()
            if target.last_problem is not None or target.closed is not None
        }

    def refusing(self) -> Collection[str]:
        """Return the endpoints that refuse to list their models: they want a key, or another one."""
        return [t.address for t in self._targets.values() if t.refusal is not None]

    async def run(self) -> None:
        """Scrape until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for target in self._targets.values():
                    self._start(target)
                await asyncio.Event().wait()  # endpoints may come at any time
        finally:
            self._tasks = None

    def close(self) -> None:
        """Count no more for the others' pace; call it when `run` has ended."""
        self._count(-len(self._targets))

    def _target(self, address: str) -> ScrapeTarget:
        return ScrapeTarget.at(address, timeout_seconds=self._timeout_seconds, key=self._key)

    def _start(self, target: ScrapeTarget) -> None:
        if self._tasks is not None:
            target.tasks = (
                self._tasks.create_task(self._keep_fresh(target), name=f"scrape {target.address}"),
                self._tasks.create_task(self._keep_models(target), name=f"models of {target.address}"),
            )

    def _remove(self, target: ScrapeTarget) -> None:
        if self._pages is not None:
            self._pages.forget(target.address)
        self._count(-1)
        for task in target.tasks:
            task.cancel()
        target.scraped.set()  # `first_scrapes` must not wait for it
        self._answers.got(target.address)

    def _count(self, more: int) -> None:
        self._pace.endpoints += more
        if not self._is_idle:
            self._pace.busy += more

    def _set_pace(self) -> None:
        """Go by how many endpoints there are, and whether requests come."""
        pace = self._pace
        self._interval_seconds = pace.interval(self._wanted_interval_seconds, idle=self._is_idle)
        stale = self._wanted_stale_seconds
        if self._interval_seconds > self._wanted_interval_seconds:
            stale = pace.stale_after(stale, interval_seconds=self._interval_seconds)
        until, idle_stale = self._catching_up
        self._stale_after_seconds = max(stale, idle_stale) if time.monotonic() < until else stale

    def _set_busy(self) -> None:
        self._is_idle = False
        self._pace.busy += len(self._targets)
        # what was reported in the idle time counts until there is something newer
        self._catching_up = self._asked_at + CATCH_UP_SECONDS, self._stale_after_seconds
        self._set_pace()
        self._busy.set()
        for target in self._targets.values():
            target.models_due.set()

    async def _pause(self) -> None:
        """Wait until the next scrape; jitter keeps replicas and endpoints from falling into step."""
        if self._pace.rests and not self._is_idle and time.monotonic() - self._asked_at > IDLE_AFTER_SECONDS:
            self._is_idle = True
            self._pace.busy -= len(self._targets)
            self._busy.clear()
        self._set_pace()
        seconds = _jittered(self._interval_seconds)
        if not self._is_idle:  # else until requests come again
            await asyncio.sleep(seconds)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._busy.wait()

    async def _keep_fresh(self, target: ScrapeTarget) -> None:
        try:
            while True:
                await self._scrape(target)
                await self._pause()
        finally:
            target.http.close()

    async def _scrape(self, target: ScrapeTarget) -> None:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await target.page.get()
                load = await self._load(target, response.body, asked_at) if is_page(response) else None
            target.refuses(refused=False)
            if load is not None and target.load is not None and restarted(target.load, load):
                self._is_another(target, began_anew=True)
            if target.must_ask:
                target.must_ask = False
                self._answers.expect(target.address)
                target.models_due.set()
            if load is None:
                self._problem(target, f"its load is unknown: {why_no_load(response)}")
            else:
                await self._take(target, load, response.body, asked_at)
        except Exception as error:  # whatever one pod answers must not end the scraping of all
            # nothing listens there; names that do not resolve or routes that fail say nothing of the pod
            refused = isinstance(error, ConnectionRefusedError)
            target.is_new = target.is_new or refused
            if refused and not target.refused:
                self._is_another(target)  # the process that listens there next has an empty cache
            target.refuses(refused=refused)
            if target.must_ask:
                self._answers.got(target.address)
            self._problem(target, f"no load from /metrics: {str(error) or type(error).__name__}")
        target.scraped.set()
        if self._changed is not None and target.last_problem is not None:
            self._changed()

    async def _take(self, target: ScrapeTarget, load: EndpointLoad, text: bytes, asked_at: float) -> None:
        """Believe a report, unless its numbers stand still, and read the rest of its page."""
        if (still := target.still_seconds(load)) > self._most_still_seconds(target):
            target.ready = None
            self._problem(target, FROZEN.format(load=load, waiting=load.unfinished_requests - load.running_requests))
            return
        if still == 0.0:
            target.moved(load)
        if target.is_new:
            target.is_new, target.ready_since = False, asked_at
            target.unknown = replace(target.unknown, ready_since=asked_at)
        target.load, target.text = load, text if len(text) <= KEPT_PAGE_BYTES else b""
        self._ready(target, load)
        if self._pages is not None:
            async with asyncio.timeout(self._timeout_seconds):
                await self._turns.read(self._pages.page(target.address, text, load=load))
        self._problem(target, None)

    async def _load(self, target: ScrapeTarget, text: bytes, asked_at: float) -> EndpointLoad | None:
        """Read the load; a page that says what the last report said is not read again."""
        if target.load is not None and text == target.text:
            return replace(target.load, reported_at=asked_at)
        return await self._turns.read(parse_load(text, reported_at=asked_at))

    def _most_still_seconds(self, target: ScrapeTarget) -> float:
        return max(self._stale_after_seconds, PAUSE_FACTOR * target.longest_pause_seconds)

    def _ready(self, target: ScrapeTarget, load: EndpointLoad) -> None:
        trend = target.trends.report(load)
        target.ready = EndpointStatus(
            address=target.address,
            reachability=Reachability.READY,
            load=load,
            trend=trend,
            models=target.models,
            ready_since=target.ready_since,
        )
        if self._reported is not None:
            self._reported(target.address, load, trend)

    def _is_another(self, target: ScrapeTarget, *, began_anew: bool = False) -> None:
        """Take it for another process; `began_anew`: by its counters, and not because it has refused a connection."""
        target.models = None
        target.is_new = target.must_ask = True
        target.longest_pause_seconds = 0.0
        # not for a refusal alone: were it the same process after all, all that it has ever counted would count again
        if began_anew and self._pages is not None:
            self._pages.restarted(target.address)
        if self._restarted is not None:
            self._restarted(target.address)

    async def _keep_models(self, target: ScrapeTarget) -> None:
        await target.scraped.wait()  # and its connection is there
        while True:
            target.models_due.clear()
            has_answered = await self._read_models(target)
            if not target.models_due.is_set():
                self._answers.got(target.address)
            seconds = self._pace.models_interval(self._models_interval_seconds, idle=self._is_idle)
            with suppress(TimeoutError):
                async with asyncio.timeout(_jittered(seconds)):
                    await asyncio.sleep(MODELS_AGAIN_SECONDS if has_answered else 0.0)
                    await target.models_due.wait()

    async def _read_models(self, target: ScrapeTarget) -> bool:
        """Keep what was known where the pod does not answer; where it does not say, every model may be there.

        Return whether it has answered.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await target.http.get("/v1/models", max_body_bytes=MAX_MODELS_BYTES)
        except Exception as error:  # whatever one pod answers must not end the scraping of all
            log.debug("no models from /v1/models: %s", error, extra={"endpoint": target.address})
            return False
        self._refused(target, why_refused(response.status, shows_key=self._key is not None))
        if target.refusal is not None:
            return True
        models = parse_served_models(response.body) if response.status == 200 else None
        if models != target.models:
            target.models = models
            target.unknown = replace(target.unknown, models=models)
            if target.ready is not None:
                target.ready = replace(target.ready, models=models)
            self._learn_adapters()
        return True

    def _learn_adapters(self) -> None:
        self._learned_adapters = {
            adapter: base
            for other in self._targets.values()
            if other.models is not None
            for adapter, base in other.models.adapters.items()
            if base is not None
        }

    def _status(self, target: ScrapeTarget, now: float) -> EndpointStatus:
        if target.out is not None:
            return target.out
        load, ready = target.load, target.ready
        if load is None or ready is None or load.is_stale(now=now, limit_seconds=self._stale_after_seconds):
            return target.unknown
        return ready

    def _refused(self, target: ScrapeTarget, refusal: str | None) -> None:
        if refusal == target.refusal:
            return
        target.refusal = refusal
        if refusal is None:
            log.info("endpoint lists its models", extra={"endpoint": target.address})
        else:
            log.warning("endpoint does not list its models: %s", refusal, extra={"endpoint": target.address})

    def _problem(self, target: ScrapeTarget, problem: str | None) -> None:
        if problem == target.last_problem:
            return
        if target.last_problem is None:
            target.problem_since = time.monotonic()
        target.last_problem = problem
        if problem is None:
            log.info("endpoint reports its load", extra={"endpoint": target.address})
        else:
            log.warning("endpoint: %s", problem, extra={"endpoint": target.address})


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311

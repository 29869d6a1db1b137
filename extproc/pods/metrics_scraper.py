"""Scrapes every endpoint's /metrics and keeps the last load of each, in named tasks per endpoint.

The picker reads `snapshot`. An endpoint that refuses connections is unreachable at once: nothing listens there. A slow
or invalid answer keeps the last report until it is stale; then the load is unknown, which never counts as idle.
/v1/models is read after the first answer and at intervals: the served models and LoRA adapters, and the context length.
A pod that refuses this (it wants a key) keeps its last known models. A report that stays the same although requests run
or wait does not count: the engine is stuck or dead. An endpoint that refused connections, restarted or came later is
new from its first report on (`ready_since`). Endpoints come and go at run time (`set_endpoints`); closed ones (no new
requests) are scraped until they are gone. A page that takes long to parse waits for its turns (`page_turns`), within
the deadline of the pod's answer.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from msgspec import structs

from extproc.pods.endpoint import EndpointStatus, EndpointTrend, EndpointTrouble, Reachability, parse_served_models
from extproc.pods.endpoint_samples import restarted
from extproc.pods.scrape_pace import IDLE_AFTER_SECONDS, ScrapePace
from extproc.pods.scrape_target import FirstAnswers, ScrapeTarget
from kvmesh.pods.engine_metrics import parse_load
from kvmesh.pods.metrics_page import is_page, why_no_load
from kvmesh.pods.page_steps import Steps
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_access import why_refused
from kvmesh.pods.pod_http import MAX_MODELS_BYTES
from kvmesh.pods.pod_key import PodKey
from kvmesh.pods.pod_report import EndpointLoad

log = logging.getLogger(__name__)

# after a pause of N s, allow 2 N s without change before calling the pod stuck: a busy pod counts with each step
PAUSE_FACTOR = 2.0
FROZEN = "/metrics stands still with {load.running_requests} requests running and {waiting} waiting"
CATCH_UP_SECONDS = 2.0  # until all endpoints of a pool that was idle have been scraped again
KEPT_PAGE_BYTES = 1 << 18  # longest page kept to recognize an unchanged one; a longer page is parsed each time
MODELS_INTERVAL_SECONDS = 5.0  # bounds the delay until a newly loaded adapter is known
MODELS_AGAIN_SECONDS = 1.0  # least pause after an answer: a pod whose counters keep resetting is not read each time


class PageReader(Protocol):
    """Reads more from the pages than the load; see `endpoint_telemetry.LatencyTelemetry`."""

    def page(self, endpoint: str, text: bytes, *, load: EndpointLoad) -> Steps[None]:
        """Take a page and the load read from it. Raise UnreadablePageError."""

    def restarted(self, endpoint: str) -> None:
        """Note that the endpoint has restarted: its counters were reset."""

    def forget(self, endpoint: str) -> None:
        """Note that the endpoint is gone."""


class MetricsScraper:
    """The endpoints and their last reports, kept fresh by `run`."""

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
        ranked: Callable[[str, tuple[int, ...]], None] = lambda *_: None,
        pace: ScrapePace | None = None,
        turns: PageTurns | None = None,
        pages: PageReader | None = None,
        key: PodKey | None = None,
    ) -> None:
        """`pace`, `turns` and `key` are shared with the other pools' scrapers; `pages` gets all good pages.

        `restarted` is called for each restarted endpoint, `reported` for each report, and `changed` for each failed
        scrape: the endpoint may now be unknown or unreachable. `told` is called when all new endpoints have been asked
        for their models. `ranked`: see `ScrapeTarget.own_page`.
        """
        self._reported, self._changed, self._ranked = reported, changed, ranked
        self._models_interval_seconds = models_interval_seconds
        self._restarted = restarted
        self._pages = pages
        self.learned_adapters: Mapping[str, str] = {}  # LoRA adapter -> base model, as reported by the pods
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
        self._catching_up = float("-inf"), 0.0  # until when reports from the idle time count, and their stale age
        self._tasks: asyncio.TaskGroup | None = None
        self._stale_after_seconds = stale_after_seconds
        self._interval_seconds = interval_seconds
        self._set_pace()

    def set_endpoints(self, endpoints: Mapping[str, Reachability | None]) -> None:
        """Replace the endpoints: address -> why it may get no new requests, or None if it may."""
        for address in [address for address in self._targets if address not in endpoints]:
            self._remove(self._targets.pop(address))
        for address, closed in endpoints.items():
            target = self._targets.get(address)
            if target is not None and closed is None and target.closed is not None and target.is_silent:
                self._remove(target)  # it was not up at its last scrape: scrape now, not when its turn comes
                target = None
            if target is None:
                target = self._targets[address] = self._target(address)
                target.is_new = self._tasks is not None
                if target.is_new:  # even before its first report: a whole queue may wait for the first pod
                    target.unknown = structs.replace(target.unknown, ready_since=time.monotonic())
                self._answers.expect(address)
                self._count(1)
                self._start(target)
            is_closed_by = target.closed.reachability if target.closed is not None else None
            if closed is not is_closed_by:
                target.closed = None if closed is None else structs.replace(target.unreachable, reachability=closed)
                target.closed_since = time.monotonic()
                target.refuses(refused=target.refused)
        # keep the given order: pages and ties depend on it
        self._targets = {address: self._targets[address] for address in endpoints}
        self._learn_adapters()
        self._set_pace()

    def reconfigure(self, *, stale_after_seconds: float) -> None:
        """Set the age at which reports become stale."""
        self._wanted_stale_seconds = stale_after_seconds
        self._set_pace()

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every endpoint's status at `now` (monotonic seconds), for a request: an idle pool wakes up."""
        self._asked_at = now
        if self._is_idle:
            self._set_busy()
        return [self._status(target, now) for target in self._targets.values()]

    def known(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return the same statuses without a request: an idle pool stays idle."""
        return [self._status(target, now) for target in self._targets.values()]

    @property
    def is_asking(self) -> bool:
        """Whether some new endpoint has not been asked for its models yet."""
        return not self._answers.is_complete

    async def first_scrapes(self) -> None:
        """Wait until every endpoint was scraped once, successfully or not; each scrape has its deadline."""
        for target in tuple(self._targets.values()):
            await target.scraped.wait()

    async def first_answers(self) -> None:
        """Wait until every responding endpoint was asked for its models, at most a scrape's deadline."""
        await self._answers.wait(seconds=self._timeout_seconds)

    def problems(self) -> dict[str, str]:
        """Return the problem of each endpoint whose last scrape failed, or that refuses to list its models."""
        return {t.address: why for t in self._targets.values() if (why := t.last_problem or t.refusal) is not None}

    def troubles(self) -> Mapping[str, EndpointTrouble]:
        """Return why endpoints get no requests or have an unknown load, only for endpoints with trouble."""
        return {
            target.address: trouble
            for target in self._targets.values()
            if (trouble := target.trouble(asked_every_seconds=self._interval_seconds)) is not None
        }

    def refusing(self) -> Collection[str]:
        """Return the endpoints that refuse to list their models: they want a key, or a different one."""
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
        """Stop counting for the shared pace; call it after `run` has ended."""
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
        # reports from the idle time count until newer ones come
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
        if not self._is_idle:  # an idle pool sleeps only until the next request
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
                text = await target.own_page(response.body, ranked=self._ranked) if is_page(response) else b""
                load = await self._load(target, text, asked_at) if text else None
            target.refuses(refused=False)
            if load is not None and target.load is not None and restarted(target.load, load):
                self._is_another(target, began_anew=True)
            if target.must_ask:
                target.must_ask = False
                self._answers.expect(target.address)
                target.models_due.set()
            if load is None:
                target.note_problem(f"its load is unknown: {why_no_load(response, target.page.path)}")
            else:
                await self._take(target, load, text, asked_at)
        except Exception as error:  # one pod's answer must not stop the scraping of all
            # nothing listens there; DNS and routing errors say nothing about the pod
            refused = isinstance(error, ConnectionRefusedError)
            target.is_new = target.is_new or refused
            if refused and not target.refused:
                self._is_another(target)  # the process that listens there next has an empty cache
            target.refuses(refused=refused)
            if target.must_ask:
                self._answers.got(target.address)
            target.note_problem(f"no load from /metrics: {str(error) or type(error).__name__}")
        target.scraped.set()
        if self._changed is not None and target.last_problem is not None:
            self._changed()

    async def _take(self, target: ScrapeTarget, load: EndpointLoad, text: bytes, asked_at: float) -> None:
        if load.is_asleep:
            target.sleeps()
            return
        most_still_seconds = max(self._stale_after_seconds, PAUSE_FACTOR * target.longest_pause_seconds)
        if (still := target.still_seconds(load)) > most_still_seconds:
            target.ready = None
            target.note_problem(FROZEN.format(load=load, waiting=load.unfinished_requests - load.running_requests))
            return
        if still == 0.0:
            target.moved(load)
        if target.is_new:
            target.is_new, target.ready_since = False, asked_at
            target.unknown = structs.replace(target.unknown, ready_since=asked_at)
        target.load, target.text = load, text if len(text) <= KEPT_PAGE_BYTES else b""
        trend = target.reports(load)
        if self._reported is not None:
            self._reported(target.address, load, trend)
        if self._pages is not None:
            async with asyncio.timeout(self._timeout_seconds):
                await self._turns.read(self._pages.page(target.address, text, load=load))
        target.note_problem(None)

    async def _load(self, target: ScrapeTarget, text: bytes, asked_at: float) -> EndpointLoad | None:
        """Read the load; an unchanged page is not parsed again."""
        if target.load is not None and text == target.text:
            return structs.replace(target.load, reported_at=asked_at)
        load = await self._turns.read(parse_load(text, reported_at=asked_at))
        return structs.replace(load, is_dealt=True) if load is not None and target.is_dealt else load

    def _is_another(self, target: ScrapeTarget, *, began_anew: bool = False) -> None:
        """Treat the endpoint as restarted; `began_anew`: its counters show it, not just a refused connection."""
        target.lists(None)
        target.is_new = target.must_ask = True
        target.longest_pause_seconds = 0.0
        # not for a refusal alone: if it is the same process after all, its whole counters would count a second time
        if began_anew and self._pages is not None:
            self._pages.restarted(target.address)
        if self._restarted is not None:
            self._restarted(target.address)

    async def _keep_models(self, target: ScrapeTarget) -> None:
        await target.scraped.wait()  # by now its connection is open
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
        """Read /v1/models and return whether the pod answered.

        Without an answer the known models stay. After an answer without models, any model may be served.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                response = await target.http.get("/v1/models", max_body_bytes=MAX_MODELS_BYTES)
        except Exception as error:  # one pod's answer must not stop the scraping of all
            log.debug("no models from /v1/models: %s", error, extra={"endpoint": target.address})
            return False
        target.note_refusal(why_refused(response.status, shows_key=self._key is not None))
        if target.refusal is not None:
            return True
        models = parse_served_models(response.body) if response.status == 200 else None
        if models is None or models != target.models:  # None also for a new process, whose adapters are still known
            target.lists(models)
            self._learn_adapters()
        return True

    def _learn_adapters(self) -> None:
        self.learned_adapters = {
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


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311

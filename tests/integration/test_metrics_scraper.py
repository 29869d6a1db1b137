"""What the picker believes of a pod, by what the pod's /metrics does."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from extproc.adapters.metrics_scraper import MetricsScraper
from extproc.core.endpoint import EndpointStatus, Reachability
from extproc.local.ports import pick_free_port

DEADLINE_SECONDS = 10.0
LOAD = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"
Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def load_page(_: web.Request) -> web.Response:
    return web.Response(text=LOAD)


async def hangs(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def moved(_: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/metrics")


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:
        await response.write(b"x" * 65536)


async def absurd(_: web.Request) -> web.Response:
    return web.Response(text=LOAD.replace("waiting 2", "waiting 1e308") * 2)


@asynccontextmanager
async def pod(page: Page) -> AsyncIterator[tuple[str, web.AppRunner]]:
    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    port = pick_free_port(host="127.0.0.1", avoid=())
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}", runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scraping(*addresses: str, stale_after_seconds: float = 0.2) -> AsyncIterator[MetricsScraper]:
    scraper = MetricsScraper(
        addresses, interval_seconds=0.01, timeout_seconds=0.1, stale_after_seconds=stale_after_seconds
    )
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def becomes(scraper: MetricsScraper, expected: Reachability, *, index: int = 0) -> EndpointStatus:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (status := scraper.snapshot(now=time.monotonic())[index]).reachability is not expected:
            await asyncio.sleep(0.005)
    return status


async def test_a_pod_that_reports_is_ready_with_its_load() -> None:
    async with pod(load_page) as (address, _), scraping(address) as scraper:
        status = await becomes(scraper, Reachability.READY)
        assert status.load is not None
        assert (status.load.running_requests, status.load.waiting_requests, status.load.kv_usage) == (1, 2, 0.5)


@pytest.mark.parametrize("page", [hangs, moved, endless, absurd], ids=["hangs", "redirects", "endless", "absurd"])
async def test_a_pod_without_a_report_is_unknown_and_the_problem_is_said(page: Page) -> None:
    async with pod(page) as (address, _), scraping(address) as scraper:
        await scraper.first_scrapes()
        assert (await becomes(scraper, Reachability.UNKNOWN)).load is None
        assert address in scraper.problems()


async def test_a_pod_that_goes_is_unreachable_and_ready_again_when_it_returns() -> None:
    async with pod(load_page) as (address, runner), scraping(address) as scraper:
        await becomes(scraper, Reachability.READY)
        (site,) = runner.sites
        await site.stop()
        await runner.server.shutdown(0.1)  # type: ignore[union-attr]
        await becomes(scraper, Reachability.UNREACHABLE)
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        await becomes(scraper, Reachability.READY)


async def test_a_name_that_does_not_resolve_says_nothing_of_the_pod() -> None:
    async with scraping("nosuch.invalid:80") as scraper:
        await scraper.first_scrapes()
        assert scraper.snapshot(now=time.monotonic())[0].reachability is Reachability.UNKNOWN


async def test_a_report_that_is_too_old_says_nothing() -> None:
    gate = asyncio.Event()

    async def once(_: web.Request) -> web.Response:
        if gate.is_set():
            await asyncio.Event().wait()
        gate.set()
        return web.Response(text=LOAD)

    async with pod(once) as (address, _), scraping(address) as scraper:
        await becomes(scraper, Reachability.READY)
        await becomes(scraper, Reachability.UNKNOWN)


async def test_one_bad_pod_does_not_keep_the_others_from_reporting() -> None:
    async with pod(load_page) as (good, _), pod(hangs) as (bad, _), scraping(bad, good) as scraper:
        await becomes(scraper, Reachability.READY, index=1)
        assert scraper.snapshot(now=time.monotonic())[0].reachability is Reachability.UNKNOWN

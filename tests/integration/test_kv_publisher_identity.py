"""The start time of a pod's process, asked over HTTP; whatever the pod answers, nothing is raised."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from kv_indexer.adapters.publisher_identity import HttpPublisherIdentity
from tests.integration.kv_publisher import running_pod
from tests.integration.kv_redis import free_port


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def asked(http: aiohttp.ClientSession, endpoint: str, *, timeout_seconds: float = 2.0) -> float | None:
    async with asyncio.timeout(5):
        return await HttpPublisherIdentity(http=http, endpoint=endpoint, timeout_seconds=timeout_seconds).started_at()


@pytest.mark.parametrize("started_at", [1732190000.25, None])
async def test_the_start_time_is_read_where_it_is_told(http: aiohttp.ClientSession, started_at: float | None) -> None:
    async with running_pod() as pod:
        pod.started_at = started_at
        assert await asked(http, pod.endpoint) == started_at


async def test_a_pod_that_is_slow_or_away_tells_nothing_in_bounded_time(http: aiohttp.ClientSession) -> None:
    async with running_pod() as pod:
        pod.metrics_delay_seconds = 30.0
        assert await asked(http, pod.endpoint, timeout_seconds=0.1) is None
    assert await asked(http, f"127.0.0.1:{free_port()}") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("process_start_time_seconds 1.5e+09\n", 1.5e9),
        ("process_start_time_seconds 1.5e+09", 1.5e9),  # no end of line
        ('process_start_time_seconds{pid="1"} 7 1395066363000\n', 7.0),
        ("process_start_time_seconds NaN\n", None),
        ("process_start_time_seconds +Inf\n", None),
        ("process_start_time_seconds\n", None),
        ("process_start_time_seconds_total 5\n", None),
        ("# HELP process_start_time_seconds 5\n", None),
        ("\x00\xff" * 1000, None),
    ],
)
async def test_odd_answers_tell_nothing(http: aiohttp.ClientSession, text: str, expected: float | None) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=text.encode("latin-1"))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        assert await asked(http, f"127.0.0.1:{runner.addresses[0][1]}") == expected
    finally:
        await runner.cleanup()

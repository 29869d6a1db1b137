"""Scraping pods' /metrics for the indexer: simulated pods, and HTTP servers that misbehave."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from kv_indexer.watch.pod_metrics import PodMetrics
from kvmesh.pods.pod_report import EngineCounters
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import running_pods
from tests.integration.kv_redis import free_port

DEADLINE_SECONDS = 10.0
PAGE = b"""process_start_time_seconds 1.7e+09
vllm:cache_config_info{block_size="16"} 1.0
vllm:prompt_tokens_total{engine="0"} %d
vllm:time_to_first_token_seconds_count{engine="0"} 1
"""

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def http_pod(answer: Answer, *, port: int = 0) -> AsyncIterator[str]:
    """A pod made by hand; give its HOST:PORT."""
    runner = web.ServerRunner(web.Server(answer, access_log=None), shutdown_timeout=0.01)  # type: ignore[arg-type]
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scraping(*endpoints: str, timeout_seconds: float = 1.0, interval: float = 0.02) -> AsyncIterator[PodMetrics]:
    pods = PodMetrics(endpoints, interval_seconds=interval, timeout_seconds=timeout_seconds)
    task = asyncio.create_task(pods.run(), name="scrape")
    try:
        yield pods
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


def counting() -> tuple[Answer, list[int]]:
    """A well pod whose counter grows with every scrape, and the scrapes it saw."""
    seen: list[int] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.path == "/metrics"
        seen.append(len(seen))
        return web.Response(body=PAGE % len(seen))

    return answer, seen


async def test_a_simulated_pod_tells_all_that_the_rules_look_at() -> None:
    engine = EngineSettings(total_blocks=80, prefill_tokens_per_second=1e6, inter_token_seconds=0.001)
    settings = PodSettings(max_model_len=1024, engine=engine)
    folder, publisher = load_model_folder(TINY_MODEL), PublisherSettings(host="127.0.0.1")
    async with running_pods(settings, folder=folder, publisher=publisher) as [pod]:
        endpoint = pod.base_url.removeprefix("http://")
        async with scraping(endpoint) as pods, aiohttp.ClientSession(pod.base_url) as session:
            for _ in range(2):
                async with session.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 3}) as response:
                    assert response.status == 200
            report = await pods.fresh(endpoint, max_age_seconds=0)
            started_at = await pods.started_at(endpoint)

    assert report is not None
    assert report.engines == {
        0: EngineCounters(
            prompt_tokens=80,
            cached_prompt_tokens=32,
            generated_tokens=6,
            prefills=2,
            unfinished=0,
            queried_tokens=80,
            hit_tokens=32,
        )
    }
    assert (report.block_size, report.caches_prefixes) == (16, True)
    assert started_at is not None
    assert abs(started_at - time.time()) < DEADLINE_SECONDS


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("never")


async def drip(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    while True:  # a byte now and then, for ever
        await response.write(b"x")
        await asyncio.sleep(0.01)


async def flood(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for _ in range(1000):
        await response.write(b"x" * (1 << 20))
    return response


async def refuse(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, body=PAGE % 1)


async def redirect(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("http://127.0.0.1:1/metrics")


async def nonsense(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"\xff\x00" * 1000)


@pytest.mark.parametrize("bad", [hang, drip, flood, refuse, redirect])
async def test_a_pod_that_does_not_answer_as_it_should_has_no_report_and_disturbs_no_other(
    bad: Answer, caplog: pytest.LogCaptureFixture
) -> None:
    answer, seen = counting()
    async with (
        http_pod(bad) as broken,
        http_pod(answer) as well,
        scraping(broken, well, timeout_seconds=0.1) as pods,
    ):
        await eventually(lambda: len(seen) >= 10 and broken in caplog.text)
        assert pods.latest(broken) is None
        assert pods.latest(well) is not None
        began = time.monotonic()
        assert await pods.fresh(broken, max_age_seconds=0) is None
        assert time.monotonic() - began < 10.0

    assert caplog.text.count("cannot be told from an idle one") == 1  # said once, however often it is tried


async def test_a_page_without_counters_is_a_report_that_says_nothing_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with http_pod(nonsense) as endpoint, scraping(endpoint) as pods:
        await eventually(lambda: pods.latest(endpoint) is not None)
        report = pods.latest(endpoint)
        await eventually(lambda: pods.latest(endpoint) is not report)

    assert report is not None
    assert (report.engines, report.started_at, report.block_size) == (None, None, None)
    assert caplog.text.count("--disable-log-stats?") == 1


async def test_a_pod_that_goes_away_keeps_its_last_report_and_its_next_life_is_seen() -> None:
    answer, seen = counting()
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    async with scraping(endpoint) as pods:
        assert await pods.started_at(endpoint) is None
        async with http_pod(answer, port=port):
            await eventually(lambda: pods.latest(endpoint) is not None)
        assert await pods.started_at(endpoint) is None
        last = pods.latest(endpoint)
        assert last is not None

        scraped = len(seen)
        async with http_pod(answer, port=port):
            await eventually(lambda: len(seen) > scraped and pods.latest(endpoint) is not last)
            assert await pods.started_at(endpoint) == 1.7e9


async def test_several_who_want_a_fresh_report_share_one_scrape() -> None:
    answer, seen = counting()
    async with http_pod(answer) as endpoint, scraping(endpoint, interval=3600) as pods:
        await eventually(lambda: pods.latest(endpoint) is not None)
        reports = await asyncio.gather(*(pods.fresh(endpoint, max_age_seconds=0) for _ in range(10)))

    # the first one's, and one for all who asked when that was under way already
    assert len(seen) == 3
    assert len({id(report) for report in reports}) == 2


async def test_what_a_follower_asks_for_is_not_scraped_a_second_time() -> None:
    answer, seen = counting()
    async with http_pod(answer) as endpoint, scraping(endpoint, interval=0.05) as pods:
        await eventually(lambda: pods.latest(endpoint) is not None)
        asked, until = 0, time.monotonic() + 0.4
        while time.monotonic() < until:
            assert await pods.started_at(endpoint) == 1.7e9
            asked += 1
        scraped = len(seen)
        await eventually(lambda: len(seen) > scraped)  # and once nobody asks any more, it is scraped again

    assert scraped == asked + 1


async def test_a_pod_that_is_slow_tells_no_start_time_in_bounded_time() -> None:
    async with http_pod(hang) as endpoint, scraping(endpoint, timeout_seconds=30.0) as pods:
        began = time.monotonic()
        assert await pods.started_at(endpoint, timeout_seconds=0.1) is None
        assert time.monotonic() - began < 10.0


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
async def test_a_start_time_is_told_only_where_it_can_be_read(text: str, expected: float | None) -> None:
    async def page(_: web.Request) -> web.Response:
        return web.Response(body=text.encode("latin-1"))

    async with http_pod(page) as endpoint, scraping(endpoint) as pods:
        await eventually(lambda: pods.latest(endpoint) is not None)
        assert await pods.started_at(endpoint) == expected


async def test_nothing_is_asked_of_strangers_nor_before_the_start() -> None:
    pods = PodMetrics(["127.0.0.1:1"])

    assert pods.latest("10.0.0.1:8000") is None
    assert await pods.fresh("10.0.0.1:8000", max_age_seconds=0) is None
    assert await pods.fresh("127.0.0.1:1", max_age_seconds=0) is None

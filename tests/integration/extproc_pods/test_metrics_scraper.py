"""What the picker believes of a pod, by what the pod's /metrics does."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.metrics_scraper import MetricsScraper
from operate.local.ports import pick_free_port

DEADLINE_SECONDS = 10.0
LOAD = "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.5\n"
QUERIES = count(1000)
Page = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def load_page(_: web.Request) -> web.Response:
    """A pod that works: with numbers that stand still it would be taken for a frozen one."""
    return web.Response(text=f"{LOAD}vllm:prefix_cache_queries_total {next(QUERIES)}\n")


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


async def chunked(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    response.enable_chunked_encoding()
    await response.prepare(request)
    for line in LOAD.splitlines(keepends=True):
        await response.write(line.encode())
    return response


async def closes(_: web.Request) -> web.Response:
    return web.Response(text=LOAD, headers={"Connection": "close"})


async def absurd(_: web.Request) -> web.Response:
    return web.Response(text=LOAD.replace("waiting 2", "waiting 1e308") * 2)


async def of_another_engine(_: web.Request) -> web.Response:
    return web.Response(text="tgi_queue_size 0\ntgi_batch_current_size 0\n")


async def of_tensorrt_llm(request: web.Request) -> web.Response:
    """The last step's numbers, which stand still for as long as there is no other."""
    if request.path == "/metrics":
        return web.json_response([])
    names = ("num_requests_running 1", "num_requests_waiting 2", "kv_cache_utilization 0.5")
    return web.Response(text="".join(f"trtllm_{name}\n" for name in names))


@asynccontextmanager
async def pod(page: Page) -> AsyncIterator[tuple[str, web.AppRunner]]:
    app = web.Application()
    app.router.add_get("/metrics", page)
    app.router.add_get("/v1/models", page)
    if page is of_tensorrt_llm:
        app.router.add_get("/prometheus/metrics", page)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    port = pick_free_port(host="127.0.0.1", avoid=())
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}", runner
    finally:
        await runner.cleanup()


@asynccontextmanager
async def scraping(
    *addresses: str, stale_after_seconds: float = 0.2, timeout_seconds: float = 0.1, **changes: Any
) -> AsyncIterator[MetricsScraper]:
    scraper = MetricsScraper(
        addresses,
        interval_seconds=0.01,
        timeout_seconds=timeout_seconds,
        stale_after_seconds=stale_after_seconds,
        **changes,
    )
    task = asyncio.create_task(scraper.run())
    try:
        yield scraper
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def has_no_trouble(scraper: MetricsScraper) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while scraper.troubles():  # one page may come too late on a busy machine
            await asyncio.sleep(0.01)


async def becomes(scraper: MetricsScraper, expected: Reachability, *, index: int = 0) -> EndpointStatus:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (status := scraper.snapshot(now=time.monotonic())[index]).reachability is not expected:
            await asyncio.sleep(0.005)
    return status


async def test_a_pod_that_sleeps_gets_no_requests_until_it_is_awake() -> None:
    states = [b"1"]

    async def sleeper(_: web.Request) -> web.Response:
        awake = f'vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {states[-1].decode()}\n'
        return web.Response(text=f"{LOAD}vllm:prefix_cache_queries_total {next(QUERIES)}\n{awake}")

    async with pod(sleeper) as (address, _), scraping(address, stale_after_seconds=5.0, timeout_seconds=5.0) as scraper:
        await becomes(scraper, Reachability.READY)
        states.append(b"0")
        assert (await becomes(scraper, Reachability.NOT_READY)).load is None
        assert (scraper.troubles()[address].problem or "").startswith("it is asleep")
        states.append(b"1")
        await becomes(scraper, Reachability.READY)
        await has_no_trouble(scraper)


@pytest.mark.parametrize("page", [load_page, chunked, closes], ids=["plain", "chunked", "closes"])
async def test_a_pod_that_reports_is_ready_with_its_load(page: Page) -> None:
    async with pod(page) as (address, _), scraping(address) as scraper:
        status = await becomes(scraper, Reachability.READY)
        assert status.load is not None
        assert (status.load.running_requests, status.load.waiting_requests, status.load.kv_usage) == (1, 2, 0.5)


async def test_a_pod_of_an_engine_that_is_not_known_is_never_idle_and_is_said() -> None:
    async with pod(of_another_engine) as (address, _), scraping(address) as scraper:
        await scraper.first_scrapes()
        assert (await becomes(scraper, Reachability.UNKNOWN)).load is None
        assert "the load of no engine that is known here (vLLM, SGLang, TensorRT-LLM)" in scraper.problems()[address]


async def test_numbers_of_the_last_step_are_believed_though_they_stand_still() -> None:
    async with pod(of_tensorrt_llm) as (address, _), scraping(address) as scraper:
        status = await becomes(scraper, Reachability.READY)
        assert status.load is not None
        assert (status.load.running_requests, status.load.waiting_requests, status.load.kv_usage) == (1, 2, 0.5)
        first = status.load.reported_at
        async with asyncio.timeout(DEADLINE_SECONDS):
            while status.load.reported_at < first + 0.5:  # longer than numbers may stand still
                await asyncio.sleep(0.01)
                status = await becomes(scraper, Reachability.READY)
                assert status.load is not None
        assert scraper.problems() == {}


@pytest.mark.parametrize("page", [hangs, moved, endless, absurd], ids=["hangs", "redirects", "endless", "absurd"])
async def test_a_pod_without_a_report_is_unknown_and_the_problem_is_said(page: Page) -> None:
    async with pod(page) as (address, _), scraping(address) as scraper:
        await scraper.first_scrapes()
        assert (await becomes(scraper, Reachability.UNKNOWN)).load is None
        assert address in scraper.problems()


async def test_a_pod_that_its_platform_keeps_requests_from_says_since_when() -> None:
    async with pod(load_page) as (address, _), scraping(address) as scraper:
        await becomes(scraper, Reachability.READY)
        before = time.monotonic()
        scraper.set_endpoints({address: Reachability.TERMINATING})
        scraper.set_endpoints({address: Reachability.TERMINATING})
        trouble = scraper.troubles()[address]
        assert before <= trouble.since <= time.monotonic()
        scraper.set_endpoints({address: None})
        await has_no_trouble(scraper)


async def test_a_pod_that_goes_is_unreachable_and_ready_again_when_it_returns() -> None:
    async with pod(load_page) as (address, runner), scraping(address) as scraper:
        await becomes(scraper, Reachability.READY)
        (site,) = runner.sites
        await site.stop()
        await runner.server.shutdown(0.1)  # type: ignore[union-attr]
        await becomes(scraper, Reachability.UNREACHABLE)
        trouble = scraper.troubles()[address]
        assert 0.0 < trouble.since <= time.monotonic()
        assert trouble.problem is not None
        assert "Connect" in trouble.problem
        assert trouble.asked_every_seconds == 0.01
        later = time.monotonic() + 0.05
        while time.monotonic() < later:  # since it stopped, and not since it was asked last
            await asyncio.sleep(0.01)
            assert scraper.troubles()[address].since == trouble.since
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        await becomes(scraper, Reachability.READY)
        await has_no_trouble(scraper)


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


async def test_the_page_of_an_idle_pod_stays_the_same_and_is_a_new_report_each_time() -> None:
    async def idle(_: web.Request) -> web.Response:
        return web.Response(text=LOAD.replace("running 1", "running 0").replace("waiting 2", "waiting 0"))

    async with pod(idle) as (address, _), scraping(address) as scraper:
        first = (await becomes(scraper, Reachability.READY)).load
        assert first is not None
        async with asyncio.timeout(DEADLINE_SECONDS):
            until = first.reported_at + 3 * 0.2  # far beyond what makes a report stale
            while (load := scraper.snapshot(now=time.monotonic())[0].load) is None or load.reported_at < until:
                await asyncio.sleep(0.005)
        assert structs.replace(load, reported_at=first.reported_at) == first
        assert scraper.problems() == {}


@pytest.mark.parametrize("counts_itself", [False, True], ids=["same-page", "process-still-counts"])
async def test_a_busy_pod_whose_numbers_stand_still_is_unknown_until_they_move(counts_itself: bool) -> None:
    asked, tokens = [0], [7]

    async def page(_: web.Request) -> web.Response:
        asked[0] += 1
        own = f"process_cpu_seconds_total {asked[0]}\n" if counts_itself else ""
        return web.Response(text=f"{LOAD}vllm:inter_token_latency_seconds_count {tokens[0]}\n{own}")

    async with pod(page) as (address, _), scraping(address) as scraper:
        await becomes(scraper, Reachability.READY)
        assert (await becomes(scraper, Reachability.UNKNOWN)).load is None
        assert scraper.problems() == {address: "/metrics stands still with 1 requests running and 2 waiting"}
        tokens[0] += 1
        status = await becomes(scraper, Reachability.READY)
        assert status.load is not None
        assert (status.load.inter_token_count, status.ready_since) == (8, None)


async def test_a_pod_of_long_steps_is_given_time_once_it_has_shown_them() -> None:
    tokens = [7]

    async def page(_: web.Request) -> web.Response:
        return web.Response(text=f"{LOAD}vllm:inter_token_latency_seconds_count {tokens[0]}\n")

    async with pod(page) as (address, _), scraping(address, stale_after_seconds=0.1) as scraper:
        await becomes(scraper, Reachability.READY)
        await becomes(scraper, Reachability.UNKNOWN)
        tokens[0] += 1
        status = await becomes(scraper, Reachability.READY)
        assert status.load is not None
        moved = status.load.reported_at
        await becomes(scraper, Reachability.UNKNOWN)
        assert time.monotonic() - moved > 0.15  # twice the pause of 0.1 s and more; without it that would be 0.1 s


async def test_one_connection_serves_all_scrapes() -> None:
    peers = []

    async def noted(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        return web.Response(text=LOAD)

    async with pod(noted) as (address, _), scraping(address):
        async with asyncio.timeout(DEADLINE_SECONDS):
            while len(peers) < 5:
                await asyncio.sleep(0.005)
    assert len(set(peers)) == 1


async def test_a_late_answer_is_never_taken_for_the_next_one() -> None:
    asked = 0

    async def late_once(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked > 1:
            return web.Response(text=LOAD)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()  # until the picker has given up
        return web.Response(text=LOAD.replace("waiting 2", "waiting 77"))

    async with pod(late_once) as (address, _), scraping(address) as scraper:
        status = await becomes(scraper, Reachability.READY)
        assert status.load is not None
        assert status.load.waiting_requests == 2


@pytest.mark.parametrize("answers_first", [1, 3])
async def test_a_pod_that_closes_a_kept_connection_is_asked_again_at_once(answers_first: int) -> None:
    """The request meets the end of the connection, as with a server whose keep-alive time has just run out."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for _ in range(answers_first):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(LOAD), LOAD.encode()))
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")  # the next request is on its way: no answer
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, scraping(address, stale_after_seconds=60, timeout_seconds=60) as scraper:
        await scraper.first_scrapes()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while connections < 4:
                assert scraper.problems() == {}
                await asyncio.sleep(0)


async def test_a_connection_that_is_cut_within_the_answer_is_a_problem() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + LOAD.encode())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, scraping(address) as scraper:
        await scraper.first_scrapes()
        assert "ended before the response did" in scraper.problems()[address]
        assert scraper.snapshot(now=time.monotonic())[0].reachability is Reachability.UNKNOWN


async def test_a_name_is_asked_at_the_address_that_listens() -> None:
    async with pod(load_page) as (address, _), scraping(address.replace("127.0.0.1", "localhost")) as scraper:
        await becomes(scraper, Reachability.READY)


async def test_a_pod_that_was_there_first_is_not_new_and_one_that_comes_or_comes_back_is() -> None:
    free = pick_free_port(host="127.0.0.1", avoid=())
    async with pod(load_page) as (address, runner), scraping(address, f"127.0.0.1:{free}") as scraper:
        assert (await becomes(scraper, Reachability.READY)).ready_since is None
        await becomes(scraper, Reachability.UNREACHABLE, index=1)
        began = time.monotonic()
        await web.TCPSite(runner, "127.0.0.1", free).start()
        new = (await becomes(scraper, Reachability.READY, index=1)).ready_since
        assert new is not None
        assert began <= new <= time.monotonic()
        site = next(site for site in runner.sites if site.name.endswith(address))
        await site.stop()
        await runner.server.shutdown(0.1)  # type: ignore[union-attr]
        await becomes(scraper, Reachability.UNREACHABLE)
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        assert (await becomes(scraper, Reachability.READY)).ready_since is not None


async def test_a_pod_that_was_slow_to_report_is_not_new_and_one_whose_counters_began_anew_is() -> None:
    queries, gate = [count(1000)], asyncio.Event()
    gate.set()

    async def page(_: web.Request) -> web.Response:
        await gate.wait()
        return web.Response(text=f"{LOAD}vllm:prefix_cache_queries_total {next(queries[0])}\n")

    async with pod(page) as (address, _), scraping(address) as scraper:
        await becomes(scraper, Reachability.READY)
        gate.clear()
        await becomes(scraper, Reachability.UNKNOWN)
        gate.set()
        assert (await becomes(scraper, Reachability.READY)).ready_since is None
        queries[0] = count()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while scraper.snapshot(now=time.monotonic())[0].ready_since is None:
                await asyncio.sleep(0.005)


async def test_each_report_and_each_scrape_without_one_is_told() -> None:
    reported: list[tuple[str, int]] = []
    failures: list[None] = []
    free = pick_free_port(host="127.0.0.1", avoid=())
    async with pod(load_page) as (address, _):
        scraper = MetricsScraper(
            [address, f"127.0.0.1:{free}"],
            interval_seconds=0.01,
            timeout_seconds=0.5,
            stale_after_seconds=0.2,
            reported=lambda endpoint, load, _: reported.append((endpoint, load.waiting_requests)),
            changed=lambda: failures.append(None),
        )
        task = asyncio.create_task(scraper.run())
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while len(reported) < 3 or len(failures) < 3:
                    await asyncio.sleep(0.005)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert set(reported) == {(address, 2)}


async def test_a_pod_that_is_another_process_is_asked_for_its_models_as_soon_as_it_answers() -> None:
    models = ["old"]

    async def page(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in models]})
        return await load_page(request)

    async with pod(page) as (address, runner), scraping(address, models_interval_seconds=3600.0) as scraper:
        await scraper.first_answers()
        (site,) = runner.sites
        await site.stop()
        await runner.server.shutdown(0.1)  # type: ignore[union-attr]
        await becomes(scraper, Reachability.UNREACHABLE)
        models[:] = ["new"]
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (known := scraper.snapshot(now=time.monotonic())[0].models) is None or known.first != "new":
                await asyncio.sleep(0.005)


async def test_a_pod_that_is_another_process_no_longer_has_the_models_of_the_one_before() -> None:
    is_old, asked = True, 0

    async def page(request: web.Request) -> web.Response:
        nonlocal asked
        if request.path == "/metrics":
            return await load_page(request) if is_old else web.Response(text="starting")
        if is_old:
            return web.json_response({"data": [{"id": "old"}, {"id": "sql", "parent": "old"}]})
        asked += 1
        return web.Response(status=404)

    async with pod(page) as (address, runner), scraping(address, models_interval_seconds=3600.0) as scraper:
        await scraper.first_answers()
        assert scraper.learned_adapters == {"sql": "old"}
        (site,) = runner.sites
        await site.stop()
        await runner.server.shutdown(0.1)  # type: ignore[union-attr]
        await becomes(scraper, Reachability.UNREACHABLE)
        is_old = False
        host, _, port = address.rpartition(":")
        await web.TCPSite(runner, host, int(port)).start()
        async with asyncio.timeout(DEADLINE_SECONDS):
            while not asked or scraper.is_asking:
                await asyncio.sleep(0.005)
        (status,) = scraper.snapshot(now=time.monotonic())
        assert (status.reachability, status.models) == (Reachability.UNKNOWN, None)
        assert scraper.learned_adapters == {}


async def test_a_pod_whose_counters_go_back_at_each_scrape_is_not_asked_for_its_models_each_time() -> None:
    asked, queries = {"/metrics": 0, "/v1/models": 0}, count(1000, -1)

    async def page(request: web.Request) -> web.Response:
        asked[request.path] += 1
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        return web.Response(text=f"{LOAD}vllm:prefix_cache_queries_total {next(queries)}\n")

    async with pod(page) as (address, _), scraping(address):
        async with asyncio.timeout(DEADLINE_SECONDS):
            while asked["/metrics"] < 20:
                await asyncio.sleep(0.005)
        assert asked["/v1/models"] < 10


async def test_pods_that_do_not_answer_hold_nobody_up() -> None:
    free = pick_free_port(host="127.0.0.1", avoid=())

    async def keeps_its_models(request: web.Request) -> web.StreamResponse:
        return await (hangs if request.path == "/v1/models" else load_page)(request)

    async with (
        pod(hangs) as (mute, _),
        pod(keeps_its_models) as (silent, _),
        scraping(mute, silent, f"127.0.0.1:{free}") as scraper,
    ):
        async with asyncio.timeout(DEADLINE_SECONDS):
            await scraper.first_scrapes()
            while scraper.is_asking:
                await scraper.first_answers()
        assert [status.models for status in scraper.snapshot(now=time.monotonic())] == [None] * 3

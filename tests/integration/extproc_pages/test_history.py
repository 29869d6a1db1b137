"""The last 15 minutes, of a real picker before a real Redis: kept without anybody who watches."""

import asyncio
import time

from extproc.answers.judgement import Measured
from extproc.pages.history_state import HistoryEvent
from tests.integration.kv_redis import RedisServer
from tests.integration.live_picker import DEADLINE_SECONDS, MODEL, LivePicker, live_picker

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
KEY = ("standard", MODEL)


async def asked_before_anybody_watched(picker: LivePicker) -> None:
    (await picker.ask(PROMPT)).finish()
    measured = Measured(ttft_seconds=0.3, inter_token_seconds=0.02)
    picker.pool.telemetry.history.measured(KEY, measured, weight=50.0, now=time.monotonic())
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not sum((await picker.pages.history(None)).load.requests):  # its slice of five seconds is over
            await asyncio.sleep(0.05)


async def test_what_happened_before_is_in_the_snapshot_and_the_page_and_comes_again(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        await asked_before_anybody_watched(picker)
        async with picker.watching() as stream:
            snapshot = (await stream.next()).data
            event = (await stream.next("history")).data
        status, page = await picker.get("/v1/history")

        assert status == 200
        for shown in (snapshot["history"], event, page):
            assert (shown["picker"], shown["pool"]) == (picker.resources.name, "")
            assert (sum(shown["load"]["requests"]), sum(shown["load"]["refused"])) == (1, 0)
            assert sum(shown["load"]["prompt_tokens"]) > 100
            assert [(each["measure"], each["class"], each["model"]) for each in shown["latencies"]] == [
                ("ttft", *KEY),
                ("inter-token", *KEY),
            ]
            assert shown["latencies"][0]["whole"] == {"observed": 1, "p50_ms": 300.0, "p95_ms": 300.0, "p99_ms": 300.0}
        assert set(page) == set(HistoryEvent.__struct_fields__)
        assert snapshot["picker"] == picker.resources.name
        assert snapshot["docs"].startswith("https://")


async def test_a_decision_is_found_by_its_own_id(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        for _ in range(2):  # clients choose the ids of requests: there may be two
            (await picker.ask(PROMPT, request_id="same")).finish()
        async with picker.watching() as stream:
            first, second = (await stream.next()).data["decisions"]
        for decision in (first, second):
            status, found = await picker.get(f"/v1/decisions?decision_id={decision['id']}")
            assert (status, [each["id"] for each in found]) == (200, [decision["id"]])
        assert await picker.get("/v1/decisions?decision_id=none-such") == (200, [])


async def test_an_unknown_pool_has_no_history(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        status, said = await picker.get("/v1/history?pool=shop/none")
        assert (status, "shop/none" in said["error"]) == (404, True)

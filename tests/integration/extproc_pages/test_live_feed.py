"""The live feed over HTTP, of a real picker before a real Redis: what comes, when, and what never comes."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import cast

import aiohttp
import pytest

from extproc.errors import MalformedRequestError
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import Arrival, Decided, DecisionRecord, NoDecision, RequestOutcome
from extproc.pages.admin_http import AdminServer
from extproc.pages.admin_pages import PickerPages
from extproc.pages.live_feed import MOST_WATCHERS, LiveFeed
from extproc.pages.live_watchers import Coalesced, Watcher
from extproc.pick import pick
from extproc.policy.priority import Quota
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import ObservabilityPolicy, PickPolicy
from kvmesh.blocks.block_keys import KEY_BYTES, block_keys, root_key
from kvmesh.blocks.index_changes import Store, pack_hashes
from kvmesh.blocks.source import Stream as KvStream
from operate.local.ports import pick_free_port
from tests.integration.kv_index import redis_index
from tests.integration.kv_redis import RedisServer
from tests.integration.live_picker import DEADLINE_SECONDS, MODEL, PODS, Event, LivePicker, live_picker

PROMPT = "the quick brown fox jumps over the lazy dog " * 12
SHOWN = PickPolicy(observability=ObservabilityPolicy(show_prompt_text=True))
BLOCK = 16


async def hold(redis: RedisServer, picker: LivePicker, text: str, **held: tuple[str, int]) -> None:
    """Have the index say who holds the first blocks of a prompt, and in which tier: `one` and `other` are the pods."""
    tokenizer = picker.pool.prompts.tokenizers[MODEL]
    tokens = tokenizer._engine.encode(text, add_special_tokens=True)
    keys = block_keys(tokens, block_size=BLOCK, parent=root_key(hash_seed="kvmesh", model=MODEL))
    async with redis_index(redis) as index:
        for pod, (tier, blocks) in zip(PODS, held.values(), strict=False):
            numbers = range(1, blocks + 1)
            stored = Store(
                hashes=pack_hashes(numbers), keys=keys[: blocks * KEY_BYTES], block_size=BLOCK, tier=tier, group=0
            )
            await index.apply(KvStream(endpoint=pod), stored)


async def test_the_snapshot_comes_first_and_a_decision_with_its_end_follows(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        (await picker.ask(PROMPT, request_id="before")).finish()
        async with picker.watching() as stream:
            snapshot = (await stream.next()).data
            exchange = await picker.ask(PROMPT, request_id="r-2")
            decision = (await stream.next("decision")).data
            exchange.responded(status=200, served_by=None, from_pod=True, content_type="application/json")
            exchange.finish()
            ended = (await stream.next("ended")).data

        assert [event.id for event in stream.seen] == sorted({event.id for event in stream.seen})
        assert stream.seen[0].name == "snapshot"
        assert (snapshot["version"], snapshot["pool"], snapshot["pools"]) == (1, "", [])
        assert [pod["address"] for pod in snapshot["pods"]["pods"]] == list(PODS)
        assert [line["class"] for line in snapshot["classes"]["classes"]] == ["critical", "standard", "sheddable"]
        assert [line["request_id"] for line in snapshot["decisions"]] == ["before"]
        assert (decision["request_id"], decision["path"], decision["missed"]) == ("r-2", "/v1/completions", 0)
        assert decision["endpoint"] == decision["candidates"][0]["endpoint"]
        assert decision["matched_tokens"] > 0
        assert set(decision["phases_ms"]) >= {"parse", "tokenize", "lookup", "decide"}
        assert (ended["decision_id"], ended["status"], ended["missed"]) == (decision["id"], 200, 0)


async def test_pods_classes_and_the_index_come_every_second(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker, picker.watching() as stream:
        await hold(redis_server, picker, PROMPT, one=("GPU", 5))
        pods = (await stream.next("pods")).data
        while pods["totals"]["cached_blocks"] != 5:
            pods = (await stream.next("pods")).data
        classes, index = await stream.next("classes"), (await stream.next("index")).data

        first = pods["pods"][0]
        assert (first["tiers"], first["cached_tokens"], first["block_tokens"]) == ({"GPU": 5}, 80, BLOCK)
        assert classes.data["waiting"] == 0
        (source,) = index["sources"]
        assert (source["endpoint"], source["tier"], source["cached_blocks"]) == (PODS[0], "GPU", 5)


async def test_the_prefix_tree_names_the_pods_and_tiers_that_hold_it_and_no_text(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        await hold(redis_server, picker, PROMPT, one=("GPU", 6), other=("CPU", 2))
        (await picker.ask(PROMPT)).finish()
        (await picker.ask(PROMPT)).finish()
        await settled(picker)

        status, page = await picker.get("/v1/prefixes")

        assert status == 200
        assert (page["pool"], page["index"], page["cached_blocks"], page["text_shown"]) == ("", "ok", 8, False)
        (node,) = page["nodes"]
        assert (node["model"], node["parent"], node["text"]) == (MODEL, None, None)
        assert node["requests"] == pytest.approx(2.0, abs=0.1)
        assert node["share_of_requests"] == 1.0
        assert [(holder["endpoint"], list(holder["tiers"])) for holder in node["holders"]] == [
            (PODS[0], ["GPU"]),
            (PODS[1], ["CPU"]),
        ]
        # of an edge some blocks are looked up
        assert node["held_blocks"] == pytest.approx(8, abs=2)
        assert node["share_of_memory"] == pytest.approx(1.0, abs=0.25)


async def settled(picker: LivePicker) -> None:
    """Wait until what follows an answer is done: it comes in the next turns of the loop."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while len(picker.pool.telemetry.recent) < 1 or not len(picker.pool_pages.prefixes.view(limit=1).edges):
            await asyncio.sleep(0)


async def test_text_is_shown_only_where_the_policy_says_so(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url, policy=SHOWN) as picker:
        (await picker.ask(PROMPT)).finish()
        await settled(picker)
        _, page = await picker.get("/v1/prefixes")

    (node,) = page["nodes"]
    assert page["text_shown"] is True
    assert node["text"] == f"<|bos|>{PROMPT}"[: len(node["text"])]
    assert 40 < len(node["text"]) <= 80


async def test_a_policy_that_forbids_text_has_what_was_kept_forgotten_at_once(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url, policy=SHOWN) as picker:
        (await picker.ask(PROMPT)).finish()
        await settled(picker)

        picker.pool.apply(replace(picker.pool.config, policy=PickPolicy()))
        picker.pages.reconfigure()

        assert [edge.head for edge in picker.pool_pages.prefixes.view(limit=9).edges] == [b""]
        _, page = await picker.get("/v1/prefixes")
        assert [node["text"] for node in page["nodes"]] == [None]


async def test_salted_prompts_have_no_text_even_so(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url, policy=SHOWN) as picker:
        facts_body = {"model": MODEL, "prompt": PROMPT, "cache_salt": "private"}
        exchange = await pick(picker.facts(), json.dumps(facts_body).encode(), picker.pool.runtime)
        exchange.finish()
        await settled(picker)
        _, page = await picker.get("/v1/prefixes")

    assert [node["text"] for node in page["nodes"]] == [None]


async def test_no_prompt_query_or_unnamed_tenant_reaches_any_event_or_page(redis_server: RedisServer) -> None:
    quotas = (Quota(tenant="acme", requests_per_minute=600.0), Quota(requests_per_minute=600.0))
    policy = PickPolicy(priorities=PriorityPolicy(quotas=quotas))
    async with live_picker(redis_server.url, policy=policy) as picker, picker.watching() as stream:
        for tenant in ("planted-tenant", "acme"):
            exchange = await picker.ask(
                "planted-prompt " * 40, **{"x-gateway-inference-fairness-id": tenant, "authorization": "planted-token"}
            )
            exchange.finish()
        first, second = await stream.next("decision"), await stream.next("decision")
        await stream.next("prefixes")
        pages = [await picker.get(path) for path in ("/state", "/v1/decisions", "/v1/prefixes", "/pools")]

    seen = json.dumps([event.data for event in stream.seen]) + json.dumps(pages)
    assert "planted" not in seen
    assert [first.data["request"]["tenant"], second.data["request"]["tenant"]] == ["other", "acme"]


async def test_without_redis_the_feed_says_so_and_goes_on(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker, picker.watching() as stream:
        (await picker.ask(PROMPT)).finish()
        assert (await stream.next("snapshot")).data["index"]["state"] == "stale"  # no indexer is there

        redis_server.kill()

        index = (await stream.next("index")).data
        while index["state"] != "unavailable":
            index = (await stream.next("index")).data
        assert index["problem"]
        assert index["sources"] == []
        prefixes = (await stream.next("prefixes")).data
        while prefixes["index"] != "unavailable":
            prefixes = (await stream.next("prefixes")).data
        assert [node["holders"] for node in prefixes["nodes"]] == [None]
        assert (await stream.next("pods")).data["totals"]["pods"] == 2


async def test_requests_are_observed_only_while_somebody_watches(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        assert picker.resources.observers == []
        async with picker.watching() as one, picker.watching() as other:
            await one.next("snapshot")
            await other.next("snapshot")
            assert picker.resources.observers == [picker.feed]

        async with asyncio.timeout(DEADLINE_SECONDS):
            while picker.resources.observers:
                await asyncio.sleep(0.01)


async def test_a_burst_is_thinned_out_and_counted(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker, picker.watching() as stream:
        await stream.next("snapshot")
        for number in range(60):
            (await picker.ask(PROMPT, request_id=f"r-{number}")).finish()
        decisions: list[Event] = []
        while sum(1 + event.data["missed"] for event in decisions) < 60:
            decisions.append(await stream.next("decision"))

    per_second = Counter(int(event.data["at"]) for event in decisions)
    assert max(per_second.values()) <= 2 * 20  # a second of the clock has parts of two of the feed's
    assert len(decisions) < 60
    assert decisions[-1].data["request_id"] == "r-59"


async def test_what_was_refused_is_told_with_its_reason(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker, picker.watching() as stream:
        await stream.next("snapshot")
        with pytest.raises(Exception, match="JSON"):
            await pick(picker.facts(request_id="bad"), b"{", picker.pool.runtime)
        decision = (await stream.next("decision")).data

    assert (decision["request_id"], decision["endpoint"], decision["status"]) == ("bad", None, 400)
    assert decision["reason"] == "malformed-json"


async def test_one_too_many_is_told_to_come_again_and_may_when_another_has_left(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker, AsyncExitStack() as watching:
        streams = [await watching.enter_async_context(picker.watching()) for _ in range(MOST_WATCHERS)]
        for stream in streams:
            await stream.next("snapshot")
        async with picker.http.get(f"{picker.admin}/v1/live") as refused:
            assert (refused.status, refused.headers["retry-after"]) == (503, "5")
            assert "watch already" in (await refused.json())["error"]

        streams[0].response.close()

        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                async with picker.http.get(f"{picker.admin}/v1/live") as response:
                    if response.status == 200:
                        break
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("path", ["/v1/live?pool=llm/none", "/v1/prefixes?pool=llm/none"])
async def test_an_unknown_pool_is_a_clear_404(redis_server: RedisServer, path: str) -> None:
    async with live_picker(redis_server.url) as picker:
        words = (
            "the pool 'llm/none' is not known here; this picker has one pool, which has no name: that of --endpoints"
        )
        assert await picker.get(path) == (404, {"error": words})


@pytest.mark.parametrize("limit", ["0", "501", "x", "-1", "", "9" * 40])
async def test_a_limit_that_is_none_is_a_clear_400(redis_server: RedisServer, limit: str) -> None:
    async with live_picker(redis_server.url) as picker:
        status, page = await picker.get(f"/v1/prefixes?limit={limit}")

    assert status == 400
    assert page["error"].startswith("limit must be a number of nodes from 1 to 500, not ")


async def test_the_end_of_the_picker_ends_the_streams_with_a_word(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker, picker.watching() as stream:
        await stream.next("snapshot")

        picker.feed.end_all()

        last = (await stream.rest())[-1]
        assert (last.name, last.data["why"]) == ("bye", "shutdown")
        async with picker.http.get(f"{picker.admin}/v1/live") as response:
            assert response.status == 503


async def test_who_does_not_read_is_let_go_and_others_go_on(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.pages.live_watchers.MOST_WAITING_BYTES", 200_000)
    monkeypatch.setattr("extproc.pages.admin_http.WRITE_SECONDS", 0.2)
    async with live_picker(redis_server.url) as picker, picker.watching() as stream:
        await stream.next("snapshot")
        reader, writer = await asyncio.open_connection(*picker.admin.removeprefix("http://").split(":"), limit=1024)
        writer.write(b"GET /v1/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await writer.drain()
        await reader.readexactly(100)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while picker.feed.watched("") < 2:
                await asyncio.sleep(0.01)
            for number in range(100_000):  # until the kernel's buffers are full
                picker.feed.decided(decided(number))
                picker.feed._audiences[""].decisions = Coalesced()
                if picker.feed.watched("") < 2:
                    break
                while (await stream.next("decision")).data["request_id"] != f"r-{number}":
                    pass
        writer.close()

        assert picker.feed.watched("") == 1
        await stream.next("pods")


def decided(number: int) -> Decided:
    """A refusal with many words."""
    facts = RequestFacts(method="POST", path="/", objective=None, request_id=f"r-{number}")
    outcome = NoDecision.of(MalformedRequestError("x" * 50_000))
    return Decided(
        arrival=Arrival(number=number),
        outcome_kind=RequestOutcome.REFUSED,
        record=DecisionRecord(at=float(number), id=f"d-{number}", facts=facts, model=None, outcome=outcome),
    )


async def test_a_client_that_is_gone_is_forgotten(redis_server: RedisServer) -> None:
    async with live_picker(redis_server.url) as picker:
        async with aiohttp.ClientSession() as http, http.get(f"{picker.admin}/v1/live") as response:
            await response.content.readline()
            assert picker.feed.watched("") == 1

        async with asyncio.timeout(DEADLINE_SECONDS):
            while picker.feed.watched(""):
                await asyncio.sleep(0.01)


async def test_one_whose_machine_takes_nothing_any_more_loses_its_place_long_before_the_buffers_are_full(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.pages.admin_http.UNHEARD_SECONDS", 0.5)
    async with live_picker(redis_server.url) as picker:
        host, port = picker.admin.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect((host, int(port)))
            connection.sendall(b"GET /v1/live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not picker.feed.watched(""):
                    await asyncio.sleep(0.01)
                while picker.feed.watched(""):
                    await asyncio.sleep(0.01)


class QuietFeed:
    """Whoever watches gets nothing."""

    def __init__(self) -> None:
        self.watching = 0

    @asynccontextmanager
    async def watcher(self, pool: str | None) -> AsyncIterator[Watcher]:
        self.watching += 1
        try:
            yield Watcher(lambda why: why.encode())
        finally:
            self.watching -= 1

    def end_all(self) -> None:
        pass


async def test_who_has_gone_gives_the_place_back_before_anything_is_to_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.pages.admin_http.KEEP_ALIVE_SECONDS", 10 * DEADLINE_SECONDS)
    monkeypatch.setattr("extproc.pages.admin_http.LOOK_SECONDS", 0.05)
    feed, port = QuietFeed(), pick_free_port(host="127.0.0.1", avoid=())
    server = AdminServer(cast("PickerPages", None), max_body_bytes=1, feed=cast("LiveFeed", feed))
    try:
        await server.start(host="127.0.0.1", port=port)
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/v1/live"):
            assert feed.watching == 1
        async with asyncio.timeout(DEADLINE_SECONDS):
            while feed.watching:
                await asyncio.sleep(0.01)
    finally:
        await server.stop()


async def test_a_failure_while_looking_harms_nobody_and_the_feed_goes_on(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with live_picker(redis_server.url) as picker, picker.watching() as stream:
        await stream.next("snapshot")
        classes, failed = picker.pool_pages.classes, asyncio.Event()

        def broken() -> None:
            failed.set()
            raise RuntimeError("a defect")

        monkeypatch.setattr(picker.pool_pages, "classes", broken)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await failed.wait()
        monkeypatch.setattr(picker.pool_pages, "classes", classes)

        await stream.next("pods")
        assert [record.message for record in caplog.records if record.name == "extproc.pages.live_feed"] == [
            "the live feed has failed; it goes on"
        ]

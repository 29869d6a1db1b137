"""The running indexer between a real Redis and scripted pods with real ZMQ sockets."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import pytest

from kv_indexer.config import IndexerSettings, parse_event_sources
from kv_indexer.events.zmq_sockets import ZmqReplaySource
from kv_indexer.follow.catch_up import RecoveryPolicy
from kv_indexer.service import IndexerService
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.source import SourceState
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.redis_reader import PrefixIndexReader
from tests.integration.kv_publisher import ScriptedPod, running_pod
from tests.integration.kv_redis import RedisServer, free_port
from tests.unit.kv_indexer_follow.kv_fakes import CLEARED, prompt, removed, stored

ROOT = root_key(hash_seed="kvmesh", model="tiny")
DEADLINE_SECONDS = 15.0
QUICK = RecoveryPolicy(idle_seconds=0.05, retry_seconds=0.05, retry_limit_seconds=0.1)


async def eventually(condition: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Wait until the condition's value is the expected one."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    value: Any = None
    while time.monotonic() < deadline:
        try:
            value = await condition()
        except (IndexUnavailableError, aiohttp.ClientError) as error:
            value = error
        if value == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"still {value!r} instead of {expected!r} after {DEADLINE_SECONDS} s")


class Mesh:
    """What a test looks at and pulls on."""

    def __init__(self, redis_server: RedisServer, stack: AsyncExitStack) -> None:
        self.redis = redis_server
        self._stack = stack
        self.reader = PrefixIndexReader(url=redis_server.url, hash_seed="kvmesh")

    async def pod(self, **options: Any) -> ScriptedPod:
        return await self._stack.enter_async_context(running_pod(**options))

    @asynccontextmanager
    async def indexer(self, *pods: ScriptedPod | str, ready: bool = True, **more: Any) -> AsyncIterator[IndexerService]:
        """Run an indexer over these pods, waiting until it is ready."""
        endpoints = tuple(pod if isinstance(pod, str) else pod.endpoint for pod in pods)
        service = IndexerService(
            IndexerSettings(
                host="127.0.0.1",
                admin_port=0,
                redis_url=self.redis.url,
                endpoints=endpoints,
                model="tiny",
                hash_seed="kvmesh",
                **{"recovery": QUICK, "rediscover_seconds": 0.2, "rediscover_lost_seconds": 0.05, **more},
            )
        )
        task = asyncio.create_task(service.run(), name="indexer")
        try:
            if ready:
                await eventually(self.not_ready(service), {})
            yield service
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def not_ready(self, service: IndexerService) -> Callable[[], Awaitable[dict[str, str]]]:
        async def ask() -> dict[str, str]:
            return dict(service.not_ready())

        return ask

    async def matched(self) -> dict[str, int]:
        return dict((await self.reader.lookup(prompt(9), root=ROOT)).matched_blocks)

    async def states(self) -> list[tuple[SourceState, str]]:
        return [(line.state, line.reason) for line in await self.reader.sources()]

    async def becomes(self, matched: dict[ScriptedPod, int]) -> None:
        await eventually(self.matched, {pod.endpoint: blocks for pod, blocks in matched.items()})


@pytest.fixture
async def mesh(redis_server: RedisServer) -> AsyncIterator[Mesh]:
    async with AsyncExitStack() as stack:
        mesh = Mesh(redis_server, stack)
        stack.push_async_callback(mesh.reader.close)
        yield mesh


async def test_what_a_pod_stores_is_found_and_what_it_removes_is_not(mesh: Mesh) -> None:
    a, b = await mesh.pod(), await mesh.pod()
    async with mesh.indexer(a, b):
        await a.publish(stored(1, 2, 3))
        await b.publish(stored(1))
        await mesh.becomes({a: 3, b: 1})

        await a.publish(removed(2, 3))
        await b.publish(stored(2, parent=1))
        await mesh.becomes({a: 1, b: 2})


async def test_what_was_published_before_the_indexer_came_is_replayed(mesh: Mesh) -> None:
    for with_topic in (True, False):
        pod = await mesh.pod(replies_with_topic=with_topic)
        await pod.publish(stored(1, 2))
        await pod.publish(removed(2))
        async with mesh.indexer(pod):
            await mesh.becomes({pod: 1})


@pytest.mark.parametrize("key", ["registry", "slots", "streams", "indexers", "pulses"])
async def test_a_key_of_another_type_is_deleted_and_the_index_rebuilt(
    mesh: Mesh, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})
        client = mesh.redis.client()
        client.delete("{kv2}" + key)
        client.set("{kv2}" + key, "foreign")

        async def is_named() -> bool:
            return f"{{kv2}}{key} was of another type" in caplog.text

        await eventually(is_named, True)
        await pod.publish(stored(4, parent=3))
        await mesh.becomes({pod: 4})


async def test_two_stores_need_two_removals(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        for event in (stored(1), stored(1), removed(1), stored(2, parent=1)):
            await pod.publish(event)
        await mesh.becomes({pod: 2})
        await pod.publish(removed(1))
        await mesh.becomes({})


async def test_a_clear_empties_its_pod_alone(mesh: Mesh) -> None:
    a, b = await mesh.pod(), await mesh.pod()
    async with mesh.indexer(a, b):
        await a.publish(stored(1, 2))
        await b.publish(stored(1, 2))
        await mesh.becomes({a: 2, b: 2})
        await a.publish(CLEARED)
        await mesh.becomes({b: 2})


async def test_a_live_gap_is_filled_by_replay(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1))
        await mesh.becomes({pod: 1})
        await pod.publish(stored(2, parent=1), lost=True)
        await pod.publish(stored(3, parent=2), lost=True)
        await pod.publish(stored(4, parent=3))
        await mesh.becomes({pod: 4})
        assert pod.requests[-1] == 1
        await eventually(mesh.states, [(SourceState.LIVE, "")])


async def test_a_replay_that_drops_batches_and_its_end_is_completed(mesh: Mesh) -> None:
    pod = await mesh.pod()
    for block in range(1, 10):
        await pod.publish(stored(block, parent=block - 1 or None))
    pod.lost_replies, pod.loses_end = {3, 4, 7}, True
    async with mesh.indexer(pod):
        await mesh.becomes({pod: 9})
        await eventually(mesh.states, [(SourceState.LIVE, "")])


async def test_a_restarted_pod_loses_its_old_blocks_before_it_says_anything(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})
        pod.restart()
        await mesh.becomes({})
        await eventually(mesh.states, [(SourceState.LIVE, "")])
        await pod.publish(stored(1))
        await mesh.becomes({pod: 1})


async def test_a_restarted_pod_that_is_already_past_our_last_batch_is_found_out(mesh: Mesh) -> None:
    pod = await mesh.pod()
    pod.started_at = None  # the batches alone must tell
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})
        pod.restart(seconds_back=500.0)  # nor does the clock help
        for _ in range(5):
            await pod.publish(stored(1))
        await mesh.becomes({pod: 1})
        await eventually(mesh.states, [(SourceState.LIVE, "")])


async def test_a_pod_that_moves_elsewhere_is_another_process(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})
        pod.move()
        await pod.publish(stored(1))
        await mesh.becomes({pod: 1})


async def test_a_new_start_time_voids_old_blocks_though_the_connection_stands(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod, recovery=replace(QUICK, identity_seconds=0.05, idle_probes=10_000)):
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})
        pod.forget_quietly()
        pod.started_at = 5000.0
        await mesh.becomes({})
        await eventually(mesh.states, [(SourceState.LIVE, "")])


async def test_a_batch_that_can_never_be_had_degrades_the_source_until_the_cache_is_reset(mesh: Mesh) -> None:
    pod = await mesh.pod()
    for block in (1, 2, 3):
        await pod.publish(stored(block, parent=block - 1 or None))
    await pod.publish(stored(1, 2))
    pod.lost_for_good = {1}
    async with mesh.indexer(pod):
        await mesh.becomes({pod: 3})  # the third block had waited for the second
        await eventually(mesh.states, [(SourceState.DEGRADED, "history-truncated")])
        await pod.publish(CLEARED, stored(1))
        await mesh.becomes({pod: 1})
        await eventually(mesh.states, [(SourceState.LIVE, "")])


async def test_a_truncated_history_is_completed_by_what_another_pod_knows(mesh: Mesh) -> None:
    whole, cut = await mesh.pod(), await mesh.pod()
    await whole.publish(stored(1, 2, 3))
    cut.buffer_steps = 2
    for event in (stored(1, 2, 3), stored(4, parent=3), stored(1, 2)):
        await cut.publish(event)
    async with mesh.indexer(whole, cut, recovery=replace(QUICK, orphan_seconds=0.05)):
        await mesh.becomes({whole: 3, cut: 2})
        await cut.publish(stored(3, parent=2))
        await mesh.becomes({whole: 3, cut: 4})  # the fourth block had lost its parent


async def test_a_replay_socket_that_comes_back_makes_the_source_exact_again(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient = partial(ZmqReplaySource, first_answer_seconds=0.3, silence_seconds=0.1)
    monkeypatch.setattr("kv_indexer.service.ZmqReplaySource", impatient)
    pod = await mesh.pod()
    pod.answers_replay = False
    await pod.publish(stored(1, 2))
    async with mesh.indexer(pod, ready=False, recovery=replace(QUICK, heal_seconds=0.1, heal_limit_seconds=0.1)):
        await eventually(mesh.states, [(SourceState.DEGRADED, "replay-unanswered")])
        pod.answers_replay = True
        await mesh.becomes({pod: 2})
        await eventually(mesh.states, [(SourceState.LIVE, "")])


async def test_a_pod_without_replay_is_followed_live_and_shown_as_degraded(mesh: Mesh) -> None:
    pod = await mesh.pod(has_replay=False)
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2))
        await mesh.becomes({pod: 2})
        await eventually(mesh.states, [(SourceState.DEGRADED, "no-replay-endpoint")])


async def test_a_restarted_indexer_goes_on_where_it_ended(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1))
        await pod.publish(stored(1))
        await mesh.becomes({pod: 1})
        await eventually(lambda: last_seq(mesh), 1)
    await pod.publish(removed(1))
    await pod.publish(stored(2, parent=1))
    pod.requests.clear()
    async with mesh.indexer(pod):
        await mesh.becomes({pod: 2})
        assert pod.requests[0] == 1  # its last batch, to see that the pod is still the same
        await pod.publish(removed(1))
        await mesh.becomes({})


async def last_seq(mesh: Mesh) -> int:
    return (await mesh.reader.sources())[0].last_seq


async def test_two_indexers_on_one_pod_count_each_batch_once(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod), mesh.indexer(pod):
        for _ in range(20):
            await pod.publish(stored(1))
        await mesh.becomes({pod: 1})
        await pod.publish(removed(*[1] * 19), stored(2, parent=1))
        await mesh.becomes({pod: 2})
        await pod.publish(removed(1))
        await mesh.becomes({})


async def test_an_index_lost_with_redis_is_rebuilt_by_replay(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod) as service:
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})
        mesh.redis.kill()
        await eventually(lambda: is_reported(service), True)
        await pod.publish(removed(3))
        mesh.redis.start()
        await mesh.becomes({pod: 2})
        await eventually(mesh.not_ready(service), {})


async def is_reported(service: IndexerService) -> bool:
    return "redis" in service.not_ready()


async def test_a_flushed_redis_is_noticed_without_any_event(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})
        mesh.redis.client().flushall()
        await mesh.becomes({pod: 3})


async def test_a_pod_that_is_down_does_not_hold_up_the_others(mesh: Mesh) -> None:
    pod = await mesh.pod()
    down = f"127.0.0.1:{free_port()}"
    async with mesh.indexer(down, pod) as service:
        await pod.publish(stored(1))
        await mesh.becomes({pod: 1})
        assert service.not_ready() == {}


async def test_a_pod_that_publishes_nothing_is_reported_until_it_does(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await mesh.pod(publishes=False)
    async with mesh.indexer(pod) as service:
        assert f"{pod.endpoint} publishes no KV events" in caplog.text
        metrics = (await page(service, "/metrics"))[1]
        assert f'kvmesh_indexer_source_state{{dp_rank="0",endpoint="{pod.endpoint}",state="lost"}} 1.0' in metrics

        pod.publishes = True
        await pod.publish(stored(1))
        await mesh.becomes({pod: 1})


async def test_a_pod_without_discovery_is_followed_where_the_settings_say(mesh: Mesh) -> None:
    pod = await mesh.pod()
    config = pod.config()["0"]
    sources = parse_event_sources(
        json.dumps({pod.endpoint: {"events": config["endpoint"], "replay": config["replay_endpoint"]}})
    )
    pod.publishes = False  # as if it had no /kv_event_sources
    async with mesh.indexer(pod, event_sources=sources):
        await pod.publish(stored(1))
        await mesh.becomes({pod: 1})


async def test_an_endpoint_that_is_no_longer_configured_is_dropped(mesh: Mesh) -> None:
    a, b = await mesh.pod(), await mesh.pod()
    async with mesh.indexer(a, b):
        await a.publish(stored(1))
        await b.publish(stored(1))
        await mesh.becomes({a: 1, b: 1})
    async with mesh.indexer(b):
        await mesh.becomes({b: 1})


async def test_a_model_that_the_pod_does_not_serve_is_reported(mesh: Mesh, caplog: pytest.LogCaptureFixture) -> None:
    pod = await mesh.pod()
    pod.models = ["other"]
    async with mesh.indexer(pod):
        expected = f"{pod.endpoint} does not serve --model tiny but other: nothing will match"
        await eventually(lambda: is_logged(caplog, expected), True)


async def is_logged(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


async def page(service: IndexerService, path: str) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{service.admin_port}{path}") as answer,
    ):
        return answer.status, await answer.text()


async def test_the_admin_pages_tell_how_it_stands(mesh: Mesh) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod) as service:
        await pod.publish(stored(1, 2), removed(7), {"type": "New"})
        await mesh.becomes({pod: 2})

        assert await page(service, "/healthz") == (200, '{"status":"ok"}')
        assert await page(service, "/readyz") == (200, '{"ready":true,"not_ready":{}}')
        status, text = await page(service, "/sources")
        (line,) = json.loads(text)["sources"]
        assert (status, line["endpoint"], line["state"], line["cached_blocks"]) == (200, pod.endpoint, "live", 2)
        metrics = (await page(service, "/metrics"))[1].splitlines()
        labels = f'{{dp_rank="0",endpoint="{pod.endpoint}"'
        assert {
            'kvmesh_indexer_events_total{type="BlockStored"} 1.0',
            'kvmesh_indexer_events_total{type="BlockRemoved"} 1.0',
            'kvmesh_indexer_decode_errors_total{reason="unknown-event-type"} 1.0',
            f"kvmesh_indexer_batches_total{labels}}} 1.0",
            f'kvmesh_indexer_source_state{labels},state="live"}} 1.0',
            f'kvmesh_indexer_blocks{labels},tier="GPU"}} 2.0',
            "kvmesh_indexer_redis_up 1.0",
        } <= set(metrics)


async def test_without_redis_the_indexer_is_alive_and_says_that_it_is_not_ready(mesh: Mesh) -> None:
    pod = await mesh.pod()
    mesh.redis.kill()
    async with mesh.indexer(pod, ready=False) as service:
        await eventually(lambda: is_down(service), True)
        assert (await page(service, "/healthz"))[0] == 200
        status, text = await page(service, "/readyz")
        assert (status, "redis" in json.loads(text)["not_ready"]) == (503, True)
        assert (await page(service, "/sources"))[0] == 503


async def is_down(service: IndexerService) -> bool:
    return "kvmesh_indexer_redis_up 0.0" in (await page(service, "/metrics"))[1]

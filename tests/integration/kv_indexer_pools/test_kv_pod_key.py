"""An indexer before pods with --api-key: models are learned with the key, and a refusal says which flag to give."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from kv_indexer.pools.event_sources import EventSourceDirectory
from kv_indexer.service import IndexerService
from kvmesh.blocks.source import SourceState, Stream
from kvmesh.errors import PodRefusesError
from kvmesh.pods import pod_key
from kvmesh.pods.pod_access import PodAccess
from kvmesh.pods.pod_http import PodPages
from podsim.server import RunningPod
from tests.integration.keyed_pods import KEY, address_of, keyed_pod, write_key
from tests.integration.kv_pools import PoolMesh, eventually, eventually_async
from tests.integration.kv_redis import RedisServer

WANTS_A_KEY = "the pod wants a key: give --pod-key-file"


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_key, "LOOK_SECONDS", 0.0)


@pytest.fixture
async def mesh(redis_server: RedisServer) -> AsyncIterator[PoolMesh]:
    async with AsyncExitStack() as stack:
        mesh = PoolMesh(redis_server, stack)
        stack.push_async_callback(mesh.reader.close)
        mesh.cluster.pool("red")
        yield mesh


def state_of(service: IndexerService, pod: RunningPod) -> str:
    state, reason = service._telemetry.states.get(Stream(endpoint=address_of(pod)), (None, ""))
    return reason if state is SourceState.LOST else "" if state is None else state.value


async def metric(service: IndexerService, name: str) -> float:
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{service.admin_port}/metrics") as answer:
        page = await answer.text()
    return next(float(line.partition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name} "))


async def complete(pod: RunningPod, prompt: str) -> None:
    async with (
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {KEY}"}) as http,
        http.post(f"{pod.base_url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}) as answer,
    ):
        assert answer.status == 200


async def test_with_the_key_a_pools_model_is_learned_and_its_blocks_indexed(
    mesh: PoolMesh, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    access = PodAccess(key_file=write_key(tmp_path / "key", KEY))
    async with keyed_pod(KEY) as pod:
        mesh.cluster.pod(address_of(pod), pool="red")
        async with mesh.indexer(pod_access=access) as service:
            await complete(pod, "What is a block pool? " * 20)
            await eventually_async(lambda: _has_blocks(mesh, pod), True)
            assert await metric(service, "kvmesh_indexer_pod_key_unusable") == 0.0
    assert KEY not in caplog.text


async def _has_blocks(mesh: PoolMesh, pod: RunningPod) -> bool:
    return any(line.cached_blocks > 0 and line.endpoint == address_of(pod) for line in await mesh.reader.sources())


async def test_without_a_key_the_stream_is_lost_and_the_message_names_the_flag(
    mesh: PoolMesh, caplog: pytest.LogCaptureFixture
) -> None:
    async with keyed_pod(KEY) as pod:
        mesh.cluster.pod(address_of(pod), pool="red")
        async with mesh.indexer(ready=False) as service:
            await eventually(lambda: state_of(service, pod), "pod-refuses")
    said = [each.getMessage() for each in caplog.records if WANTS_A_KEY in each.getMessage()]
    assert said == [f"{address_of(pod)}/v1/models: {WANTS_A_KEY}"]


async def test_a_wrong_key_is_mended_by_the_file_alone(mesh: PoolMesh, tmp_path: Path) -> None:
    file = write_key(tmp_path / "key", "wrong")
    async with keyed_pod(KEY) as pod:
        mesh.cluster.pod(address_of(pod), pool="red")
        async with mesh.indexer(ready=False, pod_access=PodAccess(key_file=file)) as service:
            await eventually(lambda: state_of(service, pod), "pod-refuses")

            write_key(file, "two words")
            await eventually_async(lambda: metric(service, "kvmesh_indexer_pod_key_unusable"), 1.0)

            write_key(file, KEY)
            await eventually(lambda: state_of(service, pod), SourceState.LIVE.value)
            assert await metric(service, "kvmesh_indexer_pod_key_unusable") == 0.0


async def test_models_that_a_pod_refuses_to_list_are_not_taken_for_none() -> None:
    """As with --endpoints, where a pod's models are compared with --model."""
    pages = PodPages()
    try:
        async with keyed_pod(KEY) as pod:
            directory = EventSourceDirectory(pages=pages, configured={})
            with pytest.raises(PodRefusesError, match=WANTS_A_KEY):
                await directory.served_models(address_of(pod))
    finally:
        pages.close()

"""The running indexer when pods change where they publish, and which ranks they have."""

from collections.abc import Callable
from typing import Any

import pytest

from kvmesh.blocks.source import SourceState
from tests.integration.kv_indexer_follow.test_kv_index_recovery import Mesh, eventually, mesh  # noqa: F401  the fixture
from tests.integration.kv_publisher import ScriptedPod
from tests.integration.kv_recount import recount
from tests.unit.kv_indexer_follow.kv_fakes import stored


def announce(monkeypatch: pytest.MonkeyPatch, pod: ScriptedPod, *publishers: ScriptedPod) -> None:
    """Let a pod's /kv_event_sources name these publishers, rank by rank."""
    configs = [ScriptedPod.config(each)["0"] for each in publishers]
    monkeypatch.setattr(pod, "config", lambda: {str(rank): config for rank, config in enumerate(configs)})


def blocks(mesh: Mesh) -> Callable[[], Any]:  # noqa: F811
    """How many blocks each stream holds."""

    async def count() -> dict[str, int]:
        return {stream: len(held) for stream, held in recount(mesh.redis.client()).held.items()}

    return count


async def test_a_rank_that_its_pod_no_longer_has_is_dropped_with_its_blocks(
    mesh: Mesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod, second_rank = await mesh.pod(), await mesh.pod()
    announce(monkeypatch, pod, pod, second_rank)
    async with mesh.indexer(pod) as service:
        await pod.publish(stored(1, 2))
        await second_rank.publish(stored(1, 2, 3))
        await eventually(blocks(mesh), {f"{pod.endpoint}#0": 2, f"{pod.endpoint}#1": 3})

        announce(monkeypatch, pod, pod)
        await eventually(blocks(mesh), {f"{pod.endpoint}#0": 2})
        await mesh.becomes({pod: 2})
        assert service.not_ready() == {}


async def test_a_rank_that_vanished_while_no_indexer_ran_is_dropped_too(
    mesh: Mesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod, second_rank = await mesh.pod(), await mesh.pod()
    announce(monkeypatch, pod, pod, second_rank)
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2))
        await second_rank.publish(stored(1, 2, 3))
        await eventually(blocks(mesh), {f"{pod.endpoint}#0": 2, f"{pod.endpoint}#1": 3})

    announce(monkeypatch, pod, pod)
    async with mesh.indexer(pod):
        await eventually(blocks(mesh), {f"{pod.endpoint}#0": 2})


async def test_a_pod_that_moves_its_publisher_is_followed_there_and_only_its_new_blocks_count(
    mesh: Mesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod, elsewhere = await mesh.pod(), await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2, 3))
        await mesh.becomes({pod: 3})

        await elsewhere.publish(stored(1))
        announce(monkeypatch, pod, elsewhere)
        await mesh.becomes({pod: 1})
        await elsewhere.publish(stored(2, parent=1))
        await mesh.becomes({pod: 2})
        await pod.publish(stored(4, parent=3))
        await eventually(mesh.states, [(SourceState.LIVE, "")])
        await mesh.becomes({pod: 2})


async def test_the_same_publisher_at_a_new_address_goes_on_without_a_replay_from_the_start(
    mesh: Mesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        for block in (1, 2, 3):
            await pod.publish(stored(block, parent=block - 1 or None))
        await mesh.becomes({pod: 3})
        pod.requests.clear()

        config = pod.config()["0"]
        by_name = {name: str(value).replace("*", "localhost") for name, value in config.items() if "endpoint" in name}
        monkeypatch.setattr(pod, "config", lambda: {"0": {**config, **by_name}})
        await eventually(lambda: was_asked(pod), True)
        await pod.publish(stored(4, parent=3))
        await mesh.becomes({pod: 4})
        assert min(pod.requests) == 2  # its last batch, to see that the publisher is still the same


async def was_asked(pod: ScriptedPod) -> bool:
    return bool(pod.requests)


async def test_a_pod_that_says_it_publishes_no_more_attracts_nobody(
    mesh: Mesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2))
        await mesh.becomes({pod: 2})
        announce(monkeypatch, pod)
        await mesh.becomes({})
        await eventually(blocks(mesh), {})


async def test_a_pod_that_announces_anothers_stream_gets_no_blocks_and_the_other_keeps_its_own(
    mesh: Mesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pod, thief = await mesh.pod(), await mesh.pod()
    async with mesh.indexer(pod, thief):
        await pod.publish(stored(1, 2, 3))
        await thief.publish(stored(7))
        await eventually(blocks(mesh), {f"{pod.endpoint}#0": 3, f"{thief.endpoint}#0": 1})

        announce(monkeypatch, thief, pod)
        await eventually(blocks(mesh), {f"{pod.endpoint}#0": 3})
        await pod.publish(stored(4, parent=3))
        await eventually(blocks(mesh), {f"{pod.endpoint}#0": 4})

"""A pool of bad pods: an honest refusal, and recovery with the first pod that is well."""

import asyncio
from pathlib import Path

import pytest

from tests.e2e.stack import Answer, eventually
from tests.reports.failing_pods import (
    CHAT,
    CHATS,
    Pod,
    Way,
    all_serve,
    fail,
    failures_of_a_load,
    hang,
    is_served,
    mesh_of,
    refuse,
    well,
)


@pytest.mark.parametrize("way", [fail, refuse, hang], ids=lambda way: way.__name__)
async def test_with_all_pods_bad_the_answer_is_an_honest_503_until_one_is_well(tmp_path: Path, way: Way) -> None:
    pods = [Pod(way=way) for _ in range(4)]
    async with mesh_of(tmp_path, pods) as mesh:
        await failures_of_a_load(mesh)
        for pod in pods:
            pod.answers = 0
        answers = await asyncio.gather(
            *(mesh.send("POST", CHATS, json=CHAT) for _ in range(40)), return_exceptions=True
        )
        own = [answer for answer in answers if isinstance(answer, Answer) and "x-kvmesh-reason" in answer.headers]
        assert len(own) >= 30
        assert {(answer.status, "retry-after" in answer.headers) for answer in own} == {(503, True)}
        pods[2].way = well
        await eventually(lambda: is_served(mesh), bool, seconds=20.0)
        assert await failures_of_a_load(mesh, requests=20) <= 6  # the others' trials
        for pod in pods:
            pod.way = well
        await all_serve(mesh, pods)


async def test_pods_that_sleep_get_nothing_however_many_they_are(tmp_path: Path) -> None:
    pods = [Pod(counts=True, is_awake=False) for _ in range(4)]
    async with mesh_of(tmp_path, pods) as mesh:
        answer = await mesh.send("POST", CHATS, json=CHAT)
        assert (answer.status, answer.headers["retry-after"]) == (503, "5")
        assert all("asleep" in pod["problem"] for pod in (await mesh.state())["endpoints"])
        pods[0].is_awake = True
        await eventually(lambda: is_served(mesh), bool)
        assert await failures_of_a_load(mesh, requests=20) == 0
        assert [pod.answers for pod in pods[1:]] == [0, 0, 0]

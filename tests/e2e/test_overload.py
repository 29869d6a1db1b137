"""The queue and shedding through a real Envoy with the real `openai` client: what its retries and errors make of it.

One mesh serves all tests of this file; each finds its pods empty and leaves nothing in the picker.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.e2e.overload_stack import OverloadStack, overload_stack, say

CLASSES: list[dict[str, Any]] = [
    {"name": "sheddable", "queueRequests": 1},
    {"name": "batch", "priority": -50, "sheddable": True, "queueRequests": 0, "refusalStatus": 429},
    {"name": "hurried", "priority": -10, "sheddable": True, "ttftSeconds": 60, "queueSeconds": 0.3},
    {"name": "patient", "priority": 5, "queueSeconds": 0.3},
    {
        "name": "capped",
        "priority": 1,
        "ttftSeconds": 0.01,
        "queueSeconds": 30,
        "degrade": [{"step": "cap-output", "tokens": 7, "enter": 1, "leave": 0.5, "leastSeconds": 0}],
    },
]
POLICY: dict[str, Any] = {"priorities": {"classes": CLASSES}, "load": {"overload": {"queueRequests": 3}}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OverloadStack]:
    async with overload_stack(tmp_path_factory.mktemp("stack"), policy=POLICY) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(running: OverloadStack) -> AsyncIterator[OverloadStack]:
    for pod in running.pods:
        pod.hold()
        pod.free()
        pod.received.clear()
    await running.nothing_is_left()
    yield running
    running.free()
    await running.nothing_is_left()


pytestmark = pytest.mark.asyncio(loop_scope="module")


def received(mesh: OverloadStack) -> list[Any]:
    return [request for pod in mesh.pods for request in pod.received]


async def test_requests_wait_at_the_picker_while_all_pods_are_full_and_are_answered_when_there_is_room(
    mesh: OverloadStack,
) -> None:
    await mesh.fill()
    plain = asyncio.create_task(say(mesh.client()))
    await mesh.waiting({"standard": 1})
    critical = asyncio.create_task(say(mesh.client("critical")))
    await mesh.waiting({"standard": 1, "critical": 1})
    assert received(mesh) == []
    mesh.free()
    answers = await asyncio.gather(plain, critical)
    assert {answer.parse().choices[0].message.content for answer in answers} == {"yes"}


async def test_a_stream_that_has_waited_streams(mesh: OverloadStack) -> None:
    await mesh.fill()

    async def text() -> list[str | None]:
        messages: Any = [{"role": "user", "content": "hello"}]
        chunks = await mesh.client().chat.completions.create(model="tiny", messages=messages, stream=True)
        return [chunk.choices[0].delta.content async for chunk in chunks]

    streamed = asyncio.create_task(text())
    await mesh.waiting({"standard": 1})
    mesh.free()
    assert await streamed == ["yes"]


async def test_a_client_that_gives_up_leaves_the_queue_at_once(mesh: OverloadStack) -> None:
    await mesh.fill()
    task = asyncio.create_task(say(mesh.client()))
    await mesh.waiting({"standard": 1})
    task.cancel()
    await mesh.waiting({})
    assert received(mesh) == []


async def test_a_refusal_is_the_clients_internal_server_error_with_our_words(mesh: OverloadStack) -> None:
    await mesh.fill()
    first = asyncio.create_task(say(mesh.client("sheddable")))
    await mesh.waiting({"sheddable": 1})
    began = time.monotonic()
    with pytest.raises(openai.InternalServerError) as caught:
        await say(mesh.client("sheddable"))
    assert time.monotonic() - began < 10.0  # it has not waited for anything
    error = caught.value
    assert (error.status_code, error.code, error.type) == (503, "overloaded", "server_error")
    assert "the pool is busy" in error.message
    headers = error.response.headers
    assert f"try again in {headers['retry-after']} s" in error.message
    assert (headers["x-kvmesh-reason"], headers["x-kvmesh-priority"]) == ("queue-full", "sheddable")
    mesh.free()
    assert (await first).status_code == 200


async def test_where_the_policy_says_429_the_client_sees_a_rate_limit(mesh: OverloadStack) -> None:
    await mesh.fill()
    with pytest.raises(openai.RateLimitError, match="the pool is busy") as caught:
        await say(mesh.client("batch"))
    assert caught.value.response.headers["x-kvmesh-priority"] == "batch"


async def test_the_clients_own_retry_comes_when_it_was_told_to_and_is_served(mesh: OverloadStack) -> None:
    await mesh.fill()
    shed = await mesh.stack.metric("kvmesh_shed_requests_total")
    task = asyncio.create_task(say(mesh.client("batch", max_retries=1)))
    refused = await _decided(mesh, after=shed)
    mesh.free()
    answer = await task
    assert (answer.status_code, answer.retries_taken) == (200, 1)
    state = await mesh.stack.state()
    # the least Retry-After, and the client's own first wait is at most 0.5 s
    assert 1.0 <= state["decisions"][0]["at"] - refused < 10.0


async def _decided(mesh: OverloadStack, *, after: float) -> float:
    """Wait for one more refusal; return when it was made."""
    async with asyncio.timeout(15):
        while await mesh.stack.metric("kvmesh_shed_requests_total") <= after:
            await asyncio.sleep(0.01)
    return float((await mesh.stack.state())["decisions"][0]["at"])


async def test_waiting_ends_with_a_refusal_or_with_a_pod_as_the_class_has_it(mesh: OverloadStack) -> None:
    await mesh.fill()
    with pytest.raises(openai.InternalServerError) as caught:
        await say(mesh.client("hurried"))
    assert caught.value.response.headers["x-kvmesh-reason"] == "queue-timeout"
    for pod in mesh.pods:
        pod.release()  # and full they stay
    assert (await say(mesh.client("patient"))).status_code == 200


async def test_a_critical_request_takes_the_place_of_a_sheddable_one_and_is_never_refused(mesh: OverloadStack) -> None:
    await mesh.fill()
    sheddable = asyncio.create_task(say(mesh.client("sheddable")))
    await mesh.waiting({"sheddable": 1})
    others = [asyncio.create_task(say(mesh.client())) for _ in range(2)]
    await mesh.waiting({"sheddable": 1, "standard": 2})
    critical = asyncio.create_task(say(mesh.client("critical")))
    with pytest.raises(openai.InternalServerError) as caught:
        await sheddable
    assert caught.value.response.headers["x-kvmesh-reason"] == "displaced"
    await mesh.waiting({"standard": 2, "critical": 1})
    for pod in mesh.pods:
        pod.release()
    # no place is left and nobody has to give way: it goes on, full as the pods are
    assert (await say(mesh.client("critical"))).status_code == 200
    mesh.free()
    assert {(await task).status_code for task in (*others, critical)} == {200}


async def test_an_answer_that_was_capped_says_so_and_one_that_was_not_says_nothing(mesh: OverloadStack) -> None:
    await mesh.fill()
    critical = asyncio.create_task(say(mesh.client("critical")))  # shows how the pool stands
    await mesh.waiting({"critical": 1})
    capped = asyncio.create_task(say(mesh.client("capped"), max_completion_tokens=500))
    await mesh.waiting({"critical": 1, "capped": 1})
    mesh.free()
    assert (await capped).headers["x-kvmesh-degraded"] == "cap-output"
    assert "x-kvmesh-degraded" not in (await critical).headers
    assert sorted(request.body.get("max_completion_tokens", 0) for request in received(mesh)) == [0, 7]

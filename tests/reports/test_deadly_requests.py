"""A request under which a pod dies does not end the next one, and costs no other client an answer."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from tests.e2e.echo_pod import MODEL, echo_pod
from tests.e2e.stack import Answer, Stack, eventually, free_ports, running_stack

CHATS = "/v1/chat/completions"
ANSWER = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "x"}}]}
SLOW_SECONDS = 1.0


class MortalPod:
    """A pod that ends at the word "killer": at once, or behind the headers of a stream."""

    def __init__(self) -> None:
        self.ends = asyncio.Event()
        self.killers = 0
        self.refusal: int | None = None  # the status of a full pod

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        if request.path != CHATS:  # a pod's tokenizer is not its engine
            return web.Response(status=404)
        if "killer" in body:
            self.killers += 1
            if json.loads(body).get("stream"):
                await web.StreamResponse(headers={"content-type": "text/event-stream"}).prepare(request)
            self.ends.set()
            await asyncio.Event().wait()
        if "slow" in body:
            await asyncio.sleep(SLOW_SECONDS)
        if self.refusal is not None:
            return web.json_response({"error": {"message": "no room"}}, status=self.refusal)
        return web.json_response(ANSWER)

    async def serve(self, port: int) -> None:
        async with echo_pod("127.0.0.1", port, self.answer):
            await self.ends.wait()


@asynccontextmanager
async def mesh_of(tmp_path: Path, pods: list[MortalPod]) -> AsyncIterator[Stack]:
    ports = free_ports(len(pods))
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        for port, pod in zip(ports, pods, strict=True):
            tasks.create_task(pod.serve(port))
            stack.callback(pod.ends.set)
        endpoints = [f"127.0.0.1:{port}" for port in ports]
        yield await stack.enter_async_context(running_stack(tmp_path, "--model", MODEL, endpoints=endpoints))


async def ask(mesh: Stack, content: str, **fields: object) -> Answer | None:
    """Send a chat; return None if the answer breaks off."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
    try:
        return await mesh.send("POST", CHATS, json=body)
    except aiohttp.ClientError:
        return None


def reason(answer: Answer | None) -> str | None:
    return None if answer is None else answer.headers.get("x-kvmesh-reason")


@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
async def test_a_client_that_repeats_it_ends_one_pod(tmp_path: Path, stream: bool) -> None:
    pods = [MortalPod() for _ in range(4)]
    async with mesh_of(tmp_path, pods) as mesh:
        await eventually(lambda: ask(mesh, "hello"), lambda answer: answer is not None and answer.status == 200)
        first = await ask(mesh, "killer", stream=stream)
        assert first is None or first.status == 503
        if stream:  # headers have come, so the client's retry is not held back: wait for the picker to see the death
            await eventually(mesh.state, lambda state: any(each["problem"] for each in state["endpoints"]))
        for _ in range(10):
            again = await ask(mesh, "killer", stream=stream)
            assert again is not None
            assert (again.status, reason(again)) == (503, "ended-a-pod")
            assert int(again.headers["retry-after"]) in range(1, 61)
            other = await ask(mesh, "hello")
            assert other is not None
            assert other.status == 200
            await asyncio.sleep(0.1)
        assert sum(pod.killers for pod in pods) == 1


async def insist(mesh: Stack, content: str) -> Answer | None:
    """Repeat a chat, as clients do, until it is served or refused for long."""
    for _ in range(30):
        answer = await ask(mesh, content)
        if answer is not None and (answer.status == 200 or int(answer.headers.get("retry-after", 0)) > 10):
            break
        await asyncio.sleep(0.2)
    return answer


async def test_other_requests_of_the_dead_pod_are_served_when_they_are_repeated(tmp_path: Path) -> None:
    pods = [MortalPod() for _ in range(5)]
    async with mesh_of(tmp_path, pods) as mesh:
        await eventually(lambda: ask(mesh, "hello"), lambda answer: answer is not None and answer.status == 200)
        innocents = [asyncio.create_task(insist(mesh, f"slow {number}")) for number in range(20)]
        await asyncio.sleep(SLOW_SECONDS / 4)
        first = await ask(mesh, "killer")
        assert first is None or first.status == 503
        served = await asyncio.gather(*innocents)
        assert [answer is not None and answer.status for answer in served] == [200] * 20
        killer = await insist(mesh, "killer")
        assert reason(killer) == "ended-a-pod"
        assert sum(pod.killers for pod in pods) <= 2


@pytest.mark.parametrize("status", [429, 503])
async def test_a_request_that_full_pods_have_refused_may_be_repeated_at_once(tmp_path: Path, status: int) -> None:
    pods = [MortalPod() for _ in range(3)]
    async with mesh_of(tmp_path, pods) as mesh:
        await eventually(lambda: ask(mesh, "hello"), lambda answer: answer is not None and answer.status == 200)
        for pod in pods[1:]:
            pod.refusal = status
        answers = [await ask(mesh, "again") for _ in range(8)]
        assert {reason(answer) for answer in answers} == {None}
        assert [answer.status for answer in answers if answer is not None][-1] == 200

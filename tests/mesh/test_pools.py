"""Two pools of one model behind one gateway and one picker: nothing leaks, and changes apply while requests run."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.e2e.pool_documents import inference_policy
from tests.e2e.stack import eventually
from tests.mesh.pools_mesh import CHAT, CODE, IPS, PoolsMesh, pool_documents, pools_mesh

APPLIES_WITHIN_SECONDS = 5.0  # measured: below 1; a busy machine is no failure of it
STREAM_TOKENS = 300  # of 20 ms each

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mesh(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PoolsMesh]:
    async with pools_mesh(tmp_path_factory.mktemp("pools"), secrets=secrets) as running:
        yield running


def story(name: str) -> str:
    """Return a prompt that nobody else sends."""
    return " ".join(f"{name} word{i} of a story about the sea" for i in range(40))


async def test_each_host_is_served_by_its_own_pool_alone(mesh: PoolsMesh) -> None:
    for host, pool in (("chat.example.com", CHAT), ("code.example.com", CODE)):
        answers = [await mesh.complete(host, story(f"{host} {i}")) for i in range(8)]

        assert {answer.status for answer in answers} == {200}
        assert {answer.upstream for answer in answers} == mesh.pods(pool)


async def test_a_prompt_is_found_in_the_pool_that_has_seen_it_and_in_no_other(mesh: PoolsMesh) -> None:
    prompt = story("only chat knows")
    holder = (await mesh.complete("chat.example.com", prompt)).upstream
    await mesh.indexed(CHAT, prompt)

    again = [await mesh.complete("chat.example.com", prompt) for _ in range(3)]
    elsewhere = await mesh.complete("code.example.com", prompt)

    assert {answer.upstream for answer in again} == {holder}
    assert all(answer.cached_tokens > 0 for answer in again)
    assert (elsewhere.upstream in mesh.pods(CODE), elsewhere.cached_tokens) == (True, 0)


async def test_a_weighted_route_finds_a_prompt_in_both_pools(mesh: PoolsMesh) -> None:
    prompt = story("both know")
    holders = {(await mesh.complete(host, prompt)).upstream for host in ("chat.example.com", "code.example.com")}
    await mesh.indexed(CHAT, prompt)
    await mesh.indexed(CODE, prompt)

    answers = [await mesh.complete("both.example.com", prompt) for _ in range(30)]

    assert {answer.upstream for answer in answers} == holders
    assert all(answer.cached_tokens > 0 for answer in answers)


async def test_a_policy_applies_to_its_pool_at_once_and_no_stream_notices(mesh: PoolsMesh) -> None:
    rule = {"model": "fast", "targets": [{"model": "tiny"}]}
    target = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llama"}
    async with mesh.stream("chat.example.com", story("streamed"), max_tokens=STREAM_TOKENS) as stream:
        assert (await mesh.complete("chat.example.com", "hello", model="fast")).status == 404

        mesh.write("own", inference_policy("own", "chat", targetRefs=[target], models={"rules": [rule]}))
        written = time.monotonic()
        await eventually(
            lambda: mesh.complete("chat.example.com", "hello", model="fast"), lambda answer: answer.status == 200
        )
        assert time.monotonic() - written < APPLIES_WITHIN_SECONDS
        assert (await mesh.complete("code.example.com", "hello", model="fast")).status == 404

        # a bad document changes nothing: what was good stays
        mesh.write("own", inference_policy("own", "chat", targetRefs=[target], models={"rulez": [rule]}))
        mesh.write("other", inference_policy("other", "code", targetRefs=[target], models={"rules": [rule]}))
        await eventually(
            lambda: mesh.complete("code.example.com", "hello", model="fast"), lambda answer: answer.status == 200
        )
        assert (await mesh.complete("chat.example.com", "hello", model="fast")).status == 200

        assert await tokens_of(stream) == STREAM_TOKENS
    (mesh.documents / "own.yaml").unlink()
    (mesh.documents / "other.yaml").unlink()
    await eventually(
        lambda: mesh.complete("chat.example.com", "hello", model="fast"), lambda answer: answer.status == 404
    )


async def test_a_pod_that_leaves_gets_nothing_new_and_finishes_what_it_has(mesh: PoolsMesh) -> None:
    async with mesh.stream("code.example.com", story("leaving"), max_tokens=STREAM_TOKENS) as stream:
        leaving = stream.headers["x-kvmesh-upstream"]
        stays = next(ip for ip in IPS[CODE] if not leaving.startswith(f"{ip}:"))

        mesh.write("pools", *pool_documents(mesh.port, {**IPS, CODE: [stays]}))

        async def four() -> set[str]:
            prompts = [story(f"after {leaving} {time.monotonic()} {i}") for i in range(4)]
            return {(await mesh.complete("code.example.com", prompt)).upstream for prompt in prompts}

        await eventually(four, lambda served: served == {f"{stays}:{mesh.port}"})
        assert await four() == {f"{stays}:{mesh.port}"}
        assert await tokens_of(stream) == STREAM_TOKENS
    mesh.write("pools", *pool_documents(mesh.port))
    await eventually(four, lambda served: served == mesh.pods(CODE))


async def test_requests_for_a_pool_that_is_gone_are_refused_and_the_other_pool_goes_on(mesh: PoolsMesh) -> None:
    mesh.write("pools", *pool_documents(mesh.port, {CHAT: IPS[CHAT]}))

    await eventually(
        lambda: mesh.complete("code.example.com", "hello"),
        lambda answer: (answer.status, answer.headers.get("x-kvmesh-reason")) == (503, "unknown-pool"),
    )
    assert (await mesh.complete("chat.example.com", "hello")).status == 200

    mesh.write("pools", *pool_documents(mesh.port))
    await eventually(lambda: mesh.complete("code.example.com", "hello"), lambda answer: answer.status == 200)


async def tokens_of(stream: aiohttp.ClientResponse) -> int:
    """Read the stream to its end; return how many tokens it says to have had."""
    async with asyncio.timeout(60):
        body = (await stream.read()).decode()
    events: list[Any] = [line for line in body.split("\n\n") if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]", "the stream was cut"
    return int(json.loads(events[-2].removeprefix("data: "))["usage"]["completion_tokens"])

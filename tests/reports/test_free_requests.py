"""Requests that cost no GPU are answered at once, use no quota and wake no pod."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.overload_stack import TENANT, OverloadStack, overload_stack
from tests.e2e.stack import eventually, free_ports, running_stack, simulated_pods
from tests.integration.kv_redis import RedisServer
from tests.integration.overload_pods import MODEL

AT_ONCE_SECONDS = 5.0  # a class may wait for QUEUE_SECONDS
QUEUE_SECONDS = 30.0
REQUESTS = [
    *(("GET", "/health"), ("GET", "/v1/models"), ("OPTIONS", "/v1/chat/completions"), ("HEAD", "/health")),
    *(("POST", "/tokenize"), ("GET", "/version"), ("GET", "/metrics")),
]
POLICY: dict[str, Any] = {
    "priorities": {"classes": [{"name": "standard", "queueSeconds": QUEUE_SECONDS, "ttftSeconds": 1000}]},
    "quotas": [{"tenant": "acme", "requestsPerMinute": 3, "burstSeconds": 60}],
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def mesh(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OverloadStack]:
    redis = RedisServer(tmp_path_factory.mktemp("redis"))
    redis.start()
    try:
        folder, flags = tmp_path_factory.mktemp("stack"), ("--redis", redis.url)
        async with overload_stack(folder, *flags, policy=POLICY, index_timeout_ms=1000) as started:
            yield started
    finally:
        redis.kill()


@pytest.mark.parametrize(("method", "path"), REQUESTS)
async def test_with_all_pods_full_they_do_not_wait(mesh: OverloadStack, method: str, path: str) -> None:
    await mesh.fill()
    waiting = asyncio.create_task(
        mesh.stack.send("POST", "/v1/completions", json={"model": MODEL, "prompt": "a", "max_tokens": 1})
    )
    await mesh.waiting({"standard": 1})
    body = {"json": {"model": MODEL, "prompt": "a"}} if method == "POST" else {}
    async with asyncio.timeout(AT_ONCE_SECONDS):
        answer = await mesh.stack.send(method, path, **body)
    assert answer.status < 500, answer
    assert not waiting.done()
    mesh.free()
    assert (await waiting).status == 200


async def test_they_use_no_quota(mesh: OverloadStack) -> None:
    mesh.free()
    headers = {TENANT: "acme"}
    for _ in range(5):
        assert (await mesh.stack.send("GET", "/v1/models", headers=headers)).status == 200
        assert (await mesh.stack.send("GET", "/health", headers=headers)).status == 200
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    statuses = [(await mesh.stack.send("POST", "/v1/completions", json=body, headers=headers)).status for _ in range(4)]
    assert statuses == [200, 200, 200, 429]


async def test_at_zero_they_wake_no_pod_and_the_models_are_listed_all_the_same(tmp_path: Any) -> None:
    (port,) = free_ports(1)
    settings = '{"policy": {"autoscale": {"both": {"minReplicas": 0, "maxReplicas": 4}}}, "scrape_interval_ms": 50}'
    async with running_stack(tmp_path, "--model", "tiny", endpoints=[f"127.0.0.1:{port}"], settings=settings) as stack:

        async def wanted() -> int:
            return max((each["wanted"] for each in (await stack.state())["scale"]), default=0)

        async with asyncio.timeout(AT_ONCE_SECONDS):
            assert (await stack.send("GET", "/health")).status == 503
            models = await stack.send("GET", "/v1/models")
        assert (models.status, [card["id"] for card in models.json["data"]]) == (200, ["tiny"])
        assert await wanted() == 0
        body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
        waiting = asyncio.create_task(stack.send("POST", "/v1/completions", json=body))
        await eventually(wanted, lambda count: count == 1)
        waiting.cancel()


async def test_the_gateways_health_is_that_of_any_pod_if_the_policy_says_so(tmp_path: Any) -> None:
    settings = '{"policy": {"load": {"health": {"answered": true}}}, "scrape_interval_ms": 50}'
    async with (
        simulated_pods(1) as pods,
        running_stack(tmp_path, "--model", "tiny", endpoints=list(pods), settings=settings) as stack,
    ):
        answer = await stack.send("GET", "/health?verbose=1")
        assert (answer.status, answer.body, answer.headers.get("x-kvmesh-upstream")) == (200, b"", None)
        for process in pods.values():
            process.kill()
        gone = await eventually(lambda: stack.send("GET", "/health"), lambda answer: answer.status == 503)
        assert gone.headers.get("x-kvmesh-upstream") is None
        assert (await stack.state())["decisions"] == []

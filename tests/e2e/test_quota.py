"""Quotas through a real Envoy with the real `openai` client and a real Redis that goes away and comes back.

One mesh serves all tests of this file; each has a tenant of its own.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

from tests.e2e.overload_stack import OverloadStack, overload_stack, say
from tests.e2e.stack import eventually
from tests.integration.kv_redis import RedisServer

POLICY: dict[str, Any] = {
    "quotas": [
        # two at once, and then one in ten seconds
        {"tenant": "acme", "requestsPerMinute": 6, "burstSeconds": 20},
        {"tenant": "outage", "requestsPerMinute": 6, "burstSeconds": 20},
        {"tenant": "hasty", "requestsPerMinute": 60, "burstSeconds": 1},
        {"tenant": "pair", "concurrentRequests": 2},
        {"tenant": "writer", "generatedTokensPerMinute": 60, "burstSeconds": 60},
        {"tenant": "reader", "promptTokensPerMinute": 60, "burstSeconds": 30},
    ],
}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis_of_all(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory, redis_of_all: RedisServer) -> AsyncIterator[OverloadStack]:
    folder = tmp_path_factory.mktemp("stack")
    # a busy machine must not make an answer of Redis late: then this replica's share would decide
    settings = {"index_timeout_ms": 1000}
    async with overload_stack(folder, "--redis", redis_of_all.url, policy=POLICY, **settings) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def mesh(running: OverloadStack) -> AsyncIterator[OverloadStack]:
    running.free()
    yield running
    running.free()
    await running.nothing_is_left()


async def test_beyond_the_quota_the_client_sees_a_rate_limit_with_our_words_and_openais_headers(
    mesh: OverloadStack,
) -> None:
    client = mesh.client(tenant="acme")
    first = await say(client)
    assert (first.headers["x-ratelimit-limit-requests"], first.headers["x-ratelimit-remaining-requests"]) == ("6", "1")
    await say(client)
    with pytest.raises(openai.RateLimitError, match="rate limit reached: 6 requests a minute; try again in") as caught:
        await say(client)
    error, headers = caught.value, caught.value.response.headers
    assert (error.code, error.type, headers["x-kvmesh-reason"]) == ("rate_limit_exceeded", "requests", "quota-exceeded")
    assert headers["x-ratelimit-remaining-requests"] == "0"
    assert 1 <= int(headers["retry-after"]) <= 10
    assert (await say(mesh.client(tenant="another"))).status_code == 200  # has no quota


async def test_the_clients_own_retry_waits_as_long_as_it_is_told(mesh: OverloadStack) -> None:
    # the bucket gives one a second, and by itself the client would be back after half of that, for the last time
    client = mesh.client(tenant="hasty", max_retries=1)
    answers = await asyncio.gather(say(client), say(client))
    assert sorted(answer.retries_taken for answer in answers) == [0, 1]


async def test_open_requests_are_counted_until_they_end_or_their_client_leaves(mesh: OverloadStack) -> None:
    for pod in mesh.pods:
        pod.hold()
    client = mesh.client(tenant="pair")
    tasks = [asyncio.create_task(say(client)) for _ in range(2)]
    await eventually(mesh.stack.open_bookings, lambda count: count == 2)
    with pytest.raises(openai.RateLimitError, match="2 requests at a time"):
        await say(client)
    tasks[0].cancel()
    await eventually(mesh.stack.open_bookings, lambda count: count == 1)
    for pod in mesh.pods:
        pod.release()
    await eventually(lambda: allowed(client), bool)  # what ends is written behind the answer
    assert (await tasks[1]).status_code == 200


async def test_of_generated_tokens_only_those_count_that_were_generated(mesh: OverloadStack) -> None:
    client = mesh.client(tenant="writer")
    first = await say(client, max_completion_tokens=50)
    assert first.headers["x-ratelimit-remaining-tokens"] == "10"
    # one of fifty was: what was reserved beyond it comes back
    await eventually(lambda: allowed(client, max_completion_tokens=50), bool)


async def test_a_prompt_that_uses_the_tokens_up_makes_the_next_one_wait(mesh: OverloadStack) -> None:
    client = mesh.client(tenant="reader")
    answer = await say(client, "word " * 100)
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
    with pytest.raises(openai.RateLimitError, match="60 prompt tokens a minute") as caught:
        await say(client)
    assert caught.value.type == "tokens"


async def test_without_redis_the_share_of_this_replica_holds_and_redis_decides_again_when_it_is_back(
    mesh: OverloadStack, redis_of_all: RedisServer
) -> None:
    before, client = mesh.client(tenant="acme"), mesh.client(tenant="outage")
    redis_of_all.kill()
    for _ in range(2):
        assert (await say(client)).headers["x-ratelimit-limit-requests"] == "6"
    for emptied in (client, before):  # what is used up stays so: an outage is no second burst
        with pytest.raises(openai.RateLimitError):
            await say(emptied)
    decision = next(each for each in (await mesh.stack.state())["decisions"] if each["status"] == 200)
    assert "quota-local" in decision["degraded"]

    redis_of_all.start()

    async def words() -> Any:
        await say(mesh.client(tenant="pair"))
        return (await mesh.stack.state())["decisions"][0]["degraded"]

    await eventually(words, lambda found: "quota-local" not in found)


async def allowed(client: openai.AsyncOpenAI, **fields: Any) -> bool:
    try:
        await say(client, **fields)
    except openai.RateLimitError:
        return False
    return True

"""A quota of generated tokens holds for every form in which a request can ask for them.

The pods hold what they get, so that nothing is given back meanwhile.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.overload_stack import TENANT, OverloadStack, overload_stack
from tests.e2e.stack import eventually
from tests.integration.kv_redis import RedisServer
from tests.integration.overload_pods import MODEL

BURST = 1_000  # tokens; 16.7 more come each second
COUNT = 40
MORE = 2  # that the bucket's refill may let through while a slow machine sends
FORMS: dict[str, dict[str, Any]] = {
    "choices": {"prompt": "a", "n": 50, "max_tokens": 2},
    "choices written as text": {"prompt": "a", "n": "50.0", "max_tokens": 2},
    "beams": {"prompt": "a", "n": 50, "use_beam_search": True, "max_tokens": 2},
    "the best of many": {"prompt": "a", "best_of": 50, "max_tokens": 2},
    "prompts": {"prompt": ["a"] * 50, "max_tokens": 2},
    "prompts of token ids, two choices each": {"prompt": [[1]] * 25, "n": 2, "max_tokens": 2},
    "a fraction of zero": {"prompt": "a", "max_tokens": 100.0},
    "a text": {"prompt": "a", "max_tokens": "100.0"},
}
POLICY = {
    "quotas": [{"tenant": f"t{i}", "generatedTokensPerMinute": BURST, "burstSeconds": 60} for i in range(len(FORMS))]
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


@pytest.mark.parametrize(("tenant", "form"), list(enumerate(FORMS)), ids=list(FORMS))
async def test_forty_requests_for_a_hundred_tokens_each_get_the_thousand_that_the_quota_has(
    mesh: OverloadStack, tenant: int, form: str
) -> None:
    for pod in mesh.pods:
        pod.free()
        pod.hold()

    async def send() -> int:
        body, headers = {"model": MODEL, **FORMS[form]}, {TENANT: f"t{tenant}"}
        return (await mesh.stack.send("POST", "/v1/completions", json=body, headers=headers)).status

    tasks = [asyncio.create_task(send()) for _ in range(COUNT)]

    async def seen() -> tuple[int, int]:
        return sum(task.done() for task in tasks), await mesh.stack.open_bookings()

    refused, _ = await eventually(seen, lambda counts: sum(counts) == COUNT)
    mesh.free()
    statuses = await asyncio.gather(*tasks)
    assert statuses.count(429) == refused
    assert BURST // 100 <= statuses.count(200) <= BURST // 100 + MORE

"""A source that is cleared by hand while a real indexer follows it: the owner notices and replays it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kv_indexer.inspect.redis_inspect import RedisInspector
from kv_indexer.inspect.verify_index import IndexVerifier
from tests.integration.kv_indexer_processes import at_work, busy_pods, indexer_process
from tests.integration.kv_recount import recount
from tests.integration.kv_redis import RedisServer

DEADLINE_SECONDS = 20.0


async def eventually(condition: Callable[[], Awaitable[Any]], expected: Any) -> None:
    """Wait until the condition's value is the expected one."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    value: Any = None
    while time.monotonic() < deadline:
        value = await condition()
        if value == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still {value!r} instead of {expected!r}")


@pytest.mark.parametrize("pod_is_busy", [False, True])
async def test_a_cleared_source_is_replayed_by_its_owner(
    redis_server: RedisServer, tmp_path: Path, pod_is_busy: bool
) -> None:
    client: Any = redis_server.client()

    async def state(name: str) -> str:
        return (client.hget(f"{{kv2}}stream:{name}", "state") or b"").decode()

    async def held(name: str) -> Any:
        return recount(client).held.get(name)

    async with busy_pods(1) as [pod]:
        await pod.work(200)
        with indexer_process(redis_server, tmp_path, name="one", endpoints=[pod.pod.endpoint]) as indexer:
            await eventually(indexer.is_ready, True)
            await eventually(lambda: state(pod.name), "live")
            inspector = RedisInspector(redis_server.url)
            before = int(client.hget(f"{{kv2}}stream:{pod.name}", "epoch"))
            if pod_is_busy:
                async with at_work([pod]):
                    epoch = await inspector.clear(pod.name)
                    await eventually(lambda: state(pod.name), "live")
            else:
                epoch = await inspector.clear(pod.name)
            await eventually(lambda: state(pod.name), "live")
            await eventually(lambda: held(pod.name), pod.held)
            audit = await IndexVerifier(inspector).verify()
            await inspector.close()

    assert epoch is not None
    assert before < epoch <= int(client.hget(f"{{kv2}}stream:{pod.name}", "epoch"))
    assert audit.counts == {}

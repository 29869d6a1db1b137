"""Two replicas that follow the same documents over one real Redis share what is a pool's; pools stay apart."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import redis

from tests.integration.hermetic_envoy import Refused, Routed
from tests.integration.kv_redis import RedisServer
from tests.integration.pools_picker import Mesh, policy_document, pool_document, running_mesh, send

SESSIONS = [f"session {number}" for number in range(8)]
SESSION_KEYS = "{kv2}picker:session:*"


@asynccontextmanager
async def two_replicas(folder: Path, server: RedisServer, **spec: Any) -> AsyncIterator[tuple[Mesh, Mesh]]:
    """Start both with two pods, which are the pool llm/a and llm/b as well; each has heard of the other."""
    settings: dict[str, Any] = {"redis_url": server.url, "shares_load": True, "index_timeout_seconds": 5.0}
    async with running_mesh(folder, **settings) as one:
        pools = [pool_document(name, port=one.port) for name in ("a", "b")]
        for pool in pools:
            pool["spec"]["selector"]["matchLabels"] = {"pool": "both"}
        one.desk.put(*pools, policy_document("p", **spec))
        pods = [await one.pod("both") for _ in range(2)]
        async with running_mesh(folder, *one.desk.documents, **settings) as other:
            for mesh in (one, other):
                for name in ("llm/a", "llm/b"):
                    await mesh.serves(name, *[pod.address for pod in pods])
                await mesh.eventually("/state?pool=llm/a", lambda state: state["replicas"]["others"] == 1)
                await mesh.eventually("/pools", lambda lines: all(line["policies"] == ["llm/p"] for line in lines))
            yield one, other


async def hold(mesh: Mesh, stack: AsyncExitStack, *, pool: str) -> Routed | Refused:
    """Open a request that ends with the stack."""
    exchange = await stack.enter_async_context(mesh.exchange(pool=pool))
    found: Routed | Refused = await send(exchange)
    return found


async def test_what_one_replica_has_booked_in_a_pool_the_other_one_counts_with(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with two_replicas(tmp_path, redis_server, scoring={"strategy": "least-request"}) as (one, other):
        async with AsyncExitStack() as requests:
            held = await hold(one, requests, pool="llm/a")
            assert isinstance(held, Routed)
            busy = held.endpoints[0]
            await other.eventually("/state?pool=llm/a", lambda state: state["replicas"]["others_bookings"] == {busy: 1})

            assert busy not in [await other.pick(pool="llm/a") for _ in range(6)]
            # bookings go by endpoint: the pod is no freer for its other pool
            assert busy not in [await other.pick(pool="llm/b") for _ in range(6)]

        await other.eventually("/state?pool=llm/a", lambda state: not state["replicas"]["others_bookings"])


async def test_replicas_share_a_pools_sessions_and_no_other_pool_has_them(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    client: Any = redis.Redis.from_url(redis_server.url)
    async with two_replicas(tmp_path, redis_server, scoring={"weights": {"session": 5}}) as (one, other):
        placed = [await one.pick(pool="llm/a", headers={"x-session-id": session}) for session in SESSIONS]
        await other.eventually("/pools", lambda _: len(client.keys(SESSION_KEYS)) == len(SESSIONS))

        assert [await other.pick(pool="llm/a", headers={"x-session-id": session}) for session in SESSIONS] == placed

        for session in SESSIONS:
            await other.pick(pool="llm/b", headers={"x-session-id": session})
        await other.eventually("/pools", lambda _: len(client.keys(SESSION_KEYS)) == 2 * len(SESSIONS))


async def test_replicas_share_a_pools_quota_and_another_pool_has_its_own(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    quotas = [{"tenant": "*", "concurrentRequests": 1}]
    async with two_replicas(tmp_path, redis_server, quotas=quotas) as (one, other), AsyncExitStack() as requests:
        assert isinstance(await hold(one, requests, pool="llm/a"), Routed)

        refused = await other.asked(pool="llm/a")

        assert isinstance(refused, Refused)
        assert (refused.status, refused.reason) == (429, "quota-exceeded")
        assert isinstance(await hold(other, requests, pool="llm/b"), Routed)
        refused = await one.asked(pool="llm/b")
        assert isinstance(refused, Refused)
        assert refused.reason == "quota-exceeded"

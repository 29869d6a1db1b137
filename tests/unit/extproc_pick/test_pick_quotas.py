"""A request that reaches no pod uses nothing of its tenant's quota, whatever ends it."""

import asyncio

import pytest

from extproc.errors import NoReadyEndpointError, QuotaExceededError
from extproc.pick import pick
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.policy.priority import Quota
from tests.unit.extproc_pick.pick_fakes import FakeEndpoints, ShownPool, chat, facts, pod
from tests.unit.extproc_pick.test_shadow import full, limited

# of each, one request is admitted at a time
QUOTAS = [
    pytest.param(Quota(requests_per_minute=60, burst_seconds=1), id="rate"),
    pytest.param(Quota(concurrent_requests=1), id="concurrent"),
]


def become(pool: ShownPool, status: EndpointStatus) -> None:
    assert isinstance(pool.view.endpoints, FakeEndpoints)
    pool.view.endpoints.statuses = [status]


async def admits_one_request(pool: ShownPool) -> bool:
    become(pool, pod("a"))
    exchange = await pick(facts(), chat(), pool)
    with pytest.raises(QuotaExceededError):
        await pick(facts(), chat(), pool)
    exchange.finish()
    return True


@pytest.mark.parametrize("quota", QUOTAS)
async def test_a_request_that_no_pod_may_serve_uses_no_quota(quota: Quota) -> None:
    pool = limited(quota, shadow=False)
    become(pool, pod("a", reachability=Reachability.UNREACHABLE))
    for _ in range(2):
        with pytest.raises(NoReadyEndpointError):
            await pick(facts(), chat(), pool)
    assert await admits_one_request(pool)


@pytest.mark.parametrize("quota", QUOTAS)
async def test_a_client_that_leaves_the_queue_uses_no_quota(quota: Quota) -> None:
    pool = limited(quota, shadow=False)
    become(pool, full("a"))
    for _ in range(2):
        task = asyncio.create_task(pick(facts(), chat(), pool))
        while not task.done() and not sum(pool.admission.waiting.values()):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await admits_one_request(pool)

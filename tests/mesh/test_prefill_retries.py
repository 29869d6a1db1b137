"""Transfer parameters are worth one fetch: no retry of a route brings them to a second pod that could use them.

Real istiod and Envoys like istio-proxy's, the real picker, one simulated prefill pod, and decode pods that are full.
"""

import json
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from operate.install.plan import BodyMode, Mode, RouteSettings
from tests.e2e.stack import Answer, Stack, eventually, running_stack, simulated_pods
from tests.e2e.test_disaggregation import HANDS_OVER
from tests.integration.overload_pods import HeldPod
from tests.kube_api.certificates import Authority
from tests.mesh.install_checks import story
from tests.mesh.installations import POOL, Installation
from tests.mesh.istio_envoys import ENVOYS
from tests.mesh.real_way import MeshCase, RealWay, real_way

pytestmark = pytest.mark.asyncio(loop_scope="session")
GATEWAYS = Installation(minor=31, mode=Mode.GATEWAY)
BUFFERED = Installation(minor=31, mode=Mode.GATEWAY, body_mode=BodyMode.BUFFERED)
SIDECARS = Installation(minor=31, mode=Mode.SIDECAR)
RETRIES_503 = {"defaultHttpRetryPolicy": {"attempts": 2, "retryOn": "503,reset,5xx"}}  # of the mesh, in all routes


@dataclass(frozen=True, kw_only=True)
class SplitPool:
    """A pool whose prompts are computed by one pod and whose answers others give, or do not."""

    stack: Stack
    decode: tuple[HeldPod, ...]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SplitPool]:
    folder = tmp_path_factory.mktemp("split")
    (folder / "policy.yaml").write_text(
        "{disaggregation: {enabled: true, rule: always}, models: {onlyListed: true}}\n", encoding="utf-8"
    )
    async with AsyncExitStack() as exits:
        (prefill,) = await exits.enter_async_context(simulated_pods(1, *HANDS_OVER, own_hosts=True))
        decode = HeldPod(), HeldPod(), HeldPod()
        for number, pod in enumerate(decode, start=3):
            await pod.start(host=f"127.0.0.{number}")
            exits.push_async_callback(pod.stop)
            pod.release()
        settings = {"roles": f"{prefill}=prefill", "policy": str(folder / "policy.yaml")}
        endpoints = [prefill, *(pod.address for pod in decode)]
        stack = await exits.enter_async_context(
            running_stack(folder, endpoints=endpoints, settings=json.dumps(settings))
        )
        await eventually(stack.state, lambda state: all(pod["state"] == "ready" for pod in state["endpoints"]))
        yield SplitPool(stack=stack, decode=decode)


@pytest.fixture
def run(pool: SplitPool, secrets: Path, authority: Authority, tmp_path: Path) -> Any:
    """Start a case before the pool."""
    return lambda case: real_way(case, pool.stack, tmp_path, secrets=secrets, authority=authority)


async def refused(through: RealWay, pool: SplitPool, **fields: Any) -> list[Any]:
    """Send a request while every decode pod is full; return the parameters in each that pods have got.

    Envoy's last tries may go to any pod of the cluster: what the prefill pod has answered is one more, without any.
    """
    for pod in pool.decode:
        pod.refuses = True
    answer, got = await asked(through, pool, **fields)
    for pod in pool.decode:
        pod.refuses = False
    assert answer.status in (200, 503)
    return [*got, None] if answer.status == 200 else got


async def asked(through: RealWay, pool: SplitPool, **fields: Any) -> tuple[Answer, list[Any]]:
    """Send a request with a prompt of its own; return the answer, and the parameters that decode pods have got."""
    for pod in pool.decode:
        pod.received.clear()
    answer = await through.way.complete(story(str(uuid.uuid4())), **fields)
    return answer, [each.body.get("kv_transfer_params") for pod in pool.decode for each in pod.received]


@pytest.mark.parametrize("envoy", ENVOYS)
async def test_a_route_that_retries_503_does_not_repeat_a_request_with_parameters(
    run: Any, pool: SplitPool, envoy: str
) -> None:
    async with run(MeshCase(installation=GATEWAYS, envoy=envoy, mesh_config=RETRIES_503)) as through:
        assert await through.proxy.refused() == {}
        (parameters,) = await refused(through, pool)
        assert parameters["do_remote_prefill"] is True
        # what has no parameters is retried as the route says
        assert len(await refused(through, pool, echo=True)) > 1
        # a client that comes again is picked for again, and its parameters are new
        answer, (again,) = await asked(through, pool)
        assert answer.status == 200
        assert again["remote_request_id"] != parameters["remote_request_id"]


@pytest.mark.parametrize("installation", [BUFFERED, SIDECARS], ids=str)
async def test_so_it_is_in_every_mode(run: Any, pool: SplitPool, installation: Installation) -> None:
    async with run(MeshCase(installation=installation, mesh_config=RETRIES_503)) as through:
        assert len(await refused(through, pool)) == 1
        assert len(await refused(through, pool, echo=True)) > 1


async def test_replaced_retries_repeat_no_request_that_a_pod_has_begun(run: Any, pool: SplitPool) -> None:
    case = MeshCase(installation=GATEWAYS, mesh_config=RETRIES_503, route_settings=RouteSettings.REPLACE)
    async with run(case) as through:
        assert len(await refused(through, pool)) == 1
        assert await refused(through, pool, echo=True) == [None]


async def test_istio_s_own_retries_repeat_no_request_that_a_pod_has_answered(run: Any, pool: SplitPool) -> None:
    async with run(MeshCase(installation=GATEWAYS)) as through:
        retries = (await through.proxy.routes())[f"{POOL.namespace}.llm-route.0"]["route"]["retry_policy"]
        assert retries["retry_on"].endswith("retriable-status-codes")
        assert "retriable_status_codes" not in retries
        assert await refused(through, pool, echo=True) == [None]

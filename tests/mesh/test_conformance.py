"""The inference extension's conformance tests that need no cluster, through our installation, picker and a real Envoy.

The test of each case has the name of the original in its docstring. The suite itself runs in `tests/mesh_cluster`, on
native pools; here it is the installation with filters of ours that is tried. Not here: what only the status says that a
gateway's controller writes, and several ports of one pod: of one address istiod knows one endpoint of a Service.
"""

import asyncio
import itertools
import math
import operator
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from operate.install.plan import FailureMode
from tests.e2e.stack import eventually
from tests.mesh.conformance_mesh import Answer, Cluster, conformance_cluster

PRIMARY, SECONDARY = "primary-inference-model-server", "secondary-inference-model-server"
REQUESTS, CONCURRENCY = 100, 10

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(secrets: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """All pools, both gateways."""
    folder, mode = tmp_path_factory.mktemp("cluster"), FailureMode.FAIL_CLOSE
    async with conformance_cluster(folder, secrets=secrets, failure_mode=mode) as running:
        yield running


async def until_served(cluster: Cluster, host: str, path: str, address: str) -> None:
    """Send pinned requests until the picker knows the pod, as the original does."""
    await eventually(lambda: cluster.send(host, path, pin=[address]), lambda answer: answer.status == 200)


async def test_every_answer_comes_from_a_listed_pod(cluster: Cluster) -> None:
    """GatewayFollowingEPPRouting."""
    host, path = "primary.example.com", "/primary-gateway-test"
    pods = cluster.pods[PRIMARY]
    for pod in pods:
        await until_served(cluster, host, path, cluster.address(pod))
    for count in (1, 2, 3):
        for listed in itertools.combinations(pods, count):
            pin = [cluster.address(pod) for pod in listed]

            answers = await cluster.send_many(REQUESTS, concurrency=CONCURRENCY, host=host, path=path, pin=pin)

            assert {answer.status for answer in answers} == {200}
            assert {answer.pod for answer in answers} == {pod.name for pod in listed}


async def test_who_served_is_reported_to_the_client_and_to_the_picker(cluster: Cluster) -> None:
    """GatewayDestinationEndpointServed."""
    host, path = "primary.example.com", "/destination-endpoint-served-test"
    for pod in cluster.pods[PRIMARY]:
        address = cluster.address(pod)
        await until_served(cluster, host, path, address)
        # what was just answered is counted when its exchange has ended
        await eventually(partial(metric, cluster, "kvmesh_open_bookings", address), partial(operator.eq, 0.0))
        before = await served_by(cluster, address)

        answer = await cluster.send(host, path, pin=[address])

        assert (answer.status, answer.pod, answer.served) == (200, pod.name, address)
        await eventually(partial(served_by, cluster, address), partial(operator.eq, before + 1))


async def served_by(cluster: Cluster, address: str) -> float:
    """Return how many answers the picker knows to be this pod's."""
    return await metric(cluster, "kvmesh_pod_responses_total", address)


async def metric(cluster: Cluster, name: str, address: str) -> float:
    """Return the sum of a metric of the picker over all its series of this pod."""
    async with cluster.http.get(f"{cluster.admin}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith(f"{name}{{") and f'endpoint="{address}"' in line
    )


async def test_weights_split_the_requests_between_two_pools(cluster: Cluster) -> None:
    """GatewayWeightedAcrossTwoInferencePools."""
    host, path = "weighted.example.com", "/weighted-two-pools-test"
    pin = [cluster.address(pod) for app in (PRIMARY, SECONDARY) for pod in cluster.pods[app]]
    total, share = 200, 0.7

    answers = await cluster.send_many(total, concurrency=5, host=host, path=path, pin=pin)

    assert {answer.status for answer in answers} == {200}
    primary = sum(count for answer, count in answers.items() if answer.pod.startswith(PRIMARY))
    assert abs(primary / total - share) <= max(0.10, 4.5 * math.sqrt(share * (1 - share) / total))
    assert {answer.pod.rpartition("-")[0] for answer in answers} == {PRIMARY, SECONDARY}


async def test_each_of_two_weighted_pools_is_asked_for_the_requests_that_it_is_dealt(cluster: Cluster) -> None:
    """More than the original: the split alone also holds where the pick of one pool is forgotten."""
    chosen = (cluster.pods[PRIMARY][0], cluster.pods[SECONDARY][2])

    answers = await cluster.send_many(
        REQUESTS,
        concurrency=CONCURRENCY,
        host="weighted.example.com",
        path="/weighted-two-pools-test",
        pin=[cluster.address(pod) for pod in chosen],
    )

    assert {(answer.status, answer.pod) for answer in answers} == {(200, pod.name) for pod in chosen}


async def test_each_gateway_leads_to_its_own_pool(cluster: Cluster) -> None:
    """HTTPRouteMultipleGatewaysDifferentPools."""
    ways = (
        ("conformance-primary", "primary.example.com", "/test-primary-gateway", PRIMARY),
        ("conformance-secondary", "secondary.example.com", "/test-secondary-gateway", SECONDARY),
    )
    for gateway, host, path, app in ways:
        answer = await cluster.send(host, path, gateway=gateway, method="GET")

        assert (answer.status, answer.pod.rpartition("-")[0]) == (200, app)


async def test_each_rule_of_a_route_leads_to_its_own_pool(cluster: Cluster) -> None:
    """HTTPRouteMultipleRulesDifferentPools."""
    for path, app in (("/primary", PRIMARY), ("/secondary", SECONDARY)):
        answers = await cluster.send_many(10, concurrency=5, host="primary.example.com", path=path, method="GET")

        assert {(answer.status, answer.pod.rpartition("-")[0]) for answer in answers} == {(200, app)}


@pytest.mark.parametrize(
    ("kind", "port", "protocol"), [("h2c", 3001, "HTTP/2"), ("http", 3000, "HTTP/1.1")], ids=["h2c", "http"]
)
async def test_pods_are_spoken_to_in_the_protocol_of_their_pool(
    cluster: Cluster, kind: str, port: int, protocol: str
) -> None:
    """InferencePoolAppProtocol."""
    host, path = f"appprotocol-{kind}.example.com", f"/inferencepool-app-protocol-{kind}"
    for pod in cluster.pods[PRIMARY]:
        address = cluster.address(pod, port)
        await until_served(cluster, host, path, address)

        answer = await cluster.send(host, path, pin=[address])

        assert answer == Answer(status=200, pod=pod.name, port="3000", protocol=protocol, served=address)


async def test_a_host_without_a_route_is_answered_404(cluster: Cluster) -> None:
    """The traffic half of InferencePoolResolvedRefsCondition: a route that is gone."""
    assert (await cluster.send("gone.example.com")).status == 404


async def test_without_its_picker_a_pool_that_fails_open_is_served_by_any_of_its_pods(
    secrets: Path, tmp_path: Path
) -> None:
    """EppUnAvailableFailOpen."""
    host, path, gateway = "secondary.example.com", "/failopen-pool-test", "conformance-secondary"
    async with conformance_cluster(tmp_path, secrets=secrets, failure_mode=FailureMode.FAIL_OPEN) as cluster:
        first = cluster.pods[SECONDARY][0]
        address = cluster.address(first)
        await eventually(
            lambda: cluster.send(host, path, pin=[address], gateway=gateway), lambda answer: answer.status == 200
        )
        pinned = await cluster.send(host, path, pin=[address], gateway=gateway)
        assert (pinned.status, pinned.pod) == (200, first.name)

        await cluster.stop_picker()

        for _ in range(20):
            answer = await cluster.send(host, path, gateway=gateway)
            assert (answer.status, answer.pod.rpartition("-")[0]) == (200, SECONDARY)


async def test_a_pool_whose_picker_does_not_exist_is_answered_5xx(secrets: Path, tmp_path: Path) -> None:
    """The traffic half of InferencePoolInvalidEPPService."""
    async with conformance_cluster(
        tmp_path, secrets=secrets, failure_mode=FailureMode.FAIL_CLOSE, has_picker=False
    ) as cluster:
        answers = await asyncio.gather(*(cluster.send("primary.example.com", "/any") for _ in range(5)))

        assert {answer.status for answer in answers} == {503}

"""What people have configured of a pool's host and routes stays, and the picks are obeyed beside it."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from operate.install.plan import Mode, RouteSettings
from tests.e2e.stack import Stack
from tests.kube_api.certificates import Authority
from tests.mesh import install_checks
from tests.mesh.install_checks import story
from tests.mesh.installations import PICKER, PODS, POOL, Installation
from tests.mesh.mesh_objects import Object, http_route, kubernetes_object, rule
from tests.mesh.real_way import GATEWAY, MeshCase, RealWay, real_way

pytestmark = pytest.mark.asyncio(loop_scope="session")
GATEWAYS = Installation(minor=31, mode=Mode.GATEWAY)
OLDER, YOUNGER = "2020-01-01T00:00:00Z", "2030-01-01T00:00:00Z"
THEIRS = "7s"  # a connect timeout that only their rule has
LONG_ANSWER = 600  # tokens
NAMESPACES = (POOL.namespace, "istio-ingress", "istio-system")


@pytest.fixture
def run(stack: Stack, secrets: Path, authority: Authority, tmp_path: Path) -> Any:
    """Start a case."""

    @asynccontextmanager
    async def started(case: MeshCase) -> AsyncIterator[RealWay]:
        async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as way:
            yield way

    return started


def their_rule(namespace: str, *, created: str, host: str = PODS.host, **policy: Any) -> Object:
    """Return a DestinationRule of somebody else, with a subset."""
    rule = kubernetes_object(
        "networking.istio.io/v1",
        "DestinationRule",
        namespace,
        "theirs",
        spec={
            "host": host,
            "trafficPolicy": {"connectionPool": {"tcp": {"connectTimeout": THEIRS}}, **policy},
            "subsets": [{"name": "all", "labels": {"app": POOL.name}}],
        },
    )
    rule["metadata"]["creationTimestamp"] = created
    return rule


@pytest.mark.parametrize("created", [OLDER, YOUNGER], ids=["older", "younger"])
@pytest.mark.parametrize("namespace", NAMESPACES)
async def test_a_rule_of_the_pools_host_is_kept_and_picks_are_obeyed(run: Any, namespace: str, created: str) -> None:
    case = MeshCase(installation=GATEWAYS, has_rule=True, beside=[their_rule(namespace, created=created)])
    async with run(case) as through:
        cluster = (await through.proxy.clusters())[PODS.cluster]
        assert cluster["connect_timeout"] == THEIRS
        assert await through.proxy.refused() == {}
        await install_checks.a_repeated_prompt_lands_on_the_pod_that_holds_it(through.way)
        await install_checks.a_client_that_names_a_pod_is_not_heard(through.way)


async def test_a_rule_for_many_hosts_is_kept_and_picks_are_obeyed(run: Any) -> None:
    theirs = their_rule("istio-ingress", created=OLDER, host=f"*.{POOL.namespace}.svc.cluster.local")
    async with run(MeshCase(installation=GATEWAYS, has_rule=True, beside=[theirs])) as through:
        assert (await through.proxy.clusters())[PODS.cluster]["connect_timeout"] == THEIRS
        await install_checks.a_repeated_prompt_lands_on_the_pod_that_holds_it(through.way)


@pytest.mark.parametrize(
    "balancer",
    [{"consistentHash": {"httpHeaderName": "x-user"}}, {"simple": "LEAST_REQUEST", "warmup": {"duration": "60s"}}],
    ids=["hashing", "warm-up"],
)
async def test_picks_take_the_place_of_hashing_and_warm_up(run: Any, balancer: Mapping[str, Any]) -> None:
    theirs = their_rule(POOL.namespace, created=OLDER, loadBalancer=balancer)
    async with run(MeshCase(installation=GATEWAYS, has_rule=True, beside=[theirs])) as through:
        assert await through.proxy.refused() == {}
        await install_checks.a_repeated_prompt_lands_on_the_pod_that_holds_it(through.way)
        await install_checks.unrelated_prompts_are_spread(through.way)


async def test_our_rule_protects_the_pool_from_locality_weights_of_the_whole_mesh(run: Any) -> None:
    everywhere = {"localityLbSetting": {"distribute": [{"from": "*", "to": {"region/zone/*": 100}}]}}
    async with run(MeshCase(installation=GATEWAYS, mesh_config=everywhere)) as through:
        assert await through.proxy.refused() == {}
        await install_checks.a_repeated_prompt_lands_on_the_pod_that_holds_it(through.way)


def timeouts(route: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what a route says of time and tries: timeout, limit of one try, when to retry, and how often."""
    action = route["route"]
    retries = action["retry_policy"]
    return action["timeout"], retries.get("per_try_timeout"), retries.get("retry_on"), retries.get("num_retries")


@pytest.mark.parametrize("settings", list(RouteSettings))
async def test_a_route_s_timeout_and_retries_are_kept_unless_they_are_to_be_replaced(
    run: Any, settings: RouteSettings
) -> None:
    theirs = http_route(
        POOL.namespace,
        "theirs",
        gateway=("istio-ingress", GATEWAY),
        hosts=[GATEWAYS.host],
        rules=[
            rule(
                "/v1/completions",  # longer than the installation's own path
                POOL.name,
                POOL.port,
                timeouts={"request": "77s", "backendRequest": "1s"},
                retry={"attempts": 5},
            )
        ],
    )
    async with run(MeshCase(installation=GATEWAYS, beside=[theirs], route_settings=settings)) as through:
        found = (await through.proxy.routes())[f"{POOL.namespace}.theirs.0"]
        began = time.monotonic()
        answer = await through.way.complete(story("a long answer"), max_tokens=LONG_ANSWER, ignore_eos=True)
        assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, LONG_ANSWER)
        assert time.monotonic() - began > 1.0, "the answer took no longer than one try might"
    timeout, per_try, retry_on, attempts = timeouts(found)
    assert per_try in {None, "0s"}
    if settings is RouteSettings.KEEP:
        assert (timeout, attempts) == ("77s", 5)
    else:
        assert (timeout, attempts, retry_on) == ("1200s", 2, "connect-failure,refused-stream,reset-before-request")


async def test_a_mesh_that_keeps_services_to_their_namespaces_knows_the_picker_none_the_less(run: Any) -> None:
    kept = {"defaultServiceExportTo": ["."], "defaultDestinationRuleExportTo": ["."]}
    # its gateway is in the pool's namespace: only the picker is elsewhere
    beside_the_pool = Installation(minor=31, mode=Mode.AMBIENT_GATEWAY)
    async with run(MeshCase(installation=beside_the_pool, mesh_config=kept)) as through:
        picker = (await through.proxy.clusters())[PICKER.cluster]
        assert picker["connect_timeout"] == "1s", "the rule of the picker's host is not known"
        await install_checks.a_repeated_prompt_lands_on_the_pod_that_holds_it(through.way)

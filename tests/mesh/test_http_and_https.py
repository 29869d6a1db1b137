"""A gateway with a listener for HTTP and one for HTTPS, and a `--hostname` that names no port."""

from dataclasses import replace
from pathlib import Path

import pytest

from operate.install.plan import Mode
from tests.e2e.stack import Stack, free_ports
from tests.e2e.supervised import HOST
from tests.kube_api.certificates import Authority
from tests.mesh.install_checks import a_repeated_prompt_lands_on_the_pod_that_holds_it
from tests.mesh.installations import POOL, Installation
from tests.mesh.mesh_objects import http_route
from tests.mesh.real_way import GATEWAY, MeshCase, real_way

pytestmark = pytest.mark.asyncio(loop_scope="session")
INSTALLED = Installation(minor=31, mode=Mode.GATEWAY)


async def test_a_host_of_both_listeners_asks_the_picker_on_both(
    stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    (tls,) = free_ports(1)
    case = MeshCase(installation=INSTALLED, further_listeners={443: tls})
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        assert await through.proxy.refused() == {}
        assert await through.istiod.filter_errors() == {}
        await a_repeated_prompt_lands_on_the_pod_that_holds_it(through.way)
        by_tls = replace(through.way, name="by TLS", url=f"https://{HOST}:{tls}")
        await a_repeated_prompt_lands_on_the_pod_that_holds_it(by_tls)


async def test_a_host_that_http_redirects_asks_the_picker_by_https_alone(
    stack: Stack, secrets: Path, authority: Authority, tmp_path: Path
) -> None:
    redirect = {"type": "RequestRedirect", "requestRedirect": {"scheme": "https", "statusCode": 301}}
    to_https = http_route(
        POOL.namespace,
        "to-https",
        gateway=(INSTALLED.plan().gateways[0].namespace, GATEWAY),
        port=80,
        hosts=[INSTALLED.host],
        rules=[{"filters": [redirect]}],
    )
    (tls,) = free_ports(1)
    case = MeshCase(installation=INSTALLED, further_listeners={443: tls}, route_port=443, beside=[to_https])
    async with real_way(case, stack, tmp_path, secrets=secrets, authority=authority) as through:
        assert await through.proxy.refused() == {}
        picks = await stack.metric("kvmesh_picks_total")
        plain = await through.way.send("POST", "/v1/completions", json={"model": "tiny"}, allow_redirects=False)
        assert (plain.status, plain.headers["location"]) == (301, f"https://{INSTALLED.host}/v1/completions")
        assert await stack.metric("kvmesh_picks_total") == picks
        by_tls = replace(through.way, name="redirected", url=f"https://{HOST}:{tls}")
        await a_repeated_prompt_lands_on_the_pod_that_holds_it(by_tls)

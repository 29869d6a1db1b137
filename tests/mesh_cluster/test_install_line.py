"""The line of docs/start/istio.md: exact tokens without a further flag, and a loud word where there are none."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio
import yaml

from tests.e2e.stack import eventually
from tests.e2e.supervised import supervised
from tests.mesh.install_checks import story
from tests.mesh.istio_proxy import IstioProxy
from tests.mesh_cluster.cluster import Cluster, simulated
from tests.mesh_cluster.install_line import ROOT, Installed, installed_by_the_line

pytestmark = pytest.mark.asyncio(loop_scope="session")
ALERT = "KvmeshTextOnly"
TELLING = {
    "tokenize": ("--no-enable-scale-out",),  # vLLM's default
    "render": ("--enable-scale-out", "--no-tokenize"),
    "nothing": ("--no-enable-scale-out", "--no-tokenize"),
}


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=list(TELLING))
async def installed(
    request: pytest.FixtureRequest, started: tuple[Cluster, IstioProxy]
) -> AsyncIterator[tuple[Installed, str]]:
    """What the line makes before pods that tell tokens in one way."""
    cluster, _ = started
    flags = TELLING[request.param]
    async with installed_by_the_line(
        cluster,
        lambda pods: supervised([simulated(name, address, *flags) for name, address in pods.items()], cluster.folder),
    ) as made:
        yield made, request.param


async def test_a_repeated_prompt_is_predicted_exactly_or_said_not_to_be(installed: tuple[Installed, str]) -> None:
    made, telling = installed
    prompt = story(f"line {telling}")
    for _ in range(8):
        assert (await made.complete(prompt)).status == 200
    if telling == "nothing":
        await _is_said_everywhere(made)
        return
    await eventually(partial(made.compared, prompt), lambda seen: seen[0] == [] and seen[1] == seen[2] > 0)
    await eventually(made.token_sources, lambda sources: sources == {"tiny": "pods"})
    assert "ExactTokens" not in await made.status()


async def _is_said_everywhere(installed: Installed) -> None:
    cluster = installed.cluster
    await eventually(installed.explained, lambda reasons: reasons == ["text-only"])
    await eventually(installed.token_sources, lambda sources: sources == {"tiny": "text"})
    await eventually(installed.status, lambda words: "ExactTokens=False TextOnly" in words)
    rules = yaml.safe_load((ROOT / "manifests/monitoring/prometheus/kvmesh.rules.yaml").read_text("utf-8"))
    [expression] = [each["expr"] for group in rules["groups"] for each in group["rules"] if each.get("alert") == ALERT]
    metric, _, labels = expression.partition("(kvmesh_")[2].partition("{")
    series = [line for line in (await installed.metrics()).splitlines() if line.startswith(f"kvmesh_{metric}{{")]
    assert any(labels.partition("}")[0] in line and line.endswith((" 1", " 1.0")) for line in series)
    doctor = await asyncio.to_thread(cluster.doctor, "kvmesh-system")
    [render] = [each for each in doctor if each["check"] == "render" and each["severity"] == "error"][:1]
    assert "tiny" in render["seen"] + render["subject"]

"""The line of docs/start/istio.md: exact tokens without a further flag, and a loud word where there are none."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tests.e2e.install_checks import story
from tests.e2e.stack import Answer, eventually
from tests.istiod.bootstrap import supervised
from tests.mesh.istio_proxy import IstioProxy
from tests.mesh.mesh_objects import http_route, kubernetes_object, rule
from tests.mesh_cluster.cluster import API_PORT, GATEWAY, GATEWAYS, POOLS, Cluster, pods_eventually, simulated, vllm_pod

pytestmark = pytest.mark.asyncio(loop_scope="session")
ROOT = Path(__file__).parents[2]
LINE = re.search(
    r"kvmesh (install .*?)--dry-run", (ROOT / "docs/start/istio.md").read_text(encoding="utf-8"), re.DOTALL
)
ALERT = "KvmeshTextOnly"
POOL, HOST, PODS = "vllm-llama", "llm.example.com", 2
OWN, ADMIN = "127.0.0.1", "http://127.0.0.1:9090"
TELLING = {
    "tokenize": ("--no-enable-scale-out",),  # vLLM's default
    "render": ("--enable-scale-out", "--no-tokenize"),
    "nothing": ("--no-enable-scale-out", "--no-tokenize"),
}
# a cluster's pods have one process each; here one stands for the picker, and it has no sidecar
HERE = ("--istio-version=1.31", "--membership=none", "--replicas=1", "--max-replicas=1")


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The cluster after the line, with pods that tell tokens in one way."""

    cluster: Cluster
    telling: str
    said: str  # by kvmesh install

    async def complete(self, prompt: str) -> Answer:
        return await self.cluster.complete(HOST, prompt)

    async def state(self) -> Any:
        async with self.cluster.http.get(
            f"{ADMIN}/state", params={"pool": f"{POOLS}/{POOL}"}, headers=self._login()
        ) as got:
            return await got.json()

    async def token_sources(self) -> dict[str, str]:
        """Return what the page has of each model's tokens."""
        return dict((await self.state())["token_sources"])

    async def explained(self) -> list[str]:
        """Return what `kvmesh policy explain` asks for: the findings of the pool's models."""
        params = {"target": f"{POOLS}/{POOL}"}
        async with self.cluster.http.get(f"{ADMIN}/policies", params=params, headers=self._login()) as got:
            [pool] = (await got.json())["pools"]
        return [each["reason"] for each in pool["tokens"]]

    async def metrics(self) -> str:
        async with self.cluster.http.get(f"{ADMIN}/metrics", headers=self._login()) as got:
            return await got.text()

    def _login(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {(self.cluster.folder / 'admin-token').read_text(encoding='utf-8').strip()}"}


def objects() -> list[dict[str, Any]]:
    """Return what the page takes as given: pods behind a Service that is a pool, a route, and a policy of step 4."""
    spec = {"selector": {"app": POOL}, "ports": [{"name": "http", "port": API_PORT}]}
    to_pool = rule("/", POOL, API_PORT)
    policy = {"scoring": {"strategy": "kv-aware", "weights": {"session": 1}}}
    return [
        kubernetes_object("v1", "Service", POOLS, POOL, labels={"kvmesh.io/pool": "true"}, spec=spec),
        http_route(POOLS, POOL, gateway=(GATEWAYS, GATEWAY), hosts=[HOST], rules=[to_pool]),
        *(vllm_pod(f"{POOL}-{number}", app=POOL) for number in range(PODS)),
        kubernetes_object("kvmesh.io/v1alpha1", "InferencePolicy", POOLS, "long-prompts", spec=policy),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=list(TELLING))
async def installed(request: pytest.FixtureRequest, started: tuple[Cluster, IstioProxy]) -> AsyncIterator[Installed]:
    """Install by the line, and run the picker and the indexer with the arguments that it has rendered."""
    cluster, _ = started
    assert LINE is not None
    line = [word for word in shlex.split(LINE[1].replace("\\\n", " "))[1:] if word != "1.27"]
    flags = [word for word in line if word != "--istio-version"]
    policy_definition = yaml.safe_load((ROOT / "manifests/crds/kvmesh.io_inferencepolicies.yaml").read_text("utf-8"))
    cluster.kube.apply(policy_definition)
    await asyncio.to_thread(
        cluster.kube.kubectl, "wait", "--for=condition=Established", "crd", "--all", "--timeout=30s"
    )
    cluster.kube.apply(*objects())
    pods = await pods_eventually(cluster.kube, POOLS, {"app": POOL}, count=PODS)
    own = "kvmesh-system"
    telling = TELLING[request.param]
    async with supervised([simulated(name, address, *telling) for name, address in pods.items()], cluster.folder):
        said = await asyncio.to_thread(cluster.kvmesh, "install", *flags, *HERE)
        parts = [
            cluster.program("kvmesh-indexer", namespace=own, address=OWN, admin_port=9091),
            cluster.program("kvmesh-picker", namespace=own, address=OWN, admin_port=9090),
        ]
        async with supervised(parts, cluster.folder):
            made = Installed(cluster=cluster, telling=request.param, said=said)
            await eventually(partial(made.complete, "hello"), lambda answer: answer.status == 200)
            await eventually(made.explained, bool)  # the pods have told their model
            yield made
    await asyncio.to_thread(
        cluster.kvmesh, "uninstall", "--yes", "--settle-seconds=0", f"--namespace={own}", "--keep-crds"
    )
    gone = ("service", POOL), ("httproute", POOL), ("inferencepolicy", "long-prompts")
    for kind, name in (*gone, *(("pod", name) for name in pods)):
        command = ("delete", kind, "-n", POOLS, name, "--ignore-not-found", "--grace-period=0", "--force")
        await asyncio.to_thread(cluster.kube.kubectl, *command)


async def test_a_repeated_prompt_is_predicted_exactly_or_said_not_to_be(installed: Installed) -> None:
    prompt = story(f"line {installed.telling}")
    for _ in range(8):
        assert (await installed.complete(prompt)).status == 200
    if installed.telling == "nothing":
        await _is_said_everywhere(installed)
        return

    async def compared() -> tuple[list[str], int, int]:
        answer = await installed.complete(prompt)
        decision = (await installed.state())["decisions"][0]
        return decision["degraded"], decision["matched_tokens"], answer.cached_tokens

    await eventually(compared, lambda seen: seen[0] == [] and seen[1] == seen[2] > 0)
    assert f"tokens of pool {POOLS}/{POOL}: pod {POOL}-" in installed.said
    path = "/tokenize" if installed.telling == "tokenize" else "/v1/completions/render"
    assert f" tells them at {path}" in installed.said
    await eventually(installed.token_sources, lambda sources: sources == {"tiny": "pods"})
    assert "ExactTokens" not in await _status(installed)


async def _is_said_everywhere(installed: Installed) -> None:
    cluster = installed.cluster
    assert "tells none (/tokenize answers 404; /v1/completions/render answers 403): it is routed on TEXT ONLY" in (
        installed.said
    )
    await eventually(installed.explained, lambda reasons: reasons == ["text-only"])
    await eventually(installed.token_sources, lambda sources: sources == {"tiny": "text"})
    await eventually(partial(_status, installed), lambda words: "ExactTokens=False TextOnly" in words)
    rules = yaml.safe_load((ROOT / "manifests/monitoring/prometheus/kvmesh.rules.yaml").read_text("utf-8"))
    [expression] = [each["expr"] for group in rules["groups"] for each in group["rules"] if each.get("alert") == ALERT]
    metric, _, labels = expression.partition("(kvmesh_")[2].partition("{")
    series = [line for line in (await installed.metrics()).splitlines() if line.startswith(f"kvmesh_{metric}{{")]
    assert any(labels.partition("}")[0] in line and line.endswith((" 1", " 1.0")) for line in series)
    doctor = await asyncio.to_thread(cluster.doctor, "kvmesh-system")
    [render] = [each for each in doctor if each["check"] == "render" and each["severity"] == "error"][:1]
    assert "tiny" in render["seen"] + render["subject"]


async def _status(installed: Installed) -> str:
    path = "-o=jsonpath={range .status.ancestors[*].conditions[*]}{.type}={.status} {.reason};{end}"
    command = ("get", "infpol", "-n", POOLS, "long-prompts", path)
    return await asyncio.to_thread(installed.cluster.kube.kubectl, *command)

"""What the install line of docs/start/istio.md makes of the cluster, with pods that somebody starts."""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.stack import Answer, eventually
from tests.e2e.supervised import supervised
from tests.mesh.mesh_objects import http_route, kubernetes_object, rule
from tests.mesh_cluster.cluster import API_PORT, GATEWAY, GATEWAYS, POOLS, Cluster, pods_eventually, vllm_pod

ROOT = Path(__file__).parents[2]
LINE = re.search(
    r"kvmesh (install .*?)--dry-run", (ROOT / "docs/start/istio.md").read_text(encoding="utf-8"), re.DOTALL
)
POOL, HOST, PODS = "vllm-llama", "llm.example.com", 2
OWN, ADMIN = "127.0.0.1", "http://127.0.0.1:9090"
# a cluster's pods have one process each; here one stands for the picker, and it has no sidecar
HERE = ("--istio-version=1.31", "--membership=none", "--replicas=1", "--max-replicas=1")
RunningPods = Callable[[Mapping[str, str]], AbstractAsyncContextManager[Any]]  # of addresses by name


@dataclass(frozen=True, kw_only=True)
class Installed:
    """The cluster after the line."""

    cluster: Cluster
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

    async def compared(self, prompt: str) -> tuple[list[str], int, int]:
        """Send a prompt; return what its decision lacked, and its cached tokens: predicted and realised."""
        answer = await self.complete(prompt)
        decision = (await self.state())["decisions"][0]
        return decision["degraded"], decision["matched_tokens"], answer.cached_tokens

    async def status(self) -> str:
        """Return the conditions of the policy of the pool."""
        path = "-o=jsonpath={range .status.ancestors[*].conditions[*]}{.type}={.status} {.reason};{end}"
        command = ("get", "infpol", "-n", POOLS, "long-prompts", path)
        return await asyncio.to_thread(self.cluster.kube.kubectl, *command)

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


@asynccontextmanager
async def installed_by_the_line(cluster: Cluster, running: RunningPods) -> AsyncIterator[Installed]:
    """Install by the line, and run the picker and the indexer with the arguments that it has rendered."""
    assert LINE is not None
    flags = shlex.split(LINE[1].replace("\\\n", " "))[1:]
    release = flags.index("--istio-version")
    del flags[release : release + 2]  # the page's; this cluster has the newest
    policy_definition = yaml.safe_load((ROOT / "manifests/crds/kvmesh.io_inferencepolicies.yaml").read_text("utf-8"))
    cluster.kube.apply(policy_definition)
    await asyncio.to_thread(
        cluster.kube.kubectl, "wait", "--for=condition=Established", "crd", "--all", "--timeout=30s"
    )
    cluster.kube.apply(*objects())
    pods = await pods_eventually(cluster.kube, POOLS, {"app": POOL}, count=PODS)
    own = "kvmesh-system"
    async with running(pods):
        said = await asyncio.to_thread(cluster.kvmesh, "install", *flags, *HERE)
        parts = [
            cluster.program("kvmesh-indexer", namespace=own, address=OWN, admin_port=9091),
            cluster.program("kvmesh-picker", namespace=own, address=OWN, admin_port=9090),
        ]
        async with supervised(parts, cluster.folder):
            made = Installed(cluster=cluster, said=said)
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

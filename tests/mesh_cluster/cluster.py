"""The cluster: what is in the API server, and the processes that stand for the pods."""

import asyncio
import base64
import json
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from operate.install.redis_access import USER_RIGHTS
from operate.local.processes import HttpReady, ProcessSpec
from operate.local.service import simulated_tokenizer
from tests.e2e.stack import Answer, eventually
from tests.e2e.supervised import supervised
from tests.integration.kv_redis import RedisServer, redis_7_program
from tests.mesh.go_programs import go_program
from tests.mesh.istio_proxy import IstioProxy, Workload, running_istio_proxy
from tests.mesh.istiod import ENVIRONMENT, Istiod
from tests.mesh.kube import Kube
from tests.mesh.mesh_objects import gateway_by_hand, gateway_labels, kubernetes_object, namespace

NETWORK = "10.244.0.0/16"  # of the fake node's pods
GATEWAYS, GATEWAY = "istio-ingress", "inference-gateway"
POOLS = "llm"  # the namespace
START_SECONDS = 90.0
INSTALL_SECONDS = 180
EVENTS_PORT, API_PORT = 5557, 8000
ISTIOD = Istiod(xds="127.0.0.1:15010", http="http://127.0.0.1:15014")
MESH_CONFIG: Mapping[str, Any] = {"rootNamespace": "istio-system", "enableAutoMtls": True}


def take_network() -> None:
    """Make all pods' addresses this network's own. Raise OSError where it is not a network of ours alone."""
    links = json.loads(subprocess.run(["ip", "-j", "link"], capture_output=True, check=True, text=True).stdout)
    if [each["ifname"] for each in links] != ["lo"]:
        raise OSError("tests/mesh_cluster needs a network of its own: make test-mesh")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "address", "add", NETWORK.replace(".0.0/", ".0.1/"), "dev", "lo"], check=True)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The running cluster and a client of its gateway."""

    kube: Kube
    folder: Path
    redis: RedisServer
    http: aiohttp.ClientSession
    gateway: str

    async def complete(self, host: str, prompt: str, **fields: Any) -> Answer:
        """Send one completion through the gateway."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 2} | fields
        url = f"{self.gateway}/v1/completions"
        async with self.http.post(url, json=body, headers={"Host": host}) as response:
            return Answer(
                status=response.status,
                headers={name.lower(): value for name, value in response.headers.items()},
                body=await response.read(),
            )

    def install(self, *flags: str) -> str:
        """Call `kvmesh install` as its user does, and return what it printed."""
        return self.kvmesh("install", f"--gateway={GATEWAYS}/{GATEWAY}", *flags)

    def kvmesh(self, *arguments: str) -> str:
        """Call the command as the cluster's administrator."""
        done = subprocess.run(
            [sys.executable, "-m", "operate", *arguments],
            env=os.environ | {"KUBECONFIG": str(self.kube.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def doctor(self, namespace: str, *flags: str) -> list[dict[str, str]]:
        """Call `kvmesh doctor --kubernetes` as in the picker's container, and return its findings."""
        environment = self.program("kvmesh-picker", namespace=namespace, address="", admin_port=0).environment
        names = self.folder / "hosts"  # the cluster's DNS: our components are at this address
        names.write_text("".join(f"127.0.0.1 {name}.{namespace}.svc\n" for name in ("kvmesh-picker", "kvmesh-indexer")))
        words = [sys.executable, "-m", "operate", "doctor", "--kubernetes", "-o", "json", *flags]
        script = f"mount --bind {names} /etc/hosts && exec {shlex.join(words)}"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
        assert done.returncode in {0, 1, 2}, done.stderr
        found: list[dict[str, str]] = json.loads(done.stdout)
        return found

    def program(self, component: str, *, namespace: str, address: str, admin_port: int, **changes: str) -> ProcessSpec:
        """Return the process of a component's pod: its container's words and environment, its account's rights."""
        deployment = json.loads(self.kube.kubectl("get", "deployment", "-n", namespace, component, "-o", "json"))
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        environment = {each["name"]: each.get("value", "") for each in container["env"]}
        environment |= {
            "POD_NAME": component,
            "POD_NAMESPACE": namespace,
            "KUBECONFIG": str(self._account(namespace, component)),
            "KVMESH_REDIS": self._redis_url(namespace, user=component.removeprefix("kvmesh-")),
            "KVMESH_ADMIN_TOKEN_FILE": str(self._admin_token(namespace)),
            "KVMESH_TOKEN_FILE": str(self._admin_token(namespace)),
            **changes,
        }
        return ProcessSpec(
            name=component,
            argv=(sys.executable, "-m", "operate", *container["args"]),
            environment=environment,
            ready=(HttpReady(url=f"http://{address}:{admin_port}/readyz"),),
            ready_within_seconds=START_SECONDS,
        )

    def _account(self, namespace: str, name: str) -> Path:
        token = self.kube.kubectl("create", "token", "-n", namespace, name).strip()
        return self.kube.write_kubeconfig(f"{namespace}-{name}", user={"token": token})

    def _admin_token(self, namespace: str) -> Path:
        path = self.folder / "admin-token"
        path.write_text(self._secret(namespace, "kvmesh-admin-token")["token"])
        return path

    def _redis_url(self, namespace: str, *, user: str) -> str:
        """Give Redis the installation's user; return its URL for it."""
        password = self._secret(namespace, "kvmesh-redis-users")[user]
        client: Any = self.redis.client()
        client.execute_command("ACL", "SETUSER", user, "on", f">{password}", *USER_RIGHTS[user].split())
        return self.redis.url.replace("redis://", f"redis://{user}:{password}@")

    def _secret(self, namespace: str, name: str) -> Mapping[str, str]:
        words = self.kube.kubectl("get", "secret", "-n", namespace, name, "-o", "json")
        return {key: base64.b64decode(text).decode() for key, text in json.loads(words)["data"].items()}


async def pods_eventually(kube: Kube, namespace: str, labels: Mapping[str, str], *, count: int) -> dict[str, str]:
    """Return the addresses of pods by name, when there are so many."""
    selector = ",".join(f"{name}={value}" for name, value in labels.items())

    async def look() -> dict[str, str]:
        words = await asyncio.to_thread(kube.kubectl, "get", "pods", "-n", namespace, "-l", selector, "-o", "json")
        found = {each["metadata"]["name"]: each["status"].get("podIP", "") for each in json.loads(words)["items"]}
        return {name: address for name, address in found.items() if address}

    found: dict[str, str] = await eventually(look, lambda pods: len(pods) >= count)
    return found


def vllm_pod(name: str, **labels: str) -> dict[str, Any]:
    """Return the object of a pod that serves the model."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{EVENTS_PORT}"}
    config["replay_endpoint"] = f"tcp://*:{EVENTS_PORT + 1}"
    container = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.32.0",
        "args": ["--model", "tiny", "--kv-events-config", json.dumps(config)],
        "ports": [{"containerPort": API_PORT, "name": "http"}],
    }
    return kubernetes_object("v1", "Pod", POOLS, name, labels=labels, spec={"containers": [container]})


def simulated(name: str, address: str, *more: str) -> ProcessSpec:
    """Return the process that stands for vLLM at a pod's address; `more` flags of it."""
    flags = (*more, "--host", address, "--sim-port", str(API_PORT), "--events-port", str(EVENTS_PORT))
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", "podsim", *flags),
        ready=(HttpReady(url=f"http://{address}:{API_PORT}/health"),),
        ready_within_seconds=START_SECONDS,
    )


def model_policy() -> dict[str, Any]:
    """Return the policy of the whole mesh: the model that the pods serve, and where its tokenizer is."""
    served = {"name": "tiny", "tokenizer": str(simulated_tokenizer())}
    return {
        "apiVersion": "kvmesh.io/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": {"name": "mesh", "namespace": "istio-system"},
        "spec": {"models": {"served": [served]}},
    }


@asynccontextmanager
async def running_cluster(kube: Kube, folder: Path, *, secrets: Path) -> AsyncIterator[tuple[Cluster, IstioProxy]]:
    """Start istiod and the gateway on the API server; yield when the gateway is told what to do."""
    kube.apply(*(namespace(name) for name in ("istio-system", GATEWAYS, POOLS)))
    kube.define("gateway", "inference")
    kube.apply(*gateway_by_hand(GATEWAYS, GATEWAY))
    [(pod, address)] = (await pods_eventually(kube, GATEWAYS, gateway_labels(GATEWAY), count=1)).items()
    config = folder / "mesh_config.yaml"
    config.write_text(yaml.safe_dump(dict(MESH_CONFIG)), encoding="utf-8")
    workload = Workload(
        namespace=GATEWAYS,
        name=GATEWAY,
        service_account=f"{GATEWAY}-istio",
        labels=gateway_labels(GATEWAY),
        is_gateway=True,
        ip=address,
        pod=pod,
    )
    async with AsyncExitStack() as stack:
        redis = RedisServer(folder, program=redis_7_program())
        stack.callback(redis.kill)
        redis.start()
        await stack.enter_async_context(supervised([_istiod(kube, config)], folder))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        proxy = await stack.enter_async_context(running_istio_proxy(workload, ISTIOD, folder, secrets=secrets))
        yield Cluster(kube=kube, folder=folder, redis=redis, http=http, gateway=f"http://{address}"), proxy


def _istiod(kube: Kube, config: Path) -> ProcessSpec:
    switched_off = ("INJECTION_WEBHOOK_CONFIG_NAME", "VALIDATION_WEBHOOK_CONFIG_NAME")
    environment = {
        **ENVIRONMENT,
        **dict.fromkeys(switched_off, ""),
        "ENABLE_CA_SERVER": "false",
        "POD_NAME": "istiod-1",
        "POD_NAMESPACE": "istio-system",
        "CLUSTER_ID": "Kubernetes",
        "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
        "XDS_AUTH_PLAINTEXT": "false",  # it believes service accounts' tokens, and proxies here have none
    }
    addresses = ("--grpcAddr", ISTIOD.xds, "--httpAddr", "127.0.0.1:15080", "--monitoringAddr", "127.0.0.1:15014")
    off = ("--secureGRPCAddr", "", "--httpsAddr", "", "--ctrlz_port", "0")
    return ProcessSpec(
        name="istiod",
        argv=(
            *(str(go_program("istiod")), "discovery", "--kubeconfig", str(kube.kubeconfig)),
            *("--meshConfig", str(config), *addresses, *off),
        ),
        environment=environment,
        ready=(HttpReady(url="http://127.0.0.1:15080/ready"),),
        ready_within_seconds=START_SECONDS,
    )

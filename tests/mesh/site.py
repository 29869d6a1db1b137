"""A pool, a gateway and an installation of a test's own in a real Kubernetes control plane."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from operate.install.objects import INSTALLATION, KINDS, Kind
from tests.mesh.kube import Kube
from tests.mesh.mesh_objects import gateway_by_hand, http_route, kubernetes_object, namespace, rule

NUMBERS = count(1)
IMAGE = "registry.example/kvmesh:0.1.0"
COMMAND_SECONDS = 150.0
ISTIO_AND_OURS = ("networking.istio.io", "security.istio.io", "kvmesh.io", "inference.networking.k8s.io")
READ_BY_PICKERS = ("inference.networking.x-k8s.io", "llm-d.ai", "gateway.networking.k8s.io")


@dataclass(frozen=True, kw_only=True)
class Site:
    """A pool, a gateway and an installation of a test's own."""

    kube: Kube
    number: int = field(default_factory=lambda: next(NUMBERS))

    @property
    def namespace(self) -> str:
        return f"kvmesh-{self.number}"

    @property
    def pool(self) -> str:
        return f"llm-{self.number}"

    @property
    def gateway(self) -> str:
        return f"ingress-{self.number}"

    def flags(self, image: str = IMAGE) -> list[str]:
        return [
            f"--namespace={self.namespace}",
            f"--pool={self.pool}/vllm",
            f"--pool-selector={self.pool}/vllm=app=vllm",
            f"--gateway={self.gateway}/gateway",
            f"--hostname=llm-{self.number}.example.com",
            f"--image={image}",
        ]

    def install(self, *more: str, kubeconfig: Path | None = None) -> "Done":
        return self.call("install", *self.flags(), *more, kubeconfig=kubeconfig)

    def uninstall(self, *more: str, kubeconfig: Path | None = None) -> "Done":
        arguments = ("--yes", "--settle-seconds=0", f"--namespace={self.namespace}", *more)
        return self.call("uninstall", *arguments, kubeconfig=kubeconfig)

    def call(self, *arguments: str, kubeconfig: Path | None = None) -> "Done":
        """Run `kvmesh` as people do."""
        command = [str(Path(sys.executable).with_name("kvmesh")), *arguments]
        environment = os.environ | {"KUBECONFIG": str(kubeconfig or self.kube.kubeconfig)}
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
        )
        return Done(code=ended.returncode, printed=ended.stdout, errors=ended.stderr)

    def left(self) -> list[str]:
        """Everything of the installation, but what is on its way out."""
        kinds = ",".join(_resource(kind) for kind in KINDS if "monitoring" not in kind.group)
        listed = self.kube.kubectl("get", kinds, "-A", "-l", f"{INSTALLATION}={self.namespace}", "-o=yaml")
        return [
            f"{each['kind']}/{each['metadata']['name']}"
            for each in yaml.safe_load(listed)["items"]
            if "deletionTimestamp" not in each["metadata"]
        ]


@dataclass(frozen=True, kw_only=True)
class Done:
    """A command that ended."""

    code: int
    printed: str
    errors: str

    @property
    def outcomes(self) -> dict[str, str]:
        """What became of each object that was applied, by kind and name."""
        found = re.findall(r"^(created|changed|unchanged) (\w+) (\S+)$", self.printed, re.MULTILINE)
        return {f"{kind} {name}": outcome for outcome, kind, name in found}


def _resource(kind: Kind) -> str:
    return f"{kind.plural}.{kind.version}.{kind.group}" if kind.group else kind.plural


@contextmanager
def made_site(kube: Kube) -> Iterator[Site]:
    """Make a pool, a gateway with a pod, and a route between them; at the end everything of ours goes."""
    made = Site(kube=kube)
    spec = {"selector": {"app": "vllm"}, "ports": [{"name": "http", "port": 8000}]}
    route = http_route(
        made.pool,
        "llm",
        gateway=(made.gateway, "gateway"),
        hosts=[f"llm-{made.number}.example.com"],
        rules=[rule("/", "vllm", 8000)],
    )
    kube.apply(namespace(made.pool), namespace(made.gateway))
    pool = kubernetes_object("v1", "Service", made.pool, "vllm", spec=spec)
    kube.apply(*gateway_by_hand(made.gateway, "gateway"), pool, route)
    yield made
    made.uninstall()
    kube.kubectl("delete", "namespace", "--wait=false", "--ignore-not-found", made.pool, made.gateway, made.namespace)


def namespace_administrator(site: Site, spaces: Sequence[str]) -> Path:
    """Return the kubeconfig of somebody who may do everything in these namespaces, and nothing elsewhere."""
    name = f"owner-{site.number}"
    rules = [{"apiGroups": [group], "resources": ["*"], "verbs": ["*"]} for group in ISTIO_AND_OURS + READ_BY_PICKERS]
    for space in spaces:
        subject: Mapping[str, Any] = {"kind": "User", "name": name, "apiGroup": "rbac.authorization.k8s.io"}
        for role, kind in (("admin", "ClusterRole"), (f"{name}-more", "Role")):
            binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
            reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role}
            meta = {"name": f"{name}-{role}", "namespace": space}
            site.kube.apply({**binding, "metadata": meta, "roleRef": reference, "subjects": [dict(subject)]})
        meta = {"name": f"{name}-more", "namespace": space}
        site.kube.apply(
            {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": meta, "rules": rules}
        )
    return site.kube.write_kubeconfig(name, cert=site.kube.authority.issue(name, subject=f"/CN={name}"))

"""A real Kubernetes control plane: etcd, API server, controller-manager and scheduler, with a node that runs nothing.

What is not there: a kubelet, probes, NetworkPolicies. `fake_node` says which pods become ready.
"""

import asyncio
import ssl
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from operate.local.processes import ProcessSpec
from tests.e2e.stack import free_ports
from tests.e2e.supervised import HOST, supervised
from tests.kube_api.certificates import SERVER_NAMES, Authority, ServerCertificate, make_authority
from tests.mesh.fake_node import run_fake_node
from tests.mesh.go_programs import go_program, module_folder

START_SECONDS = 60.0
CALL_SECONDS = 60.0
ADMIN = "/O=system:masters/CN=admin"
MODULES = {"istio": "istio.io/istio", "gateway": "sigs.k8s.io/gateway-api"}
MODULES["inference"] = "sigs.k8s.io/gateway-api-inference-extension"
DEFINITIONS = {  # the files of each module, by the name that a test says
    "istio": "manifests/charts/base/files/crd-all.gen.yaml",
    "gateway": "config/crd/standard/*_*s.yaml",
    "inference": "config/crd/bases/*.yaml",
}


@dataclass(frozen=True, kw_only=True)
class Kube:
    """The running control plane, and its administrator."""

    server: str  # https://ip:port
    folder: Path
    authority: Authority
    admin: ServerCertificate

    @cached_property
    def kubeconfig(self) -> Path:
        """The administrator's."""
        return self.write_kubeconfig("admin", cert=self.admin)

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """The administrator's: trusts the server and shows the certificate."""
        context = ssl.create_default_context(cafile=str(self.authority.cert))
        context.load_cert_chain(self.admin.cert, self.admin.key)
        return context

    def write_kubeconfig(
        self,
        name: str,
        *,
        cert: ServerCertificate | None = None,
        user: dict[str, Any] | None = None,
        cluster: dict[str, Any] | None = None,
    ) -> Path:
        """Write a kubeconfig whose context, cluster and user are called `name`."""
        login = user or {}
        if cert is not None:
            login |= {"client-certificate": str(cert.cert), "client-key": str(cert.key)}
        reached = {"server": self.server, "certificate-authority": str(self.authority.cert)} | (cluster or {})
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": name,
            "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
            "clusters": [{"name": name, "cluster": reached}],
            "users": [{"name": name, "user": login}],
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """Call kubectl as the administrator and return what it printed."""
        command = [str(go_program("kube")), "kubectl", f"--kubeconfig={self.kubeconfig}", *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
        assert done.returncode == 0 or not check, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout + done.stderr

    def apply(self, *documents: dict[str, Any]) -> None:
        """Apply documents as the administrator."""
        self.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(documents))

    def define(self, *names: str) -> None:
        """Load the definitions of `DEFINITIONS`, and wait until they are served."""
        for name in names:
            files = sorted(module_folder("istiod", MODULES[name]).glob(DEFINITIONS[name]))
            self.kubectl("apply", "--server-side", "--force-conflicts", *(f"--filename={file}" for file in files))
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")


@asynccontextmanager
async def running_kube(folder: Path, *, emulates: str | None = None) -> AsyncIterator[Kube]:
    """Start the control plane and its node in this event loop; logs are `folder/NAME.log`.

    `emulates`: the release whose features the API server has, such as 1.34.
    """
    program = str(go_program("kube"))
    etcd, peers, api, manager, scheduler = free_ports(5)
    authority = make_authority(folder)
    shown = authority.issue("server", subject="/CN=kube-apiserver", names=f"{SERVER_NAMES},IP:10.96.0.1")
    admin = authority.issue("admin", subject=ADMIN)
    kube = Kube(server=f"https://{HOST}:{api}", folder=folder, authority=authority, admin=admin)
    etcd_url = f"http://{HOST}:{etcd}"
    connect = f"--kubeconfig={kube.kubeconfig}"
    common = (connect, f"--bind-address={HOST}", "--leader-elect=false", "--kube-api-qps=200", "--kube-api-burst=400")
    specs = [
        _spec(
            "etcd",
            *(program, "etcd", "--unsafe-no-fsync", f"--data-dir={folder / 'etcd'}", "--log-level=warn"),
            *(f"--listen-client-urls={etcd_url}", f"--advertise-client-urls={etcd_url}"),
            f"--listen-peer-urls=http://{HOST}:{peers}",
        ),
        _spec(
            "kube-apiserver",
            *(program, "kube-apiserver", f"--etcd-servers={etcd_url}", f"--bind-address={HOST}"),
            "--advertise-address=192.0.2.1",  # told to nobody; else a default route is looked for
            *(f"--secure-port={api}", "--endpoint-reconciler-type=none", "--authorization-mode=Node,RBAC"),
            *("--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={shown.cert}"),
            *(f"--service-account-signing-key-file={shown.key}", "--service-cluster-ip-range=10.96.0.0/16"),
            *(f"--client-ca-file={authority.cert}", f"--tls-cert-file={shown.cert}"),
            *(f"--tls-private-key-file={shown.key}", f"--cert-dir={folder / 'made'}"),
            *([f"--emulated-version={emulates}"] if emulates else []),
        ),
        _spec(
            "kube-controller-manager",
            *(program, "kube-controller-manager", *common, f"--secure-port={manager}"),
            *("--use-service-account-credentials", f"--service-account-private-key-file={shown.key}"),
            *(f"--root-ca-file={authority.cert}", f"--cert-dir={folder / 'made'}"),
        ),
        _spec("kube-scheduler", program, "kube-scheduler", *common, f"--secure-port={scheduler}"),
    ]
    async with supervised(specs, folder), _session(kube) as session:
        async with asyncio.timeout(START_SECONDS):
            while not await _answers(session, "/api/v1/namespaces/default/serviceaccounts/default"):
                await asyncio.sleep(0.1)
        node = asyncio.create_task(run_fake_node(session), name="fake node")
        try:
            yield kube
        finally:
            node.cancel()
            await asyncio.wait([node])
            if not node.cancelled():
                node.result()


def _spec(name: str, *argv: str) -> ProcessSpec:
    return ProcessSpec(name=name, argv=argv)


@asynccontextmanager
async def _session(kube: Kube) -> AsyncIterator[aiohttp.ClientSession]:
    """Return the administrator's HTTP session."""
    connector = aiohttp.TCPConnector(ssl=kube.tls)
    async with aiohttp.ClientSession(kube.server, connector=connector) as session:
        yield session


async def _answers(session: aiohttp.ClientSession, path: str) -> bool:
    try:
        async with session.get(path) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError):
        return False


@contextmanager
def kube_in_background(folder: Path, *, emulates: str | None = None) -> Iterator[Kube]:
    """Run the control plane in a thread of its own, for tests that wait in theirs."""
    began: Future[Kube] = Future()
    end = threading.Event()

    async def run() -> None:
        try:
            async with running_kube(folder, emulates=emulates) as kube:
                began.set_result(kube)
                await asyncio.to_thread(end.wait)
        except BaseException as error:
            if not began.done():
                began.set_exception(error)
                return
            raise

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="control plane")
    thread.start()
    try:
        yield began.result(timeout=2 * START_SECONDS)
    finally:
        end.set()
        thread.join()


def loose_definition(group: str, version: str, kind: str, plural: str) -> dict[str, Any]:
    """Return a definition of a namespaced kind that takes any content: the kind is all that matters of it."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}],
        },
    }


PROMETHEUS_OPERATOR: Sequence[dict[str, Any]] = [
    loose_definition("monitoring.coreos.com", "v1", kind, plural)
    for kind, plural in (("ServiceMonitor", "servicemonitors"), ("PrometheusRule", "prometheusrules"))
]

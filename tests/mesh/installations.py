"""The installations that are proven: what `kvmesh install` renders for a release and a mode.

One pool, `llm/vllm-llama`, and beside it a service that has nothing to do with us.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from operate.install.plan import (
    BodyMode,
    ClientsTarget,
    FailureMode,
    GatewayTarget,
    InstallPlan,
    IstioVersion,
    MeshMembership,
    Mode,
    PoolTarget,
    RouteTarget,
)
from operate.install.render import render
from tests.e2e.supervised import SHOWN_UPSTREAM
from tests.mesh.mesh_objects import Object, kubernetes_object, slices

OF_ISTIOD = ("Service", "EnvoyFilter", "DestinationRule", "PeerAuthentication", "AuthorizationPolicy", "Sidecar")
DENIED_PATH = "/denied"  # of the AuthorizationPolicy: nobody may


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshService:
    """A ClusterIP Service with one port."""

    namespace: str
    name: str
    port: int
    is_http2: bool = False

    @property
    def host(self) -> str:
        return f"{self.name}.{self.namespace}.svc.cluster.local"

    @property
    def cluster(self) -> str:
        """The name of its cluster in a proxy."""
        return f"outbound|{self.port}||{self.host}"


POOL = PoolTarget(namespace="llm", name="vllm-llama", port=8000)
PODS = MeshService(namespace="llm", name="vllm-llama", port=8000)
SHOP = MeshService(namespace="shop", name="catalog", port=8000)
PICKER = MeshService(namespace="kvmesh-system", name="kvmesh-picker", port=9002, is_http2=True)
FILTER_MODES = (Mode.GATEWAY, Mode.SIDECAR, Mode.AMBIENT_GATEWAY)  # by filters of ours
CLIENT_LABELS = {"kvmesh.io/client": "true", "app": "chat"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """One thing to prove."""

    minor: int  # of the release that it is rendered for
    mode: Mode
    body_mode: BodyMode | None = None  # None: the release's best
    failure_mode: FailureMode = FailureMode.FAIL_CLOSE
    is_https: bool = False

    def __str__(self) -> str:
        words = [f"1.{self.minor}", self.mode.value]
        words += ["buffered"] if self.body_mode is BodyMode.BUFFERED else []
        words += ["https"] if self.is_https else []
        words += ["fail-open"] if self.failure_mode is FailureMode.FAIL_OPEN else []
        return "-".join(words)

    @property
    def host(self) -> str:
        """What a client writes into the Host header."""
        return {Mode.SIDECAR: PODS.host, Mode.AMBIENT_GATEWAY: "models.llm"}.get(self.mode, "llm.example.com")

    @property
    def other_host(self) -> str:
        """The host of the service that is none of ours."""
        return SHOP.host if self.mode is Mode.SIDECAR else "shop.example.com"

    def plan(self) -> InstallPlan:
        """Return what a user would ask for."""
        further: dict[str, Any] = {
            "clients": (ClientsTarget(namespace="llm-clients", selector={"kvmesh.io/client": "true"}),)
        }
        if self.mode is not Mode.SIDECAR:
            further = {
                "gateways": (
                    GatewayTarget(
                        namespace=self._gateway_namespace,
                        name="inference-gateway",
                        selector={"gateway.networking.k8s.io/gateway-name": "inference-gateway"},
                        service_account="inference-gateway-istio",
                    ),
                ),
                "routes": (RouteTarget(host=self.host, pool=POOL),),
            }
        return InstallPlan(
            istio=IstioVersion(minor=self.minor),
            mode=self.mode,
            pools=(POOL,),
            failure_mode=self.failure_mode,
            body_mode=self.body_mode,
            membership=MeshMembership.AMBIENT if self.mode is Mode.AMBIENT_GATEWAY else MeshMembership.SIDECAR,
            **further,
        )

    def documents(self) -> Sequence[Mapping[str, Any]]:
        """Return everything that the command would apply."""
        return render(self.plan())

    @property
    def _gateway_namespace(self) -> str:
        return "llm" if self.mode is Mode.AMBIENT_GATEWAY else "istio-ingress"


def installed(plan: InstallPlan, *, picker: str | None) -> list[Object]:
    """Return what istiod reads of a rendered plan, with the picker at ip:port; None: its Service is not there."""
    rendered = [dict(each) for each in render(plan) if each["kind"] in OF_ISTIOD]
    if picker is None:
        return [each for each in rendered if each["kind"] != "Service"]
    for number, each in enumerate(each for each in rendered if each["kind"] == "Service"):
        each["spec"] = each["spec"] | {"clusterIP": f"10.96.1.{number + 1}"}
    return [*rendered, *slices(PICKER.namespace, PICKER.name, [picker], port_name="grpc-ext-proc")]


def shown_upstream() -> Object:
    """Return a filter of the tests' own that tells clients who served."""
    patch = {
        "applyTo": "ROUTE_CONFIGURATION",
        "match": {"context": "ANY"},
        "patch": {"operation": "MERGE", "value": {"response_headers_to_add": [SHOWN_UPSTREAM]}},
    }
    spec = {"configPatches": [patch]}
    return kubernetes_object("networking.istio.io/v1alpha3", "EnvoyFilter", "istio-system", "shown", spec=spec)

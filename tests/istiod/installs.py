"""The installations that are proven: what `kvmesh install` renders for a release and a mode, on istiod's configuration.

Used by the tests with a scripted picker and by those with a real one. One pool, `llm/vllm-llama`, and beside it a
service that has nothing to do with us.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.install.istio_release import DOMAIN_NAME_MATCH_FROM, wiring
from extproc.install.plan import (
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
from extproc.install.render import render
from extproc.policy.values import Steering
from tests.istiod.apply import Applied, apply_envoy_filters
from tests.istiod.base import GatewayRoute, Proxy, gateway_proxy, sidecar_proxy
from tests.istiod.clusters import MeshService
from tests.istiod.filters import documents_of
from tests.istiod.releases import RELEASES

POOL = PoolTarget(namespace="llm", name="vllm-llama", port=8000)
PODS = MeshService(namespace="llm", name="vllm-llama", port=8000)
SHOP = MeshService(namespace="shop", name="catalog", port=8000)
PICKER = MeshService(namespace="kvmesh-system", name="kvmesh-picker", port=9002, is_http2=True)
SERVICES = (PODS, SHOP, PICKER)
CLIENT_LABELS = {"kvmesh.io/client": "true", "app": "chat"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """One thing to prove."""

    minor: int  # of the release that it is rendered for
    mode: Mode
    body_mode: BodyMode | None = None  # None: the release's best
    failure_mode: FailureMode = FailureMode.FAIL_CLOSE
    runs_on: int | None = None  # minor of istiod and of the proxies; None: as rendered
    is_https: bool = False

    def __str__(self) -> str:
        words = [f"1.{self.minor}", self.mode.value]
        words += ["buffered"] if self.body_mode is BodyMode.BUFFERED else []
        words += ["https"] if self.is_https else []
        words += ["fail-open"] if self.failure_mode is FailureMode.FAIL_OPEN else []
        words += ["on", f"1.{self.runs_on}"] if self.runs_on is not None else []
        return "-".join(words)

    @property
    def steering(self) -> Steering:
        return wiring(IstioVersion(minor=self.minor)).steering

    @property
    def is_buffered(self) -> bool:
        """Whether the picker gets bodies as a whole."""
        return wiring(IstioVersion(minor=self.minor), body_mode=self.body_mode).body_mode is BodyMode.BUFFERED

    @property
    def host(self) -> str:
        """What a client writes into the Host header."""
        return {Mode.SIDECAR: PODS.host, Mode.AMBIENT_GATEWAY: "models.llm"}.get(self.mode, "llm.example.com")

    @property
    def other_host(self) -> str:
        """The host of the service that is none of ours."""
        return SHOP.host if self.mode is Mode.SIDECAR else "shop.example.com"

    @property
    def entry(self) -> str:
        """The listener that clients reach."""
        if self.mode is Mode.SIDECAR:
            return "0.0.0.0_8000"
        return "0.0.0.0_443" if self.is_https else "0.0.0.0_80"

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
                "routes": (RouteTarget(host=self.host, port=443 if self.names_port else None, pool=POOL),),
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

    def base(self, rules: Sequence[Mapping[str, Any]] | None = None) -> Proxy:
        """Return the proxy's configuration with the DestinationRules (its own), without the EnvoyFilters."""
        release = RELEASES[f"1.{self.runs_on or self.minor}"]
        if rules is None:
            rules = documents_of(self.documents(), "DestinationRule")
        if self.mode is Mode.SIDECAR:
            return sidecar_proxy(release, services=SERVICES, labels=CLIENT_LABELS, rules=rules)
        routes = [
            GatewayRoute(name="llm.llm-route.0", host=self.host, prefix="/v1", to={PODS: 1}),
            GatewayRoute(name="llm.llm-route.1", host=self.host, prefix="/denied", to={PODS: 1}),
            GatewayRoute(name="llm.llm-route.2", host=self.host, prefix="/slow", to={PODS: 1}),
            GatewayRoute(name="shop.catalog.0", host=self.other_host, prefix="/", to={SHOP: 1}),
        ]
        return gateway_proxy(
            release,
            is_https=self.is_https,
            services=SERVICES,
            namespace=self._gateway_namespace,
            routes=routes,
            rules=rules,
        )

    def applied(self) -> Applied:
        """Return the proxy's configuration with everything on it."""
        release = RELEASES[f"1.{self.runs_on or self.minor}"]
        return apply_envoy_filters(self.base(), documents_of(self.documents(), "EnvoyFilter"), release=release)

    @property
    def names_port(self) -> bool:
        """Whether the listener's port must be said: istiods that match no domain find a host by it."""
        return self.is_https and self.minor < DOMAIN_NAME_MATCH_FROM

    @property
    def _gateway_namespace(self) -> str:
        return "llm" if self.mode is Mode.AMBIENT_GATEWAY else "istio-ingress"


INSTALLATIONS = (
    *(Installation(minor=minor, mode=mode) for minor in (24, 26, 27, 30) for mode in Mode),
    *(Installation(minor=minor, mode=Mode.GATEWAY, body_mode=BodyMode.BUFFERED) for minor in (26, 27, 30)),
    *(Installation(minor=minor, mode=Mode.GATEWAY, is_https=True) for minor in (24, 30)),
    # Istio was upgraded, the installation not yet
    Installation(minor=24, mode=Mode.GATEWAY, runs_on=30),
    Installation(minor=27, mode=Mode.GATEWAY, runs_on=31),
)

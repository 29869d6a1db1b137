"""What istiod would send to a proxy, for tests that need no cluster: a base configuration and the EnvoyFilters on it.

`gateway` and `sidecar` build the base, `apply_envoy_filters` patches it by istiod's rules for one Istio release, and
`bootstrap` makes of the result a file that a real Envoy runs. Read from Istio's sources; none of its code is here.
"""

from tests.istiod.apply import Applied, Outcome, apply_envoy_filters
from tests.istiod.base import GatewayRoute, Proxy, gateway_proxy, sidecar_proxy
from tests.istiod.bootstrap import bootstrap, running_proxy
from tests.istiod.clusters import MeshService
from tests.istiod.releases import RELEASES, Release

__all__ = [
    "RELEASES",
    "Applied",
    "GatewayRoute",
    "MeshService",
    "Outcome",
    "Proxy",
    "Release",
    "apply_envoy_filters",
    "bootstrap",
    "gateway_proxy",
    "running_proxy",
    "sidecar_proxy",
]

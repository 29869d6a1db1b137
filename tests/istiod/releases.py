"""What each Istio release knows of Envoy's API, as far as an endpoint picker's EnvoyFilters use it.

istiod drops fields that it does not know and refuses types and enum names that it does not know, so what it knows
decides what reaches the proxy. Sources: the go-control-plane commit in each tag's go.mod and the registered types in
`pkg/config/xds/filter_types.gen.go`. What is not listed here is in every release from 1.24 on.
"""

from collections.abc import Mapping
from dataclasses import dataclass

EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3"
OVERRIDE_HOST = "envoy.extensions.load_balancing_policies.override_host.v3"

# the first minor release whose istiod knows a field
FIELDS: Mapping[str, int] = {
    f"{EXT_PROC}.ExternalProcessor.on_processing_response": 26,
    f"{EXT_PROC}.ExternalProcessor.status_on_error": 28,
    f"{EXT_PROC}.ExternalProcessor.processing_request_modifier": 28,
    f"{EXT_PROC}.ExternalProcessor.allow_content_length_header": 30,
    f"{EXT_PROC}.ExtProcOverrides.failure_mode_allow": 27,
    f"{EXT_PROC}.ExtProcOverrides.processing_request_modifier": 28,
    f"{OVERRIDE_HOST}.OverrideHost.selected_host_key": 30,
    "envoy.config.route.v3.Route.request_body_buffer_limit": 28,
    "envoy.config.route.v3.VirtualHost.request_body_buffer_limit": 28,
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions.hash_policy": 29,
}
# an enum's name; its number passes everywhere
ENUM_NAMES: Mapping[str, int] = {
    f"{EXT_PROC}.ProcessingMode.BodySendMode.FULL_DUPLEX_STREAMED": 25,
    f"{EXT_PROC}.ProcessingMode.BodySendMode.GRPC": 28,
}
# Packages whose messages an Any may hold, with the first minor release that registers them. A short list on purpose:
# what it lacks is refused here, and has to be looked up before it is added.
PACKAGES: Mapping[str, int] = {
    EXT_PROC: 24,
    OVERRIDE_HOST: 27,
    "envoy.extensions.common.matching.v3": 24,
    "envoy.extensions.filters.common.matcher.action.v3": 24,
    "envoy.extensions.filters.http.composite.v3": 24,
    "envoy.extensions.filters.http.cors.v3": 24,
    "envoy.extensions.filters.http.fault.v3": 24,
    "envoy.extensions.filters.http.header_mutation.v3": 24,
    "envoy.extensions.filters.http.header_to_metadata.v3": 24,
    "envoy.extensions.filters.http.local_ratelimit.v3": 24,
    "envoy.extensions.filters.http.lua.v3": 24,
    "envoy.extensions.filters.http.rbac.v3": 24,
    "envoy.extensions.filters.http.router.v3": 24,
    "envoy.extensions.filters.http.set_filter_state.v3": 24,
    "envoy.extensions.filters.http.set_metadata.v3": 24,
    "envoy.extensions.filters.network.http_connection_manager.v3": 24,
    "envoy.extensions.filters.network.tcp_proxy.v3": 24,
    "envoy.extensions.http.early_header_mutation.header_mutation.v3": 24,
    "envoy.extensions.load_balancing_policies.least_request.v3": 24,
    "envoy.extensions.load_balancing_policies.round_robin.v3": 24,
    "envoy.extensions.matching.common_inputs.network.v3": 24,
    "envoy.extensions.matching.input_matchers.metadata.v3": 24,
    "envoy.extensions.matching.input_matchers.runtime_fraction.v3": 24,
    "envoy.extensions.retry.host.previous_hosts.v3": 24,
    "envoy.extensions.transport_sockets.raw_buffer.v3": 24,
    "envoy.extensions.transport_sockets.tls.v3": 24,
    "envoy.extensions.upstreams.http.v3": 24,
    "envoy.type.matcher.v3": 24,
}
VHOST_DOMAIN_NAME = 26  # `vhost.domainName` is matched; before, it is silently taken for "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One Istio minor release, of istiod and of the proxy alike."""

    minor: int  # 27 is Istio 1.27

    @property
    def name(self) -> str:
        return f"1.{self.minor}"

    @property
    def proxy_version(self) -> str:
        """What the proxy says of itself; patches are guarded by it."""
        return f"1.{self.minor}.3"

    def knows_field(self, full_name: str) -> bool:
        return FIELDS.get(full_name, 0) <= self.minor

    def knows_enum_name(self, full_name: str) -> bool:
        return ENUM_NAMES.get(full_name, 0) <= self.minor

    def registers(self, package: str) -> bool:
        """Tell whether messages of this package may stand in an Any."""
        return package in PACKAGES and PACKAGES[package] <= self.minor


RELEASES: Mapping[str, Release] = {f"1.{minor}": Release(minor=minor) for minor in range(24, 32)}

"""Envoy's admin answers become facts, whatever form they come in."""

from typing import Any

from operate.doctor.facts import EnvoyFacts, EnvoyHost, PoolRoute
from operate.doctor.gather_admin import read_clusters, read_filters, read_pool_routes, read_routes
from operate.install.envoy_filters import REFUSE_UNPICKED, UNPICKED_FILTER

TYPE = "type.googleapis.com/envoy."
EXT_PROC = {"@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExternalProcessor"}


def dump(*http_filters: object) -> dict[str, object]:
    manager = {
        "@type": f"{TYPE}extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "http_filters": list(http_filters),
    }
    listener = {
        "@type": f"{TYPE}config.listener.v3.Listener",
        "filter_chains": [{"filters": [{"typed_config": manager}]}],
    }
    return {
        "configs": [
            {
                "@type": f"{TYPE}admin.v3.ListenersConfigDump",
                "dynamic_listeners": [{"active_state": {"listener": listener}}],
            },
            {
                "@type": f"{TYPE}admin.v3.ClustersConfigDump",
                "dynamic_active_clusters": [
                    {"cluster": {"@type": f"{TYPE}config.cluster.v3.Cluster", "name": "outbound|8000||pods"}}
                ],
            },
            {
                "@type": f"{TYPE}admin.v3.RoutesConfigDump",
                "dynamic_route_configs": [
                    {
                        "route_config": {
                            "@type": f"{TYPE}config.route.v3.RouteConfiguration",
                            "virtual_hosts": [{"routes": [{"route": {"cluster": "pods"}}, {"redirect": {}}]}],
                        }
                    }
                ],
            },
        ]
    }


def test_filters_are_found_in_dynamic_listeners_and_within_matchers() -> None:
    plain = {"name": "a", "typed_config": EXT_PROC}
    wrapped = {"name": "b", "typed_config": {"extension_config": {"typed_config": EXT_PROC}}}

    assert [each.name for each in read_filters(dump(plain, {"name": "router"}, wrapped))] == ["a", "b"]


def test_the_filter_that_sees_requests_is_the_picking_one_and_ours_goes_before_others() -> None:
    responses = {
        "name": "kvmesh-response",
        "typed_config": EXT_PROC | {"processing_mode": {"request_header_mode": "SKIP"}},
    }
    foreign = {"name": "audit", "typed_config": EXT_PROC}
    ours = {"name": "envoy.filters.http.ext_proc.kvmesh", "typed_config": EXT_PROC}
    facts = EnvoyFacts(url="http://e", filters=tuple(read_filters(dump(responses, foreign, ours))))
    picking = facts.picking_filter()

    assert picking is not None
    assert picking.name == "envoy.filters.http.ext_proc.kvmesh"
    assert [picking.mode(name) for name in ("request_header_mode", "request_body_mode")] == ["SEND", "NONE"]


def test_clusters_are_joined_with_the_addresses_that_envoy_has_now() -> None:
    socket = {"socket_address": {"address": "::1", "port_value": 8000}}
    statuses = {
        "cluster_statuses": [
            {
                "name": "outbound|8000||pods",
                "host_statuses": [
                    {
                        "address": socket,
                        "stats": [{"name": "cx_connect_fail", "value": "3"}, {"name": "cx_total", "value": "4"}],
                        "health_status": {"eds_health_status": "HEALTHY", "failed_active_health_check": True},
                    },
                    {"address": {"pipe": {"path": "/x"}}},
                ],
            }
        ]
    }
    [cluster] = read_clusters(dump(), statuses)

    assert cluster.hosts == (EnvoyHost(address="[::1]:8000", healthy=False, connections_failed=3, connections_made=4),)


def test_routes_are_those_that_lead_to_a_cluster() -> None:
    assert list(read_routes(dump())) == [{"cluster": "pods"}]


def test_an_answer_that_is_none_has_nothing_in_it() -> None:
    assert list(read_filters({"configs": [3, {"@type": "x.ListenersConfigDump"}]})) == []
    assert next(iter(read_clusters(dump(), None))).hosts == ()


def per_route(pool: str = "", **overrides: object) -> dict[str, Any]:
    """A route's own settings of the picking filter."""
    metadata = {"grpc_initial_metadata": [{"key": "x-kvmesh-pool", "value": pool}]} if pool else {}
    config = {"@type": f"{TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute", "overrides": metadata | overrides}
    return {"typed_per_filter_config": {"kvmesh": config}}


def refusing_unpicked(route: dict[str, Any]) -> dict[str, Any]:
    """The route, which refuses what nobody has picked for."""
    return {"typed_per_filter_config": route["typed_per_filter_config"] | {UNPICKED_FILTER: REFUSE_UNPICKED}}


def test_routes_that_name_a_pool_are_found_with_their_failure_mode_or_that_of_their_host() -> None:
    weighted = {"weighted_clusters": {"clusters": [{"name": "b1"}, {"name": "b2"}]}}
    hosts = [
        {
            "name": "h1",
            "routes": [
                {"name": "r1", "route": {"cluster": "a"}} | per_route("llm/a:8000", failure_mode_allow=True),
                {"name": "r2", "route": {"cluster": "other"}},
                {"name": "r3", "route": {"cluster": "a"}}
                | refusing_unpicked(per_route("llm/a", failure_mode_allow=True)),
                {"redirect": {}} | per_route("llm/a"),
            ],
        },
        per_route("llm/b", failure_mode_allow=False) | {"name": "h2", "routes": [{"route": weighted}]},
    ]
    table = {"@type": f"{TYPE}config.route.v3.RouteConfiguration", "virtual_hosts": hosts}
    section = {"@type": f"{TYPE}admin.v3.RoutesConfigDump", "static_route_configs": [{"route_config": table}]}
    assert list(read_pool_routes({"configs": [section]})) == [
        PoolRoute(name="r1", pool="llm/a", clusters=frozenset({"a"}), fails_open=True),
        PoolRoute(name="r3", pool="llm/a", clusters=frozenset({"a"}), fails_open=False),
        PoolRoute(name="h2", pool="llm/b", clusters=frozenset({"b1", "b2"}), fails_open=False),
    ]

"""The rules by which istiod applies EnvoyFilters, as the tests' own istiod keeps them."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.istiod import RELEASES, GatewayRoute, MeshService, Proxy, apply_envoy_filters, gateway_proxy, sidecar_proxy
from tests.istiod.apply import HCM, Applied
from tests.istiod.envoy_api import to_json
from tests.istiod.filters import RefusedFilterError

PODS = MeshService(namespace="llm", name="vllm", port=8000)
HTTP2 = "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
OVERRIDE_HOST = "type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
EXT_PROC = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
LUA = "type.googleapis.com/envoy.extensions.filters.http.lua.v3.Lua"
CHAIN = {"filterChain": {"filter": {"name": HCM}}}
BEFORE_ROUTER = {"filterChain": {"filter": {"name": HCM, "subFilter": {"name": "envoy.filters.http.router"}}}}
CLUSTER = {"cluster": {"service": PODS.host, "portNumber": 8000}}


def gateway(minor: int = 27, **further: Any) -> Proxy:
    route = GatewayRoute(name="llm.route.0", host="llm.example.com", prefix="/v1", to={PODS: 1})
    return gateway_proxy(RELEASES[f"1.{minor}"], routes=[route], services=[PODS], **further)


def patch(apply_to: str, operation: str, value: Any = None, **match: Any) -> dict[str, Any]:
    document = {"applyTo": apply_to, "match": {"context": "GATEWAY", **match}, "patch": {"operation": operation}}
    if value is not None:
        document["patch"]["value"] = value  # type: ignore[index]
    return document


def envoy_filter(*patches: Mapping[str, Any], name: str = "own", namespace: str = "istio-ingress", **spec: Any) -> Any:
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": name, "namespace": namespace} | spec.pop("metadata", {}),
        "spec": {"configPatches": list(patches), **spec},
    }


def applied(*documents: Any, minor: int = 27, proxy: Proxy | None = None) -> Applied:
    return apply_envoy_filters(proxy or gateway(minor), documents, release=RELEASES[f"1.{minor}"])


def http_filter(name: str) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": LUA, "default_source_code": {"inline_string": ""}}}


def filter_names(result: Applied) -> list[str]:
    [chain] = to_json(result.proxy.listeners[0])["filter_chains"]
    return [each["name"] for each in chain["filters"][0]["typed_config"]["http_filters"]]


def cluster(result: Applied) -> dict[str, Any]:
    return to_json(result.proxy.clusters[0])


def test_a_merge_appends_to_lists_so_that_a_second_policy_is_never_the_first() -> None:
    def policy(name: str) -> Any:
        config = {"typed_extension_config": {"name": name, "typed_config": {"@type": OVERRIDE_HOST}}}
        return patch("CLUSTER", "MERGE", {"load_balancing_policy": {"policies": [config]}}, **CLUSTER)

    result = applied(envoy_filter(policy("second"), priority=10), envoy_filter(policy("first"), name="other"))

    policies = cluster(result)["load_balancing_policy"]["policies"]
    assert [each["typed_extension_config"]["name"] for each in policies] == ["first", "second"]


def test_a_merged_duration_replaces_the_old_one_whole() -> None:
    rule = {"spec": {"host": PODS.host, "trafficPolicy": {"connectionPool": {"tcp": {"connectTimeout": "1.5s"}}}}}
    before = gateway(rules=[rule])

    result = applied(envoy_filter(patch("CLUSTER", "MERGE", {"connect_timeout": "3s"}, **CLUSTER)), proxy=before)

    assert to_json(before.clusters[0])["connect_timeout"] == "1.500s"
    assert cluster(result)["connect_timeout"] == "3s"


def test_a_merged_entry_of_a_map_replaces_the_old_one_whole() -> None:
    rule = {"spec": {"host": PODS.host, "trafficPolicy": {"connectionPool": {"http": {"idleTimeout": "4s"}}}}}
    options = {"@type": HTTP2, "explicit_http_config": {"http2_protocol_options": {}}}
    key = HTTP2.removeprefix("type.googleapis.com/")
    merging = patch("CLUSTER", "MERGE", {"typed_extension_protocol_options": {key: options}}, **CLUSTER)

    result = applied(envoy_filter(merging), proxy=gateway(rules=[rule]))

    assert cluster(result)["typed_extension_protocol_options"] == {key: options}


def test_a_patch_with_a_transport_socket_loses_everything_else() -> None:
    raw = {"@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"}
    socket = {"name": "envoy.transport_sockets.raw_buffer", "typed_config": raw}
    merging = patch("CLUSTER", "MERGE", {"transport_socket": socket, "connect_timeout": "3s"}, **CLUSTER)

    assert cluster(applied(envoy_filter(merging))) == to_json(gateway().clusters[0])


def test_fields_that_the_release_does_not_know_are_dropped_and_named() -> None:
    config = {"@type": EXT_PROC, "status_on_error": {"code": "ServiceUnavailable"}, "stat_prefix": "x"}
    inserting = patch("HTTP_FILTER", "INSERT_FIRST", {"name": "p", "typed_config": config}, listener=CHAIN)

    dropped = {
        minor: applied(envoy_filter(inserting), minor=minor).dropped()  # no crash, no refusal
        for minor in (27, 28)
    }

    assert dropped == {27: {"istio-ingress/own[0]": ("typed_config.status_on_error",)}, 28: {}}


@pytest.mark.parametrize(
    ("minor", "value", "words"),
    [
        (26, {"@type": OVERRIDE_HOST}, "could not resolve Any message type"),
        (27, {"@type": "type.googleapis.com/not.there.Message"}, "could not resolve Any message type"),
        (27, {"stat_prefix": "x"}, "@type"),
        (24, {"@type": EXT_PROC, "processing_mode": {"request_body_mode": "FULL_DUPLEX_STREAMED"}}, "unknown value"),
        (27, {"@type": EXT_PROC, "message_timeout": "soon"}, "no duration"),
    ],
)
def test_types_enum_names_and_values_that_istiod_cannot_read_are_refused(minor: int, value: Any, words: str) -> None:
    document = envoy_filter(patch("HTTP_FILTER", "INSERT_FIRST", {"name": "p", "typed_config": value}, listener=CHAIN))

    with pytest.raises(RefusedFilterError, match=words):
        applied(document, minor=minor)


def test_the_number_of_an_enum_passes_everywhere() -> None:
    config = {"@type": EXT_PROC, "processing_mode": {"request_body_mode": 4}, "message_timeout": "1m30s"}
    inserting = patch("HTTP_FILTER", "INSERT_FIRST", {"name": "p", "typed_config": config}, listener=CHAIN)

    assert filter_names(applied(envoy_filter(inserting), minor=24))[0] == "p"


def test_a_guard_does_not_save_a_patch_that_istiod_cannot_read() -> None:
    guarded = patch(
        "HTTP_FILTER",
        "INSERT_FIRST",
        {"name": "p", "typed_config": {"@type": OVERRIDE_HOST}},
        listener=CHAIN,
        proxy={"proxyVersion": r"^1\.27.*"},
    )

    with pytest.raises(RefusedFilterError):
        applied(envoy_filter(guarded), minor=24)


def test_filters_are_applied_by_priority_then_the_root_namespace_first_then_by_age() -> None:
    def first(name: str, **further: Any) -> Any:
        return envoy_filter(
            patch("HTTP_FILTER", "INSERT_FIRST", http_filter(name), listener=CHAIN), name=name, **further
        )

    result = applied(
        first("late", priority=100),
        first("young", metadata={"creationTimestamp": "2026-02-01T00:00:00Z"}),
        first("old", metadata={"creationTimestamp": "2026-01-01T00:00:00Z"}),
        first("root", namespace="istio-system", metadata={"creationTimestamp": "2026-03-01T00:00:00Z"}),
    )

    assert filter_names(result)[:4] == ["late", "young", "old", "root"]


def test_before_the_router_means_right_before_it_and_without_a_subfilter_first() -> None:
    result = applied(
        envoy_filter(
            patch("HTTP_FILTER", "INSERT_BEFORE", http_filter("last"), listener=BEFORE_ROUTER),
            patch("HTTP_FILTER", "INSERT_BEFORE", http_filter("first"), listener=CHAIN),
        )
    )

    names = filter_names(result)
    assert (names[0], names[-2:]) == ("first", ["last", "envoy.filters.http.router"])


def test_filters_of_other_namespaces_and_other_workloads_are_not_for_the_proxy() -> None:
    inserting = patch("HTTP_FILTER", "INSERT_FIRST", http_filter("p"), listener=CHAIN)
    strangers = (
        envoy_filter(inserting, namespace="llm"),
        envoy_filter(inserting, workloadSelector={"labels": {"app": "other"}}),
        envoy_filter(inserting, targetRefs=[{"kind": "Gateway", "name": "other"}]),
    )

    assert applied(*strangers).outcomes == ()
    assert "p" in filter_names(
        applied(envoy_filter(inserting, targetRefs=[{"kind": "Gateway", "name": "inference-gateway"}]))
    )


def test_what_matches_nothing_is_said() -> None:
    nowhere = {"routeConfiguration": {"vhost": {"name": "other.example.com:80"}}}

    result = applied(envoy_filter(patch("VIRTUAL_HOST", "MERGE", {"require_tls": "NONE"}, **nowhere)))

    assert result.unmatched() == ["istio-ingress/own[0]"]


@pytest.mark.parametrize(("minor", "changed"), [(25, True), (26, False)])
def test_a_domain_is_matched_from_1_26_on_and_means_any_host_before(minor: int, changed: bool) -> None:
    other = {"routeConfiguration": {"vhost": {"domainName": "other.example.com"}}}

    result = applied(envoy_filter(patch("HTTP_ROUTE", "MERGE", {"name": "renamed"}, **other)), minor=minor)

    assert (result.unmatched() == []) is changed


def test_a_patch_for_what_goes_out_of_a_sidecar_leaves_what_comes_in_alone() -> None:
    proxy = sidecar_proxy(RELEASES["1.27"], services=[PODS], namespace="istio-ingress", labels={})
    inserting = patch("HTTP_FILTER", "INSERT_FIRST", http_filter("p"), listener=CHAIN) | {}
    inserting["match"]["context"] = "SIDECAR_OUTBOUND"

    result = applied(envoy_filter(inserting), proxy=proxy)

    assert [each.where for each in result.outcomes] == [("0.0.0.0_8000",)]
    assert to_json(result.proxy.listeners[-1]) == to_json(proxy.listeners[-1])


def test_the_cluster_of_a_passed_through_service_dials_what_it_is_told() -> None:
    policy = {"loadBalancer": {"simple": "PASSTHROUGH"}, "tls": {"mode": "ISTIO_MUTUAL"}}

    [built] = gateway(rules=[{"spec": {"host": PODS.host, "trafficPolicy": policy}}]).clusters

    found = to_json(built)
    assert (found["type"], found["lb_policy"]) == ("ORIGINAL_DST", "CLUSTER_PROVIDED")
    assert found["transport_socket"]["typed_config"]["sni"] == f"outbound_.8000_._.{PODS.host}"
    assert "transport_socket_matches" not in found

"""What would keep an installation from working is said before anything is applied."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from operate.install.cluster import InstallError
from operate.install.mesh_facts import MeshFacts, describe_caller, read_mesh
from operate.install.objects import INSTALLATION, Document, Kind
from operate.install.plan import ClientsTarget, InstallPlan, IstioVersion, Mode
from operate.install.preflight import Preflight, judge
from tests.unit.operate_install.sample_plans import plan

SAMPLE = plan(31)
[POOL] = SAMPLE.pools
[GATEWAY] = SAMPLE.gateways
[ROUTE] = SAMPLE.routes


def made(kind: str, namespace: str, name: str, *, labels: dict[str, str] | None = None, **content: Any) -> Document:
    return {"kind": kind, "metadata": {"namespace": namespace, "name": name, "labels": labels or {}}, **content}


def proxy_pod(image: str, *, container: str = "istio-proxy") -> Document:
    return made("Pod", GATEWAY.namespace, "proxy", spec={"containers": [{"name": container, "image": image}]})


def http_route(*hosts: str, backend: str = POOL.name, gateway: str = GATEWAY.name) -> Document:
    parents = [{"namespace": GATEWAY.namespace, "name": gateway}]
    rules = [{"backendRefs": [{"name": backend, "port": POOL.port}]}]
    return made("HTTPRoute", POOL.namespace, "chat", spec={"parentRefs": parents, "hostnames": hosts, "rules": rules})


def rule(namespace: str, host: str, **spec: Any) -> Document:
    return made("DestinationRule", namespace, "theirs", spec={"host": host, **spec})


def pool_pod(**config: Any) -> Document:
    arguments = ["--model", "llama", "--kv-events-config", json.dumps(config)] if config else ["--model", "llama"]
    return started_with(arguments)


def started_with(arguments: Sequence[str]) -> Document:
    return made("Pod", POOL.namespace, "vllm", spec={"containers": [{"name": "vllm", "args": arguments}]})


def mesh(**changes: Any) -> MeshFacts:
    listeners = [{"port": 80, "protocol": "HTTP"}]
    facts = MeshFacts(
        istiods=[proxy_pod("docker.io/istio/pilot:1.31.0", container="discovery")],
        gateways=[made("Gateway", GATEWAY.namespace, GATEWAY.name, spec={"listeners": listeners})],
        http_routes=[http_route(ROUTE.host)],
        services={POOL.identity: made("Service", POOL.namespace, POOL.name)},
        callers={describe_caller(GATEWAY): [proxy_pod("docker.io/istio/proxyv2:1.31.0-distroless")]},
    )
    return replace(facts, **changes)


def judged(facts: MeshFacts, install: InstallPlan = SAMPLE, *, release_is_given: bool = True) -> Preflight:
    return judge(install, facts, release_is_given=release_is_given)


def test_a_mesh_that_fits_is_left_as_it_is() -> None:
    assert judged(mesh()) == Preflight(plan=SAMPLE, refusals=[], warnings=[], notes=[])


def test_another_trust_domain_is_taken_from_the_mesh_unless_one_is_given() -> None:
    facts = mesh(mesh_config={"trustDomain": "prod.example.com"})
    found = judged(facts)
    assert found.plan.trust_domain == "prod.example.com"
    assert [note for note in found.notes if "prod.example.com" in note] == list(found.notes)
    given = replace(SAMPLE, trust_domain="other.example.com")
    assert judged(facts, given).plan == given


def test_the_release_is_the_oldest_proxy_s() -> None:
    pods = [proxy_pod("registry:5000/istio/proxyv2:1.29.2"), proxy_pod("istio/proxyv2:1.30.0")]
    found = judged(mesh(callers={describe_caller(GATEWAY): pods}), release_is_given=False)
    assert found.plan.istio == IstioVersion(minor=29)
    assert found.refusals == []
    assert "half upgraded (1.29, 1.30, 1.31)" in found.warnings[0]


def test_a_release_that_is_newer_than_a_proxy_is_refused() -> None:
    pods = [proxy_pod("istio/proxyv2:1.28.8")]
    [refusal] = judged(mesh(callers={describe_caller(GATEWAY): pods}), plan(30)).refusals
    assert "--istio-version 1.28" in refusal


@pytest.mark.parametrize("is_given", [True, False])
def test_an_istio_that_is_too_old_is_refused_with_what_to_do(is_given: bool) -> None:
    pods = [proxy_pod("istio/proxyv2:1.27.5")]
    [refusal] = judged(mesh(callers={describe_caller(GATEWAY): pods}), release_is_given=is_given).refusals
    assert refusal == "Istio 1.27 is too old: kvmesh needs 1.28 (Envoy 1.36) or newer. Upgrade Istio first"


def test_a_release_that_is_nowhere_to_be_found_must_be_named() -> None:
    nowhere = mesh(istiods=[], callers={})
    [refusal] = judged(nowhere, release_is_given=False).refusals
    assert "--istio-version" in refusal
    assert judged(nowhere).refusals == []


def test_a_gateway_that_is_not_there_is_refused_with_those_that_are() -> None:
    other = made("Gateway", "shop", "front", spec={"listeners": []})
    refusals = judged(mesh(gateways=[other])).refusals
    assert refusals[0] == f"--gateway {GATEWAY.namespace}/{GATEWAY.name}: there is no such Gateway; here: shop/front"


def test_a_gateway_by_labels_needs_pods() -> None:
    classic = replace(GATEWAY, selector={"istio": "ingressgateway"})
    install = replace(SAMPLE, gateways=(classic,))
    assert "no pod there has the labels istio=ingressgateway" in judged(mesh(callers={}), install).refusals[0]


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (replace(ROUTE, host="x.example.com"), "no route of the gateway has this host; here: llm.example.com"),
        (replace(ROUTE, route="llm.chat.7"), "there is no such route; here: llm.chat.0"),
        (replace(ROUTE, port=8443), "no listener of the gateway has this port; here: 80"),
    ],
)
def test_a_host_route_or_port_that_is_not_there_is_refused(route: Any, words: str) -> None:
    assert words in judged(mesh(), replace(SAMPLE, routes=(route,))).refusals[0]


def test_a_route_through_another_gateway_does_not_count() -> None:
    assert "there is none at all" in judged(mesh(http_routes=[http_route(ROUTE.host, gateway="other")])).refusals[0]


def test_other_backends_of_a_host_are_warned_of() -> None:
    two = mesh(http_routes=[http_route(ROUTE.host), http_route(ROUTE.host, backend="front")])
    [warning] = judged(two).warnings
    assert "also leads to llm/front" in warning
    assert judged(two, replace(SAMPLE, routes=(replace(ROUTE, route="llm.chat.0"),))).warnings == []


@pytest.mark.parametrize(
    ("namespace", "host"),
    [
        (POOL.namespace, POOL.host),
        (POOL.namespace, POOL.name),
        (GATEWAY.namespace, f"{POOL.name}.{POOL.namespace}"),
        ("istio-system", "*.svc.cluster.local"),
    ],
)
def test_a_rule_of_theirs_takes_the_place_of_ours(namespace: str, host: str) -> None:
    found = judged(mesh(rules=[rule(namespace, host)]))
    assert (found.refusals, found.plan.pools[0].has_rule, found.plan.routes[0].pool.has_rule) == ([], True, True)
    assert f"DestinationRule {namespace}/theirs stays in force" in found.notes[0]


@pytest.mark.parametrize(
    "other",
    [
        rule("shop", POOL.host),  # of a namespace that does not count
        rule(POOL.namespace, "catalog.llm.svc.cluster.local"),
        rule(POOL.namespace, POOL.host, exportTo=["."]),  # not for the gateway
        made(
            "DestinationRule", POOL.namespace, "ours", labels={INSTALLATION: "kvmesh-system"}, spec={"host": POOL.host}
        ),
    ],
)
def test_a_rule_that_is_not_for_the_gateway_or_is_ours_does_not_count(other: Document) -> None:
    assert judged(mesh(rules=[other])).plan == SAMPLE


@pytest.mark.parametrize("of_mesh", [True, False])
def test_weights_by_locality_are_refused_with_what_to_write(of_mesh: bool) -> None:
    weights = {"localityLbSetting": {"distribute": [{"from": "a", "to": {"b": 100}}]}}
    policy = {} if of_mesh else {"trafficPolicy": {"loadBalancer": {"simple": "RANDOM", **weights}}}
    facts = mesh(rules=[rule(POOL.namespace, POOL.host, **policy)], mesh_config=weights if of_mesh else {})
    [refusal] = judged(facts).refusals
    assert "enabled: false" in refusal


@pytest.mark.parametrize(
    ("selector", "is_seen"),
    [
        ({"matchLabels": {"mesh": "on"}}, False),
        ({"matchLabels": {"kubernetes.io/metadata.name": "kvmesh-system"}}, True),
        ({"matchExpressions": [{"key": "mesh", "operator": "In", "values": ["on"]}]}, False),
        ({"matchExpressions": [{"key": "mesh", "operator": "DoesNotExist"}]}, True),
    ],
)
def test_a_mesh_that_does_not_look_at_our_namespace_is_refused(selector: dict[str, Any], is_seen: bool) -> None:
    refusals = judged(mesh(mesh_config={"discoverySelectors": [selector]})).refusals
    assert [("discoverySelectors" in each) for each in refusals] == ([] if is_seen else [True])


def test_a_sidecar_resource_that_hides_the_picker_from_clients_is_refused() -> None:
    install = plan(31, Mode.SIDECAR, clients=(ClientsTarget(namespace="apps", selector={"a": "b"}),))
    narrow = made("Sidecar", "apps", "default", spec={"egress": [{"hosts": ["./*", "istio-system/*"]}]})
    wide = made("Sidecar", "apps", "default", spec={"egress": [{"hosts": ["./*", "kvmesh-system/*"]}]})
    facts = mesh(callers={"apps/a=b": [proxy_pod("istio/proxyv2:1.31.0")]})
    assert "add kvmesh-system/* to its egress" in judged(replace(facts, sidecars=[narrow]), install).refusals[0]
    assert judged(replace(facts, sidecars=[wide]), install).refusals == []


def test_pods_that_publish_nothing_or_on_other_ports_are_warned_of() -> None:
    [nothing] = judged(mesh(pods={POOL.identity: [pool_pod()]})).warnings
    assert "publish no KV events" in nothing
    facts = mesh(pods={POOL.identity: [pool_pod(endpoint="tcp://*:5557", replay_endpoint="tcp://*:5657")]})
    [other] = judged(facts).warnings
    assert "replay_endpoint of its pods is port 5657" in other
    unselected = replace(SAMPLE, pools=(replace(POOL, selector=None),))
    assert judged(facts, unselected).warnings == []  # nobody opens ports there


def test_a_gateway_without_pods_is_warned_of() -> None:
    facts = mesh(callers={describe_caller(GATEWAY): []})
    assert "has no pods now" in judged(facts).warnings[0]


class Closed:
    """An API of which nothing but Services may be read."""

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> Document:
        raise AssertionError(f"{document} is applied while it is only looked around")

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        raise AssertionError(f"{kind} {namespace}/{name} is deleted while it is only looked around")

    def serves(self, kind: Kind) -> bool:
        return True

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        if kind.name != "Service":
            raise InstallError(f"cannot get {kind.plural}: forbidden")
        return made("Service", namespace or "", name)

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        raise InstallError(f"cannot list {kind.plural}: forbidden")


def test_what_may_not_be_read_is_said_and_refuses_nothing() -> None:
    facts = read_mesh(Closed(), SAMPLE)
    found = judged(facts)
    assert found.refusals == []
    assert "not looked at: cannot list gateways: forbidden" in found.warnings


def test_a_cluster_without_istio_is_left_to_the_installer() -> None:
    assert judged(MeshFacts(has_istio=False), release_is_given=False) == Preflight(plan=SAMPLE)


JSON_CONFIG = '{"publisher": "zmq", "replay_endpoint": "tcp://*:9"}'


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kv-events-config", JSON_CONFIG],
        [f"--kv-events-config={JSON_CONFIG}"],
        ["--kv-events-config.publisher", "zmq", "--kv-events-config.replay-endpoint=tcp://*:9"],
        ["--kv_events_config.publisher=zmq", "--kv_events_config.replay_endpoint", "tcp://*:9"],
        ["-c", f"exec vllm serve llama --kv-events-config '{JSON_CONFIG}' --port 8000"],
        ["-c", 'vllm serve llama --kv-events-config "' + JSON_CONFIG.replace('"', '\\"') + '"'],
        ["-c", "vllm serve llama --kv-events-config.publisher zmq --kv-events-config.replay_endpoint=tcp://*:9"],
    ],
)
def test_the_events_config_is_read_in_every_form_that_vllm_takes(arguments: list[str]) -> None:
    pods = {
        POOL.identity: [made("Pod", POOL.namespace, "vllm", spec={"containers": [{"name": "v", "args": arguments}]})]
    }
    pool = replace(POOL, selector={"app": "vllm"})
    warnings = judged(mesh(pods=pods), replace(SAMPLE, pools=(pool,))).warnings
    assert not any("publish no KV events" in warning for warning in warnings), warnings
    assert any("replay_endpoint of its pods is port 9" in warning for warning in warnings), warnings


@pytest.mark.parametrize("arguments", [["--kv-events-config", "{"], ["-c", "vllm --kv-events-config 'x"], ["serve"]])
def test_a_command_line_without_a_readable_events_config_is_warned_of(arguments: list[str]) -> None:
    pods = {
        POOL.identity: [made("Pod", POOL.namespace, "vllm", spec={"containers": [{"name": "v", "args": arguments}]})]
    }
    assert any("publish no KV events" in warning for warning in judged(mesh(pods=pods)).warnings)

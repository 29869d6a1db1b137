"""How pools, gateways, hosts and clients are written on the command line."""

from dataclasses import replace
from typing import Any

import pytest

from extproc.errors import ConfigError
from operate.install.parse_targets import parse_clients, parse_gateway, parse_hosts, parse_pools
from operate.install.plan import (
    BodyMode,
    ClientsTarget,
    FailureMode,
    GatewayTarget,
    MeshMembership,
    Mode,
    PoolTarget,
    RedisKind,
    RouteTarget,
    Scope,
)
from operate.install.render import render
from tests.unit.operate_install.sample_plans import plan
from tools.kustomize_tree import SIDECAR

LLAMA = PoolTarget(namespace="llm", name="llama")
QWEN = PoolTarget(namespace="llm", name="qwen", port=80, pod_port=8000)


def test_a_pool_s_ports_may_be_left_out() -> None:
    assert parse_pools(["llm/llama", "llm/qwen:80:8000"]) == (LLAMA, QWEN)
    assert (LLAMA.api_port, QWEN.api_port) == (8000, 8000)


def test_labels_belong_to_the_pool_that_they_name() -> None:
    [pool] = parse_pools(["llm/llama"], selectors=["llm/llama=app=llama,tier=gpu"])
    assert pool.selector == {"app": "llama", "tier": "gpu"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "istio-ingress/llm",
            GatewayTarget(
                namespace="istio-ingress",
                name="llm",
                selector={"gateway.networking.k8s.io/gateway-name": "llm"},
                service_account="llm-istio",
            ),
        ),
        (
            "istio-system/istio-ingressgateway@istio=ingressgateway@istio-ingressgateway-service-account",
            GatewayTarget(
                namespace="istio-system",
                name="istio-ingressgateway",
                selector={"istio": "ingressgateway"},
                service_account="istio-ingressgateway-service-account",
            ),
        ),
        (
            "edge/gw@app=gw",
            GatewayTarget(namespace="edge", name="gw", selector={"app": "gw"}, service_account="gw"),
        ),
    ],
)
def test_a_gateway_is_a_resource_or_pods_with_labels(text: str, expected: GatewayTarget) -> None:
    assert parse_gateway(text) == expected


def test_clients_have_a_label_of_ours_unless_others_are_named() -> None:
    assert parse_clients("apps") == ClientsTarget(namespace="apps", selector={"kvmesh.io/client": "true"})
    assert parse_clients("apps@app=chat") == ClientsTarget(namespace="apps", selector={"app": "chat"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("llm.example.com", RouteTarget(host="llm.example.com", pool=LLAMA)),
        ("llm.example.com:8080", RouteTarget(host="llm.example.com", port=8080, pool=LLAMA)),
        ("*", RouteTarget(host="*", pool=LLAMA)),
        ("*.example.com/llm.chat.0", RouteTarget(host="*.example.com", route="llm.chat.0", pool=LLAMA)),
        ("a.b=llm/llama", RouteTarget(host="a.b", pool=LLAMA)),
    ],
)
def test_a_host_may_name_port_route_and_pool(text: str, expected: RouteTarget) -> None:
    assert parse_hosts([text], [LLAMA]) == (expected,)


@pytest.mark.parametrize("text", ["llm", "llm/", "/llama", "llm/llama/x", "llm/llama:0", "llm/llama:x", "llm/l:1:2:3"])
def test_a_pool_that_cannot_be_read_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--pool"):
        parse_pools([text])


@pytest.mark.parametrize("text", ["", "UPPER.example", "a..b", "h:99999", "h=llm/other", "-h", "h:"])
def test_a_host_that_cannot_be_read_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ConfigError, match="--hostname"):
        parse_hosts([text], [LLAMA])


def test_with_several_pools_a_host_must_say_which() -> None:
    with pytest.raises(ConfigError, match="there are 2 pools; write HOST=NAMESPACE/POOL"):
        parse_hosts(["llm.example.com"], [LLAMA, QWEN])


@pytest.mark.parametrize("text", ["gw", "ns/gw@", "ns/gw@label", "ns/gw@a=b@c@d"])
def test_a_gateway_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--gateway"):
        parse_gateway(text)


def test_labels_of_an_unknown_pool_are_refused() -> None:
    with pytest.raises(ConfigError, match="--pool-selector: no --pool is called llm/other"):
        parse_pools(["llm/llama"], selectors=["llm/other=a=b"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pools": ()}, "--pool is missing"),
        ({"gateways": ()}, "--mode gateway needs --gateway"),
        ({"routes": ()}, "--mode gateway needs --hostname"),
        ({"mode": Mode.SIDECAR, "clients": ()}, "--mode sidecar needs --clients"),
        (
            {"mode": Mode.SIDECAR, "clients": (ClientsTarget(namespace="apps", selector={}),)},
            "without labels the picker's own sidecar would ask the picker",
        ),
        ({"mode": Mode.AMBIENT_GATEWAY}, "--membership ambient"),
        ({"namespace": "Kvmesh"}, "--namespace: 'Kvmesh' is no Kubernetes name"),
        ({"redis": RedisKind.EXTERNAL}, "--redis is missing"),
        ({"redis": RedisKind.EXTERNAL, "redis_url": "http://redis"}, "must begin with one of"),
        (
            {"redis": RedisKind.EXTERNAL, "redis_url": "redis://:secret@redis:6379/0"},
            "a password does not belong into a URL",
        ),
        ({"picker_replicas": 4, "picker_replicas_max": 3}, "--max-replicas 3: is below --replicas 4"),
        ({"scope": Scope.NAMESPACED, "root_namespace": "istio-system"}, "--root-namespace"),
        ({"redis_ca_secret": "ca"}, "--redis-ca-secret: is for a Redis of your own, and --redis is missing"),
        ({"pod_key_secret": "x y"}, "--pod-key-secret: 'x y' is no Kubernetes name"),
        ({"pod_key_secret_key": "a/b"}, "--pod-key-secret-key: 'a/b' is no key of a Secret"),
        ({"redis_password_secret": "x y"}, "--redis-password-secret: 'x y' is no Kubernetes name"),
        (
            {"redis": RedisKind.EXTERNAL, "redis_url": "redis://:a/b@redis:6379/0"},
            "a password does not belong into a URL",
        ),
        (
            {"redis": RedisKind.EXTERNAL, "redis_url": "redis://redis:6379/0?password=secret"},
            "a password does not belong into a URL",
        ),
        ({"redis": RedisKind.EXTERNAL, "redis_url": "unix:///redis.sock"}, "must begin with one of"),
        (
            {"clients": (ClientsTarget(namespace="apps", selector={"a": "b"}),)},
            "--clients: not with --mode gateway",
        ),
        ({**SIDECAR, "gateways": (parse_gateway("a/b"),)}, "--gateway and --hostname: not with --mode sidecar"),
        ({"gateways": (parse_gateway("a/b@c=d@"),)}, "--gateway: '' is no Kubernetes name"),
        ({"pools": (LLAMA, replace(LLAMA, port=8001))}, "--pool: llm/llama is given twice"),
        (
            {"failure_mode": FailureMode.FAIL_OPEN, "body_mode": BodyMode.DUPLEX},
            "cannot fail open once a byte",
        ),
        ({"gateways": (parse_gateway("a/b"), parse_gateway("a/b"))}, "--gateway: a/b is given twice"),
    ],
)
def test_contradictions_are_refused_before_anything_is_rendered(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render(plan(**{"membership": MeshMembership.SIDECAR, **changes}))
    assert words in str(caught.value)


def test_two_pools_whose_objects_would_have_one_name_are_refused() -> None:
    pools = (
        PoolTarget(namespace="llm", name="a", selector={"app": "a"}),
        PoolTarget(namespace="llm", name="a-pods", selector={"app": "b"}),
    )
    routes = tuple(RouteTarget(host=f"{pool.name}.example.com", pool=pool) for pool in pools)
    with pytest.raises(ConfigError, match="--pool: two of them need a DestinationRule llm/kvmesh-a-pods"):
        render(plan(pools=pools, routes=routes))


@pytest.mark.parametrize(
    "text", ["llm/llama=app", "llm/llama=app=a b", "llm/llama==a", "llm/llama=-a=b", "llm/llama=a=b-"]
)
def test_labels_that_kubernetes_would_refuse_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="labels are written NAME=VALUE"):
        parse_pools(["llm/llama"], selectors=[text])


def test_a_pool_that_no_host_leads_to_is_refused() -> None:
    other = PoolTarget(namespace="llm", name="other")
    with pytest.raises(ConfigError, match="--hostname: none leads to llm/other"):
        render(plan(pools=(*plan().pools, other)))

"""What every installation has in common: safe pods, known settings, labels, order, rights."""

import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.errors import ConfigError
from operate.install.envoy_filters import envoy_filters
from operate.install.objects import INSTALLATION, KINDS, OWNED
from operate.install.plan import InstallPlan, MeshMembership, Mode, PoolTarget, RedisKind, RouteTarget, Scope
from operate.install.render import render
from tests.unit.operate_install.sample_plans import MODES, every_plan, one, plan

PLANS = every_plan()


@pytest.fixture(params=list(PLANS))
def rendered(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return render(PLANS[request.param])


def workloads(documents: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (each for each in documents if each["kind"] in {"Deployment", "StatefulSet"})


def test_every_container_meets_the_restricted_pod_standard(rendered: list[dict[str, Any]]) -> None:
    for workload in workloads(rendered):
        spec = workload["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
            assert "memory" in container["resources"]["limits"]


def test_only_those_that_ask_the_api_get_a_token(rendered: list[dict[str, Any]]) -> None:
    tokens = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]["automountServiceAccountToken"]
        for each in workloads(rendered)
    }
    assert tokens.pop("kvmesh-redis", False) is False
    assert tokens == {"kvmesh-indexer": True, "kvmesh-picker": True}
    assert all(not each["automountServiceAccountToken"] for each in rendered if each["kind"] == "ServiceAccount")


def test_everything_is_of_a_known_kind_appears_once_and_can_be_found_again(rendered: list[dict[str, Any]]) -> None:
    kinds = {kind.name: kind for kind in KINDS}
    keys = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in rendered]
    assert len(set(keys)) == len(keys)
    for each in rendered:
        kind = kinds[each["kind"]]
        assert each["apiVersion"] == kind.api_version
        assert kind.namespaced == ("namespace" in each["metadata"])
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "kvmesh-install"
        assert labels["kvmesh.io/installation"] == "kvmesh-system"


def test_filters_come_last_and_the_namespace_first(rendered: list[dict[str, Any]]) -> None:
    kinds = [each["kind"] for each in rendered]
    assert kinds[0] == "Namespace"
    assert kinds[-1] == "EnvoyFilter"
    assert kinds.index("EnvoyFilter") > max(kinds.index("Deployment"), kinds.index("Service"))


def test_services_and_budgets_select_the_pods_of_their_workload(rendered: list[dict[str, Any]]) -> None:
    pods = {each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"] for each in workloads(rendered)}
    for each in rendered:
        name, spec = each["metadata"]["name"], each.get("spec", {})
        if name not in pods or each["kind"] not in {"Service", "PodDisruptionBudget", "NetworkPolicy"}:
            continue
        selector = spec.get("podSelector", spec["selector"] if each["kind"] == "Service" else spec.get("selector"))
        assert selector.get("matchLabels", selector).items() <= pods[name].items()


@pytest.mark.parametrize("seconds", [10, 60, 300])
def test_a_picker_is_given_the_time_to_drain(seconds: int) -> None:
    picker = one(render(plan(drain_seconds=seconds)), "Deployment", "kvmesh-picker")["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in picker["containers"][0]["env"]}
    assert environment["KVMESH_DRAIN_SECONDS"] == str(seconds)
    assert picker["terminationGracePeriodSeconds"] == seconds + 15


def test_the_autoscaler_has_the_replicas_to_itself() -> None:
    documents = render(plan(picker_replicas=3, picker_replicas_max=7))
    scaler = one(documents, "HorizontalPodAutoscaler", "kvmesh-picker")["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (3, 7)
    assert "replicas" not in one(documents, "Deployment", "kvmesh-picker")["spec"]


def test_a_namespaced_installation_asks_for_nothing_of_the_cluster() -> None:
    documents = render(PLANS["namespaced"])
    assert not [each for each in documents if each["kind"].startswith("Cluster")]
    roles = {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in documents if each["kind"] == "Role"}
    assert roles == {
        ("kvmesh-system", "kvmesh-picker"),
        ("kvmesh-system", "kvmesh-indexer"),
        ("kvmesh-system", "kvmesh-status-writer"),
        ("llm", "kvmesh-picker-kvmesh-system"),
        ("llm", "kvmesh-indexer-kvmesh-system"),
    }


def test_nobody_may_write_more_than_the_status_of_policies_and_one_lease() -> None:
    writes = {
        (resource, verb, tuple(rule.get("resourceNames", ())))
        for each in render(plan())
        for rule in each.get("rules", ())
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if verb not in {"get", "list", "watch"}
    }
    assert writes == {
        ("inferencepolicies/status", "update", ()),
        ("leases", "update", ("kvmesh-status-writer",)),
    }


def test_no_rule_names_a_wildcard() -> None:
    for install in PLANS.values():
        for each in render(install):
            for rule in each.get("rules", ()):
                assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]


def test_only_the_gateway_may_ask_for_picks() -> None:
    documents = render(plan())
    assert one(documents, "AuthorizationPolicy", "kvmesh-picker")["spec"]["rules"][0] == {
        "from": [{"source": {"principals": ["cluster.local/ns/istio-ingress/sa/inference-gateway-istio"]}}],
        "to": [{"operation": {"ports": ["9002"], "paths": ["/envoy.service.ext_proc.v3.ExternalProcessor/Process"]}}],
    }
    assert one(documents, "NetworkPolicy", "kvmesh-picker")["spec"]["ingress"][0] == {
        "from": [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "istio-ingress"}},
                "podSelector": {"matchLabels": {"gateway.networking.k8s.io/gateway-name": "inference-gateway"}},
            }
        ],
        "ports": [{"protocol": "TCP", "port": 9002}],
    }


def test_no_policy_lets_in_everybody_but_to_metrics(rendered: list[dict[str, Any]]) -> None:
    """The API server is no pod: its certificate is looked at by the picker."""
    for each in rendered:
        if each["kind"] == "AuthorizationPolicy":
            for rule in each["spec"]["rules"]:
                operations = [to["operation"] for to in rule["to"]]
                assert rule.get("from") or all(
                    to.get("paths") == ["/metrics"] or to == {"ports": ["9443"]} for to in operations
                )
        if each["kind"] == "NetworkPolicy":
            to_api_server = {"ports": [{"protocol": "TCP", "port": 9443}]}
            assert all(rule == to_api_server or rule["from"] for rule in each["spec"]["ingress"])


def test_ambient_gets_rules_without_paths_which_its_proxy_would_drop() -> None:
    documents = render(plan(28, Mode.AMBIENT_GATEWAY, monitoring=True))
    operations = [
        to["operation"]
        for each in documents
        if each["kind"] == "AuthorizationPolicy"
        for rule in each["spec"]["rules"]
        for to in rule["to"]
    ]
    assert operations
    assert all(set(operation) == {"ports"} for operation in operations)
    ports = one(documents, "NetworkPolicy", "kvmesh-picker")["spec"]["ingress"][0]["ports"]
    assert [each["port"] for each in ports] == [9002, 15008]


def test_the_kubelet_s_probes_get_through_where_ambient_changes_their_address() -> None:
    ports = {"kvmesh-picker": 9090, "kvmesh-indexer": 9091}
    for component, port in ports.items():
        policy = one(render(plan(28, Mode.AMBIENT_GATEWAY)), "NetworkPolicy", component)
        cidrs = ["169.254.7.127/32", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128"]  # of istio-cni, for both families
        probes = {"from": [{"ipBlock": {"cidr": each}} for each in cidrs], "ports": [{"protocol": "TCP", "port": port}]}
        assert probes in policy["spec"]["ingress"]


def test_the_bundled_redis_opens_connections_for_names_and_its_proxy_alone_wherever_these_are() -> None:
    policy = one(render(plan()), "NetworkPolicy", "kvmesh-redis")
    assert policy["spec"]["egress"] == [
        {"ports": [{"protocol": each, "port": port} for port in (53, 5353) for each in ("UDP", "TCP")]},
        {"ports": [{"protocol": "TCP", "port": port} for port in (15012, 443, 6443)]},
    ]


@pytest.mark.parametrize("mode", list(MODES))
def test_only_callers_of_the_mesh_s_trust_domain_are_admitted(mode: Mode) -> None:
    """A source by namespace would admit that namespace of every federated trust domain."""
    sources = [
        origin["source"]
        for each in render(plan(mode=mode, trust_domain="prod.example.com", monitoring=True))
        if each["kind"] == "AuthorizationPolicy"
        for rule in each["spec"]["rules"]
        for origin in rule.get("from", ())
    ]
    assert {name for source in sources for name in source} == {"principals"}
    principals = [principal for source in sources for principal in source["principals"]]
    assert [each for each in principals if not each.startswith("prod.example.com/ns/")] == []


def egress_of(documents: list[dict[str, Any]], component: str) -> list[dict[str, Any]]:
    spec = one(documents, "NetworkPolicy", component)["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    egress: list[dict[str, Any]] = spec["egress"]
    return egress


@pytest.mark.parametrize("component", ["kvmesh-picker", "kvmesh-indexer"])
def test_pickers_and_indexers_open_connections_to_pods_where_pools_may_be_and_to_a_few_ports(component: str) -> None:
    to_pods, _, to_servers = egress_of(render(plan()), component)
    assert to_pods == {"to": [{"namespaceSelector": {}}]}
    assert [each["port"] for each in to_servers["ports"]] == [443, 6443, 8443, 16443, 15012]
    to_pods, *_ = egress_of(render(plan(scope=Scope.NAMESPACED, root_namespace="kvmesh-system")), component)
    names = [each["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for each in to_pods["to"]]
    assert names == ["kvmesh-system", "llm"]


@pytest.mark.parametrize(
    ("url", "port"), [("rediss://redis.example.com:6380", 6380), ("redis://[fd00::1]/0?username=a:1", 6379)]
)
def test_the_port_of_a_redis_of_ones_own_is_open_to_any_address(url: str, port: int) -> None:
    documents = render(plan(redis=RedisKind.EXTERNAL, redis_url=url))
    assert egress_of(documents, "kvmesh-indexer")[-1]["ports"][-1] == {"protocol": "TCP", "port": port}


def test_servers_that_sentinels_announce_may_be_anywhere() -> None:
    documents = render(plan(redis=RedisKind.EXTERNAL, redis_url="redis+sentinel://a:26379,b:26379/mymaster"))
    assert egress_of(documents, "kvmesh-picker") == [{}]


def test_the_port_of_a_hub_is_open_to_the_picker() -> None:
    documents = render(plan(fetch_models=("org/a",), hub_endpoint="http://mirror.example.com:8081"))
    assert {"protocol": "TCP", "port": 8081} in egress_of(documents, "kvmesh-picker")[-1]["ports"]
    assert {"protocol": "TCP", "port": 8081} not in egress_of(documents, "kvmesh-indexer")[-1]["ports"]


def test_the_platform_may_pick_the_user() -> None:
    for workload in workloads(render(plan(run_as_user=False))):
        context = workload["spec"]["template"]["spec"]["securityContext"]
        assert context == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def test_sidecars_come_from_the_revision_that_is_named() -> None:
    documents = render(plan(istio_revision="canary"))
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in workloads(documents)]
    labels.append(one(documents, "Namespace", "kvmesh-system")["metadata"]["labels"])
    assert [each["istio.io/rev"] for each in labels] == ["canary"] * 4
    with pytest.raises(ConfigError, match="--istio-revision"):
        render(plan(istio_revision="canary", membership=MeshMembership.NONE))


def test_images_are_pulled_with_the_secrets_that_are_named() -> None:
    pods = [each["spec"]["template"]["spec"] for each in workloads(render(plan(image_pull_secrets=("a", "b"))))]
    assert [each["imagePullSecrets"] for each in pods] == [[{"name": "a"}, {"name": "b"}]] * 3


def test_what_the_disk_claims_make_can_be_found_again() -> None:
    [server] = [each for each in render(plan()) if each["kind"] == "StatefulSet"]
    [claim] = server["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["labels"].items() >= (OWNED | {INSTALLATION: "kvmesh-system"}).items()


def test_a_route_s_own_pool_is_patched_in_after_that_of_its_host() -> None:
    other = PoolTarget(namespace="llm", name="other")
    [pool] = plan().pools
    routes = (
        RouteTarget(host="llm.example.com", route="llm.chat.0", pool=other),
        RouteTarget(host="llm.example.com", pool=pool),
    )
    [document] = envoy_filters(plan(pools=(pool, other), routes=routes))
    named = [
        each["match"]["routeConfiguration"]["vhost"]["route"].get("name")
        for each in document["spec"]["configPatches"]
        if each["applyTo"] == "HTTP_ROUTE"
    ]
    assert named == [None, "llm.chat.0"]


def test_the_pods_service_has_a_name_that_a_service_may_have() -> None:
    pool = PoolTarget(namespace="llm", name="p" * 63, selector={"app": "p"})
    routes = (RouteTarget(host="llm.example.com", pool=pool),)
    services = [each for each in render(plan(pools=(pool,), routes=routes)) if each["kind"] == "Service"]
    assert max(len(each["metadata"]["name"]) for each in services) <= 63


def test_mtls_is_strict_for_every_part_and_only_metrics_may_be_read_without() -> None:
    def modes(install: InstallPlan) -> dict[str, Any]:
        found = [each for each in render(install) if each["kind"] == "PeerAuthentication"]
        return {each["metadata"]["name"]: {**each["spec"], "selector": None} for each in found}

    strict = {"selector": None, "mtls": {"mode": "STRICT"}}
    parts = ("kvmesh-picker", "kvmesh-indexer", "kvmesh-redis")
    assert modes(plan()) == dict.fromkeys(parts, strict)
    assert modes(plan(monitoring=True)) == {
        "kvmesh-picker": strict | {"portLevelMtls": {"9090": {"mode": "PERMISSIVE"}}},
        "kvmesh-indexer": strict | {"portLevelMtls": {"9091": {"mode": "PERMISSIVE"}}},
        "kvmesh-redis": strict,
    }
    assert modes(plan(membership=MeshMembership.NONE)) == {}


def test_a_pool_s_pods_are_reached_with_mtls_by_a_headless_service_where_their_labels_are_known() -> None:
    documents = render(plan())
    service = one(documents, "Service", "kvmesh-vllm-llama-pods")
    assert service["spec"]["clusterIP"] == "None"
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == {
        "tcp-api": 8000,
        "tcp-kv-events": 5557,
        "tcp-kv-replay": 5558,
    }
    assert service["metadata"]["annotations"] == {"networking.istio.io/exportTo": "kvmesh-system"}


@pytest.mark.parametrize(("component", "command"), [("kvmesh-picker", "extproc"), ("kvmesh-indexer", "indexer")])
def test_every_setting_of_a_pod_is_a_flag_of_its_command(
    component: str, command: str, rendered: list[dict[str, Any]]
) -> None:
    from extproc.cli import run_picker
    from kv_indexer.cli import indexer

    flags = set(inspect.signature({"extproc": run_picker, "indexer": indexer}[command]).parameters)
    [container] = one(rendered, "Deployment", component)["spec"]["template"]["spec"]["containers"]
    names = {each["name"].removeprefix("KVMESH_").lower() for each in container["env"] if "value" in each}
    assert container["args"] == [command]
    # token_file is of the commands that people run in the container
    assert names - flags == {"log_format", "log_level", "token_file"}


def test_secrets_of_redis_are_mounted_whole_and_named_to_both_roles() -> None:
    documents = render(PLANS["external redis"])
    for name in ("kvmesh-picker", "kvmesh-indexer"):
        spec = one(documents, "Deployment", name)["spec"]["template"]["spec"]
        [container] = spec["containers"]
        environment = {each["name"]: each["value"] for each in container["env"] if "REDIS" in each["name"]}
        assert environment == {
            "KVMESH_REDIS": "rediss+sentinel://sentinel.redis.svc:26379/mymaster/0?username=kvmesh"
            "&password_file=/etc/kvmesh/redis/password/password"
            "&sentinel_password_file=/etc/kvmesh/redis/sentinel/password&ca_file=/etc/kvmesh/redis/ca/ca.crt"
            "&cert_file=/etc/kvmesh/redis/tls/tls.crt&key_file=/etc/kvmesh/redis/tls/tls.key"
        }
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}


def test_the_pods_key_is_mounted_alone_into_both_roles_and_renewed_there() -> None:
    documents = render(PLANS["pods that want a key"])
    for name in ("kvmesh-picker", "kvmesh-indexer"):
        spec = one(documents, "Deployment", name)["spec"]["template"]["spec"]
        [container] = spec["containers"]
        assert {"name": "KVMESH_POD_KEY_FILE", "value": "/etc/kvmesh/pods/key"} in container["env"]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "pod-key"]
        assert mount == {"name": "pod-key", "mountPath": "/etc/kvmesh/pods", "readOnly": True}  # a subPath would not be
        [volume] = [each for each in spec["volumes"] if each["name"] == "pod-key"]
        items = [{"key": "VLLM_API_KEY", "path": "key"}]
        assert volume["secret"] == {"secretName": "vllm", "items": items, "defaultMode": 0o440}
    assert "pod-key" not in str(one(documents, "StatefulSet", "kvmesh-redis"))


def test_the_bundled_redis_never_evicts_and_has_memory_to_spare() -> None:
    [container] = one(render(plan(redis_memory_mib=1000)), "StatefulSet", "kvmesh-redis")["spec"]["template"]["spec"][
        "containers"
    ]
    arguments = container["args"]
    assert arguments[arguments.index("--maxmemory-policy") + 1] == "noeviction"
    assert arguments[arguments.index("--maxmemory") + 1] == "1000mb"
    assert container["resources"]["limits"] == {"memory": "1600Mi"}

"""What is installed is what the files in envoy/ say, which are tried with a real Envoy: compared field by field."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from operate.install.envoy_filters import (
    NOTE_FILTER,
    PICK_FILTER,
    REFUSE_UNPICKED,
    RESPONSE_FILTER,
    STRIP_FILTER,
    UNPICKED_FILTER,
    envoy_filters,
    note_filter,
    pick_filter,
    response_filter,
    strip_filter,
    unpicked_filter,
)
from operate.install.network_objects import mesh_objects
from operate.install.plan import BodyMode, FailureMode, InstallPlan, Mode, RouteSettings
from tests.unit.operate_install.sample_plans import plan

ENVOY = Path(__file__).parents[3] / "envoy"
PICKER_CLUSTER = {
    "envoy_grpc": {
        "cluster_name": "outbound|9002||kvmesh-picker.kvmesh-system.svc.cluster.local",
        "authority": "kvmesh-picker.kvmesh-system.svc.cluster.local",
    }
}


def local(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ENVOY / name).read_text(encoding="utf-8"))["static_resources"]
    return loaded


def local_filters(name: str) -> dict[str, dict[str, Any]]:
    manager = local(name)["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    return {each["name"]: each for each in manager["http_filters"]}


def local_cluster(name: str, cluster: str = "pods") -> dict[str, Any]:
    return next(each for each in local(name)["clusters"] if each["name"] == cluster)


def local_route(name: str) -> dict[str, Any]:
    manager = local(name)["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    route: dict[str, Any] = manager["route_config"]["virtual_hosts"][0]["routes"][0]["route"]
    return route


def patches(install: InstallPlan, apply_to: str) -> list[dict[str, Any]]:
    return [each for each in envoy_filters(install)[0]["spec"]["configPatches"] if each["applyTo"] == apply_to]


@pytest.mark.parametrize(
    ("file", "install"),
    [
        ("local.yaml", plan(30)),
        ("buffered.yaml", plan(30, body_mode=BodyMode.BUFFERED)),
    ],
)
def test_the_pick_filter_is_the_one_of_the_file_but_for_its_cluster_and_the_switch(
    file: str, install: InstallPlan
) -> None:
    of_file = local_filters(file)[PICK_FILTER]["typed_config"]
    expected = of_file | {"grpc_service": PICKER_CLUSTER, "request_attributes": ["xds.cluster_name"]}
    # the files' routes repeat only what no pod has begun; whoever keeps others' lets the picker forbid repeating
    expected["mutation_rules"] = {"allow_envoy": True}
    expected["failure_mode_allow"] = False  # each route says it
    assert pick_filter(install) == {"name": PICK_FILTER, "disabled": True, "typed_config": expected}


def test_where_bodies_are_buffered_answers_go_on_without_the_picker_and_unpicked_requests_are_refused() -> None:
    install = plan(30, body_mode=BodyMode.BUFFERED)
    of_file = local_filters("buffered.yaml")[UNPICKED_FILTER]
    assert of_file["typed_config"] == REFUSE_UNPICKED
    assert unpicked_filter() == of_file | {"disabled": True}
    names = [patch["patch"]["value"]["name"] for patch in patches(install, "HTTP_FILTER")]
    assert names[:2] == [PICK_FILTER, UNPICKED_FILTER]
    switched = patches(install, "HTTP_ROUTE")[0]["patch"]["value"]["typed_per_filter_config"]
    assert switched[UNPICKED_FILTER] == REFUSE_UNPICKED
    assert switched[PICK_FILTER]["overrides"]["failure_mode_allow"] is True


@pytest.mark.parametrize(
    "install",
    [plan(30), plan(30, failure_mode=FailureMode.FAIL_OPEN, body_mode=BodyMode.BUFFERED)],
    ids=["duplex", "failing open"],
)
def test_elsewhere_nothing_refuses_unpicked_requests_but_the_pick_s_own_filter(install: InstallPlan) -> None:
    assert UNPICKED_FILTER not in [patch["patch"]["value"]["name"] for patch in patches(install, "HTTP_FILTER")]
    switched = patches(install, "HTTP_ROUTE")[0]["patch"]["value"]["typed_per_filter_config"]
    assert set(switched) == {PICK_FILTER}


def test_the_response_filter_is_the_one_of_the_file_but_for_its_cluster() -> None:
    expected = local_filters("local.yaml")[RESPONSE_FILTER]
    expected["typed_config"]["extension_config"]["typed_config"]["grpc_service"] = PICKER_CLUSTER
    assert response_filter(plan(30)) == expected


def test_the_pick_s_note_is_shown_and_taken_off_as_in_the_file() -> None:
    of_file = local_filters("local.yaml")
    assert note_filter() == of_file[NOTE_FILTER]
    mutations = strip_filter()["typed_config"]["mutations"]
    [expected] = of_file[STRIP_FILTER]["typed_config"]["mutations"].values()
    assert mutations["response_mutations"] == expected


@pytest.mark.parametrize("mode", [Mode.GATEWAY, Mode.SIDECAR, Mode.AMBIENT_GATEWAY])
def test_the_pool_s_cluster_obeys_the_pick_as_in_the_file(mode: Mode) -> None:
    cluster = local_cluster("local.yaml")
    expected = {name: cluster[name] for name in ("per_connection_buffer_limit_bytes", "load_balancing_policy")}
    patch, _ = patches(plan(30, mode), "CLUSTER")
    assert patch["patch"] == {"operation": "MERGE", "value": expected}
    assert patch["match"]["cluster"] == {"service": "vllm-llama.llm.svc.cluster.local", "portNumber": 8000}


@pytest.mark.parametrize("name", ["local.yaml", "buffered.yaml", "original-dst.yaml"])
def test_the_connections_to_the_picker_have_the_limits_of_the_files(name: str) -> None:
    [of_file] = local_cluster(name, "picker")["typed_extension_protocol_options"].values()
    install = plan(30)
    _, patch = patches(install, "CLUSTER")
    [options] = patch["patch"]["value"]["typed_extension_protocol_options"].values()
    rule = next(each for each in mesh_objects(install) if each["metadata"]["name"] == "kvmesh-picker")
    # istiod replaces the options: what the rule says of them must be in the patch, too
    idle = {"idle_timeout": rule["spec"]["trafficPolicy"]["connectionPool"]["http"]["idleTimeout"]}
    assert options == of_file | {"common_http_protocol_options": idle}
    assert patch["match"]["cluster"] == {"service": "kvmesh-picker.kvmesh-system.svc.cluster.local", "portNumber": 9002}


def test_the_connections_of_the_pool_are_those_of_the_file() -> None:
    cluster = local_cluster("local.yaml")
    rule = next(each for each in mesh_objects(plan(30)) if each["metadata"]["name"] == "kvmesh-vllm-llama")
    pool = rule["spec"]["trafficPolicy"]["connectionPool"]
    options = cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    assert pool["tcp"]["connectTimeout"] == cluster["connect_timeout"]
    assert pool["http"]["idleTimeout"] == options["common_http_protocol_options"]["idle_timeout"]
    assert pool["http"]["http2MaxRequests"] == cluster["circuit_breakers"]["thresholds"][0]["max_requests"]
    assert rule["spec"]["exportTo"] == ["istio-ingress"]


def test_timeouts_and_retries_of_a_route_are_its_owner_s_but_no_try_is_cut() -> None:
    [patch] = patches(plan(28, longest_queue_seconds=100, longest_stream_seconds=500), "HTTP_ROUTE")
    assert patch["patch"]["value"]["route"] == {"idle_timeout": "600s", "retry_policy": {"per_try_timeout": "0s"}}


def test_replaced_retries_walk_the_list_as_in_the_file() -> None:
    [patch] = patches(plan(30, route_settings=RouteSettings.REPLACE), "HTTP_ROUTE")
    expected = local_route("local.yaml")["retry_policy"] | {"per_try_timeout": "0s"}
    assert patch["patch"]["value"]["route"]["retry_policy"] == expected


def test_the_picker_forbids_retries_only_where_they_are_not_replaced() -> None:
    install = plan(30, route_settings=RouteSettings.REPLACE)
    assert "mutation_rules" not in pick_filter(install)["typed_config"]


def test_replaced_timeouts_are_longer_than_the_longest_queue_and_answer_together() -> None:
    replaced = plan(28, longest_queue_seconds=100, longest_stream_seconds=500, route_settings=RouteSettings.REPLACE)
    [patch] = patches(replaced, "HTTP_ROUTE")
    action = patch["patch"]["value"]["route"]
    assert (action["timeout"], action["idle_timeout"]) == ("600s", "600s")


def test_only_forwarding_routes_of_the_named_host_ask_the_picker_and_name_their_pool() -> None:
    [patch] = patches(plan(28), "HTTP_ROUTE")
    assert patch["match"]["routeConfiguration"] == {
        "vhost": {"domainName": "llm.example.com", "route": {"action": "ROUTE"}},
    }
    assert patch["patch"]["value"]["typed_per_filter_config"] == {
        PICK_FILTER: {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute",
            "overrides": {
                "grpc_initial_metadata": [{"key": "x-kvmesh-pool", "value": "llm/vllm-llama"}],
                "failure_mode_allow": False,
            },
        }
    }


def test_a_port_is_asked_for_where_it_was_named() -> None:
    [route] = plan(28).routes
    [patch] = patches(plan(28, routes=(replace(route, port=8443),)), "HTTP_ROUTE")
    assert patch["match"]["routeConfiguration"]["portNumber"] == 8443


def test_sidecars_are_patched_on_the_listener_and_the_virtual_host_of_the_pool_s_port_alone() -> None:
    install = plan(28, Mode.SIDECAR)
    listeners = [each["match"]["listener"]["portNumber"] for each in patches(install, "HTTP_FILTER")]
    assert listeners == [8000, 8000, 8000, 8000]
    [patch] = patches(install, "HTTP_ROUTE")
    assert patch["match"]["routeConfiguration"] == {
        "name": "8000",
        "vhost": {"name": "vllm-llama.llm.svc.cluster.local:8000", "route": {"action": "ROUTE"}},
    }


@pytest.mark.parametrize("body_mode", list(BodyMode))
def test_client_headers_are_stripped_first_and_the_pick_comes_last(body_mode: BodyMode) -> None:
    filters = patches(plan(body_mode=body_mode), "HTTP_FILTER")
    found = [(each["patch"]["operation"], each["patch"]["value"]["name"]) for each in filters]
    reads = [("INSERT_FIRST", NOTE_FILTER), ("INSERT_FIRST", RESPONSE_FILTER)]
    further = [("INSERT_BEFORE", UNPICKED_FILTER)] if body_mode is BodyMode.BUFFERED else reads
    # who is put first last stands first
    assert found == [("INSERT_BEFORE", PICK_FILTER), *further, ("INSERT_FIRST", STRIP_FILTER)]


def test_bodies_fit_a_buffer_above_the_picker_s_limit() -> None:
    size = local("buffered.yaml")["listeners"][0]["per_connection_buffer_limit_bytes"]
    [patch] = patches(plan(), "HTTP_ROUTE")
    assert patch["patch"]["value"]["request_body_buffer_limit"] == size


def test_failing_open_is_said_on_the_route_so_that_early_envoys_take_the_filter() -> None:
    install = plan(28, failure_mode=FailureMode.FAIL_OPEN)
    overrides = patches(install, "HTTP_ROUTE")[0]["patch"]["value"]["typed_per_filter_config"][PICK_FILTER]["overrides"]
    assert overrides["failure_mode_allow"] is True
    assert pick_filter(install)["typed_config"]["failure_mode_allow"] is False

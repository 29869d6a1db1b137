"""Envoy's clusters and failure mode, judged pool by pool."""

from dataclasses import replace
from typing import Any

import pytest

from extproc.policy.values import Steering
from operate.doctor.checks import OF_EACH_POOL, judge
from operate.doctor.facts import EnvoyCluster, EnvoyFacts, EnvoyHost, ExtProcFilter, Facts, PoolRoute
from operate.install.envoy_filters import UNPICKED_FILTER
from tests.unit.operate_doctor.doctor_facts import POD, facts, lines

URL = "http://envoy:15000"
SOURCE = {"metadata": {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint"}]}}
OVERRIDE = {"@type": "type/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"}
OBEYS = {
    "load_balancing_policy": {
        "policies": [{"typed_extension_config": {"typed_config": OVERRIDE | {"override_host_sources": [SOURCE]}}}]
    }
}


def cluster(name: str, *addresses: str, **config: Any) -> EnvoyCluster:
    hosts = [EnvoyHost(address=each, healthy=True, connections_failed=0, connections_made=1) for each in addresses]
    return EnvoyCluster(name=name, config=config or OBEYS, hosts=tuple(hosts))


def route(pool: str, *clusters: str, fails_open: bool | None = None) -> PoolRoute:
    return PoolRoute(name=f"to-{pool}", pool=pool, clusters=frozenset(clusters), fails_open=fails_open)


WEIGHTED = route("llm/a", "a", "other")


def pool_facts(
    *clusters: EnvoyCluster, routes: tuple[PoolRoute, ...] = (), mode: str = "FailClose", filter_allows: bool = False
) -> Facts:
    picking = ExtProcFilter(name="kvmesh", config={"failure_mode_allow": filter_allows}, manager={}, listener={})
    envoy = EnvoyFacts(url=URL, filters=(picking,), clusters=clusters, pool_routes=routes)
    well = facts(envoy=envoy)
    return replace(well, expected=replace(well.expected, pool="llm/a", failure_mode=mode))


@pytest.mark.parametrize("routes", [(), (route("llm/a", "a"), route("llm/b", "b"))])
def test_a_pool_whose_cluster_obeys_the_pick_is_well_whatever_other_pools_have(routes: tuple[PoolRoute, ...]) -> None:
    seen = pool_facts(cluster("a", POD), cluster("b", "10.0.0.9:8000", type="EDS"), routes=routes)
    assert lines("envoy-steering", seen) == []


def test_a_pool_whose_own_cluster_does_not_obey_is_found_though_others_do() -> None:
    seen = pool_facts(cluster("a", POD, type="EDS"), cluster("b"), routes=(route("llm/a", "a"), route("llm/b", "b")))
    [(severity, subject, words)] = lines("envoy-steering", seen)
    assert (severity, subject, "no cluster obeys the pick" in words) == ("error", URL, True)


def test_a_pod_that_the_pools_cluster_does_not_have_is_found_though_another_cluster_has_it() -> None:
    seen = pool_facts(cluster("a"), cluster("b", POD), routes=(route("llm/a", "a"),))
    assert lines("envoy-steering", seen) == [
        ("error", URL, f"the cluster of the pods does not have {POD}: picks of these go to random pods")
    ]


def test_a_pool_made_for_the_other_steering_is_found() -> None:
    seen = pool_facts(cluster("a", type="ORIGINAL_DST"), routes=(route("llm/a", "a"),))
    [(_, _, words)] = lines("envoy-steering", seen)
    assert words == (
        f"the picker has --steering {Steering.OVERRIDE_HOST.value}, and Envoy's cluster of the pods is made for "
        f"{Steering.ORIGINAL_DST.value}"
    )


def test_a_pool_whose_routes_lead_to_a_cluster_that_envoy_does_not_have_is_found() -> None:
    seen = pool_facts(cluster("b", POD), routes=(route("llm/a", "gone"), route("llm/b", "b")))
    words = "routes for the pool lead to 'gone', which Envoy does not have: their requests are answered 503"
    assert lines("envoy-steering", seen) == [("error", URL, words)]


def test_one_missing_cluster_of_several_is_found_though_the_others_obey() -> None:
    seen = pool_facts(cluster("a", POD), routes=(route("llm/a", "a", "gone"),))
    [(severity, _, words)] = lines("envoy-steering", seen)
    assert (severity, "'gone', which Envoy does not have" in words) == ("error", True)


def test_one_of_a_pools_clusters_that_does_not_obey_is_found_though_another_does() -> None:
    seen = pool_facts(cluster("a", POD), cluster("a2", POD, type="EDS"), routes=(route("llm/a", "a", "a2"),))
    [(severity, _, words)] = lines("envoy-steering", seen)
    assert (severity, "'a2'" in words and "does not obey the pick" in words) == ("error", True)


def test_a_cluster_without_the_pools_pods_in_a_weighted_route_need_not_obey() -> None:
    seen = pool_facts(cluster("a", POD), cluster("other", "10.0.0.9:80", type="EDS"), routes=(WEIGHTED,))
    assert lines("envoy-steering", seen) == []


def test_nothing_is_said_of_a_pool_that_this_envoy_does_not_lead_to() -> None:
    seen = pool_facts(cluster("b", "10.0.0.9:8000"), routes=(route("llm/b", "b"),), mode="FailOpen")
    made = [finding.check for finding in judge(seen, names=OF_EACH_POOL)]
    assert not [name for name in made if name.startswith("envoy")]


@pytest.mark.parametrize(
    ("mode", "filter_allows", "own", "differs"),
    [
        ("FailClose", False, None, ""),
        ("FailOpen", True, None, ""),
        ("FailOpen", False, True, ""),
        ("FailOpen", False, None, "FailClose: while no picker answers, requests are refused"),
        ("FailClose", True, None, "FailOpen: while no picker answers, requests go to any pod, by chance"),
        ("FailClose", False, True, "FailOpen: while no picker answers, requests go to any pod, by chance"),
        ("FailOpen", True, False, "FailClose: while no picker answers, requests are refused"),
    ],
)
def test_a_policy_that_says_another_failure_mode_than_envoy_has_is_found(
    mode: str, filter_allows: bool, own: bool | None, differs: str
) -> None:
    routes = (route("llm/a", "a", fails_open=own), route("llm/b", "b", fails_open=not own))
    seen = pool_facts(cluster("a", POD), routes=routes, mode=mode, filter_allows=filter_allows)
    words = f"the policy says failureMode {mode}, and route 'to-llm/a' is made for {differs}"
    assert lines("envoy-failure-mode", seen) == ([("warning", URL, words)] if differs else [])


@pytest.mark.parametrize("is_off", [False, True])
def test_an_envoy_that_goes_on_without_a_picker_but_refuses_unpicked_requests_is_made_for_fail_close(
    is_off: bool,
) -> None:
    manager = {"http_filters": [{"name": "kvmesh"}, {"name": UNPICKED_FILTER, "disabled": is_off}]}
    picking = ExtProcFilter(name="kvmesh", config={"failure_mode_allow": True}, manager=manager, listener={})
    seen = pool_facts(cluster("a", POD), routes=(route("llm/a", "a"),))
    assert seen.envoy is not None
    seen = replace(seen, envoy=replace(seen.envoy, filters=(picking,)))
    assert bool(lines("envoy-failure-mode", seen)) is is_off


def test_without_routes_that_name_the_pool_the_filters_failure_mode_counts() -> None:
    seen = pool_facts(cluster("a", POD), mode="FailOpen")
    words = "and the filter is made for FailClose: while no picker answers, requests are refused"
    assert lines("envoy-failure-mode", seen) == [("warning", URL, f"the policy says failureMode FailOpen, {words}")]

"""Which pool a request is for, by its host or by the cluster that it was dealt to."""

import pytest

from extproc.pools.pool_hosts import PoolHosts, PoolPickers, pools_of_cluster, service_of, without_port

HOSTS = PoolHosts({"llm/b": ["*.example.com", "b.example.com"], "llm/a": ["*.eu.example.com", "b.example.com"]})


@pytest.mark.parametrize(
    ("authority", "pool"),
    [
        ("x.example.com", "llm/b"),
        ("X.Example.com:8443", "llm/b"),
        ("x.y.example.com.", "llm/b"),
        ("de.eu.example.com", "llm/a"),  # the more specific one
        ("b.example.com", "llm/a"),  # two claim it: the first by name
        ("example.com", None),  # not below itself
        ("x.example.org", None),
        ("", None),
    ],
)
def test_the_most_specific_host_counts(authority: str, pool: str | None) -> None:
    assert HOSTS.pool_of(authority) == pool


def test_no_hosts_are_nobodys() -> None:
    assert not PoolHosts({"llm/a": ()})
    assert PoolHosts({}).pool_of("a") is None


@pytest.mark.parametrize(
    ("authority", "host"),
    [("a:80", "a"), ("a", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), ("a:b", "a:b")],
)
def test_a_port_is_cut_off_and_nothing_else(authority: str, host: str) -> None:
    assert without_port(authority) == host


@pytest.mark.parametrize(
    ("cluster", "names"),
    [
        ("outbound|8000||vllm-llama.llm.svc.cluster.local", ["llm/vllm-llama"]),
        ("outbound|54321||pool-ip-0a1b2c3d.llm.svc.cluster.local", ["llm/pool-ip-0a1b2c3d", "llm/pool"]),
        ("outbound|8000|v1|vllm.llm.svc.mesh.internal", ["llm/vllm"]),
        ("outbound|443||api.example.com", []),
        ("outbound|443||svc.example.svcx", []),
        ("local_pods", []),
        ("", []),
    ],
)
def test_istios_clusters_name_the_service_of_a_pool(cluster: str, names: list[str]) -> None:
    assert list(pools_of_cluster(cluster)) == names


@pytest.mark.parametrize(
    ("authority", "service"),
    [
        ("outbound|9002||picker-a.llm.svc.cluster.local", "llm/picker-a"),  # Istio's native filter
        ("picker-a.llm.svc.cluster.local:9002", "llm/picker-a"),
        ("Picker-A.llm.svc", "llm/picker-a"),
        ("picker-a.llm:9002", "llm/picker-a"),
        ("picker-a", ""),
        ("picker-a.llm.example.com", ""),
        ("10.0.0.1:9002", ""),
        ("inbound|9002||picker-a.llm.svc.cluster.local", ""),
        ("", ""),
    ],
)
def test_an_authority_names_a_service(authority: str, service: str) -> None:
    assert service_of(authority) == service


def test_a_picker_of_several_pools_tells_none_of_them_apart() -> None:
    pickers = PoolPickers({"llm/a": "llm/picker-a", "llm/b": "llm/shared", "llm/c": "llm/shared", "llm/d": ""})
    assert pickers.pool_of("outbound|9002||picker-a.llm.svc.cluster.local") == "llm/a"
    assert pickers.pool_of("outbound|9002||shared.llm.svc.cluster.local") is None
    assert pickers.pool_of("") is None

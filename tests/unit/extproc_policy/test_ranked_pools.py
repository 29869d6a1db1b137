"""A pool whose pods have several data-parallel ranks: an endpoint for each, with its pod's place in the policy."""

from dataclasses import replace

from msgspec import structs

from extproc.pods.endpoint import Role
from extproc.policy.values import PickPolicy, PoolConfig
from kvmesh.documents.pools import PoolEndpoint
from kvmesh.pods.pod_report import EndpointLoad, sum_loads

A, B = PoolEndpoint(address="a:1", pod="llm/a", ready=False), PoolEndpoint(address="b:1", pod="llm/b")
POLICY = PickPolicy(
    cordoned=frozenset({"a:1"}), roles={"a:1": Role.PREFILL, "b:1": Role.DECODE}, pair_labels={"a:1": {"zone": "x"}}
)


def test_each_rank_is_an_endpoint_like_its_pod() -> None:
    config = PoolConfig(name="llm/pool", endpoints=(A, B), policy=POLICY)
    ranked = config.with_ranks({"a:1": (4, 5)})
    assert ranked.endpoints == (replace(A, address="a:1#4"), replace(A, address="a:1#5"), B)
    assert ranked.policy.cordoned == {"a:1#4", "a:1#5"}
    assert ranked.policy.roles == {"a:1#4": Role.PREFILL, "a:1#5": Role.PREFILL, "b:1": Role.DECODE}
    assert ranked.policy.pair_labels == {"a:1#4": {"zone": "x"}, "a:1#5": {"zone": "x"}}
    assert config.with_ranks({}) is config


def test_the_load_of_a_pod_is_that_of_its_ranks() -> None:
    first = EndpointLoad(
        waiting_requests=1,
        running_requests=2,
        kv_usage=0.5,
        prefix_hit_tokens=10,
        prefix_query_tokens=20,
        reported_at=8.0,
        kv_capacity_tokens=1000,
        max_adapters=None,
        running_adapters=frozenset({"x"}),
    )
    second = structs.replace(first, running_requests=5, kv_usage=0.1, reported_at=7.0, inter_token_seconds_sum=1.5)
    assert sum_loads([first, second]) == structs.replace(
        second,
        waiting_requests=2,
        running_requests=7,
        kv_usage=0.3,
        prefix_hit_tokens=20,
        prefix_query_tokens=40,
        kv_capacity_tokens=2000,
    )

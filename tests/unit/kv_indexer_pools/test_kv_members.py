"""Which pool an endpoint is indexed for, and which of a pod's streams are its own."""

import pytest

from kv_indexer.pools.follow_pools import slowdown
from kv_indexer.pools.members import (
    RANKS_A_POD,
    PodAnswer,
    PoolFeed,
    is_other_feed,
    known_streams,
    membership,
    own_rank,
)
from kvmesh.blocks.source import EventAddresses
from kvmesh.documents.pools import EventTemplates, Pool, PoolEndpoint
from kvmesh.pods.served_models import first_base_model, model_cards

ONE, TWO = PoolEndpoint(address="10.0.0.1:8000"), PoolEndpoint(address="10.0.0.2:8000")
HERE = EventAddresses(events="tcp://10.0.0.1:5557")


def pool(name: str, *endpoints: PoolEndpoint, kind: str = "InferencePool", **more: object) -> Pool:
    return Pool(name=f"llm/{name}", kind=kind, endpoints=endpoints, **more)  # type: ignore[arg-type]


def test_every_endpoint_belongs_to_its_pool() -> None:
    known = membership([pool("a", ONE, model="x"), pool("b", TWO)])
    assert {address: (each.pool, each.model) for address, each in known.members.items()} == {
        ONE.address: ("llm/a", "x"),
        TWO.address: ("llm/b", None),
    }
    assert known.shared == {}


@pytest.mark.parametrize("order", [1, -1])
def test_an_endpoint_in_several_pools_is_indexed_for_the_inference_pool_then_by_name(order: int) -> None:
    pools = [pool("a", ONE, TWO, kind="Service"), pool("c", ONE), pool("b", ONE)]
    known = membership(pools[::order])
    assert {address: each.pool for address, each in known.members.items()} == {
        ONE.address: "llm/b",
        TWO.address: "llm/a",
    }
    assert known.shared == {ONE.address: ("llm/b", "llm/c", "llm/a")}


def test_declared_event_ports_are_the_endpoints_feed() -> None:
    rank = PoolEndpoint(address="10.0.0.1:8001", rank=1)
    templates = EventTemplates(events="tcp://{ip}:5557", replay="tcp://{ip}:6557")
    known = membership([pool("a", ONE, rank, event_sources=templates)])
    assert {address: each.feed for address, each in known.members.items()} == {
        ONE.address: EventAddresses(events="tcp://10.0.0.1:5557", replay="tcp://10.0.0.1:6557"),
        rank.address: EventAddresses(events="tcp://10.0.0.1:5558", replay="tcp://10.0.0.1:6558"),
    }


def test_readiness_alone_is_no_reason_to_ask_a_pod_anew() -> None:
    (before,) = membership([pool("a", ONE)]).members.values()
    (unready,) = membership([pool("a", PoolEndpoint(address=ONE.address, ready=False))]).members.values()
    (moved,) = membership([pool("b", ONE)]).members.values()
    (renamed,) = membership([pool("a", ONE, model="x")]).members.values()
    assert [is_other_feed(before, after) for after in (unready, moved, renamed)] == [False, True, True]


def test_another_pool_or_model_makes_another_feed_of_the_same_addresses() -> None:
    feed = PoolFeed(events="tcp://a:1", pool="llm/a", model="x")
    assert feed == PoolFeed(events="tcp://a:1", pool="llm/a", model="x")
    assert feed != PoolFeed(events="tcp://a:1", pool="llm/b", model="x")
    assert feed != PoolFeed(events="tcp://a:1", pool="llm/a", model="y")
    assert feed != EventAddresses(events="tcp://a:1")


@pytest.mark.parametrize(
    ("rank", "named", "own"),
    [
        (None, [0, 1, 2], [0, 1, 2]),  # one port for all ranks
        (1, [0, 1, 2], [1]),
        (1, [5], [5]),  # each port names its own rank alone
        (1, [4, 5, 6, 7], [5]),  # a second node's
        (2, [0, 1], []),
        (0, [], []),
    ],
)
def test_a_port_has_the_stream_of_its_rank(rank: int | None, named: list[int], own: list[int]) -> None:
    endpoint = PoolEndpoint(address="10.0.0.1:8000", rank=rank)
    (member,) = membership([pool("a", endpoint)]).members.values()
    assert list(own_rank(dict.fromkeys(named, HERE), member)) == own


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"data": [{"id": "a"}, {"id": "b"}]}', "a"),
        (b'{"data": [{"id": "lora", "parent": "a"}, {"id": "a", "parent": null}]}', "a"),
        (b'{"data": []}', None),
    ],
)
def test_a_pods_model_is_the_first_that_is_no_adapter(body: bytes, model: str | None) -> None:
    assert first_base_model(model_cards(body)) == model


@pytest.mark.parametrize("body", [b"", b"{}", b'{"data": 5}', b"[" * 100_000])
def test_what_is_no_list_of_models_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a list of models"):
        first_base_model(model_cards(body))


def test_a_few_pods_are_looked_at_at_full_pace_and_thousands_ten_times_slower() -> None:
    assert [slowdown(pods) for pods in (0, 1, 200, 400, 2000, 100_000)] == [1.0, 1.0, 1.0, 2.0, 10.0, 20.0]


def test_of_a_pod_with_too_many_ranks_the_first_are_followed() -> None:
    many = PodAnswer(asked_at=0.0, ranks=dict.fromkeys(reversed(range(1024)), HERE))
    few = PodAnswer(asked_at=0.0, ranks=dict.fromkeys((3, 1), HERE))
    streams = known_streams({"a:1": many, "b:1": few})

    assert sorted(each.dp_rank for each in streams if each.endpoint == "a:1") == list(range(RANKS_A_POD))
    assert sorted(each.dp_rank for each in streams if each.endpoint == "b:1") == [1, 3]

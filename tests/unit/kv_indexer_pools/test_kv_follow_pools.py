"""Who is asked, scraped and answered for as pools change; and what a pod's answer becomes."""

import inspect
from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import cast

import pytest

from kv_indexer.pools.event_sources import QUESTIONS_AT_ONCE, EventSourceDirectory, MemberDirectory
from kv_indexer.pools.find_streams import StreamFinder
from kv_indexer.pools.follow_pools import PoolFollower
from kv_indexer.pools.members import Member, PoolFeed, membership
from kv_indexer.service import LOST_PODS_A_SECOND
from kvmesh.blocks.source import EventAddresses
from kvmesh.documents.documents import DocumentSource
from kvmesh.documents.pools import EventTemplates, Pool, PoolEndpoint
from kvmesh.errors import FeedLostError, NoEventSourceError, UnknownModelError

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def pool(name: str, *addresses: str, ready: bool = True, model: str | None = None) -> Pool:
    endpoints = tuple(PoolEndpoint(address=address, ready=ready) for address in addresses)
    return Pool(name=name, kind="InferencePool", endpoints=endpoints, model=model)


class Bench:
    """Keeps what is asked for, in words."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.following = PoolFollower(
            cast("DocumentSource", None),
            finder=cast("StreamFinder", None),
            scrape=lambda endpoint: self.done.append(f"scrape {endpoint}"),
            answer_for=self._answer_for,
            forget=self._forget,
        )
        self.following.begin = self._begin  # type: ignore[method-assign]
        self.following.end = self._end  # type: ignore[method-assign]

    def _begin(self, endpoint: str) -> None:
        self.done.append(f"ask {endpoint} for {self.following.pool_of(endpoint)}")

    def _end(self, endpoint: str) -> None:
        self.done.append(f"ask {endpoint} no more")

    def _answer_for(self, endpoints: Collection[str]) -> None:
        self.done.append(f"answer for {', '.join(sorted(endpoints)) or 'nobody'}")

    def _forget(self, endpoints: Collection[str]) -> None:
        self.done.append(f"forget {', '.join(sorted(endpoints))}")

    def apply(self, *pools: Pool) -> list[str]:
        self.done.clear()
        self.following.apply(pools)
        return list(self.done)


def test_pods_are_asked_and_scraped_once_and_nothing_happens_when_nothing_changes() -> None:
    bench = Bench()
    assert bench.apply(pool("p", A, B)) == [
        f"answer for {A}, {B}",
        f"scrape {A}",
        f"ask {A} for p",
        f"scrape {B}",
        f"ask {B} for p",
    ]
    assert bench.apply(pool("p", A, B)) == []


def test_no_pools_at_all_is_an_answer_too() -> None:
    bench = Bench()
    assert not bench.following.is_known
    assert bench.apply() == ["answer for nobody"]
    assert bench.following.is_known


def test_a_pod_that_is_not_ready_is_answered_for_and_not_asked() -> None:
    bench = Bench()
    assert bench.apply(pool("p", A, ready=False)) == [f"answer for {A}"]
    assert bench.apply(pool("p", A)) == [f"scrape {A}", f"ask {A} for p"]
    assert bench.apply(pool("p", A, ready=False)) == []


def test_a_pod_that_is_gone_is_forgotten_by_all() -> None:
    bench = Bench()
    bench.apply(pool("p", A, B))
    assert bench.apply(pool("p", B)) == [
        f"answer for {B}",
        f"ask {A} no more",
        f"forget {A}",
    ]
    assert bench.following.pool_of(A) == ""


def test_a_pod_that_moves_or_whose_pool_gets_another_model_is_asked_anew() -> None:
    bench = Bench()
    bench.apply(pool("p", A), pool("q", B))
    assert bench.apply(pool("p"), pool("q", A, B)) == [f"ask {A} for q"]
    assert bench.apply(pool("q", A, B, model="x")) == [f"ask {A} for q", f"ask {B} for q"]


def test_an_endpoint_in_two_pools_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.apply(pool("p", A), pool("q", A))
    bench.apply(pool("p", A), pool("q", A, B))
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 1
    assert errors[0].startswith("1 endpoints are in several pools")
    assert errors[0].endswith(f"{A} in p, q")


class FakePods(EventSourceDirectory):
    """What pods say when they are asked."""

    def __init__(self, *, ranks: Collection[int] = (0,), model: str | None = "tiny") -> None:
        self.ranks = ranks
        self.model = model
        self.questions: list[str] = []

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        self.questions.append("events")
        return {rank: EventAddresses(events=f"tcp://{endpoint}:{rank}") for rank in self.ranks}

    async def first_model(self, endpoint: str) -> str | None:
        self.questions.append("model")
        return self.model

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        return {self.model or ""}


def members(
    *, model: str | None = None, templates: EventTemplates | None = None, rank: int | None = None
) -> dict[str, Member]:
    endpoint = PoolEndpoint(address=A, rank=rank)
    return dict(
        membership(
            [Pool(name="p", kind="Service", endpoints=(endpoint,), model=model, event_sources=templates)]
        ).members
    )


async def test_what_a_pool_does_not_declare_its_pods_are_asked() -> None:
    pods = FakePods()
    found = await MemberDirectory(members=members(), pods=pods).find(A)
    assert found == {0: PoolFeed(events=f"tcp://{A}:0", pool="p", model="tiny")}
    assert pods.questions == ["events", "model"]


async def test_what_a_pool_declares_its_pods_are_not_asked() -> None:
    pods = FakePods()
    templates = EventTemplates(events="tcp://{ip}:5557")
    found = await MemberDirectory(members=members(model="x", templates=templates, rank=2), pods=pods).find(A)
    assert found == {2: PoolFeed(events="tcp://10.0.0.1:5559", pool="p", model="x")}
    assert pods.questions == []


async def test_a_pod_without_model_without_its_rank_or_without_pool_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(UnknownModelError, match=r"annotation kvmesh\.io/model"):
        await MemberDirectory(members=members(), pods=FakePods(model=None)).find(A)
    with pytest.raises(NoEventSourceError, match="compare the pool's targetPorts with --data-parallel-size"):
        await MemberDirectory(members=members(rank=3), pods=FakePods(ranks=(0, 1))).find(A)
    with pytest.raises(FeedLostError, match="in no pool any more"):
        await MemberDirectory(members={}, pods=FakePods()).find(A)


def test_pods_that_hang_are_asked_more_rarely_than_their_questions_time_out() -> None:
    longest = inspect.signature(EventSourceDirectory.__init__).parameters["timeout_seconds"].default
    assert QUESTIONS_AT_ONCE / longest > LOST_PODS_A_SECOND  # or else a new pod would wait behind them

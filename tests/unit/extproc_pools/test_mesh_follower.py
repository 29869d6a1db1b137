"""Documents become what pools are served with: the newest snapshot, in order, and the last good state."""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from extproc.policy.model_tokens import ModelTokens
from extproc.policy.values import PoolConfig
from extproc.pools import mesh
from extproc.pools.mesh import MeshFollower, status_updates
from extproc.reach.mesh_policy import MeshPolicy, MeshState
from kvmesh.documents.documents import DocumentKey, Snapshot

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Pools:
    """In the place of `pools.Pools`."""

    def __init__(self) -> None:
        self.applied: list[Mapping[str, PoolConfig]] = []
        self.changed = asyncio.Event()
        self.tokens: dict[str, Sequence[ModelTokens]] = {}

    async def apply(self, configs: Mapping[str, PoolConfig]) -> None:
        self.applied.append(configs)
        self.changed.set()

    def model_tokens(self) -> Mapping[str, Sequence[ModelTokens]]:
        return self.tokens

    async def next(self) -> list[str]:
        async with asyncio.timeout(5.0):
            await self.changed.wait()
        self.changed.clear()
        return sorted(self.applied[-1])


class Source:
    """Documents handed over by the test."""

    def __init__(self) -> None:
        self.tell: Callable[[Snapshot], None] | None = None
        self.running = asyncio.Event()

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        self.tell = on_change
        self.running.set()
        await asyncio.Event().wait()


async def next_messages(kind: str, states: Sequence[MeshState], pools: Pools) -> list[str]:
    """Return what conditions of this type say once the next configurations were applied."""
    await pools.next()
    while len(states) < len(pools.applied):
        await asyncio.sleep(0)
    return [each.message for each in states[-1].statuses["llm/p"].conditions if each.type == kind]


def snapshot(*pools: str, synced: bool = True, policies: tuple[dict[str, Any], ...] = ()) -> Snapshot:
    documents = {
        "InferencePool": tuple(
            {
                "apiVersion": "inference.networking.k8s.io/v1",
                "kind": "InferencePool",
                "metadata": {"name": name, "namespace": "llm", "uid": name},
                "spec": {"selector": {"matchLabels": {"app": name}}, "targetPorts": [{"number": 8000}]},
            }
            for name in pools
        ),
        "InferencePolicy": policies,
    }
    return Snapshot(documents=documents, synced=synced)


async def followed(policy: MeshPolicy | None = None) -> tuple[MeshFollower, Source, Pools, asyncio.Task[None]]:
    source, pools = Source(), Pools()
    follower = MeshFollower(policy or MeshPolicy(), pools, clock=lambda: NOW)
    task = asyncio.create_task(follower.run(source), name="follow")
    await source.running.wait()
    return follower, source, pools, task


async def test_pools_are_served_as_the_newest_snapshot_says() -> None:
    follower, source, pools, task = await followed()
    assert source.tell is not None
    source.tell(snapshot("a", synced=False))
    source.tell(snapshot("a"))
    source.tell(snapshot("a", "b"))
    assert await pools.next() == ["llm/a", "llm/b"]
    assert len(pools.applied) == 1
    assert await follower.explain(None) != {}
    task.cancel()


async def test_what_cannot_be_taken_in_leaves_everything_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    class Breaks(MeshPolicy):
        def update(self, snapshot: Snapshot, **known: Any) -> MeshState:
            if len(snapshot.of("InferencePool")) == 2:
                raise RuntimeError("a defect")
            return super().update(snapshot, **known)

    follower, source, pools, task = await followed(Breaks())
    assert source.tell is not None
    source.tell(snapshot("a"))
    assert await pools.next() == ["llm/a"]
    source.tell(snapshot("a", "b"))
    while "a defect" not in caplog.text:
        await asyncio.sleep(0)
    assert sorted(follower.state.configs) == ["llm/a"]
    source.tell(snapshot("c"))
    assert await pools.next() == ["llm/c"]
    task.cancel()


async def test_the_status_of_a_policy_is_told_once_it_is_in_force() -> None:
    follower, source, pools, task = await followed()
    states: list[MeshState] = []
    follower.told = states.append
    assert source.tell is not None
    bad = {
        "apiVersion": "kvmesh.io/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": {"name": "p", "namespace": "llm", "uid": "1", "generation": 3},
        "spec": {"scoring": {"weights": {"prefx": 1}}},
    }
    source.tell(snapshot("a", policies=(bad,)))
    assert await pools.next() == ["llm/a"]
    while not states:
        await asyncio.sleep(0)
    (update,) = status_updates(states[0])
    assert update.key == DocumentKey("kvmesh.io", "InferencePolicy", "llm", "p")
    assert (update.uid, update.generation) == ("1", 3)
    conditions = {each["type"]: each["status"] for each in update.entry["conditions"]}
    assert conditions["Accepted"] == "False"
    task.cancel()


async def test_requests_without_tokens_are_said_by_the_status_and_the_explanation_until_there_are_tokens_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh, "TOKENS_SECONDS", 0.0)
    follower, source, pools, task = await followed()
    states: list[MeshState] = []
    follower.told = states.append
    assert source.tell is not None

    async def said() -> list[str]:
        return await next_messages("ExactTokens", states, pools)

    policy = {"apiVersion": "kvmesh.io/v1alpha1", "kind": "InferencePolicy", "spec": {"scoring": {"fallbacks": 1}}}
    source.tell(snapshot("a", policies=({**policy, "metadata": {"name": "p", "namespace": "llm"}},)))
    assert await said() == []
    wrong = ModelTokens(model="m", wanted="auto", seen="text", reason="text-only", message="m: only text: do this")
    pools.tokens = {"llm/a": (wrong,)}
    assert await said() == ["m: only text: do this (at llm/a)"]
    [explained] = (await follower.explain("llm/a"))["pools"]
    assert [(each["model"], each["reason"]) for each in explained["tokens"]] == [("m", "text-only")]
    pools.tokens = {"llm/a": (replace(wrong, message="m: only text, for another reason"),)}
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(states) == 2  # the words of the last request are nothing to write again and again
    pools.tokens = {"llm/a": (replace(wrong, reason="", seen="pods"),)}
    assert await said() == []
    task.cancel()


async def test_explaining_hundreds_of_pools_holds_up_no_request() -> None:
    class Explains(MeshPolicy):
        def explain(self, target: str | None, **known: Any) -> dict[str, Any]:
            return {"thread": threading.get_ident()}

    follower, _, _, task = await followed(Explains())
    assert await follower.explain(None) != {"thread": threading.get_ident()}
    task.cancel()

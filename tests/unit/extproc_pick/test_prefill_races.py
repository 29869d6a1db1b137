"""Two prefill legs of one request at once: the first answer wins, the other leg ends, and each booking ends once."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.ledger.access_log import AccessRecord, add_end
from extproc.ledger.facts import Decided, Ended
from extproc.pages.decision_state import decision_state
from extproc.pick import pick
from extproc.policy.disaggregation import Disaggregation
from extproc.pools.booked_exchange import BookedExchange
from kvmesh.pods.http_response import HttpResponse
from tests.unit.extproc_pick.pick_fakes import ShownPool, chat, explained, facts
from tests.unit.extproc_pick.test_prefill import (
    ALWAYS,
    ANSWER,
    PARAMETERS,
    PrefillPods,
    Reply,
    booked,
    counted,
    lines_of,
    split_pool,
)

RACES = replace(ALWAYS, race_share=1.0, race_ttft_seconds=10.0)
FAILS = HttpResponse(status=500, body=b"", keep_alive=True)


def answer(engine: str) -> HttpResponse:
    """Return a prefill pod's answer whose blocks are at that engine."""
    said = {"kv_transfer_params": PARAMETERS | {"remote_engine_id": engine}}
    return HttpResponse(status=200, body=json.dumps(said).encode(), keep_alive=True)


class RacingPods(PrefillPods):
    """Pods whose answers are held back until they are released; those given at once come at once."""

    def __init__(self, *held: str, **replies: Reply) -> None:
        super().__init__(**replies)
        self.closed: list[str] = []  # endpoints whose connection was closed before their answer
        self.began: dict[str, asyncio.Event] = {name: asyncio.Event() for name in held}
        self.held: dict[str, asyncio.Event] = {name: asyncio.Event() for name in held}
        for name in held:
            reply = replies.get(name, answer(name))
            assert isinstance(reply, HttpResponse)
            self.replies[name] = self._held_back(name, reply)

    def _held_back(self, name: str, reply: HttpResponse) -> Callable[[], Any]:
        async def answered() -> HttpResponse:
            self.began[name].set()
            try:
                await self.held[name].wait()
            except asyncio.CancelledError:
                self.closed.append(name)
                raise
            return reply

        return answered

    async def all_began(self) -> None:
        for each in self.began.values():
            await each.wait()


class Watching:
    """Keeps the ends of requests."""

    def __init__(self) -> None:
        self.ends: list[Ended] = []

    def decided(self, decided: Decided, /) -> None:
        pass

    def ended(self, ended: Ended, /) -> None:
        self.ends.append(ended)


def racing_pool(pods: PrefillPods, *names: str, policy: Disaggregation = RACES) -> ShownPool:
    return split_pool(pods, *names, disaggregation=policy)


def engine(exchange: BookedExchange) -> str:
    """Return from where the decode pod fetches."""
    said = json.loads(exchange.body or b"")["kv_transfer_params"]["remote_engine_id"]
    assert isinstance(said, str)
    return said


def races(pool: ShownPool) -> dict[str, float]:
    return counted(pool, "kvmesh_prefill_races_total")


def legs(pool: ShownPool) -> set[tuple[str, str, float]]:
    """Return the legs that were counted: endpoint, outcome, how many."""
    lines = pool.telemetry.registry.text().decode().splitlines()
    found = [re.fullmatch(r'kvmesh_prefill_legs_total{endpoint="(.+)",outcome="(.+)"} (.+)', line) for line in lines]
    return {(line[1], line[2], float(line[3])) for line in found if line is not None}


def cost(pool: ShownPool, name: str) -> float:
    lines = pool.telemetry.registry.text().decode().splitlines()
    (line,) = [line for line in lines if line.startswith(f"kvmesh_prefill_race_lost_{name}_total ")]
    return float(line.split()[1])


@pytest.mark.parametrize(("first", "winner"), [("p1", "first"), ("p2", "second")])
async def test_the_first_answer_wins_and_the_other_leg_is_closed(first: str, winner: str) -> None:
    pods = RacingPods("p1", "p2")
    pool = racing_pool(pods, "p1", "p2", "d")
    task = asyncio.create_task(pick(facts(), chat(), pool))
    await pods.all_began()
    assert booked(pool) == {"p1": (1, 500.0), "p2": (1, 500.0), "d": (1, 1.0)}
    pods.held[first].set()
    exchange = await task
    (loser,) = {"p1", "p2"} - {first}
    assert (engine(exchange), pods.closed, booked(pool)) == (first, [loser], {"d": (1, 1.0)})
    assert legs(pool) == {(first, "answered", 1), (loser, "lost", 1)}
    assert (races(pool), counted(pool, "kvmesh_prefill_prompts_total")) == ({winner: 1}, {"remote": 1})
    exchange.finish()
    assert (booked(pool), pool.books.open_requests) == ({}, 0)


async def test_a_loser_that_has_answered_too_is_counted_with_all_that_it_has_computed() -> None:
    pods = RacingPods("p1", "p2")
    pool = racing_pool(pods, "p1", "p2", "d")
    task = asyncio.create_task(pick(facts(), chat(), pool))
    await pods.all_began()
    pods.held["p2"].set()
    pods.held["p1"].set()  # in the same turn of the loop
    exchange = await task
    assert (engine(exchange), pods.closed, booked(pool)) == ("p2", [], {"d": (1, 1.0)})
    assert legs(pool) == {("p2", "answered", 1), ("p1", "late", 1)}
    assert (races(pool), cost(pool, "tokens")) == ({"second": 1}, 500.0)
    exchange.finish()


@pytest.mark.parametrize("failing", ["p1", "p2"])
async def test_a_leg_that_fails_leaves_the_other_one_running(failing: str) -> None:
    (other,) = {"p1", "p2"} - {failing}
    pods = RacingPods(other, **{failing: FAILS})
    pool = racing_pool(pods, "p1", "p2", "d")
    task = asyncio.create_task(pick(facts(), chat(), pool))
    await pods.all_began()
    while failing in booked(pool):
        await asyncio.sleep(0)
    assert booked(pool) == {other: (1, 500.0), "d": (1, 1.0)}
    pods.held[other].set()
    exchange = await task
    assert (engine(exchange), pods.closed) == (other, [])
    assert legs(pool) == {(failing, "failed", 1), (other, "answered", 1)}
    assert (races(pool), cost(pool, "tokens")) == ({"second" if other == "p2" else "first": 1}, 0.0)
    exchange.finish()


@pytest.mark.parametrize("third", [True, False])
async def test_where_both_fail_the_next_pod_computes_the_prompt_and_then_the_decode_pod(third: bool) -> None:
    pods = RacingPods(p1=FAILS, p2=FAILS, p3=ANSWER)
    pool = racing_pool(pods, "p1", "p2", *(["p3"] if third else []), "d")
    exchange = await pick(facts(), chat(), pool)
    assert booked(pool) == {"d": (1, 1.0 if third else 500.0)}
    assert exchange.body is not None if third else exchange.body is None
    assert legs(pool) == {(name, "failed", 1) for name in ("p1", "p2")} | ({("p3", "answered", 1)} if third else set())
    assert (races(pool), cost(pool, "tokens")) == ({"none": 1}, 0.0)
    assert [endpoint for endpoint, *_ in pods.asked] == ["p1", "p2", *(["p3"] if third else [])]
    exchange.finish()
    assert (booked(pool), pool.books.open_requests) == ({}, 0)


async def test_a_client_that_leaves_during_a_race_ends_both_legs() -> None:
    pods = RacingPods("p1", "p2")
    pool = racing_pool(pods, "p1", "p2", "d")
    task = asyncio.create_task(pick(facts(), chat(), pool))
    await pods.all_began()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (booked(pool), pool.books.open_requests, pool.under_way) == ({}, 0, 0)
    assert legs(pool) == {("p1", "client-left", 1), ("p2", "client-left", 1)}
    assert (races(pool), sorted(pods.closed)) == ({"none": 1}, ["p1", "p2"])


@pytest.mark.parametrize("policy", [RACES, replace(RACES, race_share=0.0)], ids=["race", "one leg"])
async def test_a_client_that_leaves_between_its_booking_and_its_legs_leaves_no_booking(policy: Disaggregation) -> None:
    pods = RacingPods("p1", "p2")
    pool = racing_pool(pods, "p1", "p2", "d", policy=policy)
    picked = await explained(pool, facts(), chat())
    exchange = pool.book(picked, pool.begin(facts()))
    assert {"p1", "d"} <= set(booked(pool))
    exchange.finish()  # as the queue does with what it has booked for a client that has left
    assert (booked(pool), pool.books.open_requests, pods.asked) == ({}, 0, [])


async def asked_of(pool: ShownPool, pods: PrefillPods, prompts: int) -> Sequence[int]:
    """Return to how many pods each of so many requests went."""
    numbers = []
    for _ in range(prompts):
        before = len(pods.asked)
        (await pick(facts(), chat(), pool)).finish()
        numbers.append(len(pods.asked) - before)
    return numbers


async def test_the_budget_is_a_share_of_the_prompts_with_legs() -> None:
    pods = PrefillPods(p1=ANSWER, p2=ANSWER)
    pool = racing_pool(pods, "p1", "p2", "d", policy=replace(RACES, race_share=0.25))
    assert await asked_of(pool, pods, 8) == [1, 1, 1, 2, 1, 1, 1, 2]
    for _ in range(9):
        await explained(pool, facts(), chat())  # an explanation takes nothing
    assert await asked_of(pool, pods, 4) == [1, 1, 1, 2]


async def test_there_is_no_race_by_default() -> None:
    pods = PrefillPods(p1=ANSWER, p2=ANSWER)
    pool = racing_pool(pods, "p1", "p2", "d", policy=replace(RACES, race_share=0.0))
    assert await asked_of(pool, pods, 3) == [1, 1, 1]
    assert races(pool) == {}


async def test_a_decision_says_whether_it_is_raced_and_why() -> None:
    pods = PrefillPods(p1=ANSWER, p2=ANSWER)
    pool = racing_pool(pods, "p1", "p2", "d", policy=replace(RACES, race_share=0.5))
    shown = []
    for _ in range(2):
        (await pick(facts(), chat(), pool)).finish()
        await asyncio.sleep(0)  # it is remembered behind the answer
        shown.append(decision_state(pool.recent[0], policy=pool.view.policy))
    no, yes = [state.prefill for state in shown]
    assert no is not None
    assert yes is not None
    assert (no.races, no.race) == (False, "0.5 of the prompts may be raced, and as many were of late")
    assert (yes.races, yes.race) == (True, "p2, the second best, would take 0.145 s")
    assert any("race: none (0.5 of the prompts" in line for line in lines_of(shown[0]))
    assert any("race: two prefill pods at once (p2," in line for line in lines_of(shown[1]))


async def test_the_records_show_the_winner_and_that_there_was_a_race() -> None:
    pods = RacingPods("p1", "p2")
    pool = racing_pool(pods, "p1", "p2", "d")
    watching = Watching()
    pool.watch.observers.append(watching)
    task = asyncio.create_task(pick(facts(), chat(), pool))
    await pods.all_began()
    pods.held["p2"].set()
    (await task).finish()
    await asyncio.sleep(0)
    (ended,) = watching.ends
    assert [(leg.endpoint, leg.outcome) for leg in ended.legs] == [("p2", "answered"), ("p1", "lost")]
    line = AccessRecord(kind="", at=0.0, fate="", decided_us=0)
    add_end(line, ended)
    assert (line.prefill_endpoint, line.prefill_lost_endpoint) == ("p2", "p1")

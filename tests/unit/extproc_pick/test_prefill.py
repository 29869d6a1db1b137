"""The prefill leg on a request's corridor: who computes the prompt, what the pods get, what is booked meanwhile."""

import asyncio
import io
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console

from extproc.errors import NoReadyEndpointError
from extproc.pages.decision_state import decision_state
from extproc.pages.picker_state import DecisionState, PrefillState
from extproc.pick import pick
from extproc.pods.endpoint import Reachability, Role
from extproc.policy.disaggregation import Disaggregation, OffloadRule, Protocol
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import IndexHits, PromptKeys
from kvmesh.pods.http_response import HttpResponse, HttpResponseError
from kvmesh.pods.pod_http import PodPages
from operate.local.explain import render
from tests.unit.extproc_pick.pick_fakes import (
    FakeEndpoints,
    FakeIndex,
    FakePrompts,
    Hits,
    ShownPool,
    chat,
    explained,
    facts,
    pod,
    runtime,
    tokens,
)

KEYS = PromptKeys(keys=bytes(range(240)), tokens_each=16)  # 30 keys
PARAMETERS = {
    **{"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[4]], "remote_engine_id": "e"},
    **{"remote_request_id": "r", "remote_host": "10.0.0.1", "remote_port": 5600},
}


def answer_with(**changes: Any) -> HttpResponse:
    """Return a prefill pod's answer with these parameters changed."""
    body = json.dumps({"kv_transfer_params": PARAMETERS | changes}).encode()
    return HttpResponse(status=200, body=body, keep_alive=True)


ANSWER = answer_with()
ALWAYS = Disaggregation(enabled=True, rule=OffloadRule.ALWAYS, side_channel_hosts=("10.0.0.1",))
HOSTILE: tuple[dict[str, Any], ...] = (
    {"remote_host": "169.254.169.254"},
    {"remote_port": -5},
    {"remote_port": 10**30},
    {"remote_block_ids": [[[4]]]},
    {"remote_engine_id": "e\r\nx-evil: 1"},
)
Reply = HttpResponse | Exception | Callable[[], Awaitable[HttpResponse]]


class PrefillPods(PodPages):
    """Answers as it is told, and keeps what was asked."""

    def __init__(self, **replies: Reply) -> None:
        super().__init__()
        self.replies = replies
        self.asked: list[tuple[str, str, dict[str, Any], Mapping[str, str]]] = []

    async def post(
        self,
        endpoint: str,
        path: str,
        body: bytes,
        *,
        timeout_seconds: float | None,
        max_body_bytes: int,
        headers: Mapping[str, str] = {},
    ) -> HttpResponse:
        self.asked.append((endpoint, path, json.loads(body), headers))
        reply = self.replies[endpoint]
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, HttpResponse) else await reply()


def split_pool(
    pods: PrefillPods, *names: str, disaggregation: Disaggregation = ALWAYS, held: dict[str, int] | None = None
) -> ShownPool:
    """Return a pool whose pods p… compute prompts and whose pods d… decode."""
    roles = {name: Role.PREFILL for name in names if name.startswith("p")}
    hits = IndexHits(prompts=[Hits(held or {})], keys=[KEYS], states=dict.fromkeys(names, "live"))
    return runtime(
        *(pod(name) for name in names),
        index=FakeIndex(hits),
        prompts=FakePrompts(tokens(500)),
        policy=PickPolicy(roles=roles, disaggregation=disaggregation),
        prefill_pods=pods,
    )


def counted(pool: ShownPool, name: str) -> dict[str, float]:
    """Return a counter's series: the last label's value -> count."""
    lines = [line for line in pool.telemetry.registry.text().decode().splitlines() if line.startswith(f"{name}{{")]
    return {line.split('"')[-2]: float(line.rpartition(" ")[2]) for line in lines}


def booked(pool: ShownPool) -> dict[str, tuple[int, float]]:
    """Return by endpoint the requests that are open and the prompt tokens that are to be computed."""
    totals = {name: pool.view.bookings.totals(name, now=1.0) for name in pool.view.bookings.by_endpoint()}
    return {name: (each.requests, each.uncached_tokens) for name, each in totals.items()}


def lines_of(state: DecisionState) -> list[str]:
    """Return what `kvmesh explain` prints."""
    console = Console(width=200, record=True, file=io.StringIO())
    render(state, console=console)
    return console.export_text().splitlines()


async def test_the_prompt_is_computed_by_the_prefill_pod_and_fetched_by_the_decode_pod() -> None:
    pods = PrefillPods(p=ANSWER)
    pool = split_pool(pods, "p", "d")
    during = {}

    async def answer() -> HttpResponse:
        during.update(booked(pool))
        return ANSWER

    pods.replies["p"] = answer
    exchange = await pick(facts(traceparent="00-1"), chat(stream=True, max_tokens=9), pool)
    ((endpoint, path, sent, headers),) = pods.asked
    assert (endpoint, path, headers) == ("p", "/v1/chat/completions", {"x-request-id": "r", "traceparent": "00-1"})
    assert (sent["max_tokens"], sent["stream"], sent["kv_transfer_params"]["do_remote_decode"]) == (1, False, True)
    assert set(exchange.endpoints) == {"d"}
    assert json.loads(exchange.body or b"") == {
        **json.loads(chat(stream=True, max_tokens=9)),
        "kv_transfer_params": PARAMETERS,
    }
    assert exchange.set_headers["x-envoy-max-retries"] == "0"
    assert during == {"p": (1, 500.0), "d": (1, 1.0)}
    assert booked(pool) == {"d": (1, 1.0)}
    exchange.finish()
    assert (booked(pool), pool.books.open_requests) == ({}, 0)
    assert counted(pool, "kvmesh_prefill_legs_total") == {"answered": 1}
    assert counted(pool, "kvmesh_prefill_prompts_total") == {"remote": 1}


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (HttpResponse(status=503, body=b"", keep_alive=True), "full"),
        (HttpResponse(status=500, body=b"", keep_alive=True), "failed"),
        (HttpResponse(status=302, body=b"", keep_alive=True), "failed"),
        (HttpResponse(status=400, body=b"", keep_alive=True), "refused"),
        (HttpResponse(status=200, body=b"{}", keep_alive=True), "unreadable"),
        *((answer_with(**changes), "unreadable") for changes in HOSTILE),
        (ConnectionRefusedError(), "failed"),
        (TimeoutError(), "timed-out"),
        (HttpResponseError("the body is longer than 1048576 bytes"), "failed"),
    ],
)
async def test_a_leg_that_brings_nothing_is_followed_by_the_next_and_then_by_local_prefill(
    reply: Reply, outcome: str
) -> None:
    pool = split_pool(PrefillPods(p1=reply, p2=ANSWER), "p1", "p2", "d", held={"p1": 3})
    exchange = await pick(facts(), chat(), pool)
    assert json.loads(exchange.body or b"")["kv_transfer_params"] == PARAMETERS
    assert counted(pool, "kvmesh_prefill_legs_total") == {outcome: 1, "answered": 1}
    exchange.finish()

    pods = PrefillPods(p=reply)
    pool = split_pool(pods, "p", "d")
    exchange = await pick(facts(), chat(), pool)
    assert (exchange.body, booked(pool)) == (None, {"d": (1, 500.0)})  # the client's own, and all of it to be computed
    assert "x-envoy-max-retries" not in exchange.set_headers  # any pod can do that
    assert counted(pool, "kvmesh_prefill_prompts_total") == {"remote": 1, "fell-back": 1}
    exchange.finish()
    assert (booked(pool), pool.books.open_requests) == ({}, 0)


async def test_a_client_that_leaves_ends_the_leg_and_every_booking() -> None:
    began = asyncio.Event()

    async def never() -> HttpResponse:
        began.set()
        await asyncio.Event().wait()
        raise AssertionError

    pool = split_pool(PrefillPods(p=never), "p", "d")
    task = asyncio.create_task(pick(facts(), chat(), pool))
    await began.wait()
    assert set(booked(pool)) == {"p", "d"}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (booked(pool), pool.books.open_requests, pool.under_way) == ({}, 0, 0)
    assert counted(pool, "kvmesh_prefill_legs_total") == {"client-left": 1}


async def test_a_decode_pod_that_goes_during_the_leg_is_replaced_and_the_other_one_fetches() -> None:
    pods = PrefillPods()
    pool = split_pool(pods, "p", "d1", "d2", held={"d1": 5})

    async def answer() -> HttpResponse:
        statuses = pool.view.endpoints.snapshot(now=1.0)
        assert isinstance(pool.view.endpoints, FakeEndpoints)
        pool.view.endpoints.statuses = [
            structs.replace(each, reachability=Reachability.UNREACHABLE) if each.address == "d1" else each
            for each in statuses
        ]
        return ANSWER

    pods.replies["p"] = answer
    exchange = await pick(facts(), chat(), pool)
    assert (set(exchange.endpoints), booked(pool)) == ({"d2"}, {"d2": (1, 1.0)})
    assert json.loads(exchange.body or b"")["kv_transfer_params"] == PARAMETERS
    exchange.finish()
    assert (booked(pool), pool.books.open_requests) == ({}, 0)


async def test_a_pod_that_names_another_pods_engine_is_followed_by_the_next() -> None:
    pods = PrefillPods(p1=ANSWER, p2=ANSWER)  # the same engine id
    pool = split_pool(pods, "p1", "p2", "d", held={"p1": 3})
    (await pick(facts(), chat(), pool)).finish()
    pods.replies["p1"] = HttpResponse(status=503, body=b"", keep_alive=True)
    exchange = await pick(facts(), chat(), pool)
    assert exchange.body is None
    problems = [end.problem for end in exchange.legs]
    assert any("names the engine of p1" in problem for problem in problems), problems
    exchange.finish()


@pytest.mark.parametrize("name", ["", "a\tb", "a\r\nx-evil: 1", "é", "x" * 257])
async def test_a_clients_request_id_that_no_answer_may_have_reaches_no_prefill_pod(name: str) -> None:
    pods = PrefillPods(p=ANSWER)
    exchange = await pick(facts(request_id=name), chat(), split_pool(pods, "p", "d"))
    ((_, _, _, headers),) = pods.asked
    assert "x-request-id" not in headers
    exchange.finish()


async def test_a_decision_shows_both_sides_numbers() -> None:
    pool = split_pool(PrefillPods(p=ANSWER), "p", "d", disaggregation=Disaggregation(enabled=True), held={"d": 25})
    (await pick(facts(), chat(), pool)).finish()
    await asyncio.sleep(0)  # it is remembered behind the answer
    (state,) = [decision_state(record, policy=pool.view.policy) for record in pool.recent]
    assert state.prefill == PrefillState(
        where="local",
        why="local 0.032 s, remote 0.103 s",
        rule="estimate",
        endpoint="p",
        uncached_tokens=100,
        remote_uncached_tokens=500,
        prefill_queue=0,
        decode_requests=0,
        local_ms=32.5,
        remote_ms=103.0,
        transfer_ms=20.5,
    )
    assert any("prefill: local, by the winner (estimate: local" in line for line in lines_of(state))


async def test_the_prefill_pod_that_holds_the_prompt_computes_it() -> None:
    pods = PrefillPods(p1=ANSWER, p2=ANSWER)
    pool = split_pool(pods, "p1", "p2", "d", held={"p2": 20})
    picked = await explained(pool, facts(), chat())
    assert picked.prefill is not None
    assert [(place.endpoint, place.cached_tokens) for place in picked.prefill.places] == [("p2", 320), ("p1", 0)]
    (await pick(facts(), chat(), pool)).finish()
    assert [endpoint for endpoint, *_ in pods.asked] == ["p2"]


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"n": 3}, "it has n"), ({"prompt_logprobs": 1}, "it has prompt_logprobs")],
)
async def test_what_cannot_be_split_goes_to_the_decode_pod_as_it_is(fields: dict[str, Any], why: str) -> None:
    pods = PrefillPods(p=ANSWER)
    pool = split_pool(pods, "p", "d")
    picked = await explained(pool, facts(), chat(**fields))
    assert picked.prefill is not None
    assert (picked.prefill.is_remote, picked.prefill.verdict.why) == (False, why)
    exchange = await pick(facts(), chat(**fields), pool)
    sequences = fields.get("n", 1)
    assert (exchange.body, pods.asked, booked(pool)) == (None, [], {"d": (sequences, 500.0)})
    exchange.finish()


async def test_a_clients_own_parameters_are_those_of_no_leg() -> None:
    pods = PrefillPods(p=ANSWER)
    pool = split_pool(pods, "p", "d")
    body = chat(kv_transfer_params={"do_remote_prefill": True, "remote_host": "10.6.6.6", "remote_block_ids": "x"})
    exchange = await pick(facts(headers={"x-prefiller-host-port": "10.6.6.6:1"}), body, pool)
    sent = json.loads(exchange.body or b"")
    assert sent["kv_transfer_params"] == PARAMETERS
    assert exchange.removed_headers == ("x-prefiller-host-port",)
    assert "10.6.6.6" not in json.dumps([asked[2] for asked in pods.asked])
    exchange.finish()


async def test_where_sidecars_are_kept_they_are_told_of_the_prefill_pod_which_is_booked_until_the_answer() -> None:
    pods = PrefillPods()
    pool = split_pool(pods, "p", "d", disaggregation=Disaggregation(
        enabled=True, rule=OffloadRule.ALWAYS, protocol=Protocol.SIDECAR
    ))  # fmt: skip
    exchange = await pick(facts(headers={"x-prefiller-host-port": "10.6.6.6:1"}), chat(), pool)
    assert (exchange.set_headers, exchange.body, pods.asked) == ({"x-prefiller-host-port": "p"}, None, [])
    assert booked(pool) == {"p": (1, 500.0), "d": (1, 1.0)}
    exchange.responded(status=200, served_by="d", from_pod=True)
    assert booked(pool) == {"d": (1, 1.0)}
    exchange.finish()
    assert booked(pool) == {}
    exchange = await pick(facts(), chat(), pool)
    exchange.finish()  # without an answer
    assert booked(pool) == {}


async def test_prefill_pods_alone_serve_nobody_and_decode_pods_alone_compute_themselves() -> None:
    with pytest.raises(NoReadyEndpointError, match="computes prompts for others"):
        await pick(facts(), chat(), split_pool(PrefillPods(), "p"))
    pool = split_pool(PrefillPods(), "d")
    exchange = await pick(facts(), chat(), pool)
    assert (exchange.body, booked(pool)) == (None, {"d": (1, 500.0)})
    exchange.finish()

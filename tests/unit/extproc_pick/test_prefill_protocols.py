"""Legs of other protocols than NIXL on a request's corridor: what is asked first, and legs beside their requests."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from extproc.errors import NoReadyEndpointError
from extproc.pick import pick
from extproc.policy.disaggregation import Disaggregation, OffloadRule, Protocol
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.pool_runtime import PoolRuntime
from kvmesh.pods.http_response import HttpResponse
from tests.unit.extproc_pick.pick_fakes import chat, explained, facts
from tests.unit.extproc_pick.test_prefill import PrefillPods, Reply, booked, counted, split_pool

LENGTH = HttpResponse(status=200, body=b'{"choices": [{"finish_reason": "length"}]}', keep_alive=True)
STOP = HttpResponse(status=200, body=b'{"choices": [{"finish_reason": "stop"}]}', keep_alive=True)
ENGINE = HttpResponse(status=200, body=b'{"0": {"engine_id": "e0"}, "1": {"engine_id": "e1"}}', keep_alive=True)
EVIL_RANKS = b'{"0\\r\\nx-evil: 1": {"engine_id": "e0"}, "1\\r\\nx-evil: 1": {"engine_id": "e1"}}'


class BootstrapPods(PrefillPods):
    """Prefill pods p…:8000 whose bootstrap servers listen on 8998."""

    def __init__(self, page: Reply, **replies: Reply) -> None:
        super().__init__(**{f"{name}:8000": reply for name, reply in replies.items()})
        self.page = page
        self.pages: list[tuple[str, str]] = []

    async def get(self, endpoint: str, path: str, *, timeout_seconds: float, max_body_bytes: int) -> HttpResponse:
        self.pages.append((endpoint, path))
        if isinstance(self.page, Exception):
            raise self.page
        return self.page if isinstance(self.page, HttpResponse) else await self.page()


def policy(protocol: Protocol, rule: OffloadRule = OffloadRule.ALWAYS) -> Disaggregation:
    return Disaggregation(enabled=True, rule=rule, protocol=protocol)


def sent(exchange: BookedExchange) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(exchange.body or b"")
    return found


async def settled(pool: PoolRuntime) -> None:
    """Wait until no leg runs beside a request any more."""
    assert pool.legs is not None
    while pool.legs.beside:
        await asyncio.sleep(0)


async def test_mooncakes_bootstrap_server_names_the_engine_and_the_leg_goes_to_its_rank() -> None:
    pods = BootstrapPods(ENGINE, p=LENGTH)
    pool = split_pool(pods, "p:8000", "d:8000", disaggregation=policy(Protocol.MOONCAKE))
    exchange = await pick(facts(), chat(), pool)
    assert pods.pages == [("p:8998", "/query")]
    ((_, _, asked, headers),) = pods.asked
    got = sent(exchange)["kv_transfer_params"]
    assert asked["kv_transfer_params"]["transfer_id"] == got["transfer_id"]
    assert (got["remote_engine_id"], got["remote_bootstrap_addr"]) == (
        f"e{headers['x-data-parallel-rank']}",
        "http://p:8998",
    )
    assert exchange.plan.prediction is None  # what its usage will have of cached tokens is not known
    exchange.finish()
    assert (booked(pool), counted(pool, "kvmesh_prefill_legs_total")) == ({}, {"answered": 1})


@pytest.mark.parametrize(
    ("page", "reply", "outcome"),
    [
        (ConnectionRefusedError(), LENGTH, "failed"),
        (TimeoutError(), LENGTH, "timed-out"),
        (HttpResponse(status=404, body=b"", keep_alive=True), LENGTH, "refused"),
        (HttpResponse(status=200, body=b"{}", keep_alive=True), LENGTH, "unreadable"),
        (HttpResponse(status=200, body=EVIL_RANKS, keep_alive=True), LENGTH, "unreadable"),
        (ENGINE, STOP, "unreadable"),
    ],
)
async def test_a_leg_that_mooncake_keeps_no_blocks_of_is_followed_by_local_prefill(
    page: Reply, reply: Reply, outcome: str
) -> None:
    pods = BootstrapPods(page, p=reply)
    pool = split_pool(pods, "p:8000", "d:8000", disaggregation=policy(Protocol.MOONCAKE))
    exchange = await pick(facts(), chat(), pool)
    assert (exchange.body, booked(pool)) == (None, {"d:8000": (1, 500.0)})
    assert counted(pool, "kvmesh_prefill_legs_total") == {outcome: 1}
    exchange.finish()


async def test_with_a_shared_store_the_decode_pod_gets_the_clients_body_when_the_prompt_is_stored() -> None:
    pods = PrefillPods(p=HttpResponse(status=200, body=b"{}", keep_alive=True))
    pool = split_pool(pods, "p", "d", disaggregation=policy(Protocol.SHARED_STORAGE))
    exchange = await pick(facts(), chat(), pool)
    ((_, _, asked, _),) = pods.asked
    assert (asked["max_tokens"], "kv_transfer_params" in asked) == (1, False)
    assert (exchange.body, booked(pool)) == (chat(), {"d": (1, 1.0)})
    assert "x-envoy-max-retries" not in exchange.set_headers  # any pod finds the blocks
    exchange.finish()


def held_back(release: asyncio.Event, began: asyncio.Event, left: list[str]) -> Callable[[], Awaitable[HttpResponse]]:
    """Return a pod that answers when it is released, and notes a connection that is closed before."""

    async def answer() -> HttpResponse:
        began.set()
        try:
            await release.wait()
        except asyncio.CancelledError:
            left.append("closed")
            raise
        return LENGTH

    return answer


@pytest.mark.parametrize("ends", ["leg first", "exchange first", "client leaves"])
async def test_sglangs_leg_runs_beside_its_request_and_ends_with_it(ends: str) -> None:
    release, began, left = asyncio.Event(), asyncio.Event(), list[str]()
    pods = BootstrapPods(ENGINE, p=held_back(release, began, left))
    pool = split_pool(pods, "p:8000", "d:8000", disaggregation=policy(Protocol.SGLANG))
    exchange = await pick(facts(), chat(stream=True), pool)
    await began.wait()
    ((_, _, asked, _),) = pods.asked
    got = sent(exchange)
    assert (got["bootstrap_host"], got["bootstrap_port"]) == ("p", 8998)
    assert (got["stream"], asked) == (True, {**got, "stream": False})
    assert exchange.set_headers["x-envoy-max-retries"] == "0"
    assert booked(pool) == {"p:8000": (1, 500.0), "d:8000": (1, 1.0)}
    if ends == "leg first":
        release.set()
        await settled(pool)
        assert booked(pool) == {"d:8000": (1, 1.0)}
    if ends != "client leaves":
        exchange.responded(status=200, served_by="d:8000", from_pod=True)
    exchange.finish()
    assert (booked(pool), pool.books.open_requests) == ({}, 0)
    await settled(pool)
    outcome = "client-left" if ends == "client leaves" else "answered"
    assert counted(pool, "kvmesh_prefill_legs_total") == {outcome: 1}
    assert left == ([] if ends == "leg first" else ["closed"])


async def test_an_exchange_that_ends_before_its_leg_has_begun_leaves_nothing() -> None:
    pool = split_pool(BootstrapPods(ENGINE, p=LENGTH), "p:8000", "d:8000", disaggregation=policy(Protocol.SGLANG))
    (await pick(facts(), chat(), pool)).finish()
    assert (booked(pool), pool.books.open_requests) == ({}, 0)
    await settled(pool)
    assert counted(pool, "kvmesh_prefill_legs_total") == {"client-left": 1}


async def test_a_leg_that_fails_beside_its_request_is_counted_and_its_pod_is_avoided() -> None:
    pods = BootstrapPods(ENGINE, p=HttpResponse(status=500, body=b"", keep_alive=True))
    pool = split_pool(pods, "p:8000", "d:8000", disaggregation=policy(Protocol.SGLANG))
    exchange = await pick(facts(), chat(), pool)
    await settled(pool)
    assert (booked(pool), counted(pool, "kvmesh_prefill_legs_total")) == ({"d:8000": (1, 1.0)}, {"failed": 1})
    exchange.finish()
    assert booked(pool) == {}


async def test_where_decode_pods_compute_no_prompts_a_prefill_pod_does_whatever_the_numbers_say() -> None:
    pods = BootstrapPods(ENGINE, p=LENGTH)
    pool = split_pool(
        pods, "p:8000", "d:8000", disaggregation=policy(Protocol.SGLANG, OffloadRule.ESTIMATE), held={"d:8000": 29}
    )
    picked = await explained(pool, facts(), chat(n=2))
    assert picked.prefill is not None
    assert picked.prefill.verdict.remote
    assert picked.prefill.verdict.why == "with sglang the decode pods compute no prompts"
    with pytest.raises(NoReadyEndpointError, match="no prefill pod may serve the request; with sglang"):
        await pick(facts(), chat(), split_pool(BootstrapPods(ENGINE), "d:8000", disaggregation=policy(Protocol.SGLANG)))


async def test_a_clients_own_room_reaches_no_pod() -> None:
    pods = BootstrapPods(ENGINE, p=LENGTH)
    pool = split_pool(pods, "p:8000", "d:8000", disaggregation=policy(Protocol.SGLANG))
    body = chat(bootstrap_host="10.6.6.6", bootstrap_room=1, disagg_prefill_dp_rank=3)
    exchange = await pick(facts(headers={"x-override-bootstrap-host": "10.6.6.6"}), body, pool)
    got = sent(exchange)
    assert (got["bootstrap_host"], "disagg_prefill_dp_rank" in got) == ("p", False)
    assert exchange.removed_headers == ("x-override-bootstrap-host",)
    exchange.finish()
    await settled(pool)
    assert "10.6.6.6" not in json.dumps([asked[2] for asked in pods.asked])

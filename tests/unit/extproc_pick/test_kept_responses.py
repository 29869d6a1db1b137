"""A request that needs a response which a pod keeps goes to this pod, whichever picker has sent it there."""

import json
from typing import Any

import pytest

from extproc.admission.prepared_request import response_session
from extproc.errors import NoReadyEndpointError, ResponseGoneError, UnknownResponseError
from extproc.ext_proc.exchange import RequestFacts
from extproc.pick import pick
from extproc.pods.endpoint import Reachability
from extproc.pools.booked_exchange import BookedExchange
from extproc.pools.picker_books import OWN_KEY
from extproc.pools.pool_runtime import PoolRuntime
from extproc.prefixes.prompt_match import IndexHits
from extproc.requests.responses_api import owned_id, owner_in
from extproc.shared.shared_load import SharedView
from tests.unit.extproc_pick.pick_fakes import FakeIndex, explained, facts, pod, runtime

OF_B = owned_id("b", b"0123456789", key=OWN_KEY)
RESPONSES = "/v1/responses"


def asks(path: str = RESPONSES, **more: Any) -> RequestFacts:
    return facts(path=path, **more)


def body(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "input": "Hi", **fields}).encode()


async def sent(pool: PoolRuntime, **fields: Any) -> tuple[BookedExchange, dict[str, Any]]:
    """Pick for a new response; return the exchange and what the pod gets."""
    exchange = await pick(asks(), body(**fields), pool)
    return exchange, json.loads(exchange.body or body(**fields))


async def test_a_response_that_may_be_kept_gets_an_id_that_names_its_pod() -> None:
    pool = runtime(pod("a"), pod("b"))
    exchange, got = await sent(pool)
    first = exchange.endpoints[0]
    exchange.finish()
    assert got == {"model": "tiny", "input": "Hi", "request_id": exchange.response_id}
    assert owner_in(got["request_id"], ("a", "b"), key=OWN_KEY) == first
    again, _ = await sent(pool)
    assert again.response_id != exchange.response_id


@pytest.mark.parametrize("fields", [{"store": False}, {"request_id": "mine"}, {"request_id": None}])
async def test_a_body_that_needs_no_id_is_not_changed(fields: dict[str, Any]) -> None:
    exchange = await pick(asks(), body(**fields), runtime(pod("a")))
    assert exchange.body is None


async def test_a_body_that_cannot_be_changed_goes_as_it_is() -> None:
    exchange = await pick(asks(), body().decode().encode("utf-16"), runtime(pod("a")))
    assert (exchange.body, exchange.response_id) == (None, None)


@pytest.mark.parametrize(
    ("request_facts", "content"),
    [
        (asks(), body(previous_response_id=OF_B)),
        (asks(f"{RESPONSES}/{OF_B}", method="GET"), b""),
        (asks(f"{RESPONSES}/{OF_B}/cancel"), b""),
        (asks(headers={"x-session-id": "s"}), body(previous_response_id=OF_B)),
    ],
    ids=["continued", "returned", "cancelled", "with a session"],
)
async def test_the_pod_that_the_id_names_gets_it_however_busy(request_facts: RequestFacts, content: bytes) -> None:
    pool = runtime(pod("a"), pod("b", waiting_requests=9), pod("c"))
    assert set((await explained(pool, request_facts, content)).decision.endpoints) == {"b"}


async def test_a_response_of_a_pod_that_is_gone_is_gone() -> None:
    pool = runtime(pod("a"), pod("c"))
    with pytest.raises(ResponseGoneError, match="the pod that kept it is no more") as refusal:
        await pick(asks(), body(previous_response_id=OF_B), pool)
    assert (refusal.value.status, refusal.value.error_type, pool.under_way) == (410, "invalid_request_error", 0)


async def test_a_client_cannot_make_an_id_for_a_pod() -> None:
    made = owned_id("b", b"0123456789", key=b"guessed")
    with pytest.raises(ResponseGoneError):
        await pick(asks(), body(previous_response_id=made), runtime(pod("a"), pod("b")))


async def test_an_id_that_nobody_knows_is_not_found() -> None:
    with pytest.raises(UnknownResponseError, match="'resp_0' not found") as refusal:
        await pick(asks(), body(previous_response_id="resp_0"), runtime(pod("a"), pod("b")))
    assert refusal.value.status == 404


async def test_the_only_pod_says_itself_what_it_does_not_know() -> None:
    assert (await pick(asks(), body(previous_response_id="resp_0"), runtime(pod("a")))).endpoints == ("a",)


async def test_nobody_answers_in_the_place_of_a_pod_that_does_not() -> None:
    pool = runtime(pod("a"), pod("b", reachability=Reachability.TERMINATING))
    with pytest.raises(NoReadyEndpointError):
        await pick(asks(), body(previous_response_id=OF_B), pool)


async def test_a_route_that_does_not_allow_the_pod_does_not_reach_it() -> None:
    pool = runtime(pod("a"), pod("b"))
    with pytest.raises(NoReadyEndpointError):
        await pick(asks(subset=frozenset({"a"})), body(previous_response_id=OF_B), pool)


async def test_an_id_of_the_client_s_own_is_remembered() -> None:
    pool = runtime(pod("a"), pod("b"))
    exchange, _ = await sent(pool, request_id="mine")
    keeper = exchange.endpoints[0]
    exchange.responded(status=200, served_by=keeper, from_pod=True)
    exchange.finish()
    assert set((await explained(pool, asks(), body(previous_response_id="mine"))).decision.endpoints) == {keeper}


async def test_where_a_retry_went_past_the_pod_the_one_that_answered_keeps_the_response() -> None:
    pool = runtime(pod("a"), pod("b"))
    exchange, got = await sent(pool)
    other = exchange.endpoints[1]
    exchange.responded(status=200, served_by=other, from_pod=True)
    exchange.finish()
    follow_up = body(previous_response_id=got["request_id"])
    assert set((await explained(pool, asks(), follow_up)).decision.endpoints) == {other}


async def test_a_request_that_failed_has_left_no_response() -> None:
    pool = runtime(pod("a"), pod("b"))
    exchange, _ = await sent(pool, request_id="mine")
    exchange.responded(status=400, served_by=exchange.endpoints[0], from_pod=True)
    exchange.finish()
    with pytest.raises(UnknownResponseError):
        await pick(asks(), body(previous_response_id="mine"), pool)


async def test_what_another_picker_has_remembered_counts() -> None:
    index = FakeIndex(IndexHits(view=SharedView(session_endpoint="b", session_read=True)))
    pool = runtime(pod("a"), pod("b"), index=index)
    assert set((await explained(pool, asks(), body(previous_response_id="mine"))).decision.endpoints) == {"b"}
    assert index.asked[0]["session"] == response_session("mine")


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id", "conversation"])
async def test_a_session_that_the_body_names_returns_to_its_pod_when_nothing_else_tells(field: str) -> None:
    pool = runtime(pod("a"), pod("b"))
    pool.view.memory.note("b", prompts=(), session="tiny\0s1", adapter=None, now=1.0)
    picked = await explained(pool, asks(), body(**{field: "s1"}))
    assert (picked.decision.endpoints[0], picked.prepared.query.session) == ("b", "tiny\0s1")

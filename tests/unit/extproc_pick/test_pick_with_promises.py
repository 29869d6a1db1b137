"""A pick with classes that are promised an inter-token time: who waits, who goes where, and what is said of it."""

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from extproc.choosing.stream_room import UNLEARNED
from extproc.ledger import metrics
from extproc.pick import explain, pick
from extproc.pods.endpoint import EndpointStatus
from extproc.policy.priority import DegradationStep, PriorityClass, StepKind
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import IndexHits
from extproc.shared.shared_load import EndpointBookings, SharedView
from tests.unit.extproc_pick.pick_fakes import FakeEndpoints, FakeIndex, ShownPool, chat, facts, pod, runtime

ALONE, STREAM = 0.010, 0.001
CLASSES = {
    "chat": PriorityClass(
        priority=10,
        inter_token_seconds=0.030,
        degrade=(DegradationStep(step=StepKind.CAP_OUTPUT, tokens=7, enter=0.8, leave=0.5),),
    ),
    "batch": PriorityClass(priority=0),
}


def busy(address: str, running: int) -> EndpointStatus:
    return pod(address, running_requests=running, reported_at=1.0)


def pool(
    *statuses: EndpointStatus, learns: bool = True, index: FakeIndex | None = None, shadow: bool = False
) -> ShownPool:
    priorities = PriorityPolicy(classes=CLASSES, default_class="batch", trust_objective=True, shadow=shadow)
    loop = asyncio.get_running_loop()
    began = loop.time() - 1.0  # the pods' reports are of now
    policy = PickPolicy(priorities=priorities)
    made = runtime(*statuses, policy=policy, index=index, clock=lambda: loop.time() - began)
    for status in statuses if learns else ():
        tokens = seconds = 0.0
        for at in range(60):
            running = 2 + at % 30
            tokens, seconds = tokens + running / (ALONE + STREAM * running), seconds + running
            shown = pod(
                status.address,
                running_requests=running,
                reported_at=at - 60.0,
                inter_token_count=round(tokens),
                inter_token_seconds_sum=seconds,
            )
            assert shown.load is not None
            made.books.estimates.report(status.address, shown.load, now=at - 60.0)
    return made


def with_chats(count: int) -> FakeIndex:
    """Other replicas have sent so many streams with a promise to each pod."""
    others = {address: EndpointBookings(count, 0, 0, {"chat": count}) for address in "ab"}
    return FakeIndex(IndexHits(view=SharedView(others=others, replicas=1)))


def become(made: ShownPool, *statuses: EndpointStatus) -> None:
    endpoints = made.view.endpoints
    assert isinstance(endpoints, FakeEndpoints)
    endpoints.statuses[:] = statuses
    made.books.freed()


async def winner(made: ShownPool, of: str) -> str:
    async with asyncio.timeout(2.0):
        return (await pick(facts(objective=of), chat(), made)).endpoints[0]


async def test_a_class_goes_where_its_promise_holds_and_waits_where_it_holds_nowhere() -> None:
    assert await winner(pool(busy("a", 25), busy("b", 10)), "chat") == "b"
    crowded = pool(busy("a", 25), busy("b", 30), index=with_chats(25))
    waits = asyncio.create_task(winner(crowded, "chat"))
    async with asyncio.timeout(2.0):
        while not crowded.admission.waiting.get("chat"):
            await asyncio.sleep(0)
    crowded.others = dict  # they have ended
    become(crowded, busy("a", 25), busy("b", 10))
    assert await waits == "b"


def held(made: ShownPool) -> dict[tuple[str, ...], float]:
    """How many picks a promise has kept from a pod, by class and how."""
    families = text_string_to_metric_families(made.telemetry.registry.text().decode())
    return {
        (sample.labels["class"], sample.labels["how"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == metrics.PROMISE_HELD.name
    }


NONE_HELD = {(name, how): 0.0 for name in CLASSES for how in ("elsewhere", "no-room")}


async def test_picks_that_a_promise_kept_from_a_pod_are_counted_each_once() -> None:
    apart = pool(busy("a", 25), busy("b", 10))
    assert held(apart) == NONE_HELD
    for _ in range(2):
        assert await winner(apart, "chat") == "b"
    await explain(facts(objective="chat"), chat(), apart)
    assert held(apart) == NONE_HELD | {("chat", "elsewhere"): 2}
    crowded = pool(busy("a", 25), busy("b", 30), index=with_chats(25))
    waits = asyncio.create_task(winner(crowded, "chat"))
    async with asyncio.timeout(2.0):
        while not crowded.admission.waiting.get("chat"):
            await asyncio.sleep(0)
    crowded.books.freed()  # it looks again, and nothing has changed
    become(crowded, busy("a", 25), busy("b", 30))
    await asyncio.sleep(0)
    crowded.others = dict
    become(crowded, busy("a", 25), busy("b", 10))
    assert await waits == "b"
    assert held(crowded) == NONE_HELD | {("chat", "no-room"): 1}


async def test_what_is_full_for_another_reason_is_no_pick_that_a_promise_held_back() -> None:
    full = pod("a", running_requests=5, kv_usage=1.0, reported_at=1.0)
    made = pool(full, busy("b", 5))
    assert await winner(made, "chat") == "b"
    # less important streams alone are in the way: they are not waited for, and it goes there
    late = pool(busy("a", 25), busy("b", 25))
    await winner(late, "chat")
    assert (held(made), held(late)) == (NONE_HELD, NONE_HELD)


async def test_in_shadow_nothing_is_held_back_for_want_of_room() -> None:
    made = pool(busy("a", 25), busy("b", 30), index=with_chats(25), shadow=True)
    await winner(made, "chat")
    assert held(made) == NONE_HELD


async def test_a_less_important_class_keeps_away_from_streams_with_a_promise() -> None:
    made = pool(busy("a", 10), busy("b", 10))
    first = await winner(made, "chat")
    become(made, busy("a", 25), busy("b", 25))
    assert {await winner(made, "batch") for _ in range(3)} == {"b" if first == "a" else "a"}


async def test_streams_that_other_replicas_have_sent_count_as_well() -> None:
    view = SharedView(others={"a": EndpointBookings(5, 0, 0, {"chat": 1})}, replicas=1)
    made = pool(busy("a", 25), busy("b", 25), index=FakeIndex(IndexHits(view=view)))
    assert {await winner(made, "batch") for _ in range(3)} == {"b"}


async def test_a_retry_takes_the_promise_along_and_the_end_ends_it() -> None:
    made = pool(busy("a", 5), busy("b", 5))
    exchange = await pick(facts(objective="chat"), chat(), made)
    assert {name: each.promised for name, each in made.books.own_bookings().items()} == {
        exchange.endpoints[0]: {"chat": 1}
    }
    other = "b" if exchange.endpoints[0] == "a" else "a"
    exchange.move([other], {})
    assert made.books.own_bookings()[other].promised == {"chat": 1}
    exchange.finish()
    assert made.books.own_bookings() == {}


async def test_what_generates_nothing_is_no_stream() -> None:
    made = pool(busy("a", 5))
    body = b'{"model": "tiny", "input": "hi"}'
    await pick(facts(objective="chat", path="/v1/embeddings"), body, made)
    assert made.books.own_bookings()["a"].promised == {}


async def test_an_explanation_says_why_a_pod_is_full_and_what_is_not_known_yet() -> None:
    picked, preview = await explain(facts(objective="chat"), chat(), pool(busy("a", 25), busy("b", 10)))
    assert picked.decision.rejected["a"].startswith("room: inter-token-promise: 36")
    assert (preview.verdict, preview.rooms["a"].fill >= 1.0, preview.rooms["b"].fill < 1.0) == ("go", True, True)
    assert UNLEARNED not in picked.decision.degraded
    picked, preview = await explain(facts(objective="chat"), chat(), pool(busy("a", 25), learns=False))
    assert (preview.verdict, UNLEARNED in picked.decision.degraded) == ("go", True)
    _, preview = await explain(facts(objective="chat"), chat(), pool(busy("a", 25), index=with_chats(25)))
    assert preview.verdict == "wait"
    _, preview = await explain(facts(objective="chat"), chat(), pool(busy("a", 25)))
    assert preview.verdict == "go"  # those there are less important, and end whether it waits or not


async def test_a_class_is_degraded_by_the_time_that_one_more_stream_would_have() -> None:
    for running, capped in ((5, False), (14, True)):  # 16 and 25 ms of the 30 that are promised
        made = pool(busy("a", running))
        await winner(made, "chat")  # what it sees counts for the next
        exchange = await pick(facts(objective="chat"), chat(), made)
        assert (exchange.response_headers.get("x-kvmesh-degraded") == "cap-output") is capped, running

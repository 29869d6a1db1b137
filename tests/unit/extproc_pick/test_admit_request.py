"""From a prepared request to its booking: at once, after a wait, or refused; nothing is left behind."""

import asyncio
from functools import partial

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from extproc.admission.prepared_request import Picked
from extproc.choosing import choose as choosing
from extproc.choosing.room import Room
from extproc.errors import (
    DisplacedShedError,
    InternalPickError,
    NoReadyEndpointError,
    QueueFullShedError,
    QueueTimeoutShedError,
    RequestShedError,
    StoppingShedError,
)
from extproc.ext_proc.exchange import RequestFacts
from extproc.pick import explain, pick
from extproc.pods.endpoint import EndpointStatus
from extproc.pods.inflight import Booking
from extproc.policy.priority import DEFAULT_CLASSES, OverloadPolicy, PriorityClass
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.pools.booked_exchange import BookedExchange
from extproc.prompts.tokenized_prompt import PromptTokens
from tests.unit.extproc_pick.pick_fakes import FakeEndpoints, FakePrompts, chat, facts, pod, runtime, tokens


def full(address: str) -> EndpointStatus:
    return pod(address, waiting_requests=50, running_requests=50)


SHEDDABLE = facts(objective="sheddable")


class Desk:
    """A pool over fakes: statuses are set, time is the loop's and begins at 0."""

    def __init__(self, *statuses: EndpointStatus, priorities: PriorityPolicy | None = None, prompt: int = 500) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()  # when the pods reported, too
        self.prompts = FakePrompts(tokens(prompt))
        self.pool = runtime(
            *statuses,
            policy=PickPolicy(priorities=priorities or PriorityPolicy()),
            prompts=self.prompts,
            clock=lambda: loop.time() - began,
        )
        self.queue = self.pool.admission._queue
        self.bookings = self.pool.view.bookings
        self.open: list[BookedExchange] = []

    async def pick(self, request: RequestFacts | None = None, body: bytes | None = None) -> str:
        """Return the endpoint that was picked; the exchange stays open."""
        exchange = await pick(request or facts(), chat() if body is None else body, self.pool)
        self.open.append(exchange)
        return exchange.endpoints[0]

    def finish(self) -> None:
        while self.open:
            self.open.pop().finish()

    def count(self, metric: str, **labels: str) -> float:
        families = text_string_to_metric_families(self.pool.telemetry.registry.text().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == metric]
        return sum(sample.value for sample in samples if sample.labels == labels)

    def become(self, *statuses: EndpointStatus) -> None:
        endpoints = self.pool.view.endpoints
        assert isinstance(endpoints, FakeEndpoints)
        endpoints.statuses[:] = statuses
        self.queue.wake()

    def start(self, request: RequestFacts | None = None, body: bytes | None = None) -> "asyncio.Task[str]":
        return asyncio.get_running_loop().create_task(self.pick(request, body))

    async def waiting(self, count: int) -> None:
        async with asyncio.timeout(2.0):
            while sum(self.queue.depth.values()) != count:
                await asyncio.sleep(0)


async def test_a_request_goes_at_once_where_there_is_room() -> None:
    desk = Desk(full("a"), pod("b"))
    assert (await desk.pick(), desk.count("kvmesh_admitted_requests_total", **{"class": "standard"})) == ("b", 1.0)


async def test_a_request_waits_while_every_endpoint_is_full_and_goes_when_one_is_not() -> None:
    desk = Desk(full("a"), full("b"))
    task = desk.start()
    await desk.waiting(1)
    desk.become(full("a"), pod("b"))
    assert (await task, sum(desk.queue.depth.values())) == ("b", 0)


def _note(order: list[str], name: str, _: object) -> None:
    order.append(name)


async def test_nobody_overtakes_those_who_wait_and_the_important_do() -> None:
    desk = Desk(full("a"), priorities=PriorityPolicy(trust_objective=True))
    order: list[str] = []
    for name in ("standard", "standard", "critical"):
        task = desk.start(facts(objective=name))
        task.add_done_callback(partial(_note, order, name))
    await desk.waiting(3)
    desk.become(pod("a"))
    async with asyncio.timeout(2.0):
        while len(order) < 3:
            await asyncio.sleep(0)
    assert order == ["critical", "standard", "standard"]


async def test_a_client_that_leaves_in_the_turn_that_books_its_request_leaves_no_booking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(full("a"))
    task = desk.start()
    await desk.waiting(1)
    book = desk.pool.books.book

    def book_and_leave(picked: Picked) -> Booking:
        task.cancel()
        return book(picked)

    monkeypatch.setattr(desk.pool.books, "book", book_and_leave)
    desk.become(pod("a"))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert desk.pool.books.open_requests == 0
    assert desk.bookings.totals("a", now=desk.pool.clock()).requests == 0


async def test_a_sheddable_request_is_refused_at_once_where_its_target_cannot_be_met() -> None:
    hasty = PriorityClass(priority=-1, sheddable=True, ttft_seconds=0.001, refusal_status=429)
    desk = Desk(full("a"), priorities=PriorityPolicy(classes={**DEFAULT_CLASSES, "sheddable": hasty}))
    with pytest.raises(RequestShedError) as refusal:
        await desk.pick(SHEDDABLE)
    answer = refusal.value
    assert (answer.status, answer.reason, answer.headers["x-kvmesh-priority"]) == (429, "shed", "sheddable")
    assert answer.retry_after_seconds is not None
    assert 1 <= answer.retry_after_seconds <= 60
    assert 0 < int(answer.headers["retry-after-ms"]) <= answer.retry_after_seconds * 1000
    assert desk.count("kvmesh_shed_requests_total", reason="shed", **{"class": "sheddable"}) == 1.0


async def test_while_a_tenant_is_refused_nothing_is_done_with_prompts_that_would_be_whatever_they_are() -> None:
    slow = PriorityClass(priority=-1, sheddable=True, ttft_seconds=20.0)
    priorities = PriorityPolicy(trust_objective=True, classes={**DEFAULT_CLASSES, "sheddable": slow})
    desk = Desk(full("a"), priorities=priorities, prompt=90_000)
    prompts = desk.prompts
    first = desk.start(SHEDDABLE)
    await desk.waiting(1)
    refusals = []
    for read in (2, 2, 2):  # only one more prompt, which shows that the target is out of reach
        with pytest.raises(RequestShedError) as refusal:
            await desk.pick(SHEDDABLE)
        refusals.append(refusal.value)
        assert len(prompts.asked) == read
    after = [int(each.headers["retry-after-ms"]) for each in refusals]
    assert after == sorted(after)
    assert after[1] < after[2]  # those that were not looked at take their place in the line, too
    assert desk.count("kvmesh_shed_requests_total", reason="shed", **{"class": "sheddable"}) == 3.0
    prompts.answer = tokens(100)
    important = desk.start(facts(objective="critical"))
    await desk.waiting(2)

    desk.become(pod("a"))
    await asyncio.gather(first, important)
    desk.finish()
    await desk.pick(SHEDDABLE)  # none waits any more
    assert len(prompts.asked) == 4


async def test_an_explanation_of_a_request_that_would_be_turned_away_looks_at_all_of_it() -> None:
    slow = PriorityClass(priority=-1, sheddable=True, ttft_seconds=20.0)
    desk = Desk(full("a"), priorities=PriorityPolicy(classes={**DEFAULT_CLASSES, "sheddable": slow}), prompt=90_000)
    first = desk.start(SHEDDABLE)
    await desk.waiting(1)
    with pytest.raises(RequestShedError):
        await desk.pick(SHEDDABLE)
    _, preview = await explain(SHEDDABLE, chat(), desk.pool)
    assert preview.verdict == "refuse"
    first.cancel()


async def test_a_sheddable_request_whose_time_in_the_queue_is_over_is_refused_and_any_other_is_sent_on() -> None:
    classes = {name: structs.replace(item, queue_seconds=0.01) for name, item in DEFAULT_CLASSES.items()}
    desk = Desk(full("a"), priorities=PriorityPolicy(classes=classes))
    shed, sent = desk.start(SHEDDABLE), desk.start()
    with pytest.raises(QueueTimeoutShedError):
        await shed
    assert await sent == "a"


async def test_a_full_queue_refuses_the_sheddable_and_sends_on_the_oldest_of_the_others() -> None:
    classes = {name: structs.replace(item, queue_requests=1) for name, item in DEFAULT_CLASSES.items()}
    desk = Desk(full("a"), priorities=PriorityPolicy(classes=classes))
    low, oldest = desk.start(SHEDDABLE), desk.start()
    await desk.waiting(2)
    with pytest.raises(QueueFullShedError):
        await desk.pick(SHEDDABLE)
    newcomer = desk.start()
    assert await oldest == "a"
    assert not newcomer.done()
    desk.become(pod("a"))
    await asyncio.gather(low, newcomer)


async def test_a_class_that_nobody_may_wait_in_is_sent_on_at_once() -> None:
    classes = {name: structs.replace(item, queue_requests=0) for name, item in DEFAULT_CLASSES.items()}
    desk = Desk(full("a"), priorities=PriorityPolicy(classes=classes))
    assert await desk.pick() == "a"


async def test_what_goes_wrong_after_the_booking_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    desk = Desk(full("a"))
    waited = desk.start()
    await desk.waiting(1)
    monkeypatch.setattr(desk.pool.pressure, "waited", broken)
    desk.become(pod("a"))
    with pytest.raises(InternalPickError):
        await waited
    monkeypatch.setattr(desk.queue, "passed", broken)
    with pytest.raises(InternalPickError):
        await desk.pick()
    assert desk.bookings.by_endpoint() == {}


async def test_a_class_that_is_owed_its_share_goes_where_higher_ones_have_filled_what_it_may_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": structs.replace(DEFAULT_CLASSES["sheddable"], reserved_share=0.9)}
    desk = Desk(pod("a"), priorities=PriorityPolicy(classes=classes))
    monkeypatch.setattr(choosing, "rooms_in", lambda *_, ceiling: [Room(0.7 / ceiling, "others fill it")])
    low = desk.start(SHEDDABLE)
    await desk.waiting(1)
    desk.queue.wake()
    await asyncio.sleep(0)
    assert not low.done()
    for _ in range(2):  # pass it
        assert await desk.pick() == "a"
    desk.queue.wake()
    async with asyncio.timeout(2.0):
        assert await low == "a"


async def test_requests_with_invented_models_wait_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(full("a"), priorities=PriorityPolicy(trust_objective=True))
    order: list[str] = []
    for model, name in (("one", "standard"), ("two", "standard"), ("three", "critical")):
        task = desk.start(facts(objective=name), chat(model=model))
        task.add_done_callback(partial(_note, order, model))
    await desk.waiting(3)
    assert {each.pool for each in desk.queue._waiting} == {""}
    assert len({each.group for each in desk.queue._waiting}) == 3
    async with asyncio.timeout(2.0):
        while desk.queue._next_pass is not None:
            await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(desk.queue, "_look_soon", lambda: None)
        desk.become(pod("a"))  # and none has been tried yet
        newcomer = desk.start(facts(), chat(model="four"))
        newcomer.add_done_callback(partial(_note, order, "four"))
        await desk.waiting(4)  # it overtakes none
    desk.queue.wake()
    async with asyncio.timeout(2.0):
        while len(order) < 4:
            await asyncio.sleep(0)
    assert order == ["three", "one", "two", "four"]


async def test_a_newcomer_of_a_higher_priority_takes_the_place_of_a_sheddable_one() -> None:
    desk = Desk(full("a"), priorities=PriorityPolicy(overload=OverloadPolicy(queue_requests=1)))
    low = desk.start(SHEDDABLE)
    await desk.waiting(1)
    high = desk.start()
    with pytest.raises(DisplacedShedError):
        await low
    desk.become(pod("a"))
    assert await high == "a"


async def test_a_client_that_leaves_the_queue_leaves_nothing() -> None:
    desk = Desk(full("a"))
    task = desk.start()
    await desk.waiting(1)
    task.cancel()
    await desk.waiting(0)
    desk.become(pod("a"))
    await asyncio.sleep(0)
    assert desk.bookings.by_endpoint() == {}


async def test_a_picker_that_stops_refuses_the_sheddable_and_sends_on_the_others() -> None:
    desk = Desk(full("a"))
    shed, sent = desk.start(SHEDDABLE), desk.start()
    await desk.waiting(2)
    desk.pool.admission.close()
    with pytest.raises(StoppingShedError):
        await shed
    assert await sent == "a"


async def test_who_waits_hears_when_the_last_endpoint_is_gone() -> None:
    desk = Desk(full("a"))
    task = desk.start()
    await desk.waiting(1)
    desk.become()
    with pytest.raises(NoReadyEndpointError):
        await task


async def test_with_overload_control_off_everything_is_sent_on() -> None:
    desk = Desk(full("a"), priorities=PriorityPolicy(overload=OverloadPolicy(enabled=False)))
    assert await desk.pick(SHEDDABLE) == "a"


async def test_a_header_that_does_not_count_is_counted() -> None:
    desk = Desk(pod("a"))
    await desk.pick(facts(objective="critical"))
    await desk.pick(facts(objective="not-known"))
    assert [desk.count("kvmesh_ignored_objectives_total", why=why) for why in ("untrusted", "unknown")] == [1.0, 1.0]


async def test_a_request_of_unknown_tokens_is_admitted_too() -> None:
    desk = Desk(pod("a"))
    desk.prompts.answer = PromptTokens()
    assert await desk.pick() == "a"

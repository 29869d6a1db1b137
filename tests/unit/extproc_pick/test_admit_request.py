"""From a prepared request to its booking: at once, after a wait, or refused; nothing is left behind."""

import asyncio
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.degradation import Degradation
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.admission.saturation import Room
from extproc.errors import (
    DisplacedShedError,
    NoReadyEndpointError,
    QueueFullShedError,
    QueueTimeoutShedError,
    RequestShedError,
    StoppingShedError,
)
from extproc.ext_proc.exchange import RequestFacts
from extproc.pick import EndpointPicker, Picked
from extproc.pods.endpoint import EndpointStatus
from extproc.pods.inflight import Booking
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import DEFAULT_CLASSES, OverloadPolicy, PriorityClass, PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.pools.admit_request import RequestAdmission
from extproc.prompts.token_ids import PromptTokens
from tests.unit.extproc_pick.pick_fakes import FakeEndpoints, FakePrompts, chat, facts, picker, pod, tokens


def full(address: str) -> EndpointStatus:
    return pod(address, waiting_requests=50, running_requests=50)


SHEDDABLE = facts(objective="sheddable")


@dataclass
class Counts:
    admitted_: list[str] = field(default_factory=list)
    shed_: list[tuple[str, str]] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def admitted(self, class_name: str, *, tenant: str) -> None:
        self.admitted_.append(class_name)

    def shed(self, class_name: str, *, reason: str, tenant: str) -> None:
        self.shed_.append((class_name, reason))

    def objective_ignored(self, why: str) -> None:
        self.ignored.append(why)

    def left_queue(self, class_name: str, **what: Any) -> None:
        pass


class Desk:
    """An admission over fakes: statuses are set, time is the loop's and begins at 0."""

    def __init__(self, *statuses: EndpointStatus, priorities: PriorityPolicy | None = None, prompt: int = 500) -> None:
        policy = PickPolicy(priorities=priorities or PriorityPolicy())
        loop = asyncio.get_running_loop()
        began = loop.time()  # when the pods reported, too

        def clock() -> float:
            return loop.time() - began

        self.counts = Counts()
        self.picker: EndpointPicker = replace(
            picker(*statuses, policy=policy, prompts=FakePrompts(tokens(prompt))), clock=clock
        )
        self.estimates = LatencyEstimates()
        order = FlowQueue(policy.priorities)
        self.queue = AdmissionQueue(order, clock=clock, telemetry=self.counts)
        self.pressure = PoolPressure(
            policy=policy.priorities,
            estimates=self.estimates,
            degradation=Degradation(policy.priorities),
            waiting=order,
            clock=clock,
            random=lambda: 0.0,
        )
        self.picker = replace(self.picker, pressure=self.pressure)
        self.admission: RequestAdmission[Booking] = RequestAdmission(
            picker=self.picker,
            policy=policy.priorities,
            pressure=self.pressure,
            estimates=self.estimates,
            health=self.picker.health,
            queue=self.queue,
            book=self.book,
            unbook=self.picker.bookings.release,
            others=lambda: None,
            telemetry=self.counts,
            clock=clock,
        )

    def book(self, picked: Picked) -> Booking:
        return self.picker.bookings.book(picked.decision.endpoints[0], now=self.picker.clock())

    def become(self, *statuses: EndpointStatus) -> None:
        endpoints = self.picker.endpoints
        assert isinstance(endpoints, FakeEndpoints)
        endpoints.statuses[:] = statuses
        self.queue.wake()

    def start(self, request: RequestFacts | None = None) -> "asyncio.Task[Booking]":
        return asyncio.get_running_loop().create_task(self.admission.admit(request or facts(), chat()))

    async def waiting(self, count: int) -> None:
        async with asyncio.timeout(2.0):
            while sum(self.queue.depth.values()) != count:
                await asyncio.sleep(0)


async def test_a_request_goes_at_once_where_there_is_room() -> None:
    desk = Desk(full("a"), pod("b"))
    booking = await desk.admission.admit(facts(), chat())
    assert (booking.endpoint, desk.counts.admitted_) == ("b", ["standard"])


async def test_a_request_waits_while_every_endpoint_is_full_and_goes_when_one_is_not() -> None:
    desk = Desk(full("a"), full("b"))
    task = desk.start()
    await desk.waiting(1)
    desk.become(full("a"), pod("b"))
    assert ((await task).endpoint, sum(desk.queue.depth.values())) == ("b", 0)


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


async def test_a_sheddable_request_is_refused_at_once_where_its_target_cannot_be_met() -> None:
    hasty = PriorityClass(priority=-1, sheddable=True, ttft_seconds=0.001, refusal_status=429)
    desk = Desk(full("a"), priorities=PriorityPolicy(classes={**DEFAULT_CLASSES, "sheddable": hasty}))
    with pytest.raises(RequestShedError) as refusal:
        await desk.admission.admit(SHEDDABLE, chat())
    answer = refusal.value
    assert (answer.status, answer.reason, answer.headers["x-kvmesh-priority"]) == (429, "shed", "sheddable")
    assert answer.retry_after_seconds is not None
    assert 1 <= answer.retry_after_seconds <= 60
    assert 0 < int(answer.headers["retry-after-ms"]) <= answer.retry_after_seconds * 1000
    assert desk.counts.shed_ == [("sheddable", "shed")]


async def test_while_a_tenant_is_refused_nothing_is_done_with_prompts_that_would_be_whatever_they_are() -> None:
    slow = PriorityClass(priority=-1, sheddable=True, ttft_seconds=20.0)
    priorities = PriorityPolicy(trust_objective=True, classes={**DEFAULT_CLASSES, "sheddable": slow})
    desk = Desk(full("a"), priorities=priorities, prompt=90_000)
    prompts = desk.picker.prompts
    assert isinstance(prompts, FakePrompts)

    first = desk.start(SHEDDABLE)
    await desk.waiting(1)
    refusals = []
    for read in (2, 2, 2):  # only one more prompt, which shows that the target is out of reach
        with pytest.raises(RequestShedError) as refusal:
            await desk.admission.admit(SHEDDABLE, chat())
        refusals.append(refusal.value)
        assert len(prompts.asked) == read
    after = [int(each.headers["retry-after-ms"]) for each in refusals]
    assert after == sorted(after)
    assert after[1] < after[2]  # those that nobody has looked at take their place in the line, too
    assert desk.counts.shed_ == [("sheddable", "shed")] * 3
    prompts.answer = tokens(100)
    important = desk.start(facts(objective="critical"))
    await desk.waiting(2)

    desk.become(pod("a"))
    await asyncio.gather(first, important)
    await desk.admission.admit(SHEDDABLE, chat())  # nobody waits any more
    assert len(prompts.asked) == 4


async def test_an_explanation_of_a_request_that_would_be_turned_away_looks_at_all_of_it() -> None:
    slow = PriorityClass(priority=-1, sheddable=True, ttft_seconds=20.0)
    desk = Desk(full("a"), priorities=PriorityPolicy(classes={**DEFAULT_CLASSES, "sheddable": slow}), prompt=90_000)
    first = desk.start(SHEDDABLE)
    await desk.waiting(1)
    with pytest.raises(RequestShedError):
        await desk.admission.admit(SHEDDABLE, chat())
    prepared = await desk.picker.prepare(SHEDDABLE, chat())
    survey = desk.picker.survey(prepared, now=desk.picker.clock())
    assert desk.admission.preview(prepared, survey).verdict == "refuse"
    first.cancel()


async def test_a_sheddable_request_whose_time_in_the_queue_is_over_is_refused_and_any_other_is_sent_on() -> None:
    classes = {name: structs.replace(item, queue_seconds=0.01) for name, item in DEFAULT_CLASSES.items()}
    desk = Desk(full("a"), priorities=PriorityPolicy(classes=classes))
    shed, sent = desk.start(SHEDDABLE), desk.start()
    with pytest.raises(QueueTimeoutShedError):
        await shed
    assert (await sent).endpoint == "a"


async def test_a_full_queue_refuses_the_sheddable_and_sends_on_the_oldest_of_the_others() -> None:
    classes = {name: structs.replace(item, queue_requests=1) for name, item in DEFAULT_CLASSES.items()}
    desk = Desk(full("a"), priorities=PriorityPolicy(classes=classes))
    low, oldest = desk.start(SHEDDABLE), desk.start()
    await desk.waiting(2)
    with pytest.raises(QueueFullShedError):
        await desk.admission.admit(SHEDDABLE, chat())
    newcomer = desk.start()
    assert (await oldest).endpoint == "a"
    assert not newcomer.done()
    desk.become(pod("a"))
    await asyncio.gather(low, newcomer)


async def test_a_class_that_nobody_may_wait_in_is_sent_on_at_once() -> None:
    classes = {name: structs.replace(item, queue_requests=0) for name, item in DEFAULT_CLASSES.items()}
    desk = Desk(full("a"), priorities=PriorityPolicy(classes=classes))
    assert (await desk.admission.admit(facts(), chat())).endpoint == "a"


async def test_what_goes_wrong_after_the_booking_takes_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    desk = Desk(full("a"))
    waited = desk.start()
    await desk.waiting(1)
    monkeypatch.setattr(desk.pressure, "waited", broken)
    desk.become(pod("a"))
    with pytest.raises(ZeroDivisionError):
        await waited
    monkeypatch.setattr(desk.queue, "passed", broken)
    with pytest.raises(ZeroDivisionError):
        await desk.admission.admit(facts(), chat())
    assert desk.picker.bookings.by_endpoint() == {}


async def test_a_class_that_is_owed_its_share_goes_where_higher_ones_have_filled_what_it_may_fill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": structs.replace(DEFAULT_CLASSES["sheddable"], reserved_share=0.9)}
    desk = Desk(pod("a"), priorities=PriorityPolicy(classes=classes))
    monkeypatch.setattr(desk.admission, "rooms", lambda _, *, ceiling: [Room(0.7 / ceiling, "others fill it")])
    low = desk.start(SHEDDABLE)
    await desk.waiting(1)
    desk.queue.wake()
    await asyncio.sleep(0)
    assert not low.done()
    for _ in range(2):  # pass it
        assert (await desk.admission.admit(facts(), chat())).endpoint == "a"
    desk.queue.wake()
    async with asyncio.timeout(2.0):
        assert (await low).endpoint == "a"


async def test_requests_with_invented_models_wait_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(full("a"), priorities=PriorityPolicy(trust_objective=True))
    order: list[str] = []
    for model, name in (("one", "standard"), ("two", "standard"), ("three", "critical")):
        request = desk.admission.admit(facts(objective=name), chat(model=model))
        task = asyncio.ensure_future(request)
        task.add_done_callback(partial(_note, order, model))
    await desk.waiting(3)
    assert {each.pool for each in desk.queue._waiting} == {""}
    assert len({each.group for each in desk.queue._waiting}) == 3
    async with asyncio.timeout(2.0):
        while desk.queue._next_pass is not None:
            await asyncio.sleep(0)
    with monkeypatch.context() as patch:
        patch.setattr(desk.queue, "_look_soon", lambda: None)
        desk.become(pod("a"))  # and nobody has looked yet
        newcomer = asyncio.ensure_future(desk.admission.admit(facts(), chat(model="four")))
        newcomer.add_done_callback(partial(_note, order, "four"))
        await desk.waiting(4)  # it overtakes nobody
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
    assert (await high).endpoint == "a"


async def test_a_client_that_leaves_the_queue_leaves_nothing() -> None:
    desk = Desk(full("a"))
    task = desk.start()
    await desk.waiting(1)
    task.cancel()
    await desk.waiting(0)
    desk.become(pod("a"))
    await asyncio.sleep(0)
    assert desk.picker.bookings.by_endpoint() == {}


async def test_a_picker_that_stops_refuses_the_sheddable_and_sends_on_the_others() -> None:
    desk = Desk(full("a"))
    shed, sent = desk.start(SHEDDABLE), desk.start()
    await desk.waiting(2)
    desk.admission.close()
    with pytest.raises(StoppingShedError):
        await shed
    assert (await sent).endpoint == "a"


async def test_who_waits_hears_when_the_last_endpoint_is_gone() -> None:
    desk = Desk(full("a"))
    task = desk.start()
    await desk.waiting(1)
    desk.become()
    with pytest.raises(NoReadyEndpointError):
        await task


async def test_with_overload_control_off_everything_is_sent_on() -> None:
    desk = Desk(full("a"), priorities=PriorityPolicy(overload=OverloadPolicy(enabled=False)))
    assert (await desk.admission.admit(SHEDDABLE, chat())).endpoint == "a"


async def test_a_header_that_does_not_count_is_counted() -> None:
    desk = Desk(pod("a"))
    await desk.admission.admit(facts(objective="critical"), chat())
    await desk.admission.admit(facts(objective="nobody-knows"), chat())
    assert desk.counts.ignored == ["untrusted", "unknown"]


async def test_a_request_of_unknown_tokens_is_admitted_too() -> None:
    desk = Desk(pod("a"))
    desk.picker.prompts.answer = PromptTokens()  # type: ignore[attr-defined]
    assert (await desk.admission.admit(facts(), chat())).endpoint == "a"

"""A pool that was scaled to zero: requests wait for its first pod, bounded by class, memory and time, and then go."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any

import pytest
from msgspec import structs

from extproc.admission.first_pod import FirstPodWaits
from extproc.errors import (
    DisplacedShedError,
    FirstPodLateError,
    FirstPodNeededError,
    NoReadyEndpointError,
    QueueFullShedError,
    RequestShedError,
    StoppingShedError,
)
from extproc.models.models import ModelRule, ModelTable, ModelTarget
from extproc.pick import FIRST_POD_NOTE, explain, pick
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.policy.autoscale import Autoscale, ScalePolicy
from extproc.policy.priority import DEFAULT_CLASSES
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.pools.booked_exchange import BookedExchange
from tests.unit.extproc_admission.virtual_time import now, play, turns
from tests.unit.extproc_pick.pick_fakes import TINY, FakeEndpoints, chat, facts, pod, runtime

FROM_ZERO = Autoscale(both=ScalePolicy(min_replicas=0))  # pods take 90 s, requests wait for 180
CLASSES = PriorityPolicy(trust_objective=True)
AWAY = partial(pod, reachability=Reachability.NOT_READY)


@dataclass
class Starts:
    start_seconds: float | None = None
    first_start: float | None = None


@dataclass
class Ends:
    """Notes how waits have ended."""

    all: list[tuple[str, str, float]] = field(default_factory=list)

    def ended(self, class_name: str, *, outcome: str, seconds: float) -> None:
        self.all.append((class_name, outcome, round(seconds, 1)))


class Desk:
    """A pool without pods over fakes; time is virtual and begins at 0."""

    def __init__(
        self,
        *statuses: EndpointStatus,
        autoscale: Autoscale = FROM_ZERO,
        priorities: PriorityPolicy = CLASSES,
        models: ModelTable | None = None,
        most_bytes: int = 1 << 20,
    ) -> None:
        policy = PickPolicy(priorities=priorities, autoscale=autoscale)
        self.starts, self.ends, self.asked = Starts(), Ends(), 0
        models = models or ModelTable(served=(TINY,))
        self.pool = runtime(*statuses, policy=policy, clock=now, models=models, most_bytes=most_bytes)
        self.queue = self.pool.admission._queue
        self.bodies = self.queue._bodies
        self.endpoints = self.pool.view.endpoints
        self.waits = self.pool.first_pod = FirstPodWaits(
            autoscale,
            policy=priorities,
            queue=self.queue,
            starts=self.starts,
            serves=self._serves,
            ask=self._ask,
            telemetry=self.ends,
            clock=now,
            random=lambda: 0.0,
        )
        self.open: list[BookedExchange] = []
        self.gone: list[str] = []  # request ids, in the order in which they were answered

    def _serves(self) -> bool:
        serving = (Reachability.READY, Reachability.UNKNOWN)
        return any(each.reachability in serving for each in self.endpoints.snapshot(now=now()))

    def _ask(self) -> None:
        self.asked += 1

    def become(self, *statuses: EndpointStatus) -> None:
        assert isinstance(self.endpoints, FakeEndpoints)
        self.endpoints.statuses[:] = statuses
        self.queue.wake()

    async def pick(self, objective: str = "standard", *, name: str = "r", tenant: str = "", **body: Any) -> str:
        headers = {"x-gateway-inference-fairness-id": tenant} if tenant else {}
        asked = facts(objective=objective, request_id=name, headers=headers)
        exchange = await pick(asked, chat(**body), self.pool)
        self.open.append(exchange)
        self.gone.append(name)
        return exchange.endpoints[0]

    def start(self, objective: str = "standard", **more: Any) -> "asyncio.Task[str]":
        return asyncio.get_running_loop().create_task(self.pick(objective, **more))

    def nothing_is_left(self) -> None:
        assert (sum(self.queue.depth.values()), self.bodies.held_bytes, self.pool.under_way) == (0, 0, 0)
        assert self.waits.waiting == {}


def full(address: str) -> EndpointStatus:
    return pod(address, waiting_requests=10_000, running_requests=50, reported_at=now())


def played(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        play(test())

    return run


@played
async def test_a_request_waits_for_the_first_pod_and_goes_to_it() -> None:
    desk = Desk()
    task = desk.start()
    await turns()
    assert (desk.waits.waiting, desk.asked) == ({"standard": 1}, 1)
    await asyncio.sleep(100.0)
    desk.become(pod("a"))
    assert await task == "a"
    assert desk.ends.all == [("standard", "served", 100.0)]
    await turns()
    assert FIRST_POD_NOTE in desk.pool.recent[0].outcome.notes  # type: ignore[union-attr]
    desk.nothing_is_left()


@played
async def test_pods_that_are_not_ready_or_compute_prompts_for_others_are_none() -> None:
    desk = Desk(AWAY("a"))
    task = desk.start()
    await turns()
    desk.become(AWAY("a"), AWAY("b"))
    await asyncio.sleep(60.0)
    assert not task.done()
    desk.become(AWAY("a"), pod("b"))
    assert await task == "b"


@pytest.mark.parametrize(
    ("autoscale", "shadow"),
    [
        (Autoscale(), False),
        (Autoscale(both=ScalePolicy(min_replicas=1)), False),
        (Autoscale(both=ScalePolicy(min_replicas=0, wait_from_zero_seconds=0.0)), False),
        (Autoscale(prefill=ScalePolicy(min_replicas=0)), False),
        (FROM_ZERO, True),
    ],
    ids=["none", "never-zero", "no-wait", "prefill-alone", "shadow"],
)
def test_where_no_first_pod_is_asked_for_a_request_is_refused_at_once_as_ever(
    autoscale: Autoscale, shadow: bool
) -> None:
    async def run() -> None:
        desk = Desk(autoscale=autoscale, priorities=replace(CLASSES, shadow=shadow))
        with pytest.raises(NoReadyEndpointError) as refusal:
            await desk.pick()
        assert (refusal.value.reason, refusal.value.retry_after_seconds, desk.asked) == ("no-ready-endpoint", None, 0)
        page = desk.pool.telemetry.registry.text().decode()
        counted = (
            'kvmesh_shadow_decisions_total{action="wait",class="standard",reason="first-pod",rule="autoscale"} 1.0'
        )
        assert (counted in page) is shadow

    play(run())


@played
async def test_a_wait_in_vain_ends_with_an_honest_retry_after() -> None:
    desk = Desk()
    with pytest.raises(FirstPodLateError) as refusal:
        await desk.pick()
    assert now() == pytest.approx(180.0, abs=0.1)
    answer = refusal.value
    assert (answer.status, answer.reason) == (503, "no-pod-in-time")
    assert answer.retry_after_seconds == 60  # overdue for 90 s: the longest
    assert answer.headers["x-kvmesh-priority"] == "standard"
    assert desk.ends.all == [("standard", "no-pod-in-time", 180.0)]
    desk.nothing_is_left()


@pytest.mark.parametrize(
    ("learned", "began", "left"),
    [(None, None, 90.0), (40.0, None, 90.0), (200.0, None, 200.0), (None, -80.0, 10.0), (None, -100.0, 10.0)],
    ids=["declared", "seen-to-be-quicker", "seen-to-be-slower", "one-starts", "one-is-overdue"],
)
def test_what_is_left_goes_by_what_pods_take_and_how_long_the_oldest_has_started(
    learned: float | None, began: float | None, left: float
) -> None:
    async def run() -> None:
        desk = Desk()
        desk.starts.start_seconds, desk.starts.first_start = learned, began
        assert desk.waits.is_due()
        assert desk.waits.seconds_left(now()) == pytest.approx(left)

    play(run())


@played
async def test_how_long_a_pod_is_asked_for_begins_anew_once_there_was_one() -> None:
    desk = Desk()
    task = desk.start()
    await asyncio.sleep(50.0)
    assert desk.waits.seconds_left(now()) == pytest.approx(40.0)
    task.cancel()
    desk.become(pod("a"))
    desk.waits.look()
    desk.become()
    await asyncio.sleep(1000.0)
    assert desk.waits.seconds_left(now()) == pytest.approx(90.0)


@played
async def test_they_leave_in_the_order_of_their_priorities_as_the_pod_has_room() -> None:
    desk = Desk()
    names = ["sheddable", "standard", "critical", "standard", "critical"]
    tasks = [desk.start(name, name=f"{name}-{i}") for i, name in enumerate(names)]
    await turns()
    assert desk.waits.waiting == {"sheddable": 1, "standard": 2, "critical": 2}
    await asyncio.sleep(90.0)
    # until it has reported, a new pod gets a few at a time
    desk.become(EndpointStatus(address="a", reachability=Reachability.UNKNOWN, load=None, ready_since=now()))
    await turns(10)
    assert desk.gone == ["critical-2", "critical-4", "standard-1"]
    assert not any(task.done() and task.exception() for task in tasks)
    desk.become(pod("a"))
    await asyncio.gather(*tasks)
    assert desk.gone[3:] == ["standard-3", "sheddable-0"]
    desk.nothing_is_left()


@played
async def test_when_a_pod_is_there_and_full_the_class_waits_as_long_as_it_does_anyhow() -> None:
    desk = Desk()
    patient, shed = desk.start(), desk.start("sheddable")
    await asyncio.sleep(170.0)
    desk.become(full("a"))
    assert await patient == "a"  # it may not be refused: sent on when its own 30 s are over
    assert now() == pytest.approx(180.0 + DEFAULT_CLASSES["standard"].targets.queue_seconds, abs=1.0)
    assert ("standard", "pod-full", 180.0) in desk.ends.all
    with pytest.raises(RequestShedError) as refusal:
        await shed
    assert refusal.value.reason == "shed"  # the pod's own queue is far too long for what the class is promised


@played
async def test_a_class_waits_no_longer_than_it_says_and_than_the_pool_does() -> None:
    hasty = structs.replace(DEFAULT_CLASSES["critical"], wait_from_zero_seconds=0.0)
    slow = structs.replace(DEFAULT_CLASSES["sheddable"], wait_from_zero_seconds=1000.0)
    classes = {**DEFAULT_CLASSES, "critical": hasty, "sheddable": slow}
    desk = Desk(priorities=PriorityPolicy(trust_objective=True, classes=classes, overload=CLASSES.overload))
    with pytest.raises(FirstPodLateError) as refusal:
        await desk.pick("critical")
    assert (now(), refusal.value.retry_after_seconds, desk.asked) == (0.0, 60, 1)
    with pytest.raises(FirstPodLateError):
        await desk.pick("sheddable")
    assert now() == pytest.approx(180.0, abs=0.1)


@played
async def test_a_full_queue_refuses_newcomers_and_no_class_loses_those_that_have_waited_longest() -> None:
    classes = {name: structs.replace(item, queue_requests=1) for name, item in DEFAULT_CLASSES.items()}
    desk = Desk(priorities=PriorityPolicy(trust_objective=True, classes=classes, overload=CLASSES.overload))
    first = desk.start(name="first")
    await turns()
    with pytest.raises(QueueFullShedError) as refusal:
        await desk.pick()
    assert (refusal.value.status, refusal.value.retry_after_seconds) == (503, 60)
    desk.become(pod("a"))
    assert await first == "a"
    desk.nothing_is_left()


@played
async def test_a_policy_that_changes_meanwhile_changes_nothing_of_who_gives_way() -> None:
    classes = {name: structs.replace(item, queue_requests=1) for name, item in DEFAULT_CLASSES.items()}
    policy = PriorityPolicy(trust_objective=True, classes=classes, overload=CLASSES.overload)
    desk = Desk(priorities=policy)
    first = desk.start(name="first")
    await turns()
    desk.queue._queue.reconfigure(policy)
    with pytest.raises(QueueFullShedError):
        await desk.pick()
    desk.become(pod("a"))
    assert await first == "a"


@played
async def test_in_a_full_queue_higher_classes_displace_lower_ones_whatever_they_are() -> None:
    overload = structs.replace(CLASSES.overload, queue_requests=2)
    desk = Desk(priorities=PriorityPolicy(trust_objective=True, overload=overload))
    old, new = desk.start(name="old"), desk.start(name="new")
    await turns()
    critical = desk.start("critical", name="critical")
    with pytest.raises(DisplacedShedError):
        await new
    desk.become(pod("a"))
    await asyncio.gather(old, critical)
    assert desk.gone == ["critical", "old"]


@played
async def test_bodies_are_bounded_in_bytes_and_the_least_important_give_way() -> None:
    desk = Desk(most_bytes=2 * 3 * 10_000 + 2 * 3 * 200)  # each body counts twice: as it came, and as it was read
    big = {"user": "x" * 10_000}
    low = [desk.start("sheddable", name=f"low-{i}", **big) for i in range(2)]
    standard = desk.start(name="standard", **big)
    await turns()
    assert sum(desk.waits.waiting.values()) == 3
    critical = desk.start("critical", name="critical", **big)
    with pytest.raises(DisplacedShedError) as refusal:
        await low[1]
    assert refusal.value.retry_after_seconds is not None
    with pytest.raises(QueueFullShedError):  # nothing less important is left but its own
        await desk.pick("sheddable", **big)
    assert desk.bodies.held_bytes <= desk.bodies.most_bytes
    assert desk.bodies.gave_way == 2
    desk.become(pod("a"))
    await asyncio.gather(low[0], standard, critical)
    desk.nothing_is_left()


@played
async def test_a_client_that_leaves_leaves_nothing() -> None:
    desk = Desk()
    task = desk.start()
    await turns()
    task.cancel()
    await turns()
    assert desk.ends.all == [("standard", "client-left", 0.0)]
    desk.nothing_is_left()
    desk.become(pod("a"))
    await turns()
    assert desk.pool.books.open_requests == 0


@played
async def test_a_picker_that_stops_answers_those_that_wait_and_takes_no_more() -> None:
    desk = Desk()
    task = desk.start()
    await turns()
    desk.pool.admission.close()
    with pytest.raises(StoppingShedError) as refusal:
        await task
    assert (refusal.value.status, refusal.value.retry_after_seconds) == (503, 1)
    with pytest.raises(StoppingShedError):
        await desk.pick()
    desk.nothing_is_left()


@played
async def test_a_pool_that_goes_answers_those_that_wait() -> None:
    desk = Desk()
    task = desk.start()
    await turns()
    desk.waits.end()
    with pytest.raises(NoReadyEndpointError):
        await task
    desk.nothing_is_left()


@played
async def test_requests_that_wait_for_room_wait_on_when_the_last_pod_goes() -> None:
    desk = Desk(full("a"))
    task = desk.start()
    await asyncio.sleep(1.0)
    assert desk.waits.waiting == {}
    desk.become()
    await turns()
    assert desk.waits.waiting == {"standard": 1}
    await asyncio.sleep(100.0)
    desk.become(pod("b"))
    assert await task == "b"


@played
async def test_a_pod_that_dies_at_once_does_not_end_the_wait() -> None:
    desk = Desk()
    tasks = [desk.start(name=str(i)) for i in range(3)]
    await asyncio.sleep(60.0)
    desk.become(full("a"))
    await turns()
    desk.become(AWAY("a"))
    await asyncio.sleep(60.0)
    assert not any(task.done() for task in tasks)
    desk.become(pod("a"))
    await asyncio.gather(*tasks)


@played
async def test_a_first_pod_without_the_model_gives_the_request_to_the_next_model() -> None:
    rule = ModelRule(model="chat", targets=(ModelTarget(model="big"),), fallbacks=("tiny",))
    models = ModelTable(served=(TINY, replace(TINY, name="big", adapters=frozenset())), rules=(rule,))
    desk = Desk(models=models)
    task = desk.start(model="chat")
    await asyncio.sleep(30.0)
    desk.become(pod("a", "tiny"))
    assert await task == "a"


@played
async def test_an_explanation_says_that_it_would_wait_and_changes_nothing() -> None:
    desk = Desk()
    with pytest.raises(FirstPodNeededError, match=r"would wait up to 180 s .* expected in 90 s"):
        await explain(facts(), chat(), desk.pool)
    assert desk.asked == 0
    desk.nothing_is_left()

"""Clients that come, wait and leave at any moment, pods with few places: nothing is lost, leaked or forgotten."""

import asyncio
from collections import Counter

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission.admission_queue import AdmissionQueue, DisplacedError, Outcome, QueueTimeoutError
from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue, QueueFullError
from extproc.admission.waiting_bodies import WaitingBodies
from extproc.policy.priority import DEFAULT_CLASSES, OverloadPolicy
from extproc.policy.request_class import PriorityPolicy
from tests.unit.extproc_admission.queue_tickets import ticket
from tests.unit.extproc_admission.virtual_time import now, play, turns

TOKENS_PER_SECOND = 1000


class Client(msgspec.Struct, frozen=True, kw_only=True):
    comes: float
    class_name: str
    tenant: str
    tokens: int
    group: str  # "": every pod, "a": the first one only
    waits: float
    leaves_after: float | None
    breaks: bool


clients = st.builds(
    Client,
    comes=st.sampled_from([number / 10 for number in range(20)]),
    class_name=st.sampled_from(sorted(DEFAULT_CLASSES)),
    tenant=st.sampled_from("ab"),
    tokens=st.integers(0, 2000),
    group=st.sampled_from(["", "", "a"]),
    waits=st.sampled_from([0.0, 0.3, 2.0, 60.0]),
    leaves_after=st.sampled_from([None, None, 0.0, 0.1, 0.35, 1.0]),
    breaks=st.sampled_from([False] * 9 + [True]),
)


class World:
    def __init__(self, places: list[int], overload: OverloadPolicy, most_bytes: int) -> None:
        self.places = places
        self.used = [0 for _ in places]
        self.ends: Counter[Outcome] = Counter()
        order = FlowQueue(PriorityPolicy(classes=DEFAULT_CLASSES, overload=overload), quantum_tokens=500)
        self.bodies = WaitingBodies(most_bytes=most_bytes)
        self.queue = AdmissionQueue(order, bodies=self.bodies, clock=now, telemetry=self)

    def left_queue(self, class_name: str, *, outcome: Outcome, seconds: float, tenant: str) -> None:
        assert seconds >= 0.0
        self.ends[outcome] += 1

    def pod_for(self, asked: Ticket, ceiling: float | None = None) -> int | None:
        ceiling = asked.priority_class.ceiling if ceiling is None else ceiling
        pods = range(1 if asked.group == "a" else len(self.places))
        free = [pod for pod in pods if self.used[pod] < self.places[pod] * ceiling]
        return min(free, key=lambda pod: self.used[pod], default=None)

    def book(self, asked: Ticket, client: Client, ceiling: float) -> int | None:
        if client.breaks:
            raise ZeroDivisionError
        pod = self.pod_for(asked, ceiling)
        if pod is not None:
            self.used[pod] += 1
            assert self.used[pod] <= self.places[pod]
        return pod

    def release(self, pod: int) -> None:
        self.used[pod] -= 1
        assert self.used[pod] >= 0
        self.queue.wake("m")

    async def serve(self, client: Client) -> str:
        await asyncio.sleep(client.comes)
        asked = ticket(
            client.class_name,
            tenant=client.tenant,
            tokens=client.tokens,
            group=client.group,
            at=now(),
            wait=client.waits,
        )
        booked: list[int] = []

        def attempt(_: float, ceiling: float) -> int | None:
            pod = self.book(asked, client, ceiling)
            if pod is not None:
                booked.append(pod)
            return pod

        try:
            pod = await self.queue.enter(asked, attempt)
        except (QueueTimeoutError, DisplacedError, QueueFullError, ZeroDivisionError) as error:
            return type(error).__name__
        except asyncio.CancelledError:
            for pod in booked:  # in the same turn
                self.release(pod)
            raise
        finally:
            assert asked not in self.queue._waiting
            assert now() - asked.arrived_at <= client.waits + 0.003
        try:
            await asyncio.sleep(asked.cost / TOKENS_PER_SECOND)
            return "served"
        finally:
            self.release(pod)

    async def client(self, client: Client) -> str:
        request = asyncio.ensure_future(self.serve(client))
        if client.leaves_after is None:
            return await request
        await asyncio.wait([request], timeout=client.comes + client.leaves_after)
        request.cancel()
        try:
            return await request
        except asyncio.CancelledError:
            return "left"

    async def watch(self) -> None:
        """Nobody waits for whom there is room, but for the pause between two looks."""
        for moment in range(100):
            await asyncio.sleep(0.02 + 0.01 * moment)
            await turns(10)
            jammed = self.jammed()
            for _ in range(12):  # after a look in vain nobody looks for 5 ms
                if not jammed:
                    break
                await asyncio.sleep(0.0005)
                await turns(10)
                jammed &= self.jammed()
            assert jammed == set(), "has room and waits"

    def jammed(self) -> set[Ticket]:
        return {each for each in self.queue._waiting if self.pod_for(each) is not None}


async def run(arrivals: list[Client], world: World) -> list[str]:
    watch = asyncio.ensure_future(world.watch())
    async with asyncio.timeout(200.0):  # of virtual time
        ends = await asyncio.gather(*(world.client(each) for each in arrivals))
    if watch.done():
        watch.result()
    watch.cancel()
    await turns()
    return ends


@settings(max_examples=30)
@given(
    arrivals=st.lists(clients, min_size=1, max_size=40),
    places=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    waiting=st.sampled_from([2, 5, 100]),
    most_bytes=st.sampled_from([3_000, 1 << 30]),  # a request holds up to 2,000
)
def test_every_request_ends_once_in_its_time_and_every_place_is_given_back(
    arrivals: list[Client], places: list[int], waiting: int, most_bytes: int
) -> None:
    world = World(places, OverloadPolicy(queue_requests=waiting), most_bytes)
    ends = play(run(arrivals, world))
    assert len(ends) == len(arrivals)
    assert world.used == [0 for _ in places]
    queue = world.queue
    assert (set(queue.depth.values()), queue._waiting, queue._looked_at, queue._timer) == ({0}, {}, {}, None)
    assert not queue._over
    assert (world.bodies.held_bytes, world.bodies._bands) == (0, {})
    said = Counter(ends)
    assert said["QueueTimeoutError"] <= world.ends[Outcome.TIMEOUT]
    assert said["served"] <= world.ends[Outcome.DISPATCHED]
    assert world.ends.total() <= len(arrivals)
    assert world.ends[Outcome.DISPLACED] >= said["DisplacedError"]

"""What one turn of the event loop does at most, which pool it serves first, and how it pauses after a look in vain."""

import asyncio
from collections import Counter

import pytest

from extproc.admission.admission_queue import MOST_IN_ONE_PASS, PAUSE_SECONDS, AdmissionQueue, Outcome, SentOnError
from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import MOST_GROUPS, FlowQueue
from extproc.policy.priority import OverloadPolicy, PriorityClass
from tests.unit.extproc_admission.queue_tickets import policy, room_for_all, ticket
from tests.unit.extproc_admission.virtual_time import now, play, turns

CLASSES = {
    "high": PriorityClass(priority=100, queue_requests=10**6),
    "plain": PriorityClass(queue_requests=10**6),
    "tight": PriorityClass(queue_requests=100),
    "low": PriorityClass(priority=-100, sheddable=True, ceiling=0.6, reserved_share=0.5, queue_requests=10**6),
}


class Desk:
    """Attempts are counted; so many of them find room."""

    def __init__(self) -> None:
        self.places = 0
        self.tried: list[tuple[str, float]] = []
        self.ended: Counter[Outcome] = Counter()
        overload = OverloadPolicy(queue_requests=10**6)
        self.queue = AdmissionQueue(
            FlowQueue(policy(overload, CLASSES)), bodies=room_for_all(), clock=now, telemetry=self
        )

    def left_queue(self, class_name: str, *, outcome: Outcome, seconds: float, tenant: str) -> None:
        self.ended[outcome] += 1

    def enter(self, asked: Ticket) -> asyncio.Task[str]:
        def attempt(_: float, ceiling: float) -> str | None:
            self.tried.append((asked.pool, ceiling))
            if not self.places:
                return None
            self.places -= 1
            return asked.pool

        return asyncio.ensure_future(self.queue.enter(asked, attempt, tried=True))

    async def counts(self, turns_of_loop: int) -> list[int]:
        """How many more were tried in each turn."""
        counts = []
        for _ in range(turns_of_loop):
            before = len(self.tried)
            await asyncio.sleep(0)
            counts.append(len(self.tried) - before)
        return counts


def test_many_pools_without_room_are_tried_a_bounded_number_a_turn_and_each_once() -> None:
    async def case() -> None:
        desk = Desk()
        tasks = [desk.enter(ticket("plain", pool=f"{number}", classes=CLASSES)) for number in range(100)]
        await turns()
        desk.queue.wake()
        assert max(await desk.counts(12)) == MOST_IN_ONE_PASS
        assert Counter(pool for pool, _ in desk.tried) == {f"{number}": 1 for number in range(100)}
        desk.queue.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    play(case())


def test_a_pool_in_which_somebody_more_important_waits_is_served_first() -> None:
    async def case() -> None:
        desk = Desk()
        low = [desk.enter(ticket("low", pool=f"{number}", classes=CLASSES)) for number in range(40)]
        high = desk.enter(ticket("high", pool="last", classes=CLASSES))
        await turns()
        desk.places = 1
        desk.queue.wake()
        assert await high == "last"
        assert desk.tried[0] == ("last", 1.0)
        assert not any(each.done() for each in low)
        desk.queue.close()
        await asyncio.gather(*low, return_exceptions=True)

    play(case())


def test_after_a_look_in_vain_any_number_of_wakes_make_one_look_a_pause_later() -> None:
    async def case() -> None:
        desk = Desk()
        waiting = [desk.enter(ticket("plain", classes=CLASSES)) for _ in range(3)]
        await asyncio.sleep(1.0)
        desk.queue.wake("m")
        await turns()
        assert len(desk.tried) == 1
        for _ in range(4):
            await asyncio.sleep(PAUSE_SECONDS / 5)
            desk.queue.wake("m")
            await turns()
        assert len(desk.tried) == 1
        desk.places = 1
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert now() == pytest.approx(1.0 + PAUSE_SECONDS)
        desk.places = 1
        desk.queue.wake("m")  # the last look has sent somebody
        await turns()
        assert now() == pytest.approx(1.0 + PAUSE_SECONDS)
        assert desk.ended[Outcome.DISPATCHED] == 2
        desk.queue.close()
        await asyncio.gather(*waiting, return_exceptions=True)

    play(case())


def test_in_a_full_class_the_oldest_are_sent_on_a_bounded_number_a_turn_and_newcomers_wait() -> None:
    async def case() -> None:
        desk = Desk()
        old = [desk.enter(ticket("tight", classes=CLASSES)) for _ in range(100)]
        await turns()
        new = [desk.enter(ticket("tight", classes=CLASSES)) for _ in range(90)]
        done = []
        for _ in range(8):
            await asyncio.sleep(0)
            done.append(sum(each.done() for each in old))
        assert [b - a for a, b in zip([0, *done], done, strict=False) if b > a] == [32, 32, 26]
        assert [type(each.exception()) for each in old[:90]] == [SentOnError] * 90
        assert not any(each.done() for each in old[90:] + new)
        assert desk.ended == {Outcome.FULL: 90}
        desk.queue.close()
        await asyncio.gather(*old, *new, return_exceptions=True)

    play(case())


def test_those_whose_time_is_over_together_leave_a_bounded_number_a_turn() -> None:
    async def case() -> None:
        desk = Desk()
        tasks = [desk.enter(ticket("plain", wait=1.0, classes=CLASSES)) for _ in range(70)]
        tasks[69].cancel()
        await asyncio.sleep(0.999)
        ends = []
        async with asyncio.timeout(1.0):
            while not all(each.done() for each in tasks):
                before = desk.ended[Outcome.TIMEOUT]
                await asyncio.sleep(0 if before else 0.0001)
                ends.append(desk.ended[Outcome.TIMEOUT] - before)
        assert [each for each in ends if each] == [32, 32, 5]
        await asyncio.gather(*tasks, return_exceptions=True)

    play(case())


def test_one_that_leaves_before_it_is_told_that_it_is_sent_on_leaves_nothing() -> None:
    async def case() -> None:
        desk = Desk()
        old = [desk.enter(ticket("tight", classes=CLASSES)) for _ in range(100)]
        await turns()
        new = [desk.enter(ticket("tight", classes=CLASSES)) for _ in range(100)]
        asyncio.get_running_loop().call_soon(old[99].cancel)
        await turns(8)
        assert old[99].cancelled()
        assert desk.ended == {Outcome.FULL: 99, Outcome.CANCELLED: 1}
        desk.queue.close()
        await asyncio.gather(*old, *new, return_exceptions=True)
        assert (desk.queue._waiting, desk.queue._over) == ({}, {})

    play(case())


def test_a_class_that_is_owed_its_share_is_tried_with_the_ceiling_of_those_that_passed_it() -> None:
    async def case() -> None:
        desk = Desk()
        low = desk.enter(ticket("low", tokens=100, classes=CLASSES))
        await turns()
        desk.queue.passed("m", "high", CLASSES["high"], cost=100)
        desk.queue.wake()
        await turns()
        assert desk.tried == [("m", 0.6)]
        desk.queue.passed("m", "high", CLASSES["high"], cost=100)
        desk.places = 1
        desk.queue.wake()
        await low
        assert desk.tried == [("m", 0.6), ("m", 1.0)]

    play(case())


def test_beyond_so_many_groups_in_a_pool_the_others_are_one() -> None:
    queue = FlowQueue(policy(classes=CLASSES))
    waiting = [ticket("plain", group=f"invented {number}", classes=CLASSES) for number in range(3 * MOST_GROUPS)]
    for each in waiting:
        queue.push(each)
    assert len({each.group for each in waiting}) == MOST_GROUPS + 1
    assert sum(1 for _ in queue.candidates("m", 0.0)) == 6
    assert all(queue.remove(each) for each in waiting)

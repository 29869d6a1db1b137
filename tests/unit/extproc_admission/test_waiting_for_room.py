"""Waiting for room on the event loop: who is tried when, and that nothing is left of those who leave."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeAlias

import pytest

from extproc.admission.admission_queue import (
    MOST_IN_ONE_PASS,
    AdmissionQueue,
    DisplacedError,
    Outcome,
    QueueClosedError,
    QueueTimeoutError,
)
from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue, QueueFullError
from extproc.policy.priority import OverloadPolicy
from tests.unit.extproc_admission.queue_tickets import policy, room_for_all, ticket
from tests.unit.extproc_admission.virtual_time import now, play, turns

Case: TypeAlias = Callable[[], Coroutine[Any, Any, None]]


def in_virtual_time(case: Case) -> Callable[[], None]:
    @wraps(case)
    def played() -> None:
        play(case())

    return played


class Pool:
    """So many places; an attempt takes one and tells which request it was for."""

    def __init__(self, places: int = 0, overload: OverloadPolicy | None = None) -> None:
        self.places = places
        self.tried: list[str] = []
        self.taken: list[str] = []
        self.left: list[tuple[str, Outcome, float]] = []
        self.tasks: list[asyncio.Task[str]] = []
        self.queue = AdmissionQueue(FlowQueue(policy(overload)), bodies=room_for_all(), clock=now, telemetry=self)

    def left_queue(self, class_name: str, *, outcome: Outcome, seconds: float, tenant: str) -> None:
        self.left.append((class_name, outcome, round(seconds, 3)))

    def attempt_for(self, name: str) -> Callable[[float, float], str | None]:
        def attempt(at: float, _: float) -> str | None:
            assert at == now()
            self.tried.append(name)
            if not self.places:
                return None
            self.places -= 1
            self.taken.append(name)
            return name

        return attempt

    def give_back(self, name: str) -> None:
        self.taken.remove(name)
        self.places += 1

    def enter(self, name: str, asked: Ticket | None = None, **options: Any) -> asyncio.Task[str]:
        asked = asked or ticket(at=now())
        task = asyncio.ensure_future(self._enter(name, asked, options))
        self.tasks.append(task)
        return task

    async def _enter(self, name: str, asked: Ticket, options: Any) -> str:
        try:
            return await self.queue.enter(asked, self.attempt_for(name), **options)
        except asyncio.CancelledError:
            if name in self.taken:  # in the same turn
                self.give_back(name)
            raise

    async def close(self) -> None:
        """End all who wait, and see their ends, whatever these are."""
        self.queue.close()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def is_empty(self) -> bool:
        queue = self.queue
        return not any(queue.depth.values()) and not queue._waiting and queue._timer is None and not queue._looked_at


@in_virtual_time
async def test_a_request_waits_until_somebody_says_that_something_is_free() -> None:
    pool = Pool()
    waiting = pool.enter("one")
    await turns()
    assert (waiting.done(), pool.queue.depth["standard"]) == (False, 1)
    pool.places = 1
    await asyncio.sleep(2.0)  # time alone frees nothing
    assert not waiting.done()
    pool.queue.wake("m")
    assert await waiting == "one"
    assert pool.is_empty()
    assert pool.left == [("standard", Outcome.DISPATCHED, 2.0)]


@in_virtual_time
async def test_the_first_that_comes_is_tried_at_once() -> None:
    pool = Pool(places=1)
    assert await pool.enter("one") == "one"
    assert now() == 0.0


@in_virtual_time
async def test_a_newcomer_that_was_tried_or_follows_one_like_it_is_not_tried_again_in_vain() -> None:
    pool = Pool()
    pool.enter("one", tried=True)
    await turns()
    assert pool.tried == []
    pool.enter("two")
    await turns()
    assert pool.tried == []
    pool.enter("elsewhere", ticket(group="other"))
    await turns()
    assert pool.tried == ["one", "elsewhere"]
    await asyncio.sleep(0.1)  # nobody has looked for a while: what a backlog had left may be gone
    pool.enter("three")
    await turns()
    assert pool.tried == ["one", "elsewhere", "one", "elsewhere"]
    await pool.close()


@in_virtual_time
async def test_any_number_of_wakes_in_one_turn_make_one_pass() -> None:
    pool = Pool()
    pool.enter("one", tried=True)
    await turns()
    for _ in range(100):
        pool.queue.wake("m")
        pool.queue.wake()
        pool.queue.wake("unknown")
    await turns()
    assert pool.tried == ["one"]
    await pool.close()


@in_virtual_time
async def test_waking_nobody_does_nothing() -> None:
    pool = Pool()
    pool.queue.wake()
    pool.queue.wake("m")
    pool.queue.wake_at(5.0)
    assert pool.queue._next_pass is None
    assert pool.is_empty()


@in_virtual_time
async def test_room_goes_to_the_highest_and_a_newcomer_does_not_overtake() -> None:
    pool = Pool()
    low = pool.enter("low", ticket("sheddable"))
    await turns()
    assert [pool.queue.would_wait("m", priority) for priority in (-200, -100, -99, 0)] == [True, True, False, False]
    assert not pool.queue.would_wait("m", -100, "other")
    assert not pool.queue.would_wait("n", -100)
    high = pool.enter("high", ticket("critical", tokens=5000))
    await turns()
    pool.places = 1
    pool.queue.wake("m")
    assert await high == "high"
    assert not low.done()
    await pool.close()


@in_virtual_time
async def test_a_request_whose_time_is_over_is_told_so_at_that_time() -> None:
    pool = Pool()
    second = pool.enter("second", ticket(wait=3.0))
    first = pool.enter("first", ticket(wait=1.0))
    with pytest.raises(QueueTimeoutError, match=r"waited 1\.0 s"):
        await first
    assert now() == pytest.approx(1.0, abs=0.002)
    with pytest.raises(QueueTimeoutError):
        await second
    assert now() == pytest.approx(3.0, abs=0.002)
    assert pool.is_empty()
    assert [outcome for _, outcome, _ in pool.left] == [Outcome.TIMEOUT, Outcome.TIMEOUT]


@in_virtual_time
async def test_those_whose_time_is_over_together_are_all_told() -> None:
    pool = Pool()
    both = [pool.enter(name, ticket(wait=1.0, pool=of)) for name, of in (("a", "m"), ("b", "m"), ("c", "n"))]
    ends = await asyncio.gather(*both, return_exceptions=True)
    assert [type(each) for each in ends] == [QueueTimeoutError] * 3
    assert pool.is_empty()


@in_virtual_time
async def test_a_defect_in_the_middle_leaves_nobody_waiting_for_ever() -> None:
    pool = Pool()
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def broken(class_name: str, *, outcome: Outcome, seconds: float, tenant: str) -> None:
        raise ZeroDivisionError

    pool.left_queue = broken  # type: ignore[method-assign]
    late = [pool.enter(f"{number}", ticket(wait=1.0)) for number in range(3)]
    later = pool.enter("later", ticket(wait=2.0))
    ends = await asyncio.gather(*late, later, return_exceptions=True)
    assert [type(each) for each in ends] == [QueueTimeoutError, RuntimeError, RuntimeError, QueueTimeoutError]
    assert now() == pytest.approx(2.0, abs=0.002)
    assert [type(each) for each in reported] == [ZeroDivisionError, ZeroDivisionError]
    waiting = pool.enter("one")
    pool.places = 1
    assert await waiting == "one"
    assert pool.is_empty()


@in_virtual_time
async def test_a_newcomer_with_less_time_is_told_in_time_too() -> None:
    pool = Pool()
    patient = pool.enter("patient", ticket(wait=100.0))
    await asyncio.sleep(1.0)
    with pytest.raises(QueueTimeoutError):
        await pool.enter("hasty", ticket(at=1.0, wait=0.5))
    assert now() == pytest.approx(1.5, abs=0.002)
    assert not patient.done()
    await pool.close()


@in_virtual_time
async def test_one_that_gives_its_place_up_is_told_so() -> None:
    pool = Pool(overload=OverloadPolicy(queue_requests=1))
    low = pool.enter("low", ticket("sheddable"))
    await turns()
    high = pool.enter("high", ticket("critical"))
    with pytest.raises(DisplacedError, match="critical"):
        await low
    await asyncio.sleep(1.0)
    pool.places = 1
    pool.queue.wake("m")
    assert await high == "high"
    assert pool.left == [("sheddable", Outcome.DISPLACED, 0.0), ("critical", Outcome.DISPATCHED, 1.0)]
    assert pool.is_empty()


@in_virtual_time
async def test_a_newcomer_without_a_place_is_told_at_once_and_leaves_nothing() -> None:
    pool = Pool(overload=OverloadPolicy(queue_requests=0))
    with pytest.raises(QueueFullError):
        await pool.enter("one")
    assert pool.left == [("standard", Outcome.FULL, 0.0)]
    assert pool.is_empty()


@in_virtual_time
async def test_a_client_that_leaves_takes_its_place_in_the_queue_along() -> None:
    pool = Pool()
    one, two = pool.enter("one"), pool.enter("two")
    await asyncio.sleep(1.0)
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert pool.queue.depth["standard"] == 1
    pool.places = 2
    pool.queue.wake("m")
    assert await two == "two"
    assert (pool.taken, pool.places) == (["two"], 1)
    assert pool.left == [("standard", Outcome.CANCELLED, 1.0), ("standard", Outcome.DISPATCHED, 1.0)]
    assert pool.is_empty()


@in_virtual_time
async def test_a_client_that_leaves_before_its_task_has_begun_never_waits() -> None:
    pool = Pool()
    one = pool.enter("one")
    one.cancel()
    with pytest.raises(asyncio.CancelledError):
        await one
    assert pool.is_empty()


@in_virtual_time
async def test_room_is_not_given_to_one_that_has_just_left() -> None:
    pool = Pool()
    one, two = pool.enter("one"), pool.enter("two")
    await asyncio.sleep(1.0)
    pool.tried.clear()
    pool.places = 1
    pool.queue.wake("m")
    one.cancel()  # the pass runs before the task does
    assert await two == "two"
    assert pool.tried == ["two"]
    assert one.cancelled()
    assert pool.left == [("standard", Outcome.CANCELLED, 1.0), ("standard", Outcome.DISPATCHED, 1.0)]
    assert pool.is_empty()


@in_virtual_time
async def test_one_that_has_just_left_is_told_nothing_more() -> None:
    pool = Pool()
    one, two = pool.enter("one"), pool.enter("two")
    await turns()
    one.cancel()
    pool.queue.close()  # before its task runs
    with pytest.raises(QueueClosedError):
        await two
    assert one.cancelled()
    assert pool.left == [("standard", Outcome.CANCELLED, 0.0), ("standard", Outcome.CLOSED, 0.0)]
    assert pool.is_empty()


@in_virtual_time
async def test_after_a_pause_of_the_process_those_whose_time_is_over_do_not_go() -> None:
    pool, ahead = Pool(places=2), 0.0
    pool.queue._clock = lambda: now() + ahead
    one = asyncio.ensure_future(pool.queue.enter(ticket(wait=1.0), lambda *_: "one", tried=True))
    two = asyncio.ensure_future(pool.queue.enter(ticket(wait=9.0), lambda *_: "two", tried=True))
    await turns()
    ahead = 5.0
    pool.queue.wake("m")
    assert await two == "two"
    with pytest.raises(QueueTimeoutError):
        await one
    assert now() == 0.0


@in_virtual_time
async def test_what_was_made_for_one_that_leaves_in_that_moment_is_taken_back_and_goes_to_the_next() -> None:
    pool = Pool()
    one, two = pool.enter("one"), pool.enter("two")
    await asyncio.sleep(1.0)
    pool.places = 1
    pool.queue.wake("m")
    asyncio.get_running_loop().call_soon(one.cancel)  # after the pass, before the task
    with pytest.raises(asyncio.CancelledError):
        await one
    assert await two == "two"
    assert (pool.taken, pool.places) == (["two"], 0)
    assert pool.is_empty()


@in_virtual_time
async def test_one_that_leaves_when_it_has_just_been_told_that_its_time_is_over_is_only_gone() -> None:
    pool = Pool()
    one = pool.enter("one", ticket(wait=1.0))
    await turns()
    asyncio.get_running_loop().call_at(1.0, lambda: asyncio.get_running_loop().call_soon(one.cancel))
    with pytest.raises((asyncio.CancelledError, QueueTimeoutError)):
        await one
    assert pool.is_empty()


@in_virtual_time
async def test_an_attempt_that_raises_ends_its_own_request_and_no_other() -> None:
    pool = Pool(places=2)

    def broken(*_: float) -> str:
        raise ZeroDivisionError("mine")

    first = asyncio.ensure_future(pool.queue.enter(ticket(tokens=1), broken))
    second = pool.enter("second", ticket(tokens=2))

    def stops(*_: float) -> str:
        raise StopIteration

    third = asyncio.ensure_future(pool.queue.enter(ticket(tokens=3), stops))
    fourth = pool.enter("fourth", ticket(tokens=4))
    with pytest.raises(ZeroDivisionError, match="mine"):
        await first
    with pytest.raises(RuntimeError):
        await third
    assert [await second, await fourth] == ["second", "fourth"]
    assert pool.is_empty()


@in_virtual_time
async def test_many_go_in_several_turns_of_the_loop_so_that_others_have_theirs() -> None:
    pool = Pool()
    count = 3 * MOST_IN_ONE_PASS + 5
    requests = [pool.enter(f"{number}") for number in range(count)]
    await asyncio.sleep(1.0)
    pool.places = count
    pool.queue.wake("m")
    sent = []
    while not all(each.done() for each in requests):
        await asyncio.sleep(0)
        sent.append(len(pool.taken))
    assert now() == 1.0
    assert MOST_IN_ONE_PASS in sent
    assert max(b - a for a, b in zip([0, *sent], sent, strict=False)) == MOST_IN_ONE_PASS
    assert sent[-1] == count
    assert pool.is_empty()


@in_virtual_time
async def test_one_pool_with_many_does_not_keep_another_waiting_for_all_of_them() -> None:
    pool = Pool()
    many = [pool.enter(f"m {number}") for number in range(2 * MOST_IN_ONE_PASS)]
    other = pool.enter("n", ticket(pool="n"))
    await turns()
    pool.places = len(many) + 1
    pool.queue.wake()
    await other
    assert not all(each.done() for each in many)
    await asyncio.gather(*many)
    assert pool.is_empty()


@in_virtual_time
async def test_room_that_time_makes_is_looked_for_at_that_time() -> None:
    pool = Pool()
    waiting = pool.enter("one")
    await turns()
    pool.queue.wake_at(5.0)
    pool.queue.wake_at(2.0)
    pool.queue.wake_at(9.0)
    pool.places = 1
    assert await waiting == "one"
    assert now() == pytest.approx(2.0, abs=0.002)
    assert pool.is_empty()


@in_virtual_time
async def test_at_the_end_all_that_wait_are_told_and_nobody_is_let_in() -> None:
    pool = Pool()
    waiting = [pool.enter("one"), pool.enter("two", ticket("critical"))]
    await turns()
    pool.queue.close()
    for each in waiting:
        with pytest.raises(QueueClosedError):
            await each
    with pytest.raises(QueueClosedError):
        await pool.enter("late")
    assert pool.is_empty()
    assert {outcome for _, outcome, _ in pool.left} == {Outcome.CLOSED}

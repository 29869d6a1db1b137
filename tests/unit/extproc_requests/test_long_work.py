"""Turns and bounds of the thread for long work; what is under way is ended by the test."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from extproc.requests import long_work
from extproc.requests.long_work import LongWork, LongWorkError

MIB = 1 << 20


class Held:
    """Works that end when they are told to, in the order in which they began."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.go_on = threading.Event()

    def __call__(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.began.append(name)
            assert self.go_on.wait(10)
            return name

        return work


async def test_tenants_take_turns_whoever_sent_first() -> None:
    lane, held = LongWork(), Held()
    works = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")]
    tasks = [asyncio.create_task(lane.run(held(name), size=1, tenant=tenant)) for tenant, name in works]
    await asyncio.sleep(0)
    held.go_on.set()
    assert await asyncio.gather(*tasks) == [name for _, name in works]
    assert held.began == ["a1", "a2", "b1", "c1", "a3", "b2"]
    lane.close()


async def test_a_tenant_s_share_is_bounded_and_others_still_wait() -> None:
    lane, held = LongWork(), Held()
    first = asyncio.create_task(lane.run(held("first"), size=1, tenant="a"))
    await asyncio.sleep(0)
    waiting = [asyncio.create_task(lane.run(held("a"), size=30 * MIB, tenant="a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(LongWorkError, match="2 long requests of the tenant wait already, with 60 MiB"):
        await lane.run(held("too much"), size=5 * MIB, tenant="a")
    with pytest.raises(LongWorkError, match="2 long requests"):
        await lane.run(held("too many"), size=1, tenant="a", most_waiting=2)
    other = asyncio.create_task(lane.run(held("b"), size=100 * MIB, tenant="b"))
    held.go_on.set()
    assert await asyncio.gather(first, *waiting, other) == ["first", "a", "a", "b"]
    lane.close()


async def test_tenants_who_are_invented_one_by_one_are_bounded_together() -> None:
    lane, held = LongWork(), Held()
    tasks = [asyncio.create_task(lane.run(held(""), size=1, tenant=str(i))) for i in range(long_work.MOST_WAITING + 1)]
    await asyncio.sleep(0)
    with pytest.raises(LongWorkError, match="of all tenants 256"):
        await lane.run(held("one more"), size=1, tenant="new")
    held.go_on.set()
    await asyncio.gather(*tasks)
    lane.close()


async def test_who_leaves_is_not_worked_for_and_errors_come_to_who_waits() -> None:
    lane, held = LongWork(), Held()
    first = asyncio.create_task(lane.run(held("first"), size=1))
    await asyncio.sleep(0)
    left = asyncio.create_task(lane.run(held("left"), size=1))
    with pytest.raises(LongWorkError, match=r"it took longer than 0\.01 s"):
        await lane.run(held("late"), size=1, timeout_seconds=0.01)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    failing = asyncio.create_task(lane.run(lambda: int("no number"), size=1))
    held.go_on.set()
    with pytest.raises(ValueError, match="no number"):
        await failing
    assert (await first, held.began) == ("first", ["first"])
    lane.close()


class PanicError(BaseException):
    """As the Rust libraries of Python raise it."""


@pytest.mark.parametrize("error", [PanicError("a panic"), SystemExit(), StopIteration()])
async def test_work_that_raises_anything_fails_alone(error: BaseException) -> None:
    def fail() -> None:
        raise error

    lane = LongWork()
    with pytest.raises(RuntimeError, match=f"long work failed: {type(error).__name__}"):
        await asyncio.wait_for(lane.run(fail, size=1), 5)
    assert await asyncio.wait_for(lane.run(lambda: "next", size=1), 5) == "next"
    lane.close()


async def test_work_that_was_long_is_followed_by_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 0.03, 0.03, 0.034, 0.034, 9.0])
    monkeypatch.setattr(long_work, "thread_time", lambda: next(times))
    lane, loop = LongWork(), asyncio.get_running_loop()
    pauses: list[float] = []
    call_later = loop.call_later

    def noted(delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        pauses.append(delay)
        return call_later(0, callback)

    monkeypatch.setattr(loop, "call_later", noted)
    for _ in range(3):
        await lane.run(lambda: None, size=1)
    await asyncio.sleep(0)
    assert pauses == [0.03, 0.0, long_work.LONGEST_PAUSE_SECONDS]
    lane.close()

"""The turns that the streams of a process share: who waits for the next, and who does not."""

import asyncio

from kv_indexer.events.socket_signals import GATHER_SECONDS, SharedTurns


class Woken:
    def __init__(self, name: str, log: list[str]) -> None:
        self._name, self._log = name, log

    def wake(self) -> None:
        self._log.append(self._name)


async def test_waiters_close_together_are_woken_in_one_turn_and_each_once() -> None:
    turns, log = SharedTurns(), list[str]()
    a, b, c = (Woken(name, log) for name in "abc")
    turns.wake(a.wake)
    assert log == ["a"]
    for waiter in (b, c, b, a):
        turns.wake(waiter.wake)
    assert log == ["a"]
    while len(log) == 1:
        await asyncio.sleep(0)

    assert log == ["a", "b", "c", "a"]


async def test_the_only_waiter_never_waits() -> None:
    turns, log = SharedTurns(), list[str]()
    a, b = Woken("a", log), Woken("b", log)
    for _ in range(3):
        turns.wake(a.wake)
    assert log == ["a"] * 3

    turns.wake(b.wake)
    while len(log) == 3:
        await asyncio.sleep(0)
    turns.wake(b.wake)
    assert log == [*"aaa", "b", "b"]


async def test_after_a_pause_nobody_waits() -> None:
    turns, log = SharedTurns(), list[str]()
    turns.wake(Woken("a", log).wake)
    await asyncio.sleep(2 * GATHER_SECONDS)
    turns.wake(Woken("b", log).wake)

    assert log == ["a", "b"]

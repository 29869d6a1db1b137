"""An event loop whose clock jumps to the next timer: minutes of waiting in no time, the same order each time.

For code that waits for timers and for itself alone: nothing from outside (sockets, threads) ever arrives here.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from math import inf, nextafter
from typing import Any, TypeVar

T = TypeVar("T")

ALL_COUNTS_SECONDS = 1e6  # until then a float's steps are far below a nanosecond


class _Clock(selectors.SelectSelector):
    """Stands where the loop waits for sockets, and moves the clock instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("everybody waits, and nothing will ever happen")
        self.now += max(0.0, timeout)
        if self.now > ALL_COUNTS_SECONDS:  # asyncio's own nanosecond is lost in the sum: the timer would never be due
            self.now = nextafter(self.now, inf)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0 and is the time of the timer that runs."""

    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """As asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)

"""Lets the event loop turn while pods' pages are read: only a long page waits.

One `PageTurns` serves all pods of a process, another one the histograms that are shown.
"""

import asyncio
import time
from collections.abc import Callable

from kvmesh.pods.page_steps import Steps, T

FREE_SECONDS = 0.001  # CPU time that a page may take at once; the usual one takes a tenth of it
SHARE = 0.1  # of a core, for all longer pages together


class PageTurns:
    """Takes the steps of one page after the other; long pages take turns."""

    def __init__(self, *, share: float = SHARE, cpu_seconds: Callable[[], float] = time.thread_time) -> None:
        self._share = share
        self._cpu_seconds = cpu_seconds
        self._long = asyncio.Lock()  # fair: a page waits for one step of each other

    async def read(self, steps: Steps[T]) -> T:
        """Return the result of the steps. The caller sets the deadline. Raise the errors of the steps."""
        began: float | None = None  # the usual page has one step or two, and is not worth reading the clock
        while began is None or self._cpu_seconds() - began < FREE_SECONDS:
            try:
                next(steps)
            except StopIteration as done:
                whole: T = done.value
                return whole
            if began is None:
                began = self._cpu_seconds()
        while True:
            async with self._long:
                began = self._cpu_seconds()
                try:
                    next(steps)
                except StopIteration as done:
                    result: T = done.value
                    return result
                await asyncio.sleep((self._cpu_seconds() - began) / self._share)

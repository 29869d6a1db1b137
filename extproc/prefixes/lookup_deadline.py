"""The time that a lookup may take, kept by one timer for all of them. Used by `prefix_index`, once a request.

`asyncio.timeout` makes and drops a timer of the loop each time. Besides, it counts the loop's own time: where many
requests are picked in one turn, the answer lies in the socket, unread, when the time is over. Here a lookup ends only
after the loop has had its chance to read it.
"""

import asyncio
from collections import deque
from types import TracebackType
from typing import Self

TURNS_TO_READ = 5  # of the loop: one for the socket, the others for those whom the answer wakes one after another


class LookupDeadlines:
    """Gives each lookup the same time, so that who came first is late first."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._open: deque[LookupDeadline] = deque()  # in the order of their times; those that are over are passed over
        self._timer: asyncio.TimerHandle | None = None

    def __call__(self) -> "LookupDeadline":
        """Return a context that ends with TimeoutError when the time is over."""
        return LookupDeadline(self)

    def add(self, deadline: "LookupDeadline", loop: asyncio.AbstractEventLoop) -> None:
        """Begin to count."""
        deadline.at = loop.time() + self.seconds
        self._open.append(deadline)
        if self._timer is None:
            self._timer = loop.call_at(deadline.at, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        waiting = self._open
        now = loop.time()
        late = []
        while waiting and (waiting[0].is_over or waiting[0].at <= now):
            if not (deadline := waiting.popleft()).is_over:
                late.append(deadline)
        if waiting:
            self._timer = loop.call_at(waiting[0].at, self._look, loop)
        if late:
            loop.call_soon(_end, late, TURNS_TO_READ, loop)


class LookupDeadline:
    """The time of one lookup. For one task, once, as `asyncio.timeout`."""

    __slots__ = ("_cancelling", "_deadlines", "_task", "at", "is_late", "is_over")

    def __init__(self, deadlines: LookupDeadlines) -> None:
        self._deadlines = deadlines
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self.at = 0.0  # loop time
        self.is_over = False  # nobody waits for it any more
        self.is_late = False

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None, "lookups are made in tasks"
        self._task = task
        self._cancelling = task.cancelling()
        self._deadlines.add(self, task.get_loop())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.is_over = True
        task, self._task = self._task, None
        # as asyncio.timeout: who is cancelled by somebody else, too, stays so
        if self.is_late and task is not None and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def end(self) -> None:
        """Cancel what still waits."""
        if self._task is not None:
            self.is_late = True
            self._task.cancel()


def _end(late: list[LookupDeadline], turns: int, loop: asyncio.AbstractEventLoop) -> None:
    """End those that still wait after so many turns of the loop."""
    if turns:
        loop.call_soon(_end, late, turns - 1, loop)
        return
    for deadline in late:
        deadline.end()

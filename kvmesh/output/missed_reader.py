"""Notices that nobody reads standard output any more, while a command waits for news to print.

A failed write says so, too, but only once there are news: `kvmesh top | head -1` would run on without traffic.
"""

import asyncio
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO


@contextmanager
def reader_missed(stream: IO[str], tell: Callable[[], None]) -> Iterator[None]:
    """Have the running loop call `tell` once nobody can read the stream's pipe; never where it is no pipe."""
    loop = asyncio.get_running_loop()
    descriptor = _pipe_of(stream)

    def look() -> None:
        loop.remove_reader(descriptor)  # the error stays, and would wake the loop for ever
        if _is_unread(descriptor):
            tell()

    try:
        loop.add_reader(descriptor, look)  # what can only be written to wakes it by its error alone
    except (OSError, ValueError):  # a file, or nothing at all
        yield
        return
    try:
        yield
    finally:
        loop.remove_reader(descriptor)


def _pipe_of(stream: IO[str]) -> int:
    """The descriptor; -1 where there is none, and for a terminal: its end is SIGHUP, and typing would wake the loop."""
    try:
        return -1 if stream.isatty() else stream.fileno()
    except (AttributeError, OSError, ValueError):
        return -1


def _is_unread(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

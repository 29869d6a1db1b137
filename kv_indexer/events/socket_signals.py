"""Wakes a task when its ZMQ sockets have messages, alone or in turns that many streams share."""

import asyncio
from collections.abc import Callable

import zmq

GATHER_SECONDS = 0.0035  # between two turns: 3 ms from publishing to visible at the median
_READABLE = int(zmq.POLLIN)  # plain integers: with pyzmq's enums the test would cost more than the call


def is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Check before each read: an exception for every empty read would cost four times as much."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _READABLE)


class SharedTurns:
    """Wakes the waiters of many publishers together: their code stays in the caches, and they write in one turn.

    A waiter waits GATHER_SECONDS at most, and not at all if it was the only one the last time.
    """

    def __init__(self) -> None:
        self._woken: dict[Callable[[], None], None] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._alone: Callable[[], None] | None = None  # the only waiter of the last turn
        self._turned_at = 0.0  # loop time

    def wake(self, waiter: Callable[[], None]) -> None:
        """Wake a waiter with the next turn."""
        if self._timer is not None:
            self._woken[waiter] = None
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        wait = self._turned_at + GATHER_SECONDS - now
        if wait <= 0 or waiter == self._alone:
            self._alone, self._turned_at = waiter, now
            waiter()
        else:
            self._woken[waiter] = None
            self._timer = loop.call_later(wait, self._turn)

    def _turn(self) -> None:
        woken, self._woken, self._timer = self._woken, {}, None
        self._alone, self._turned_at = next(iter(woken)) if len(woken) == 1 else None, asyncio.get_running_loop().time()
        for waiter in woken:
            waiter()


class SocketSignals:
    """Wakes one waiter when a message may have arrived on any of these sockets. Close it before the sockets.

    `on_readable` is called first, with the socket that has a message: read it until there is none, since only later
    arrivals are signalled.
    """

    def __init__(
        self,
        *sockets: "zmq.Socket[bytes]",
        on_readable: Callable[["zmq.Socket[bytes]"], object] = lambda _: None,
        turns: SharedTurns | None = None,
    ) -> None:
        self._on_readable = on_readable
        self._turns = turns
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._descriptors: list[int] = []
        for socket in sockets:
            descriptor = socket.getsockopt(zmq.FD)
            assert isinstance(descriptor, int)
            self._loop.add_reader(descriptor, self._signalled, socket, descriptor)
            self._descriptors.append(descriptor)

    async def wait(self, *, timeout_seconds: float) -> None:
        """Return when a message may have arrived, or after the timeout.

        Call it only after a read of each socket that found nothing, with no other await in between: only later arrivals
        are signalled.
        """
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout_seconds, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def wake(self) -> None:
        """Wake the waiter without a message."""
        _wake(self._waiter)

    def close(self) -> None:
        """Leave the event loop, which must not watch the descriptor's number once it belongs to another file."""
        while self._descriptors:
            self._loop.remove_reader(self._descriptors.pop())
        _wake(self._waiter)

    def _signalled(self, socket: "zmq.Socket[bytes]", descriptor: int) -> None:
        try:
            if not is_readable(socket):  # resets the signal; otherwise the loop would spin until the socket is read
                return
        except zmq.ZMQError:
            self._loop.remove_reader(descriptor)  # closed meanwhile; the next read fails
        else:
            self._on_readable(socket)
        if self._turns is None:
            self.wake()
        elif self._waiter is not None:
            self._turns.wake(self.wake)


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)

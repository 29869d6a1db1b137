"""Waiting for ZMQ sockets on the event loop; used by the two adapters that read them. Reads no message itself.

ZMQ shows one descriptor a socket, and signals by edge: it is readable once when something has come after a read that
found nothing, and then again only after another such read. `zmq.asyncio.Poller` hides that, but makes a socket object
for every wait, which cost as much as applying a batch.
"""

import asyncio

import zmq


class SocketSignals:
    """Wakes one waiter when something may have come on any of these sockets. Close it before the sockets."""

    def __init__(self, *sockets: "zmq.Socket[bytes]") -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._descriptors: list[int] = []
        for socket in sockets:
            descriptor = socket.getsockopt(zmq.FD)
            assert isinstance(descriptor, int)
            self._loop.add_reader(descriptor, self._signalled, socket, descriptor)
            self._descriptors.append(descriptor)

    async def wait(self, *, timeout_seconds: float) -> None:
        """Return when something may have come, or after the timeout.

        Call it only after a read of each socket that found nothing, with no other await since: what comes after those
        reads is signalled, what came before them is not.
        """
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout_seconds, _wake, waiter)
        try:
            await waiter
        finally:
            timer.cancel()
            self._waiter = None

    def wake(self) -> None:
        """Have the waiter return, though nothing has come."""
        _wake(self._waiter)

    def close(self) -> None:
        """Leave the event loop; a descriptor's number may be another file's soon."""
        while self._descriptors:
            self._loop.remove_reader(self._descriptors.pop())
        _wake(self._waiter)

    def _signalled(self, socket: "zmq.Socket[bytes]", descriptor: int) -> None:
        try:
            # takes the signal back, or else the loop would spin until someone reads the socket
            socket.getsockopt(zmq.EVENTS)
        except zmq.ZMQError:
            self._loop.remove_reader(descriptor)  # closed under us; the next read says so
        _wake(self._waiter)


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)

"""A publisher's live socket: implements `ports.LiveEvents` over ZMQ SUB. Used by the service, one a stream.

ZMQ would reconnect by itself and say nothing; a pod that went away may come back as another process, so here a lost
connection is an error that starts a new session.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kv_indexer.errors import FeedLostError
from kv_indexer.wire.zmq_frames import Frame, parse_live

RECEIVE_LIMIT = 64  # batches handed over at once
QUEUE_LIMIT = 100_000  # batches that may wait unread, as many as the publisher's own default keeps
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = _GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED


class ZmqLiveEvents:
    """Subscribes to everything one publisher says."""

    def __init__(
        self,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_malformed: Callable[[], None],
        connect_timeout_seconds: float = 2.0,
    ) -> None:
        self._context = context
        self._address = address
        self._on_malformed = on_malformed
        self._connect_timeout = connect_timeout_seconds
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._poller = zmq.asyncio.Poller()

    async def connect(self) -> None:
        """See `ports.LiveEvents`."""
        self.close()
        self._socket = socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = QUEUE_LIMIT
        socket.ipv6 = True
        socket.reconnect_ivl = -1  # see the module's docstring
        socket.subscribe(b"")
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        try:
            socket.connect(self._address)
            async with asyncio.timeout(self._connect_timeout):
                while not self._shook_hands():
                    await self._poller.poll(1000)
        except (zmq.ZMQError, TimeoutError) as error:
            raise FeedLostError(f"events at {self._address}: {error or 'no connection in time'}") from error

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        """See `ports.LiveEvents`."""
        frames = self._drain()
        if not frames:
            self._shook_hands()
            await self._poller.poll(int(timeout_seconds * 1000))
            frames = self._drain()
            if not frames:
                self._shook_hands()
        return frames

    def close(self) -> None:
        """See `ports.LiveEvents`."""
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._socket = self._monitor = None

    def _shook_hands(self) -> bool:
        """Read what the monitor has to say; raise FeedLostError if the connection is gone."""
        assert self._monitor is not None
        shook = False
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & _GONE:
                raise FeedLostError(f"events at {self._address}: connection refused or closed by the pod")
            shook = shook or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return shook

    def _drain(self) -> list[Frame]:
        assert self._socket is not None
        frames: list[Frame] = []
        try:
            while len(frames) < RECEIVE_LIMIT:
                frame = parse_live(self._socket.recv_multipart(zmq.NOBLOCK))
                if frame is None:
                    self._on_malformed()
                else:
                    frames.append(frame)
        except zmq.Again:
            pass
        return frames

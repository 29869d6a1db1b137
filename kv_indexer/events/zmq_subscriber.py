"""A publisher's live socket: implements `ports.LiveEvents` over ZMQ SUB. Used by the service, one a stream.

ZMQ would reconnect by itself and say nothing; a pod that went away may come back as another process, so here a lost
connection is an error that starts a new session.
"""

import asyncio
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from kv_indexer.events.zmq_frames import Frame, parse_live
from kv_indexer.events.zmq_signals import SocketSignals
from kvmesh.errors import FeedLostError

RECEIVE_LIMIT = 64  # batches handed over at once
DRAIN_LIMIT = 1024  # messages looked at in one go, malformed ones included
QUEUE_LIMIT = 10_000  # batches that may wait unread, as many as a publisher's replay buffer has by default
MESSAGE_LIMIT = 32 << 20  # bytes of one message; a step of 8,192 tokens has 40 kB
HEARTBEAT_SECONDS = 5.0
KEEPALIVE_SECONDS = 5
ANSWER_SECONDS = 15  # that a heartbeat may take to be answered, however rare heartbeats are
HEARTBEATS_MISSED = 3  # then the publisher is gone, or the way to it; libzmq answers by itself, however busy the pod is
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = _GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED
_READABLE = int(zmq.POLLIN)  # plain integers: with pyzmq's enums the test costs more than what it tests


class ZmqLiveEvents:
    """Subscribes to everything one publisher says."""

    def __init__(
        self,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_malformed: Callable[[], None],
        connect_timeout_seconds: float = 2.0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        self._context = context
        self._address = address
        self._on_malformed = on_malformed
        self._connect_timeout = connect_timeout_seconds
        self._heartbeat_ms = round(heartbeat_seconds * 1000)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._signals: SocketSignals | None = None
        self._is_interrupted = False

    async def connect(self) -> None:
        """See `ports.LiveEvents`."""
        self.close()
        self._socket = socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = QUEUE_LIMIT
        socket.maxmsgsize = MESSAGE_LIMIT
        socket.ipv6 = True
        socket.reconnect_ivl = -1  # see the module's docstring
        # a peer that vanished without a word (power, network) leaves a connection that looks merely quiet; the kernel
        # asks for it at no cost of ours, and heartbeats ask the process behind whatever stands in between
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_SECONDS
        socket.tcp_keepalive_cnt = HEARTBEATS_MISSED
        socket.setsockopt(zmq.TCP_MAXRT, KEEPALIVE_SECONDS * HEARTBEATS_MISSED * 1000)  # for heartbeats under way
        socket.heartbeat_ivl = self._heartbeat_ms
        # not so long that an answer has to be looked for behind the next heartbeats of thousands of other sockets
        socket.heartbeat_timeout = min(self._heartbeat_ms * HEARTBEATS_MISSED, ANSWER_SECONDS * 1000)
        socket.subscribe(b"")
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._signals = signals = SocketSignals(socket, self._monitor)
        try:
            socket.connect(self._address)
            async with asyncio.timeout(self._connect_timeout):
                while not self._shook_hands():
                    await signals.wait(timeout_seconds=self._connect_timeout)
        except (zmq.ZMQError, TimeoutError) as error:
            raise FeedLostError(f"events at {self._address}: {str(error) or 'no connection in time'}") from error

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        """See `ports.LiveEvents`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        self._is_interrupted = False
        while True:
            frames, is_empty = self._drain()
            if frames:
                return frames
            self.check()
            left = deadline - clock()
            if left <= 0 or self._is_interrupted:
                return []
            if is_empty and self._signals is not None:
                await self._signals.wait(timeout_seconds=left)
            else:
                await asyncio.sleep(0)  # more has come already, so nothing would be signalled

    def interrupt(self) -> None:
        """See `ports.LiveEvents`."""
        self._is_interrupted = True
        if self._signals is not None:
            self._signals.wake()

    def check(self) -> None:
        """See `ports.LiveEvents`."""
        self._shook_hands()

    def close(self) -> None:
        """See `ports.LiveEvents`."""
        if self._signals is not None:
            self._signals.close()
            self._signals = None
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._socket = self._monitor = None

    def _shook_hands(self) -> bool:
        """Read what the monitor has to say; raise FeedLostError if the connection is gone."""
        if self._monitor is None:
            raise FeedLostError(f"events at {self._address}: not connected")
        shook = False
        while _is_readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & _GONE:
                raise FeedLostError(f"events at {self._address}: connection refused, closed by the pod, or silent")
            shook = shook or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return shook

    def _drain(self) -> tuple[list[Frame], bool]:
        """Return what has come, up to the limits, and whether that was all."""
        assert self._socket is not None
        frames: list[Frame] = []
        for _ in range(DRAIN_LIMIT):
            if not _is_readable(self._socket):
                return frames, True
            frame = parse_live(self._socket.recv_multipart(zmq.NOBLOCK))
            if frame is None:
                self._on_malformed()
            else:
                frames.append(frame)
            if len(frames) == RECEIVE_LIMIT:
                break
        return frames, False


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Ask before each read: an exception for every read that finds nothing would cost four times as much."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _READABLE)

"""A publisher's ZMQ sockets: live events (SUB) and replay (DEALER to its ROUTER).

ZMQ would reconnect silently. A pod that went away may come back as another process, so here a lost connection is an
error that starts a new session. vLLM's ROUTER drops batches, even the end marker, if the reader lags (it has no
high-water mark). So each replay request has its own socket that only receives, and received batches are kept while the
missing ones are requested again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from kv_indexer.events.sequence import (
    BATCH_LIMIT,
    Frame,
    History,
    ReplayAnswer,
    is_replay_end,
    parse_live,
    parse_replay,
    replay_request,
)
from kv_indexer.events.socket_signals import SharedTurns, SocketSignals, is_readable
from kvmesh.errors import FeedLostError

RECEIVE_LIMIT, RECEIVE_BYTES = 64, 4 << 20  # limits on one hand-over: batches and their bytes
DRAIN_LIMIT = 1024  # messages read in one go, malformed ones included
QUEUE_LIMIT = 10_000  # waiting batches, as many as a publisher's replay buffer has by default
QUEUE_BYTES, LEAST_QUEUE_BYTES = 16 << 20, 1 << 20  # limits on their bytes; a pod's ranks share the first
MESSAGE_LIMIT = 32 << 20  # bytes of one message; a step of 8,192 tokens takes 40 kB
LEAST_MESSAGE_LIMIT = 6 << 20  # minimum for each of many ranks: a step that fills a cache of a million tokens
HEARTBEAT_SECONDS = 5.0
KEEPALIVE_SECONDS = 5
ANSWER_SECONDS = 15  # time for the answer to a heartbeat, however rare heartbeats are
HEARTBEATS_MISSED = 3  # then the publisher or the path to it is gone; libzmq answers even if the pod is busy
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = _GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED
ROUNDS_WITHOUT_PROGRESS = 2
ANSWER_LIMIT_SECONDS = 20.0  # for one replay; its rest is requested again
PATIENCE_LIMIT = 4  # greatest factor on the deadlines of a slow publisher
YIELD_EVERY = 256  # messages, so that other streams are served meanwhile


def limits(ranks: int) -> tuple[int, int]:
    """Return two limits for each of a pod's ranks: the bytes of one message, and the bytes of waiting messages."""
    return max(MESSAGE_LIMIT // ranks, LEAST_MESSAGE_LIMIT), max(QUEUE_BYTES // ranks, LEAST_QUEUE_BYTES)


class ZmqLiveEvents:
    """Subscribes to everything that one publisher sends.

    Arriving messages are taken from the socket at once, and dropped if too many wait already: the gap is then filled by
    a replay. They must not wait in libzmq: it limits the number of messages, not their bytes, and it aborts the process
    (`!_io_error`, 4.3.5) if a heartbeat is due while it has stopped reading and the peer is gone.
    """

    def __init__(
        self,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_malformed: Callable[[], None],
        connect_timeout_seconds: float = 2.0,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        ranks: int = 1,
        turns: SharedTurns | None = None,
    ) -> None:
        """`ranks`: how many ranks share the limits of their pod; `turns`: the process's."""
        self._turns = turns
        self._message_limit, self._queue_bytes = limits(ranks)
        self._waiting: deque[Frame] = deque()
        self._waiting_bytes = 0
        self._more: asyncio.Handle | None = None  # the call that will read the rest of the socket
        self._context = context
        self._address = address
        self._on_malformed = on_malformed
        self._connect_timeout = connect_timeout_seconds
        self._heartbeat_ms = round(heartbeat_seconds * 1000)
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._signals: SocketSignals | None = None
        self._monitor_is_read = False
        self._is_interrupted = False

    async def connect(self) -> None:
        """See `catch_up.LiveEvents`."""
        self.close()
        self._socket = socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = 0  # no limit: see the class's docstring
        socket.maxmsgsize = self._message_limit
        socket.ipv6 = True
        socket.reconnect_ivl = -1  # see the module's docstring
        # The connection of a peer that vanished silently (power, network) looks merely quiet. The kernel's keepalives
        # find this out at no cost of ours; heartbeats also ask the process behind a proxy.
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_SECONDS
        socket.tcp_keepalive_cnt = HEARTBEATS_MISSED
        socket.setsockopt(zmq.TCP_MAXRT, KEEPALIVE_SECONDS * HEARTBEATS_MISSED * 1000)  # for heartbeats under way
        socket.heartbeat_ivl = self._heartbeat_ms
        # a longer one would let the answer wait behind the next heartbeats of thousands of other sockets
        socket.heartbeat_timeout = min(self._heartbeat_ms * HEARTBEATS_MISSED, ANSWER_SECONDS * 1000)
        socket.subscribe(b"")
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._signals = signals = SocketSignals(socket, self._monitor, on_readable=self._read, turns=self._turns)
        self._monitor_is_read = False
        try:
            socket.connect(self._address)
            async with asyncio.timeout(self._connect_timeout):
                while not self._shook_hands():
                    await signals.wait(timeout_seconds=self._connect_timeout)
            self._fill()
        except (zmq.ZMQError, TimeoutError) as error:
            raise FeedLostError(f"events at {self._address}: {str(error) or 'no connection in time'}") from error

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        """See `catch_up.LiveEvents`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        self._is_interrupted = False
        while True:
            if self._waiting:
                return self._take()
            self.check()
            left = deadline - clock()
            if left <= 0 or self._is_interrupted:
                return []
            if self._more is None and self._signals is not None:
                await self._signals.wait(timeout_seconds=left)
            else:
                await asyncio.sleep(0)  # more messages are there already, and will not be signalled

    @property
    def waiting(self) -> int:
        """See `catch_up.LiveEvents`."""
        return len(self._waiting)

    def interrupt(self) -> None:
        """See `catch_up.LiveEvents`."""
        self._is_interrupted = True
        if self._signals is not None:
            self._signals.wake()

    def check(self) -> None:
        """See `catch_up.LiveEvents`."""
        self._shook_hands()

    def close(self) -> None:
        """See `catch_up.LiveEvents`."""
        if self._signals is not None:
            self._signals.close()
            self._signals = None
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
            self._socket = self._monitor = None
        if self._more is not None:
            self._more.cancel()
            self._more = None
        self._waiting.clear()
        self._waiting_bytes = 0

    def _shook_hands(self) -> bool:
        """Read the monitor's events; raise FeedLostError if the connection is gone."""
        if self._monitor is None:
            raise FeedLostError(f"events at {self._address}: not connected")
        if self._monitor_is_read:
            return False
        shook = False
        while is_readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & _GONE:
                raise FeedLostError(f"events at {self._address}: connection refused, closed by the pod, or silent")
            shook = shook or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor_is_read = True
        return shook

    def _read(self, socket: "zmq.Socket[bytes]") -> None:
        if socket is self._monitor:
            self._monitor_is_read = False
        else:
            self._fill()

    def _fill(self) -> None:
        """Empty the socket, up to DRAIN_LIMIT messages: then other streams come first."""
        if self._more is not None:
            self._more.cancel()
            self._more = None
        if self._socket is None:
            return
        for _ in range(DRAIN_LIMIT):
            if not is_readable(self._socket):
                return
            frame = parse_live(self._socket.recv_multipart(zmq.NOBLOCK))
            if frame is None:
                self._on_malformed()
            elif len(self._waiting) < QUEUE_LIMIT and self._waiting_bytes < self._queue_bytes:
                self._waiting.append(frame)
                self._waiting_bytes += len(frame.payload)
        # the remaining messages are not signalled again
        self._more = asyncio.get_running_loop().call_soon(self._fill)

    def _take(self) -> Sequence[Frame]:
        frames: list[Frame] = []
        size = 0
        while self._waiting and len(frames) < RECEIVE_LIMIT and size < RECEIVE_BYTES:
            frame = self._waiting.popleft()
            frames.append(frame)
            size += len(frame.payload)
        self._waiting_bytes -= size
        return frames


class ZmqReplaySource:
    """Requests one publisher's past batches."""

    def __init__(
        self,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_malformed: Callable[[], None],
        first_answer_seconds: float = 2.0,
        silence_seconds: float = 0.5,
        ranks: int = 1,
    ) -> None:
        """`ranks`: how many ranks share the limits of their pod."""
        self._message_limit, _ = limits(ranks)
        self._context = context
        self._address = address
        self._on_malformed = on_malformed
        self._first_answer_seconds = first_answer_seconds
        self._silence_seconds = silence_seconds
        self._patience = 1

    async def replay(self, start_seq: int) -> ReplayAnswer:
        """Return all batches from `start_seq` on; request missing ones again as long as each round brings some."""
        history = History(start_seq)
        fruitless, clock = 0, asyncio.get_running_loop().time
        until = clock() + ANSWER_LIMIT_SECONDS
        while fruitless < ROUNDS_WITHOUT_PROGRESS and not history.is_full and not history.contradicts_itself:
            before = len(history)
            is_answered = await self._round(history, until=until)
            if history.is_complete or not is_answered or clock() >= until:
                break
            fruitless = 0 if len(history) > before else fruitless + 1
        # a slow publisher must not be asked again and again for batches that it is still about to send
        self._patience = 1 if history.ended else min(self._patience * 2, PATIENCE_LIMIT)
        return history.answer()

    async def _round(self, history: History, *, until: float) -> bool:
        """Ask once, from the first hole on; tell whether anything was answered."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger = 0
            socket.rcvhwm = BATCH_LIMIT
            socket.maxmsgsize = self._message_limit
            socket.ipv6 = True
            socket.reconnect_ivl = -1  # one request, one connection, one process
            socket.connect(self._address)
            socket.send_multipart(replay_request(history.next_seq), zmq.NOBLOCK)
            signals = SocketSignals(socket)
            try:
                return await self._receive(socket, signals, history, until=until)
            finally:
                signals.close()
        except zmq.ZMQError:
            return False
        finally:
            socket.close(linger=0)

    async def _receive(
        self, socket: "zmq.Socket[bytes]", signals: SocketSignals, history: History, *, until: float
    ) -> bool:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._first_answer_seconds * self._patience
        received, last_hole = 0, history.last_hole()
        while not history.is_full and not history.contradicts_itself and received < 2 * BATCH_LIMIT:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # a message without news does not extend the deadline, however many there are
                left = deadline - clock()
                if left <= 0:
                    break
                await signals.wait(timeout_seconds=left)
                continue
            received += 1
            if received % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if is_replay_end(parts):
                history.ended = True
                break
            frame = parse_replay(parts)
            if frame is None:
                self._on_malformed()
                continue
            if history.add(frame):
                deadline = min(clock() + self._silence_seconds * self._patience, until)
            if last_hole is not None and frame.seq > last_hole:
                break
        return received > 0

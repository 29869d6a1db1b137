"""A publisher's ZMQ sockets: live events (SUB) and replay (DEALER to its ROUTER).

ZMQ would reconnect by itself and say nothing. A pod that went away may come back as another process, so here a lost
connection is an error that starts a new session. vLLM's ROUTER drops batches, the end marker included, when the reader
lags (it has no high-water mark). So each replay request has a socket of its own that only receives, and what has come
through is kept while the rest is asked for again.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

from kv_indexer.events.sequence import Frame, ReplayAnswer, is_replay_end, parse_live, parse_replay, replay_request
from kvmesh.errors import FeedLostError

RECEIVE_LIMIT, RECEIVE_BYTES = 64, 4 << 20  # batches handed over at once, and their bytes
DRAIN_LIMIT = 1024  # messages looked at in one go, malformed ones included
QUEUE_LIMIT = 10_000  # batches that may wait, as many as a publisher's replay buffer has by default
QUEUE_BYTES, LEAST_QUEUE_BYTES = 16 << 20, 1 << 20  # that these may take; shared by a pod's ranks
MESSAGE_LIMIT = 32 << 20  # bytes of one message; a step of 8,192 tokens has 40 kB
LEAST_MESSAGE_LIMIT = 6 << 20  # likewise, of each of many ranks; a step that fills a cache of a million tokens
HEARTBEAT_SECONDS = 5.0
KEEPALIVE_SECONDS = 5
ANSWER_SECONDS = 15  # that a heartbeat may take to be answered, however rare heartbeats are
HEARTBEATS_MISSED = 3  # then the publisher is gone, or the way to it; libzmq answers by itself, however busy the pod is
_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_WATCHED = _GONE | zmq.EVENT_HANDSHAKE_SUCCEEDED
_READABLE = int(zmq.POLLIN)  # plain integers: with pyzmq's enums the test costs more than what it tests
BATCH_LIMIT = 4096  # of one answer: what is not yet decoded must not fill the memory
BYTE_LIMIT = 64 << 20
ROUNDS_WITHOUT_PROGRESS = 2
PATIENCE_LIMIT = 4  # times the default silence, for a publisher that is slow to answer
YIELD_EVERY = 256  # messages, so that other streams are served meanwhile


def limits(ranks: int) -> tuple[int, int]:
    """Return how many bytes one message may have, and those that wait, of each of a pod's ranks."""
    return max(MESSAGE_LIMIT // ranks, LEAST_MESSAGE_LIMIT), max(QUEUE_BYTES // ranks, LEAST_QUEUE_BYTES)


class SocketSignals:
    """Wakes one waiter when something may have come on any of these sockets. Close it before the sockets.

    `on_signal` is called first.
    """

    def __init__(self, *sockets: "zmq.Socket[bytes]", on_signal: Callable[[], object] = lambda: None) -> None:
        self._on_signal = on_signal
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
            # takes the signal back, or else the loop would spin until the socket is read
            socket.getsockopt(zmq.EVENTS)
        except zmq.ZMQError:
            self._loop.remove_reader(descriptor)  # closed meanwhile; the next read fails
        else:
            self._on_signal()
        _wake(self._waiter)


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class ZmqLiveEvents:
    """Subscribes to everything that one publisher sends.

    What has come is taken from the socket at once, and dropped where too much waits already: then there is a gap, and
    the replay has it. libzmq must not keep it: it bounds the number of messages, not their bytes, and it aborts the
    process (`!_io_error`, 4.3.5) if a heartbeat is due while it has stopped reading and the peer is gone.
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
    ) -> None:
        """Take the number of `ranks` that share what their pod may send."""
        self._message_limit, self._queue_bytes = limits(ranks)
        self._waiting: deque[Frame] = deque()
        self._waiting_bytes = 0
        self._more: asyncio.Handle | None = None  # to take later what is left in the socket
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
        """See `catch_up.LiveEvents`."""
        self.close()
        self._socket = socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = 0  # none: see the class's docstring
        socket.maxmsgsize = self._message_limit
        socket.ipv6 = True
        socket.reconnect_ivl = -1  # see the module's docstring
        # a peer that vanished silently (power, network) leaves a connection that looks merely quiet; the kernel
        # asks for it at no cost of ours, and heartbeats ask the process behind any proxy in between
        socket.tcp_keepalive = 1
        socket.tcp_keepalive_idle = socket.tcp_keepalive_intvl = KEEPALIVE_SECONDS
        socket.tcp_keepalive_cnt = HEARTBEATS_MISSED
        socket.setsockopt(zmq.TCP_MAXRT, KEEPALIVE_SECONDS * HEARTBEATS_MISSED * 1000)  # for heartbeats under way
        socket.heartbeat_ivl = self._heartbeat_ms
        # not so long that an answer has to be looked for behind the next heartbeats of thousands of other sockets
        socket.heartbeat_timeout = min(self._heartbeat_ms * HEARTBEATS_MISSED, ANSWER_SECONDS * 1000)
        socket.subscribe(b"")
        self._monitor = socket.get_monitor_socket(_WATCHED)
        self._signals = signals = SocketSignals(socket, self._monitor, on_signal=self._fill)
        try:
            socket.connect(self._address)
            async with asyncio.timeout(self._connect_timeout):
                while not self._shook_hands():
                    await signals.wait(timeout_seconds=self._connect_timeout)
        except (zmq.ZMQError, TimeoutError) as error:
            raise FeedLostError(f"events at {self._address}: {str(error) or 'no connection in time'}") from error

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        """See `catch_up.LiveEvents`."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_seconds
        self._is_interrupted = False
        while True:
            self._fill()
            if self._waiting:
                return self._take()
            self.check()
            left = deadline - clock()
            if left <= 0 or self._is_interrupted:
                return []
            if self._more is None and self._signals is not None:
                await self._signals.wait(timeout_seconds=left)
            else:
                await asyncio.sleep(0)  # more has come already, so nothing would be signalled

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
        shook = False
        while _is_readable(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event & _GONE:
                raise FeedLostError(f"events at {self._address}: connection refused, closed by the pod, or silent")
            shook = shook or event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return shook

    def _fill(self) -> None:
        """Empty the socket, or begin to: others come first after DRAIN_LIMIT messages."""
        if self._more is not None:
            self._more.cancel()
            self._more = None
        if self._socket is None:
            return
        for _ in range(DRAIN_LIMIT):
            if not _is_readable(self._socket):
                return
            frame = parse_live(self._socket.recv_multipart(zmq.NOBLOCK))
            if frame is None:
                self._on_malformed()
            elif len(self._waiting) < QUEUE_LIMIT and self._waiting_bytes < self._queue_bytes:
                self._waiting.append(frame)
                self._waiting_bytes += len(frame.payload)
        # what is left is not signalled again
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


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    """Ask before each read: an exception for every read that finds nothing would cost four times as much."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & _READABLE)


class History:
    """What came through of one replay, in whatever order and however often; holds no sockets.

    Batches behind a hole are kept until it is filled: where each message is dropped with some probability, those in
    front of the first hole alone would hardly ever grow.
    """

    def __init__(self, start_seq: int) -> None:
        self.next_seq = start_seq  # the first that is missing
        self.ended = False
        self.contradicts_itself = False  # two different batches under one number: another process has answered
        self._frames: list[Frame] = []
        self._behind: dict[int, Frame] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames) + len(self._behind)

    @property
    def is_full(self) -> bool:
        """Whether the caller should take what there is before more is asked for."""
        return len(self) >= BATCH_LIMIT or self._bytes >= BYTE_LIMIT

    @property
    def is_complete(self) -> bool:
        """Whether the publisher has sent the end marker, and there is no hole."""
        return self.ended and not self._behind

    def last_hole(self) -> int | None:
        """Return the last batch that is missing; None if the end is not known."""
        if not self.ended:
            return None
        seq = max(self._behind, default=self.next_seq)
        while seq in self._behind:
            seq -= 1
        return seq

    def add(self, frame: Frame) -> bool:
        """Take a batch; False if it brings nothing."""
        known = self._behind.get(frame.seq)
        if known is not None:
            self.contradicts_itself = self.contradicts_itself or known.payload != frame.payload
            return False
        if frame.seq < self.next_seq:
            return False
        self._behind[frame.seq] = frame
        self._bytes += len(frame.payload)
        while self.next_seq in self._behind:
            self._frames.append(self._behind.pop(self.next_seq))
            self.next_seq += 1
        return True

    def answer(self) -> ReplayAnswer:
        """Return what is in front of the first hole."""
        if self.contradicts_itself:
            return ReplayAnswer(frames=(), ended=False)
        last_hole = self.last_hole() if self._behind else None
        return ReplayAnswer(
            frames=tuple(self._frames),
            ended=self.is_complete,
            next_seq=min(self._behind, default=None),
            whole_from=None if last_hole is None else last_hole + 1,
        )


class ZmqReplaySource:
    """Asks one publisher for its past."""

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
        """Take the number of `ranks` that share what their pod may send."""
        self._message_limit, _ = limits(ranks)
        self._context = context
        self._address = address
        self._on_malformed = on_malformed
        self._first_answer_seconds = first_answer_seconds
        self._silence_seconds = silence_seconds
        self._patience = 1

    async def replay(self, start_seq: int) -> ReplayAnswer:
        """Return all batches from `start_seq` on; asks again for what was dropped while each round brings something."""
        history = History(start_seq)
        fruitless = 0
        while fruitless < ROUNDS_WITHOUT_PROGRESS and not history.is_full and not history.contradicts_itself:
            before = len(history)
            is_answered = await self._round(history)
            if history.is_complete or not is_answered:
                break
            fruitless = 0 if len(history) > before else fruitless + 1
        # a slow publisher must not be asked again and again for what it is still about to send
        self._patience = 1 if history.ended else min(self._patience * 2, PATIENCE_LIMIT)
        return history.answer()

    async def _round(self, history: History) -> bool:
        """Ask once from the first hole on; tell whether anything was answered."""
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
                return await self._receive(socket, signals, history)
            finally:
                signals.close()
        except zmq.ZMQError:
            return False
        finally:
            socket.close(linger=0)

    async def _receive(self, socket: "zmq.Socket[bytes]", signals: SocketSignals, history: History) -> bool:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._first_answer_seconds * self._patience
        received, last_hole = 0, history.last_hole()
        while not history.is_full and not history.contradicts_itself and received < 2 * BATCH_LIMIT:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # what brings nothing does not put the deadline off, however much of it there is
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
                deadline = clock() + self._silence_seconds * self._patience
            if last_hole is not None and frame.seq > last_hole:
                break
        return received > 0

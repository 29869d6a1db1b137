"""Waiting for ZMQ sockets: no signal is lost, no reader is left behind, and what nobody reads costs nothing."""

import asyncio
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import pytest
import zmq

from kv_indexer.events.socket_signals import SocketSignals
from kv_indexer.events.zmq_sockets import DRAIN_LIMIT, RECEIVE_LIMIT, ZmqLiveEvents, ZmqReplaySource
from kvmesh.errors import FeedLostError
from tests.integration.kv_redis import free_port

NEVER_SECONDS = 60.0  # a receiver that waits so long has missed a signal
DEADLINE_SECONDS = 30.0


@pytest.fixture
def context() -> Iterator[Any]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


class Readers:
    """Which descriptors the running loop watches, and how often it called for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        add, remove = loop.add_reader, loop.remove_reader
        self.open: set[int] = set()
        self.calls = 0

        def counted(callback: Callable[..., Any], *arguments: Any) -> None:
            self.calls += 1
            callback(*arguments)

        def add_reader(descriptor: int, callback: Callable[..., Any], *arguments: Any) -> None:
            self.open.add(descriptor)
            add(descriptor, counted, callback, *arguments)

        def remove_reader(descriptor: int) -> bool:
            self.open.discard(descriptor)
            return remove(descriptor)

        monkeypatch.setattr(loop, "add_reader", add_reader)
        monkeypatch.setattr(loop, "remove_reader", remove_reader)


@pytest.fixture
async def readers(monkeypatch: pytest.MonkeyPatch) -> Readers:
    return Readers(monkeypatch)


class Publisher:
    """A PUB socket that may be used in a thread, so that messages come at any moment."""

    def __init__(self, context: Any) -> None:
        self._socket = context.socket(zmq.XPUB)
        self._socket.sndhwm = 0
        self._socket.xpub_verbose = True  # tells of every subscription, not only of the first
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._seq = 0

    async def subscribed(self) -> None:
        """Wait for a subscription."""
        assert await asyncio.to_thread(self._socket.poll, 5000)
        assert self._socket.recv(zmq.NOBLOCK) == b"\x01"

    def publish(self, batches: int, *, malformed: int = 0) -> None:
        """Send at once; malformed messages first."""
        for _ in range(malformed):
            self._socket.send(b"no batch")
        for _ in range(batches):
            self._socket.send_multipart([b"", self._seq.to_bytes(8, "big"), b"x"])
            self._seq += 1


def feed(context: Any, address: str) -> ZmqLiveEvents:
    return ZmqLiveEvents(context=context, address=address, on_malformed=lambda: None)


async def numbers(live: ZmqLiveEvents, wanted: int) -> list[int]:
    """Receive so many batches, or hang."""
    got: list[int] = []
    while len(got) < wanted:
        got += [frame.seq for frame in await live.receive(timeout_seconds=NEVER_SECONDS)]
    return got


async def test_many_small_bursts_are_each_received_without_waiting_for_the_timeout(context: Any) -> None:
    publisher, dice = Publisher(context), Random(5)
    live = feed(context, publisher.address)
    await live.connect()
    await publisher.subscribed()
    sent = 0
    async with asyncio.timeout(DEADLINE_SECONDS):
        for turn in range(600):
            burst = dice.choice((1, 1, 1, 2, 3, RECEIVE_LIMIT, RECEIVE_LIMIT + 1))
            if turn % 3 == 0:  # all of it while nobody waits; else while the receiver reads and waits
                await asyncio.to_thread(publisher.publish, burst)
                got = await numbers(live, burst)
            else:
                _, got = await asyncio.gather(asyncio.to_thread(publisher.publish, burst), numbers(live, burst))
            assert got == list(range(sent, sent + burst))
            sent += burst
    live.close()


async def test_a_batch_behind_more_malformed_messages_than_one_look_takes_is_received(context: Any) -> None:
    publisher = Publisher(context)
    live, witness = feed(context, publisher.address), feed(context, publisher.address)
    for each in (live, witness):
        await each.connect()
        await publisher.subscribed()
    async with asyncio.timeout(DEADLINE_SECONDS):
        for turn in range(3):
            publisher.publish(1, malformed=2 * DRAIN_LIMIT + 10)
            if await numbers(witness, 1) == [turn]:  # so all of it has most likely come to the other one, too
                assert await numbers(live, 1) == [turn]
    live.close()
    witness.close()


async def test_a_receiver_that_was_cancelled_misses_nothing_afterwards(context: Any) -> None:
    publisher = Publisher(context)
    live = feed(context, publisher.address)
    await live.connect()
    await publisher.subscribed()
    async with asyncio.timeout(DEADLINE_SECONDS):
        for number in range(20):
            task = asyncio.create_task(live.receive(timeout_seconds=NEVER_SECONDS), name="cancelled")
            await asyncio.sleep(0)
            publisher.publish(1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert await numbers(live, 1) == [number]
    live.close()


async def test_what_nobody_reads_does_not_keep_the_loop_busy(context: Any, readers: Readers) -> None:
    publisher = Publisher(context)
    live = feed(context, publisher.address)
    await live.connect()
    await publisher.subscribed()
    before = readers.calls
    publisher.publish(5)
    async with asyncio.timeout(DEADLINE_SECONDS):
        while readers.calls == before:
            await asyncio.sleep(0)
    for _ in range(1000):
        await asyncio.sleep(0)

    assert readers.calls - before <= 5
    assert await numbers(live, 5) == [0, 1, 2, 3, 4]
    live.close()


async def test_no_reader_is_left_however_a_session_ends(context: Any, readers: Readers) -> None:
    publisher, nowhere = Publisher(context), f"tcp://127.0.0.1:{free_port()}"
    for address in (publisher.address, nowhere, "nonsense"):
        live = feed(context, address)
        try:
            await live.connect()
            await live.receive(timeout_seconds=0.0)
            await live.connect()  # anew, without a word
        except FeedLostError:
            pass
        live.close()
    silent = context.socket(zmq.ROUTER)
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    for address, seconds in (
        (f"tcp://127.0.0.1:{port}", 0.01),
        (nowhere, 0.01),
        (f"tcp://127.0.0.1:{port}", NEVER_SECONDS),
    ):
        source = ZmqReplaySource(
            context=context, address=address, on_malformed=lambda: None, first_answer_seconds=seconds
        )
        task = asyncio.create_task(source.replay(0), name="replay")
        if seconds == NEVER_SECONDS:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not readers.open:
                    await asyncio.sleep(0)
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    assert readers.open == set()


async def test_what_comes_between_the_read_that_found_nothing_and_the_wait_is_signalled(context: Any) -> None:
    here, there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    here.bind("inproc://signals")  # a message is there as soon as it is sent
    there.connect("inproc://signals")
    signals = SocketSignals(here)
    async with asyncio.timeout(DEADLINE_SECONDS):
        for turn in range(200):
            with pytest.raises(zmq.Again):
                here.recv(zmq.NOBLOCK)
            there.send(b"%d" % turn)
            await signals.wait(timeout_seconds=NEVER_SECONDS)
            assert here.recv(zmq.NOBLOCK) == b"%d" % turn
    signals.close()


async def test_closing_ends_a_wait(context: Any) -> None:
    socket = context.socket(zmq.PAIR)
    signals = SocketSignals(socket)
    task = asyncio.create_task(signals.wait(timeout_seconds=NEVER_SECONDS), name="waits")
    await asyncio.sleep(0)
    signals.close()

    await asyncio.wait_for(task, 5)

"""A publisher that vanishes without closing its connection is noticed, and one that is merely quiet is kept."""

import asyncio
import ctypes
import socket
import struct
import sys
from collections.abc import Iterator

import pytest
import zmq

from kv_indexer.events import zmq_sockets
from kv_indexer.events.zmq_sockets import HEARTBEATS_MISSED, ZmqLiveEvents
from kvmesh.errors import FeedLostError

HEARTBEAT_SECONDS = 0.05
DEADLINE_SECONDS = 10.0
SO_ATTACH_FILTER = 26  # Linux
# ZMTP 3.1 without security: signature, version, mechanism, not a server, filler; then a READY command
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY_BODY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
READY = b"\x04" + bytes([len(READY_BODY)]) + READY_BODY


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def live_events(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> ZmqLiveEvents:
    return ZmqLiveEvents(
        context=context, address=address, on_malformed=lambda: None, heartbeat_seconds=HEARTBEAT_SECONDS
    )


async def test_a_publisher_that_vanished_without_closing_is_lost(
    context: "zmq.Context[zmq.Socket[bytes]]",
) -> None:
    async def greet_and_vanish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + READY)
        while await reader.read(4096):  # what comes is taken, as by a kernel whose process hangs; nothing is answered
            pass
        writer.close()

    server = await asyncio.start_server(greet_and_vanish, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    live = live_events(context, f"tcp://{host}:{port}")
    try:
        await live.connect()
        with pytest.raises(FeedLostError):
            assert await live.receive(timeout_seconds=DEADLINE_SECONDS)
    finally:
        live.close()
        server.close()
        await server.wait_closed()


async def test_a_host_that_vanished_is_lost_long_before_a_heartbeat_is_missed(
    context: "zmq.Context[zmq.Socket[bytes]]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_sockets, "KEEPALIVE_SECONDS", 1)

    async def greet_and_vanish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING + READY)
        await reader.readexactly(len(GREETING))
        drop_all = struct.pack("HHI", 0x06, 0, 0)  # a packet filter that keeps nothing: the kernel acknowledges no more
        kept = ctypes.create_string_buffer(drop_all)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(kept))
        )
        await asyncio.sleep(DEADLINE_SECONDS)

    server = await asyncio.start_server(greet_and_vanish, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    live = ZmqLiveEvents(
        context=context, address=f"tcp://{host}:{port}", on_malformed=lambda: None, heartbeat_seconds=60.0
    )
    try:
        await live.connect()
        with pytest.raises(FeedLostError):
            assert await live.receive(timeout_seconds=DEADLINE_SECONDS)
    finally:
        live.close()
        server.close()


async def test_a_publisher_that_has_nothing_to_say_is_kept(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    quiet = context.socket(zmq.PUB)
    live = live_events(context, f"tcp://127.0.0.1:{quiet.bind_to_random_port('tcp://127.0.0.1')}")
    try:
        await live.connect()
        assert await live.receive(timeout_seconds=HEARTBEAT_SECONDS * HEARTBEATS_MISSED * 4) == []
    finally:
        live.close()
        quiet.close(linger=0)


# in a process of its own, because libzmq would abort it
CROWDED = """
import asyncio, zmq
from kv_indexer.events.zmq_sockets import ZmqLiveEvents

async def main():
    ours, theirs = zmq.Context(), zmq.Context()
    publisher = theirs.socket(zmq.XPUB)
    publisher.sndhwm = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    address = f"tcp://127.0.0.1:{port}"
    live = ZmqLiveEvents(context=ours, address=address, on_malformed=lambda: None, heartbeat_seconds=1.0)
    await live.connect()
    publisher.recv()
    for seq in range(60_000):
        publisher.send_multipart([b"", seq.to_bytes(8, "big"), bytes(100)])
    await asyncio.sleep(0.3)  # unread, less than a heartbeat
    theirs.destroy(linger=0)
    await asyncio.sleep(2.5)  # one heartbeat is refused, another is due
    try:
        while True:
            await live.receive(timeout_seconds=5)
    except Exception as error:
        print(type(error).__name__)
    live.close()
    ours.destroy(linger=0)

asyncio.run(main())
"""


async def test_a_crowd_of_batches_whose_publisher_goes_does_not_end_the_process() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CROWDED, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said, errors = await asyncio.wait_for(process.communicate(), 30)
    assert (process.returncode, said) == (0, b"FeedLostError\n"), errors.decode()

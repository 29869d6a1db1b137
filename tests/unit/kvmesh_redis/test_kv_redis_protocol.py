"""One connection's requests and answers, without a socket."""

import asyncio
from typing import Any

import pytest

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.protocol import MAX_PENDING, RedisProtocol, pack


class Wire:
    """Stands for the transport: keeps what is written, and ends when told."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


def connected() -> tuple[RedisProtocol, Wire]:
    protocol, wire = RedisProtocol(), Wire()
    transport: Any = wire
    protocol.connection_made(transport)
    return protocol, wire


async def test_answers_go_to_the_requests_in_their_order_however_the_bytes_arrive() -> None:
    protocol, wire = connected()
    first, second = protocol.request(pack("A") + pack("B"), 2), protocol.request(pack("C"), 1)
    for byte in b"+a\r\n$1\r\nb\r\n:3\r\n":
        protocol.data_received(bytes([byte]))

    assert (await first, await second) == ([b"a", b"b"], [3])
    assert wire.written == pack("A") + pack("B") + pack("C")


async def test_an_answer_nobody_waits_for_any_more_is_dropped() -> None:
    protocol, _ = connected()
    given_up, kept = protocol.request(pack("A"), 1), protocol.request(pack("B"), 1)
    given_up.cancel()
    protocol.data_received(b"+a\r\n+b\r\n")

    assert await kept == [b"b"]


async def test_a_server_that_refuses_unasked_is_quoted() -> None:
    protocol, wire = connected()
    protocol.data_received(b"-ERR max number of clients reached\r\n")

    assert wire.aborted
    with pytest.raises(IndexUnavailableError, match="max number of clients reached"):
        await protocol.request(pack("A"), 1)


async def test_what_is_no_redis_ends_the_connection() -> None:
    protocol, wire = connected()
    protocol.data_received(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    assert wire.aborted


async def test_a_retired_connection_answers_what_is_under_way_and_then_ends() -> None:
    protocol, wire = connected()
    last = protocol.request(pack("A"), 1)
    protocol.retire(within_seconds=60)
    assert not wire.aborted
    protocol.data_received(b"+a\r\n")

    assert (await last, wire.aborted) == ([b"a"], True)


async def test_requests_that_wait_are_bounded() -> None:
    protocol, _ = connected()
    waiting = [protocol.request(b"", 1) for _ in range(MAX_PENDING)]

    with pytest.raises(IndexUnavailableError, match="too many requests wait"):
        await protocol.request(pack("A"), 1)
    protocol.connection_lost(None)
    gone = await asyncio.gather(*waiting, return_exceptions=True)
    assert {str(error) for error in gone} == {"Redis closed the connection: end of stream"}

"""Findings on a real Redis: shared by several indexers, bounded, and void when nobody stands by them."""

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from kvmesh.blocks.findings import Finding, FindingReason
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.redis_findings import FINDINGS, MAX_FINDINGS, RedisFindings
from tests.integration.kv_redis import RedisServer

SILENT = Finding(
    endpoint="10.0.0.1:8000", dp_rank=0, reason=FindingReason.NO_EVENTS, message="silent: speak", since=1e9
)
STUCK = replace(SILENT, dp_rank=1, reason=FindingReason.STUCK_IN_REPLAY, message="stuck: move")
WHOLE = replace(SILENT, dp_rank=None)

Indexer = Callable[[str], RedisFindings]


@pytest.fixture
async def indexer(redis_server: RedisServer) -> AsyncIterator[Indexer]:
    async with AsyncExitStack() as stack:

        def make(name: str) -> RedisFindings:
            findings = RedisFindings(url=redis_server.url, indexer=name)
            stack.push_async_callback(findings.close)
            return findings

        yield make


def age(redis_server: RedisServer, *, seconds: float) -> None:
    """Let all that is kept be older than it is."""
    client = redis_server.client()
    for field, value in client.hgetall(FINDINGS).items():
        record = json.loads(value)
        client.hset(FINDINGS, field, json.dumps({**record, "seen": record["seen"] - seconds}))


async def test_what_one_indexer_finds_all_can_read(indexer: Indexer) -> None:
    a, b = indexer("a"), indexer("b")

    assert await a.share([SILENT], healed=[]) == (SILENT,)
    assert await b.share([STUCK, WHOLE], healed=[]) == (WHOLE, SILENT, STUCK)
    assert await indexer("").read() == (WHOLE, SILENT, STUCK)


async def test_the_record_is_as_documented(indexer: Indexer, redis_server: RedisServer) -> None:
    await indexer("a").share([SILENT], healed=[])

    ((field, value),) = redis_server.client().hgetall(FINDINGS).items()
    record = json.loads(value)
    assert field == b"10.0.0.1:8000#0 no-events"
    assert abs(record.pop("seen") - time.time()) < 60
    assert record == {
        "endpoint": "10.0.0.1:8000",
        "dp_rank": 0,
        "reason": "no-events",
        "message": "silent: speak",
        "since": 1e9,
        "indexer": "a",
    }


async def test_what_heals_is_gone_and_what_another_indexer_has_taken_over_stays(indexer: Indexer) -> None:
    a, b = indexer("a"), indexer("b")
    await a.share([SILENT, STUCK], healed=[])
    await b.share([STUCK], healed=[])

    assert await a.share([], healed=[SILENT, STUCK]) == (STUCK,)
    assert await b.read() == (STUCK,)


async def test_what_nobody_confirms_is_void_and_taken_away_by_whoever_comes_by(
    indexer: Indexer, redis_server: RedisServer
) -> None:
    a, b = indexer("a"), indexer("b")
    await a.share([SILENT, STUCK], healed=[])
    age(redis_server, seconds=31)
    assert await b.read() == ()

    assert await a.share([STUCK], healed=[]) == (STUCK,)
    assert redis_server.client().hkeys(FINDINGS) == [b"10.0.0.1:8000#1 stuck-in-replay"]


async def test_what_cannot_be_read_is_left_out_and_taken_away(indexer: Indexer, redis_server: RedisServer) -> None:
    client = redis_server.client()
    client.hset(FINDINGS, mapping={b"x": b"no JSON", b"y": b"[" * 100_000, b"z": b'{"endpoint": 7}', b"\xff": b"{}"})
    reader = indexer("")
    assert await reader.read() == ()

    assert await indexer("a").share([SILENT], healed=[]) == (SILENT,)
    assert client.hkeys(FINDINGS) == [b"10.0.0.1:8000#0 no-events"]


async def test_their_number_and_size_are_bounded_and_that_is_said_once(
    indexer: Indexer, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    a = indexer("a")
    many = [replace(SILENT, endpoint=f"10.0.{number >> 8}.{number & 255}:8000") for number in range(MAX_FINDINGS + 5)]
    for _ in range(2):
        assert len(await a.share([replace(many[0], message="x" * 5000), *many[1:]], healed=[])) == MAX_FINDINGS

    assert redis_server.client().hlen(FINDINGS) == MAX_FINDINGS
    assert max(map(len, redis_server.client().hvals(FINDINGS))) < 1500
    assert caplog.text.count("5 findings are not shared") == 1


async def test_a_redis_that_is_away_or_holds_something_else_there_is_an_error_of_ours(
    indexer: Indexer, redis_server: RedisServer
) -> None:
    a = indexer("a")
    redis_server.client().set(FINDINGS, "not a hash")
    with pytest.raises(IndexUnavailableError, match="WRONGTYPE"):
        await a.share([SILENT], healed=[])
    redis_server.kill()
    with pytest.raises(IndexUnavailableError):
        await a.read()

"""Asks Redis about itself and reads the index's sources, with plain commands. Writes nothing, judges nothing."""

import asyncio
import time
from collections.abc import Mapping
from statistics import median

from extproc.doctor.facts import IndexFacts, RedisFacts
from kvmesh.errors import IndexUnavailableError, RedisUrlError
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.redis.address import RedisAccess, read_address
from kvmesh.redis.link import RedisLink, pack

PINGS = 15
_PING = pack("PING")


async def gather_redis(access: RedisAccess | str, *, timeout_seconds: float) -> RedisFacts:
    """Return how the Redis stands; why it cannot be used is in `problem`."""
    label = "redis"
    try:
        label = read_address(access).label
        link = RedisLink(access, reads_only=True, connect_timeout_seconds=timeout_seconds)
    except RedisUrlError as error:
        return RedisFacts(label=label, problem=str(error))
    try:
        async with asyncio.timeout(timeout_seconds):
            return await _read(link, label)
    except (IndexUnavailableError, TimeoutError) as error:
        return RedisFacts(label=label, problem=str(error) or f"no answer within {timeout_seconds:g} s")
    finally:
        await link.close()


async def _read(link: RedisLink, label: str) -> RedisFacts:
    # one section at a time: Redis 6 takes no list of them
    commands = b"".join(pack("INFO", section) for section in ("server", "memory", "persistence", "replication"))
    info: dict[str, str] = {}
    for reply in await link.request(commands, replies=4):
        info |= _lines(reply)
    times = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await link.request(_PING, replies=1)  # a refusal takes as long
        times.append(time.perf_counter() - began)
    began = time.time()
    (clock,) = await link.request(pack("TIME"), replies=1)
    here = (began + time.time()) / 2
    return RedisFacts(
        label=label,
        version=info.get("valkey_version") or info.get("redis_version", ""),
        is_valkey="valkey_version" in info,
        role=info.get("role", ""),
        maxmemory_policy=info.get("maxmemory_policy", ""),
        maxmemory_bytes=_number(info.get("maxmemory")),
        used_bytes=_number(info.get("used_memory")),
        appends_to_file=info.get("aof_enabled") == "1",
        round_trip_seconds=median(times),
        clock_ahead_seconds=int(clock[0]) + int(clock[1]) / 1e6 - here if isinstance(clock, list) else 0.0,
    )


def _lines(reply: object) -> Mapping[str, str]:
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""  # a refusal says nothing
    return {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


async def gather_index(access: RedisAccess | str, *, hash_seed: str, timeout_seconds: float) -> IndexFacts:
    """Return what the index says of its sources."""
    try:
        reader = PrefixIndexReader(url=access, hash_seed=hash_seed)
    except RedisUrlError as error:
        return IndexFacts(problem=str(error))
    try:
        async with asyncio.timeout(timeout_seconds):
            status = await reader.status()
    except (IndexUnavailableError, TimeoutError) as error:
        return IndexFacts(problem=str(error) or f"no answer within {timeout_seconds:g} s")
    finally:
        await reader.close()
    return IndexFacts(
        indexer_alive=status.indexer_alive, unreadable=tuple(status.unreadable), sources=tuple(status.sources)
    )

"""How fast one indexer process applies events, what it costs Redis, and how many bytes a block takes there.

    python -m bench.kv_apply [--batches 4000] [--blocks 32] [--sources 16] [--grow 5000000] [--json FILE]

Starts a redis-server of its own for each row (see `bench.redis_server`) and feeds decoded-from-the-wire batches through
the same use case as the service, claims, sequence and reference counts on; sockets are left out. Redis' CPU and the
indexer's are counted apart, because they are two processes on two cores.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import redis
import uvloop

from bench.machine import machine
from bench.redis_server import cpu_seconds, start_redis, stop_redis
from kv_indexer.apply.apply_events import EventApplier, root_keys
from kv_indexer.apply.redis_writer import RedisIndexWriter
from kv_indexer.events.sequence import Frame
from kv_indexer.share.redis_leases import RedisLeaseBook
from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry
from kvmesh.blocks.source import Claim, SourceState, Stream

BLOCK_SIZE = 16
ALL_DAY_SECONDS = 86_400.0
CHAIN = 16  # batches a prompt
MASK = 2**64 - 1
WAYS = {
    "new blocks": 0,  # every source has prompts of its own
    "shared blocks": 1,  # all sources store the same prompts
    "steady state": 2,  # each batch of new blocks comes with one that removes as many old ones
}


def engine_hashes(first: int, count: int) -> list[int]:
    return [(first + i + 1) * 0x9E3779B97F4A7C15 & MASK for i in range(count)]


def stored(first: int, blocks: int, *, continues: bool) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": engine_hashes(first, blocks),
        "parent_block_hash": engine_hashes(first - 1, 1)[0] if continues else None,
        "token_ids": [(first * 7919 + i) % 150_000 for i in range(blocks * BLOCK_SIZE)],
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(first: int, blocks: int) -> dict[str, Any]:
    hashes = engine_hashes(first, blocks)
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


def frames(*, first_seq: int, batches: int, blocks: int, source: int, removes_from: int | None = None) -> list[Frame]:
    """Batches of one source; each continues a chain. `removes_from`: the batch whose blocks are removed along."""
    made = []
    for seq in range(first_seq, first_seq + batches):
        first = (source << 32) + seq * blocks
        events = [stored(first, blocks, continues=seq % CHAIN != 0)]
        if removes_from is not None:
            events.append(removed((source << 32) + (removes_from + seq - first_seq) * blocks, blocks))
        made.append(Frame(seq=seq, payload=msgspec.msgpack.encode([1.0 + seq, events, 0])))
    return made


class Bench:
    """One indexer process's part: a writer, leases of all sources, and an applier each."""

    def __init__(self, url: str, *, sources: int) -> None:
        self._client: Any = redis.Redis.from_url(url)
        self._writer = RedisIndexWriter(url=url)
        self._streams = [Stream(endpoint=f"10.0.0.{number}:8000") for number in range(sources)]
        self._book = RedisLeaseBook(url=url, indexer="bench", endpoints=(), lease_seconds=ALL_DAY_SECONDS)
        self._appliers: list[EventApplier] = []
        self._claims: Mapping[Stream, Claim] = {}

    async def open(self) -> None:
        self._claims = claims = await self._book.tick(set(self._streams))
        roots, telemetry = root_keys(hash_seed="kvmesh", model="bench"), PrometheusTelemetry()
        for stream in self._streams:
            applier = EventApplier(claim=claims[stream], roots=roots, writer=self._writer, telemetry=telemetry)
            await applier.resume()
            self._appliers.append(applier)

    async def go_live(self) -> None:
        """Have lookups believe what was applied."""
        for applier, stream in zip(self._appliers, self._streams, strict=True):
            epoch = applier.position.epoch
            await self._writer.set_state(self._claims[stream], epoch=epoch, state=SourceState.LIVE)

    async def close(self) -> None:
        await self._book.close()
        await self._writer.close()

    async def memory(self) -> int:
        return int(self._client.info("memory")["used_memory"])

    async def blocks(self) -> int:
        return sum(slot.blocks for slot in (await self._writer.read_registry()).slots)

    async def feed(self, work: Sequence[Sequence[Frame]], *, at_once: int) -> dict[str, float]:
        """Apply all; return seconds on the clock, of our CPU and of Redis' CPU."""

        async def one(applier: EventApplier, mine: Sequence[Frame]) -> None:
            for start in range(0, len(mine), at_once):
                assert await applier.apply(mine[start : start + at_once]) is None

        wall, own, theirs = time.perf_counter(), time.process_time(), cpu_seconds(self._client)
        await asyncio.gather(*(one(applier, mine) for applier, mine in zip(self._appliers, work, strict=True)))
        return {
            "wall": time.perf_counter() - wall,
            "indexer": time.process_time() - own,
            "redis": cpu_seconds(self._client) - theirs,
        }


def figures(spent: dict[str, float], *, stored_blocks: int, removed_blocks: int = 0) -> dict[str, float]:
    """Return rates by block handled, stored or removed."""
    handled = stored_blocks + removed_blocks
    return {
        "blocks_handled": handled,
        "blocks_a_second": round(handled / spent["wall"]),
        "indexer_us_a_block": round(spent["indexer"] / handled * 1e6, 2),
        "redis_us_a_block": round(spent["redis"] / handled * 1e6, 2),
    }


async def measure(url: str, *, way: str, batches: int, blocks: int, sources: int, at_once: int) -> dict[str, Any]:
    bench, each = Bench(url, sources=sources), batches // sources
    await bench.open()
    before = await bench.memory()
    if way == "steady state":  # fill first, then exchange
        full = [frames(first_seq=0, batches=each, blocks=blocks, source=i) for i in range(sources)]
        await bench.feed(full, at_once=64)
        work = [frames(first_seq=each, batches=each, blocks=blocks, source=i, removes_from=0) for i in range(sources)]
    else:
        who = [0] * sources if way == "shared blocks" else list(range(sources))
        work = [frames(first_seq=0, batches=each, blocks=blocks, source=i) for i in who]
    spent = await bench.feed(work, at_once=at_once)
    total = each * sources * blocks
    held, memory = await bench.blocks(), await bench.memory() - before
    assert held == total, (held, total)
    await bench.close()
    row = {"way": way, "batches_a_change": at_once, "blocks_held": held, "bytes_a_block": round(memory / held, 1)}
    return row | figures(spent, stored_blocks=total, removed_blocks=total if way == "steady state" else 0)


async def grow(url: str, *, up_to: int, blocks: int, sources: int, at_once: int) -> list[dict[str, Any]]:
    """Fill one index in steps; each row tells of its step alone, bytes of all so far."""
    bench, rows, done = Bench(url, sources=sources), [], 0
    await bench.open()
    before = await bench.memory()
    for target in _targets(up_to):
        slice_seq = done // (blocks * sources)
        spent = {"wall": 0.0, "indexer": 0.0, "redis": 0.0}
        began = done
        while done < target:  # batches are made in slices: the frames of five million blocks would fill the memory
            count = min(64, -(-(target - done) // (blocks * sources)))
            work = [frames(first_seq=slice_seq, batches=count, blocks=blocks, source=i) for i in range(sources)]
            part = await bench.feed(work, at_once=at_once)
            spent = {name: spent[name] + part[name] for name in spent}
            slice_seq, done = slice_seq + count, done + count * sources * blocks
        held = await bench.blocks()
        assert held == done, (held, done)
        memory = await bench.memory() - before
        rows.append(
            {"blocks_held": held, "bytes_a_block": round(memory / held, 1)} | figures(spent, stored_blocks=done - began)
        )
    await bench.close()
    return rows


def _targets(up_to: int) -> Iterator[int]:
    for target in (100_000, 200_000, 500_000, 1_000_000, 2_000_000, 3_000_000, 5_000_000, 10_000_000):
        if target <= up_to:
            yield target


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=8000)
    parser.add_argument("--blocks", type=int, default=32, help="blocks a batch")
    parser.add_argument("--sources", type=int, default=16)
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 8, 64], help="batches applied in one step")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--grow", type=int, default=0, help="also fill one index up to so many blocks")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    shape = {"blocks": options.blocks, "sources": options.sources}
    rows: list[dict[str, Any]] = []
    growth: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for way in options.ways:
            for at_once in options.at_once:
                server, url = start_redis(folder)
                try:
                    row = uvloop.run(measure(url, way=way, batches=options.batches, at_once=at_once, **shape))
                finally:
                    stop_redis(server)
                print(json.dumps(row), flush=True)
                rows.append(row)
        if options.grow:
            server, url = start_redis(folder)
            try:
                growth = uvloop.run(grow(url, up_to=options.grow, at_once=8, **shape))
            finally:
                stop_redis(server)
            for row in growth:
                print(json.dumps(row))
    if options.json:
        result = {"machine": machine(), "load": os.getloadavg(), "apply": rows, "growth": growth}
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

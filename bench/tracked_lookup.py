"""What it saves that Redis tells of changes (decision 0006), and what it costs.

    python -m bench.tracked_lookup [--blocks 512 2048] [--lookups 500] [--rounds 5] [--json FILE]

Lookups of prompts of which nine tenths are held by four pods and one tenth was never seen, by a reader that asks for
everything and by one that has Redis track, in turn. Then Redis' memory for as many tracked blocks as one reader has
at most, writes of other blocks beside them, and the CPU of both sides for each tracked block that changes.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import redis
import uvloop

from bench.machine import machine
from bench.redis_lookup import BLOCK_SIZE, Filler, measure
from bench.redis_server import cpu_seconds, start_redis, stop_redis
from kvmesh.blocks.block_keys import KEY_BYTES, TOKEN_BYTES, block_keys, root_key, split_keys
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.index.tracking_link import CHUNK_BLOCKS, LIMIT, TrackingLink
from kvmesh.redis.keys import PREFIX

ROOT = root_key(hash_seed="kvmesh", model="bench")
OTHERS = 200_000  # blocks that are written
WAIT_SECONDS = 20.0


async def lookups(url: str, *, blocks: int, count: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each reader: medians over the rounds."""
    client: Any = redis.Redis.from_url(url)
    tokens = os.urandom((blocks * BLOCK_SIZE + 1) * TOKEN_BYTES)
    shared = tokens[: blocks * 9 // 10 * BLOCK_SIZE * TOKEN_BYTES]
    filler = Filler(url)
    await filler.fill(block_keys(shared, block_size=BLOCK_SIZE, parent=ROOT), others=OTHERS)
    await filler.close()
    prompts = cycle([shared + os.urandom(len(tokens) - len(shared)) for _ in range(1000)])
    readers = {
        "asks for everything": PrefixIndexReader(url=url, hash_seed="kvmesh"),
        "has Redis track": PrefixIndexReader(url=url, hash_seed="kvmesh", tracks=True),
    }

    async def look(reader: PrefixIndexReader) -> None:
        found = await reader.lookup(next(prompts), root=ROOT)
        assert max(found.matched_blocks.values()) == blocks * 9 // 10

    whole = blocks * 9 // 10 // CHUNK_BLOCKS * CHUNK_BLOCKS
    tracking = readers["has Redis track"]
    await _until(lambda: tracking.tracked_blocks >= whole, partial(look, tracking))
    results: dict[str, list[dict[str, float]]] = {name: [] for name in readers}
    for _ in range(rounds):
        for name, reader in readers.items():
            results[name].append(await measure(partial(look, reader), client, count))
    assert tracking.known_blocks, "nothing was known, so nothing was measured"
    for reader in readers.values():
        await reader.close()
    return [{"blocks": blocks, "reader": name} | _medians(rows, digits=3) for name, rows in results.items()]


async def costs(url: str, *, tracks: bool) -> dict[str, float]:
    """Return microseconds a block of Redis' CPU and of ours: for writes of other blocks, and for changes of ours."""
    client: Any = redis.Redis.from_url(url)
    link = TrackingLink(url)
    link.begin_anew(client.info("server")["run_id"].encode())
    keys = os.urandom(LIMIT * CHUNK_BLOCKS * KEY_BYTES)
    names = [PREFIX + b"b" + key for key in split_keys(keys)]
    _set(client, names, value="1")
    spent: dict[str, float] = {}
    if tracks:
        memory = client.info("memory")["used_memory"]
        await _until(lambda: client.info("stats")["tracking_total_keys"] >= len(names), partial(_note, link, keys))
        spent["redis_bytes_a_tracked_block"] = (client.info("memory")["used_memory"] - memory) / len(names)
    theirs, filler = cpu_seconds(client), Filler(url)
    await filler.fill(b"", others=OTHERS)
    await filler.close()
    spent["redis_us_another_block"] = (cpu_seconds(client) - theirs) / OTHERS * 1e6
    own, theirs = time.process_time(), cpu_seconds(client)
    _set(client, names, value="2")
    if tracks:
        await _until(lambda: link.tracked_blocks == 0)
    spent["redis_us_a_changed_block"] = (cpu_seconds(client) - theirs) / len(names) * 1e6
    spent["own_us_a_changed_block"] = (time.process_time() - own) / len(names) * 1e6
    await link.close()
    return spent


def _set(client: Any, names: list[bytes], *, value: str) -> None:
    for start in range(0, len(names), 1_000):
        client.mset(dict.fromkeys(names[start : start + 1_000], value))


def _medians(rows: list[dict[str, float]], *, digits: int) -> dict[str, float]:
    return {figure: round(statistics.median(row[figure] for row in rows), digits) for figure in rows[0]}


async def _note(link: TrackingLink, keys: bytes) -> None:
    link.note(keys, held=len(keys) // KEY_BYTES)


async def _until(condition: Any, meanwhile: Any = None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not come to that"
        if meanwhile is not None:
            await meanwhile()
        await asyncio.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--lookups", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for blocks in options.blocks:
            server, url = start_redis(folder)
            try:
                rows += uvloop.run(lookups(url, blocks=blocks, count=options.lookups, rounds=options.rounds))
            finally:
                stop_redis(server)
        spent: dict[bool, list[dict[str, float]]] = {False: [], True: []}
        for _ in range(options.rounds):
            for tracks, results in spent.items():
                server, url = start_redis(folder)
                try:
                    results.append(uvloop.run(costs(url, tracks=tracks)))
                finally:
                    stop_redis(server)
        rows += [{"tracks": tracks} | _medians(results, digits=2) for tracks, results in spent.items()]
    for row in rows:
        print(json.dumps(row))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

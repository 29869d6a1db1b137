"""What one prefix lookup costs the picker and Redis, by how it is done.

    python -m bench.redis_lookup [--blocks 64 512] [--lookups 1000] [--others 1000000] [--json FILE]

Starts a redis-server of its own (see `bench.redis_server`). Ways are measured in turn, three rounds, and the median is
printed: milliseconds of CPU in this process, of CPU in Redis, and on the clock. The last rows are the product's own
reader, key computation included.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import redis
import redis.asyncio
import uvloop

from bench.machine import machine
from bench.redis_server import cpu_seconds, start_redis, stop_redis
from kv_indexer.apply.redis_writer import RedisIndexWriter
from kv_indexer.share.redis_leases import RedisLeaseBook
from kvmesh.blocks.block_keys import (
    KEY_BYTES,
    TOKEN_BYTES,
    DepthHints,
    KnownBlockKeys,
    block_keys,
    root_key,
    split_keys,
)
from kvmesh.blocks.index_changes import IndexChange, Store, pack_hashes
from kvmesh.blocks.source import SourceState, Stream
from kvmesh.index.prefix_match import PrefixLookup
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.redis.keys import PREFIX, pack_mget
from kvmesh.redis.link import RedisLink, Script

Way = Callable[[], Awaitable[Any]]
BLOCK_SIZE = 16
PODS = 16
SLICE = 1000  # blocks a change
# the alternative: walk in chunks inside Redis and return runs
RUNS = Script(
    """
local prefix, packed, sub, call = KEYS[1] .. 'b', ARGV[1], string.sub, redis.call
local out, last, run, n, i, chunk = {}, nil, 0, #packed / 8, 0, 64
while i < n do
  local top, names = math.min(i + chunk, n), {}
  for j = 1, top - i do names[j] = prefix .. sub(packed, (i + j) * 8 - 7, (i + j) * 8) end
  local got = call('MGET', unpack(names))
  for j = 1, #got do
    local v = got[j]
    if v ~= last then
      if run > 0 then out[#out + 1] = last; out[#out + 1] = run end
      if not v then return out end
      last, run = v, 0
    end
    run = run + 1
  end
  i, chunk = top, chunk * 2
end
if run > 0 then out[#out + 1] = last; out[#out + 1] = run end
return out
"""
)


class Filler:
    """Writes blocks as an indexer does, under its leases."""

    def __init__(self, url: str) -> None:
        self._writer = RedisIndexWriter(url=url)
        self._book = RedisLeaseBook(url=url, indexer="bench", endpoints=(), lease_seconds=86_400.0)
        self._streams = [Stream(endpoint=f"10.0.0.{number}:8000") for number in range(PODS)]

    async def fill(self, keys: bytes, *, others: int) -> None:
        """Let four pods hold the prompt, to different depths, and all of them `others` blocks of other prompts."""
        claims = await self._book.tick(set(self._streams))
        count = len(keys) // KEY_BYTES
        for place, stream in enumerate(self._streams):
            position = await self._writer.read_position(stream)
            assert position is not None
            held = max(count * (4 - place) // 4, 0)
            await self._writer.set_state(claims[stream], epoch=position.epoch, state=SourceState.LIVE)
            work = [(pack_hashes(range(1, held + 1)), keys[: held * KEY_BYTES])] if held else []
            seq, left = -1, others // PODS
            while work or left > 0:
                hashes, of_these = work.pop() if work else (os.urandom(8 * SLICE), os.urandom(8 * SLICE))
                left -= SLICE
                store = Store(tier="GPU", group=0, block_size=BLOCK_SIZE, hashes=hashes, keys=of_these)
                change = IndexChange(
                    epoch=position.epoch,
                    previous_seq=seq,
                    last_seq=seq + 1,
                    last_ts=1.0,
                    last_crc=0,
                    operations=(store,),
                    events=1,
                )
                assert await self._writer.apply(claims[stream], change) is not None
                seq += 1

    async def close(self) -> None:
        await self._book.close()
        await self._writer.close()


async def measure(way: Way, client: Any, lookups: int) -> dict[str, float]:
    """Return milliseconds a lookup."""
    theirs, own, clock = cpu_seconds(client), time.process_time(), []
    for _ in range(lookups):
        began = time.perf_counter()
        await way()
        clock.append((time.perf_counter() - began) * 1e3)
    own, theirs = time.process_time() - own, cpu_seconds(client) - theirs
    clock.sort()
    return {
        "client_cpu_ms": own / lookups * 1e3,
        "redis_cpu_ms": theirs / lookups * 1e3,
        "p50_ms": clock[len(clock) // 2],
        "p99_ms": clock[len(clock) * 99 // 100],
    }


async def compare(url: str, *, blocks: int, lookups: int, others: int, rounds: int) -> dict[str, Any]:
    """Measure all ways in turn; the median of each figure over the rounds."""
    client: Any = redis.Redis.from_url(url)
    root = root_key(hash_seed="kvmesh", model="bench")
    tokens = os.urandom((blocks * BLOCK_SIZE + 1) * 4)
    keys = block_keys(tokens, block_size=BLOCK_SIZE, parent=root)[: blocks * KEY_BYTES]
    filler = Filler(url)
    await filler.fill(keys, others=others)
    await filler.close()
    names = [PREFIX + b"b" + key for key in split_keys(keys)]
    cold = [os.urandom(len(tokens)) for _ in range(64)]
    shared = tokens[: blocks * 9 // 10 * BLOCK_SIZE * TOKEN_BYTES]
    grown = cycle([shared + os.urandom(len(tokens) - len(shared)) for _ in range(1000)])
    pooled = redis.asyncio.Redis.from_url(url)
    await pooled.script_load(RUNS.source)
    link, reader = RedisLink(url), PrefixIndexReader(url=url, hash_seed="kvmesh")
    await link.run(RUNS, keys=[PREFIX], arguments=[keys])

    async def stranger() -> PrefixLookup:
        """Ask for a held prompt that this reader knows nothing of."""
        reader._hints, reader._known = DepthHints(), KnownBlockKeys()
        return await reader.lookup(tokens, root=root)

    ways: dict[str, Way] = {
        "redis-py, MGET": lambda: pooled.mget(names),
        "redis-py, Lua runs": lambda: pooled.evalsha(RUNS.sha, 1, PREFIX, keys),
        "shared link, Lua runs": lambda: link.run(RUNS, keys=[PREFIX], arguments=[keys]),
        "shared link, MGET": lambda: link.request(pack_mget(keys), replies=1),
        "PrefixIndexReader, held, seen before": lambda: reader.lookup(tokens, root=root),
        "PrefixIndexReader, nine tenths seen before": lambda: reader.lookup(next(grown), root=root),
        "PrefixIndexReader, held, never seen": stranger,
        "PrefixIndexReader, cold": lambda: reader.lookup(random.choice(cold), root=root),
    }
    assert max((await reader.lookup(tokens, root=root)).matched_blocks.values()) == blocks
    results: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            results[name].append(await measure(way, client, lookups))
    await reader.close()
    await link.close()
    await pooled.aclose()
    size = client.dbsize()
    rows = [
        {"way": name} | {figure: round(statistics.median(row[figure] for row in rows), 3) for figure in rows[0]}
        for name, rows in results.items()
    ]
    version = client.info("server")["redis_version"]
    return {"blocks": blocks, "keys_in_redis": size, "lookups": lookups, "redis": version, "ways": rows}


def show(result: dict[str, Any]) -> None:
    print(f"{result['blocks']} blocks, {result['keys_in_redis']} keys in Redis {result['redis']}")
    figures = [figure for figure in result["ways"][0] if figure != "way"]
    print(f"{'':44}" + "".join(f"{figure:>15}" for figure in figures))
    for row in result["ways"]:
        print(f"{row['way']:44}" + "".join(f"{row[figure]:15.3f}" for figure in figures))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--lookups", type=int, default=1000)
    parser.add_argument("--others", type=int, default=1_000_000, help="blocks of other prompts in the index")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for blocks in options.blocks:
            server, url = start_redis(folder)
            try:
                shape = {"lookups": options.lookups, "others": options.others, "rounds": options.rounds}
                results.append(uvloop.run(compare(url, blocks=blocks, **shape)))
            finally:
                stop_redis(server)
            show(results[-1])
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "lookup": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

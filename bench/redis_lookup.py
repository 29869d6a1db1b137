"""What one prefix lookup costs the picker and Redis, by how it is done.

    python -m bench.redis_lookup [--blocks 512] [--lookups 1000]

Starts a redis-server of its own. Ways are measured in turn, three rounds, and the median is printed: milliseconds of
CPU in this process, of CPU in Redis, and on the clock. The last lines are the product's own reader, key computation
included.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from typing import Any

import redis
import redis.asyncio
import uvloop

from bench.kv_apply import cpu, start_redis
from kv_indexer.adapters.redis_link import RedisLink, Script
from kv_indexer.adapters.redis_writer import RedisIndexWriter
from kv_indexer.api import PrefixIndexReader, Stream, block_keys, root_key
from kv_indexer.core.block_keys import split_keys
from kv_indexer.core.index_changes import IndexChange, Store, pack_hashes
from kv_indexer.wire.redis_keys import PREFIX, pack_mget

Way = Callable[[], Awaitable[Any]]
BLOCK_SIZE = 16
# the alternative: walk in chunks inside Redis and return runs
RUNS = Script(
    """
local prefix, packed, sub, call = KEYS[1] .. 'b:', ARGV[1], string.sub, redis.call
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


async def fill(url: str, tokens: bytes, root: bytes) -> bytes:
    """Let four pods hold the prompt, to different depths; return its keys."""
    writer = RedisIndexWriter(url=url)
    keys = block_keys(tokens, block_size=BLOCK_SIZE, parent=root)
    count = len(keys) // 8
    for pod in range(4):
        stream = Stream(endpoint=f"10.0.0.{pod}:8000")
        position = await writer.open_stream(stream)
        held = count * (4 - pod) // 4
        store = Store(
            tier="GPU",
            group=0,
            block_size=BLOCK_SIZE,
            hashes=pack_hashes(range(1, held + 1)),
            keys=keys[: held * 8],
        )
        change = IndexChange(
            epoch=position.epoch, previous_seq=-1, last_seq=0, last_ts=1.0, last_crc=0, operations=(store,)
        )
        assert await writer.apply(stream, change) is not None
    await writer.close()
    return keys


async def measure(way: Way, client: "redis.Redis", lookups: int) -> tuple[float, float, float]:
    theirs, own, wall = cpu(client), time.process_time(), time.perf_counter()
    for _ in range(lookups):
        await way()
    wall, own, theirs = time.perf_counter() - wall, time.process_time() - own, cpu(client) - theirs
    return own / lookups * 1e3, theirs / lookups * 1e3, wall / lookups * 1e3


async def compare(url: str, *, blocks: int, lookups: int) -> None:
    client = redis.Redis.from_url(url)
    root = root_key(hash_seed="kvmesh", model="bench")
    tokens, cold = os.urandom((blocks * BLOCK_SIZE + 1) * 4), os.urandom((blocks * BLOCK_SIZE + 1) * 4)
    keys = await fill(url, tokens, root)
    names = [PREFIX + b"b:" + key for key in split_keys(keys)]
    pooled = redis.asyncio.Redis.from_url(url)
    await pooled.script_load(RUNS.source)
    link, reader = RedisLink(url), PrefixIndexReader(url=url, hash_seed="kvmesh")
    await link.run(RUNS, keys=[PREFIX], arguments=[keys])
    ways: dict[str, Way] = {
        "redis-py, MGET": lambda: pooled.mget(names),
        "redis-py, Lua runs": lambda: pooled.evalsha(RUNS.sha, 1, PREFIX, keys),
        "shared link, Lua runs": lambda: link.run(RUNS, keys=[PREFIX], arguments=[keys]),
        "shared link, MGET": lambda: link.request(pack_mget(keys), replies=1),
        "PrefixIndexReader, warm": lambda: reader.lookup(tokens, root=root),
        "PrefixIndexReader, cold": lambda: reader.lookup(cold, root=root),
    }
    results: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(3):
        for name, way in ways.items():
            results[name].append(await measure(way, client, lookups))
    print(f"{blocks} blocks, {lookups} lookups, median of 3 rounds; Redis {client.info('server')['redis_version']}")
    print(f"{'':26}{'client CPU ms':>15}{'Redis CPU ms':>15}{'clock ms':>12}")
    for name, rounds in results.items():
        own, theirs, wall = (statistics.median(column) for column in zip(*rounds, strict=True))
        print(f"{name:26}{own:15.3f}{theirs:15.3f}{wall:12.3f}")
    started = time.process_time()
    for _ in range(lookups):
        block_keys(tokens, block_size=BLOCK_SIZE, parent=root)
    print(f"block_keys: {(time.process_time() - started) / lookups / blocks * 1e6:.3f} us a block")
    await reader.close()
    await link.close()
    await pooled.aclose()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--lookups", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start_redis(folder)
        try:
            uvloop.run(compare(url, blocks=options.blocks, lookups=options.lookups))
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()

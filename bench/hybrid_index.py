"""What a hybrid model's further cache groups cost the index: `python -m bench.hybrid_index [--quick] [--out FILE]`.

Part of `make bench`. The same prompts are stored by pods of one cache group and by pods of full attention and a sliding
window, of which vLLM keeps every block or only those before a prompt's end; then one prompt is looked up. Layouts are
measured in turn, each in a redis-server of its own (see `bench.redis_server`), and the least of the rounds counts: the
machine's other work can only add to it. Bytes are exact.
"""

import argparse
import array
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import redis
import uvloop

from bench.kv_apply import BLOCK_SIZE, CHAIN, Bench, stored
from bench.machine import machine, revision, versions
from bench.redis_server import cpu_seconds, start_redis, stop_redis
from kv_indexer.events.sequence import Frame
from kvmesh.blocks.block_keys import root_key
from kvmesh.index.redis_reader import PrefixIndexReader

RESULTS = Path(__file__).parent / "results"
PODS = 16
HOLDERS = (4, PODS)  # pods that hold the prompt that is looked up
BLOCKS = 32  # a batch, of full attention
KEPT = 4  # of a batch's blocks, by a window that keeps what a hit at its end needs
WINDOW_TOKENS = KEPT * BLOCK_SIZE + 1  # needs as many blocks
AT_ONCE = 8  # batches a change
PROMPT_BLOCKS = CHAIN * BLOCKS
WINDOW: Mapping[str, Any] = {
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": WINDOW_TOKENS,
}
FULL = (128, 4, 2000)  # batches a pod, rounds, lookups
QUICK = (CHAIN, 1, 200)


@dataclass(frozen=True, slots=True)
class Layout:
    """The cache groups of a pod's model."""

    name: str
    kept: int  # of a batch's blocks by the window; 0: full attention alone


LAYOUTS = (
    Layout("one group", 0),
    Layout("window, keeps all", BLOCKS),
    Layout(f"window, keeps {KEPT} of {BLOCKS}", KEPT),
)


def frames(layout: Layout, *, batches: int, source: int) -> list[Frame]:
    """Return the batches of one pod: each stores 32 blocks, and its window's of the same tokens."""
    made = []
    for seq in range(batches):
        event = stored((source << 32) + seq * BLOCKS, BLOCKS, continues=seq % CHAIN != 0)
        events = [event]
        if layout.kept:  # the blocks that are left out have tokens and no hashes, as in vLLM
            kept = slice(BLOCKS - layout.kept, None)
            hashes, extra = event["block_hashes"][kept], event["extra_keys"][kept]
            events.append({**event, **WINDOW, "block_hashes": hashes, "extra_keys": extra})
        made.append(Frame(seq=seq, payload=msgspec.msgpack.encode([1.0 + seq, events, 0])))
    return made


def prompt_tokens(*, source: int) -> bytes:
    """Return the first prompt of a pod, and one token more: the last one is never matched."""
    ids = array.array("I")
    for seq in range(CHAIN):
        ids.extend(stored((source << 32) + seq * BLOCKS, BLOCKS, continues=seq > 0)["token_ids"])
    return ids.tobytes() + bytes(4)


async def applied(url: str, layout: Layout, *, batches: int) -> dict[str, float]:
    """Store prompts that no two pods share; return what a block and a batch cost."""
    bench = Bench(url, sources=PODS)
    await bench.open()
    before = await bench.memory()
    work = [frames(layout, batches=batches, source=source) for source in range(PODS)]
    spent = await bench.feed(work, at_once=AT_ONCE)
    memory, held = await bench.memory() - before, await bench.blocks()
    full = PODS * batches * BLOCKS
    assert held == full + PODS * batches * layout.kept, held
    await bench.close()
    return {
        "bytes_a_block": memory / full,  # of full attention
        "redis_us_a_block": spent["redis"] / full * 1e6,
        "indexer_us_a_block": spent["indexer"] / full * 1e6,
        "indexer_us_a_batch": spent["indexer"] / (PODS * batches) * 1e6,
        "redis_us_a_batch": spent["redis"] / (PODS * batches) * 1e6,
    }


async def looked_up(url: str, layout: Layout, *, holders: int, lookups: int) -> dict[str, float]:
    """Look up a prompt that so many pods hold, asked of Redis each time, and as tracking knows it."""
    bench = Bench(url, sources=PODS)
    await bench.open()
    sources = [0] * holders + list(range(holders, PODS))
    await bench.feed([frames(layout, batches=CHAIN, source=source) for source in sources], at_once=AT_ONCE)
    await bench.go_live()
    tokens, root = prompt_tokens(source=0), root_key(hash_seed="kvmesh", model="bench")
    client: Any = redis.Redis.from_url(url)
    found: dict[str, float] = {}
    for way, tracks in (("asked", False), ("known", True)):
        reader = PrefixIndexReader(url=url, hash_seed="kvmesh", tracks=tracks)
        match = await reader.lookup(tokens, root=root)
        assert sorted(match.matched_blocks.values()) == [PROMPT_BLOCKS] * holders, match.matched_blocks
        own, theirs = time.process_time(), cpu_seconds(client)
        for _ in range(lookups):
            await reader.lookup(tokens, root=root)
        found[f"{way}_picker_us"] = (time.process_time() - own) / lookups * 1e6
        found[f"{way}_redis_us"] = (cpu_seconds(client) - theirs) / lookups * 1e6
        await reader.close()
    await bench.close()
    return found


def measure(folder: str, *, batches: int, rounds: int, lookups: int) -> list[dict[str, Any]]:
    """Return the least of each figure over the rounds, by layout."""
    seen: dict[str, list[dict[str, float]]] = {layout.name: [] for layout in LAYOUTS}
    for _ in range(rounds):
        for layout in LAYOUTS:
            row = in_new_redis(folder, lambda url, of=layout: applied(url, of, batches=batches))
            for holders in HOLDERS:
                found = in_new_redis(
                    folder, lambda url, of=layout, n=holders: looked_up(url, of, holders=n, lookups=lookups)
                )
                row |= {f"{name}_{holders}_hold_it": value for name, value in found.items()}
            seen[layout.name].append(row)
    return [{"layout": name} | least(rows) for name, rows in seen.items()]


def least(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each figure's least value."""
    return {figure: round(min(row[figure] for row in rows), 2) for figure in rows[0]}


def in_new_redis(folder: str, work: Any) -> dict[str, float]:
    """Run the work against an empty server, and end that."""
    server, url = start_redis(folder)
    try:
        found: dict[str, float] = uvloop.run(work(url))
    finally:
        stop_redis(server)
    return found


def show(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table: a line for each figure, a column for each layout."""
    lines = [f"{'':32}" + "".join(f"{row['layout']:>24}" for row in rows)]
    figures = [figure for figure in rows[0] if figure != "layout"]
    lines += [f"{figure:32}" + "".join(f"{row[figure]:24.2f}" for row in rows) for figure in figures]
    return "\n".join(lines)


def main() -> None:
    """Parse the flags, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of few blocks, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-hybrid-index.json")
    arguments = parser.parse_args()
    batches, rounds, lookups = QUICK if arguments.quick else FULL
    began, load = datetime.now(UTC), os.getloadavg()
    try:
        with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as folder:
            rows = measure(folder, batches=batches, rounds=rounds, lookups=lookups)
    except KeyboardInterrupt:
        sys.exit("interrupted: every server that was started has ended, nothing is written")
    out = arguments.out or RESULTS / f"{began:%Y-%m-%d}-hybrid-index.json"
    result = {
        "date": began.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "kvmesh": revision(RESULTS.parent),
        "load_average": load,
        "pods": PODS,
        "blocks": PODS * batches * BLOCKS,
        "rounds": rounds,
        "layouts": rows,
    }
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\nHybrid models: {PODS} pods, {result['blocks']} blocks of full attention, {BLOCKS} a batch, {AT_ONCE}")
    print(f"batches a change; lookups of {PROMPT_BLOCKS} blocks; the least of {rounds} rounds in turn")
    print(show(rows))
    print(f"written to {out}")


if __name__ == "__main__":
    main()

"""Our index in Redis beside Dynamo's `RadixTree`, in one run on one machine: applying, looking up, bytes a block.

    python -m venv radix-venv && radix-venv/bin/pip install ai-dynamo-runtime
    python -m bench.index_compare --radix-python radix-venv/bin/python [--blocks 512000] [--json FILE]

The two do different things: theirs is Rust in the memory of one router, is told hashes, counts no references and is
gone with its process; ours is shared by all pickers, survives restarts, counts references, fences writers and begins
with the engine's own messages. Compare what each costs, not which is "faster". Rounds alternate; medians are shown.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import uvloop

from bench.kv_apply import measure as apply
from bench.machine import machine
from bench.redis_lookup import compare as look_up
from bench.redis_server import start_redis, stop_redis

BATCH, SOURCES, PROMPT, LOOKUPS = 32, 16, 512, 500
MISSING = "Dynamo's index is left out: no ai-dynamo-runtime in {python}; see the head of bench/index_compare.py"


def radix(python: str, blocks: int) -> dict[str, Any] | None:
    """Run the other index; None if it is not installed there."""
    program = Path(__file__).parent / "radix_tree.py"
    command = [python, str(program), *map(str, (blocks, BATCH, SOURCES, PROMPT, LOOKUPS))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if "ModuleNotFoundError" in done.stderr:
        return None
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def ours(folder: str, blocks: int) -> dict[str, Any]:
    """Measure the index in Redis with the same numbers of blocks, batches and sources."""
    shape = {"batches": blocks // BATCH, "blocks": BATCH, "sources": SOURCES, "at_once": 8}
    rows = {}
    for way in ("new blocks", "steady state"):
        server, url = start_redis(folder)
        try:
            rows[way] = uvloop.run(apply(url, way=way, **shape))
        finally:
            stop_redis(server)
    server, url = start_redis(folder)
    try:
        found = uvloop.run(look_up(url, blocks=PROMPT, lookups=LOOKUPS, others=blocks, rounds=1))
    finally:
        stop_redis(server)
    reader = next(row for row in found["ways"] if row["way"] == "PrefixIndexReader, held, seen before")
    mget = next(row for row in found["ways"] if row["way"] == "shared link, MGET")
    return {
        "redis": found["redis"],
        "blocks": rows["new blocks"]["blocks_held"],
        "store_redis_us_a_block": rows["new blocks"]["redis_us_a_block"],
        "store_indexer_us_a_block": rows["new blocks"]["indexer_us_a_block"],
        "exchange_redis_us_a_block": rows["steady state"]["redis_us_a_block"],
        "exchange_indexer_us_a_block": rows["steady state"]["indexer_us_a_block"],
        "bytes_a_block": rows["new blocks"]["bytes_a_block"],
        "lookup_p50_ms": reader["p50_ms"],
        "lookup_p99_ms": reader["p99_ms"],
        "lookup_client_cpu_ms": reader["client_cpu_ms"],
        "lookup_redis_cpu_ms": mget["redis_cpu_ms"],
    }


def median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    first = rounds[0]
    return {
        name: round(statistics.median(one[name] for one in rounds), 3) if isinstance(value, float) else value
        for name, value in first.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=512_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--radix-python", default=sys.executable, help="a Python that has ai-dynamo-runtime")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    own: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            other = radix(options.radix_python, options.blocks)
            theirs += [other] if other else []
            own.append(ours(folder, options.blocks))
    result = {"machine": machine(), "kvmesh": median(own), "RadixTree": median(theirs) if theirs else None}
    if not theirs:
        print(MISSING.format(python=options.radix_python), file=sys.stderr)
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

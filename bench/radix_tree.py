"""What NVIDIA Dynamo's in-memory index does with the same work as `bench.index_compare`, which calls this.

Runs in a Python of its own that has `ai-dynamo-runtime`; imports nothing of ours. Events are given in the form that its
binding takes (JSON), made before the clock starts; so are block hashes. Prints one line of JSON.

    python bench/radix_tree.py BLOCKS BLOCKS_AN_EVENT SOURCES PROMPT_BLOCKS LOOKUPS
"""

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

MASK = 2**64 - 1
CHAIN = 512  # blocks a prompt


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def hashes(source: int, first: int, count: int) -> list[int]:
    return [((source << 32) + first + i + 1) * 0x9E3779B97F4A7C15 & MASK for i in range(count)]


def stored(source: int, first: int, blocks: int) -> bytes:
    of_event = hashes(source, first, blocks)
    parent = hashes(source, first - 1, 1)[0] if first % CHAIN else None
    data = {"parent_hash": parent, "blocks": [{"block_hash": value, "tokens_hash": value} for value in of_event]}
    return json.dumps({"event_id": first, "data": {"stored": data}}).encode()


def removed(source: int, first: int, blocks: int) -> bytes:
    data = {"removed": {"block_hashes": hashes(source, first, blocks)[::-1]}}
    return json.dumps({"event_id": first, "data": data}).encode()


def measure(tree: Any, *, total: int, an_event: int, sources: int, prompt_blocks: int, lookups: int) -> dict[str, Any]:
    each, used, spent = total // sources, resident_bytes(), 0.0
    for source in range(sources):  # events are made in slices, so that they do not count as the tree's memory
        for start in range(0, each, CHAIN * 4):
            events = [stored(source, first, an_event) for first in range(start, min(start + CHAIN * 4, each), an_event)]
            began = time.process_time()
            for event in events:
                tree.apply_event(source, event)
            spent += time.process_time() - began
    held = resident_bytes() - used
    prompt = hashes(0, 0, prompt_blocks)
    assert max(tree.find_matches(prompt).scores.values()) == prompt_blocks
    waits = []
    for _ in range(lookups):
        began = time.perf_counter()
        scores = tree.find_matches(prompt).scores
        waits.append(time.perf_counter() - began)
        assert scores
    removals, gone = 0.0, 0
    for start in range(0, each // CHAIN // 4 * CHAIN, CHAIN):  # a quarter of one source, leaves first
        events = [removed(0, first, an_event) for first in reversed(range(start, start + CHAIN, an_event))]
        began = time.process_time()
        for event in events:
            tree.apply_event(0, event)
        removals, gone = removals + time.process_time() - began, gone + CHAIN
    waits.sort()
    return {
        "version": version("ai-dynamo-runtime"),
        "blocks": each * sources,
        "store_us_a_block": round(spent / (each * sources) * 1e6, 2),
        "remove_us_a_block": round(removals / max(gone, 1) * 1e6, 2),
        "bytes_a_block": round(held / (each * sources), 1),
        "lookup_p50_ms": round(waits[len(waits) // 2] * 1e3, 3),
        "lookup_p99_ms": round(waits[len(waits) * 99 // 100] * 1e3, 3),
    }


def main() -> None:
    from dynamo.llm import RadixTree  # type: ignore[import-not-found]  # noqa: PLC0415  only where it is installed

    total, an_event, sources, prompt_blocks, lookups = map(int, sys.argv[1:6])
    shape = {"an_event": an_event, "sources": sources, "prompt_blocks": prompt_blocks, "lookups": lookups}
    print(json.dumps(measure(RadixTree(), total=total, **shape)))


if __name__ == "__main__":
    main()

"""How many pickers and indexers, and how much Redis, a fleet needs, by the recorded costs.

`python -m tools.sizing costs` and `example` print the tables of docs/guides/sizing.md;
`fleet PODS BLOCKS REQUESTS TOKENS CACHED ANSWER SHARED` prints the second one for a fleet of your own.
"""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from operate.install.workloads import BUSY_PERCENT, HEADROOM
from tools.docs_site import REPOSITORY
from tools.recorded import Facts, newest, table

BUSY = BUSY_PERCENT / 100  # of a core: what is planned for one process, so that a burst and a lost one find room
FIRST_COPY_BYTES, FURTHER_COPY_BYTES = 162, 91  # of Redis, a block; the most that any recorded run took
TRACKED_BYTES, TRACKED_BLOCKS = 140, 262_144  # what Redis remembers to tell pickers of; its table's bound
SCRAPES_A_SECOND, MOST_SCRAPES = 5, 1_000  # of one pod; of one picker
LEAST_PICKERS = LEAST_INDEXERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one unit of work costs on one machine."""

    machine: str
    request_ms: Mapping[int, tuple[float, float]]  # prompt tokens -> CPU of the picker: busy, one at a time
    scrape_ms: float  # of the picker, a pod's page
    lookup_ms: float  # of Redis, a request of 8,000 tokens
    indexer_block_us: float  # stored or removed, as many of each, one batch a change
    redis_block_us: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is to be served."""

    pods: int
    blocks_a_pod: int  # of its KV cache
    block_tokens: int = 16
    requests_a_second: float
    prompt_tokens: int
    cached: float  # 0..1 of the prompt tokens
    answer_tokens: int
    shared: float  # 0..1 of a pod's blocks that another pod holds, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What that takes."""

    picker_cores: float  # of all pickers, for requests
    scraping_cores: float  # of each picker
    pickers: int | None  # None: scraping alone fills one
    blocks_a_second: float  # stored and removed
    indexer_cores: float  # of all indexers
    indexers: int
    redis_cores: float  # of its one
    redis_bytes: float


def needs(fleet: Fleet, costs: Costs) -> Needs:
    """Return what a fleet takes on such a machine."""
    picking = fleet.requests_a_second * request_ms(costs, fleet.prompt_tokens) / 1000
    scraping = min(SCRAPES_A_SECOND * fleet.pods, MOST_SCRAPES) * costs.scrape_ms / 1000
    computed = fleet.prompt_tokens * (1 - fleet.cached) + fleet.answer_tokens
    changed = 2 * fleet.requests_a_second * computed / fleet.block_tokens  # what is stored is removed one day
    indexing = changed * costs.indexer_block_us / 1e6
    held = fleet.pods * fleet.blocks_a_pod
    copies = held * fleet.shared / 2  # of a block that two pods hold, one is the further copy
    return Needs(
        picker_cores=picking,
        scraping_cores=scraping,
        pickers=max(LEAST_PICKERS, math.ceil(picking / (BUSY - scraping)) + 1) if scraping < BUSY else None,
        blocks_a_second=changed,
        indexer_cores=indexing,
        indexers=max(LEAST_INDEXERS, math.ceil(indexing / BUSY) + 1),
        redis_cores=changed * costs.redis_block_us / 1e6 + fleet.requests_a_second * costs.lookup_ms / 1000,
        redis_bytes=(held - copies) * FIRST_COPY_BYTES
        + copies * FURTHER_COPY_BYTES
        + TRACKED_BYTES * min(TRACKED_BLOCKS, held),
    )


def request_ms(costs: Costs, tokens: int) -> float:
    """Return what a request costs one at a time: a line between the sizes that were measured, and beyond them."""
    points = sorted((size, one_at_a_time) for size, (_, one_at_a_time) in costs.request_ms.items())
    right = next((at for at in range(1, len(points)) if points[at][0] >= tokens), len(points) - 1)
    (low, low_ms), (high, high_ms) = points[right - 1], points[right]
    return max(points[0][1], low_ms + (high_ms - low_ms) * (tokens - low) / (high - low))


def recorded(picker: Facts, index: Facts) -> Costs:
    """Return what two results of one machine say."""
    cases = {(each["prompt_tokens"], each["concurrency"]): each for each in picker["cases"]}
    rows = index["apply"]["rows"] if isinstance(index["apply"], dict) else index["apply"]
    block = next(each for each in rows if (each["way"], each["batches_a_change"]) == ("steady state", 1))
    with_picker, without = (
        cases[8000, 1]["routes"][route]["cpu_ms_per_request_above_idle"]["redis"]["median"]
        for route in ("picker", "direct")
    )
    return Costs(
        machine=picker["machine"]["cpu"].replace("(R)", "").replace(" Processor @ 2.50GHz", ", 2.5 GHz"),
        request_ms={
            size: (cases[size, 16]["picker_cpu_ms"]["median"], cases[size, 1]["picker_cpu_ms"]["median"])
            for size in sorted({tokens for tokens, _ in cases})
        },
        scrape_ms=picker["idle_cpu_ms_per_second"]["extproc"] / (SCRAPES_A_SECOND * picker["plan"]["pods"]),
        lookup_ms=with_picker - without,
        indexer_block_us=block["indexer_us_a_block"],
        redis_block_us=block["redis_us_a_block"],
    )


def _result(name: str) -> Facts:
    found: Facts = json.loads((REPOSITORY / "bench" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return found


# the second is what a slow core takes
MACHINES = (
    recorded(newest("picker"), newest("index")),
    recorded(_result("2026-11-22-picker"), _result("2026-11-21-index")),
)
EXAMPLE = Fleet(
    pods=32,
    blocks_a_pod=100_000,
    requests_a_second=300,
    prompt_tokens=8000,
    cached=0.8,
    answer_tokens=250,
    shared=0.25,
)


def costs() -> str:
    """Return what was recorded, by machine."""
    rows = [["what", *(each.machine for each in MACHINES)]]
    for size in MACHINES[0].request_ms:
        cells = (f"{busy:.2f} to {alone:.2f} ms" for busy, alone in (each.request_ms[size] for each in MACHINES))
        rows.append([f"picker, a request of {size:,} tokens", *cells])
    rows += [
        ["picker, a pod's page", *(f"{each.scrape_ms:.2f} ms" for each in MACHINES)],
        ["Redis, a request of 8,000 tokens", *(f"{each.lookup_ms:.2f} ms" for each in MACHINES)],
        ["indexer, a block", *(f"{each.indexer_block_us:.1f} µs" for each in MACHINES)],
        ["Redis, a block", *(f"{each.redis_block_us:.1f} µs" for each in MACHINES)],
    ]
    return table(rows)


def example() -> str:
    """Return what the page's fleet takes, by machine."""
    return fleet_table(EXAMPLE)


def fleet_table(fleet: Fleet) -> str:
    """Return what a fleet takes, by machine."""
    found = [needs(fleet, each) for each in MACHINES]
    rows = [
        ["what", *(each.machine for each in MACHINES)],
        ["picking, all pickers", *(f"{each.picker_cores:.2f} cores" for each in found)],
        ["scraping, each picker", *(f"{each.scraping_cores:.2f} cores" for each in found)],
        ["**pickers**", *(f"**{each.pickers or 'none fits'}**" for each in found)],
        ["blocks stored and removed", *(f"{each.blocks_a_second:,.0f} a second" for each in found)],
        ["indexing, all indexers", *(f"{each.indexer_cores:.2f} cores" for each in found)],
        ["**indexers**", *(f"**{each.indexers}**" for each in found)],
        ["Redis, of its one core", *(_of_one_core(each.redis_cores) for each in found)],
        ["**`--redis-memory-mib`**", *(f"**{math.ceil(each.redis_bytes / 2**20):,}**" for each in found)],
        ["the bundled Redis' container", *(f"{each.redis_bytes * HEADROOM / 2**30:.1f} GiB" for each in found)],
    ]
    return table(rows)


def _of_one_core(cores: float) -> str:
    return f"{cores:.2f}" if round(cores, 2) <= BUSY else f"{cores:.2f}: too much"


def main() -> None:
    """Print a table."""
    if len(sys.argv) == 9 and sys.argv[1] == "fleet":
        pods, blocks, requests, tokens, cached, answer, shared = map(float, sys.argv[2:])
        fleet = Fleet(
            pods=int(pods),
            blocks_a_pod=int(blocks),
            requests_a_second=requests,
            prompt_tokens=int(tokens),
            cached=cached,
            answer_tokens=int(answer),
            shared=shared,
        )
        sys.stdout.write(fleet_table(fleet))
    elif sys.argv[1:] in (["costs"], ["example"]):
        sys.stdout.write({"costs": costs, "example": example}[sys.argv[1]]())
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()

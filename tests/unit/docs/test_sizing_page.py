"""docs/guides/sizing.md: the formulae hold, their constants are those of the code and of the recorded results."""

import json
from dataclasses import replace

import pytest
import yaml

from kvmesh.redis.keys import MAX_SLOTS
from operate.install.workloads import HEADROOM
from tools.docs_site import DOCS, REPOSITORY
from tools.sizing import (
    BUSY,
    EXAMPLE,
    FIRST_COPY_BYTES,
    FURTHER_COPY_BYTES,
    MACHINES,
    TRACKED_BLOCKS,
    TRACKED_BYTES,
    Costs,
    Fleet,
    fleet_table,
    needs,
    request_ms,
)

TEXT = " ".join((DOCS / "guides" / "sizing.md").read_text(encoding="utf-8").split())
COSTS = Costs(
    machine="round figures",
    request_ms={1000: (0.5, 1.0), 3000: (1.0, 2.0)},
    scrape_ms=1.0,
    lookup_ms=0.1,
    indexer_block_us=10.0,
    redis_block_us=2.0,
)
FLEET = Fleet(
    pods=20,
    blocks_a_pod=1_000_000,
    requests_a_second=1000,
    prompt_tokens=2000,
    cached=0.5,
    answer_tokens=600,
    shared=0.5,
)


def test_a_fleet_needs_what_the_formulae_say() -> None:
    found = needs(FLEET, COSTS)
    assert found.picker_cores == pytest.approx(1.5)  # 1,000 × 1.5 ms
    assert found.scraping_cores == pytest.approx(0.1)  # 5 × 20 pages of 1 ms
    assert found.pickers == 4  # 1.5 ÷ (0.6 - 0.1), and one that may be lost
    assert found.blocks_a_second == 2 * 1000 * (1000 + 600) / 16
    assert found.indexer_cores == pytest.approx(2.0)
    assert found.indexers == 5  # 2.0 ÷ 0.6 = 3.3
    assert found.redis_cores == pytest.approx(0.4 + 0.1)
    distinct, further = 15_000_000, 5_000_000
    tracked = TRACKED_BYTES * TRACKED_BLOCKS
    assert found.redis_bytes == distinct * FIRST_COPY_BYTES + further * FURTHER_COPY_BYTES + tracked


def test_nothing_needs_less_than_two_pickers_and_two_indexers() -> None:
    found = needs(replace(FLEET, requests_a_second=0.1, pods=1), COSTS)
    assert (found.pickers, found.indexers) == (2, 2)


def test_a_picker_that_scraping_alone_fills_is_told() -> None:
    many = replace(FLEET, pods=5000)
    assert needs(many, COSTS).pickers is None  # 1,000 pages of 1 ms
    assert "**none fits**" in fleet_table(replace(many, blocks_a_pod=1))


@pytest.mark.parametrize(("tokens", "milliseconds"), [(100, 1.0), (1000, 1.0), (2000, 1.5), (3000, 2.0), (5000, 3.0)])
def test_a_request_between_and_beyond_the_measured_sizes(tokens: int, milliseconds: float) -> None:
    assert request_ms(COSTS, tokens) == pytest.approx(milliseconds)


def test_no_recorded_run_took_more_bytes_a_block() -> None:
    first: list[float] = []
    further: list[float] = []
    for path in REPOSITORY.glob("bench/results/????-??-??-index.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        parts = [part.get("rows", []) if isinstance(part, dict) else part for part in found.values()]
        for row in (row for part in parts if isinstance(part, list) for row in part):
            if isinstance(row, dict) and "blocks_handled" in row:  # of this schema
                (further if row.get("way") == "shared blocks" else first).append(row["bytes_a_block"])
    assert FIRST_COPY_BYTES - 1 < max(first) <= FIRST_COPY_BYTES
    assert FURTHER_COPY_BYTES - 1 < max(further) <= FURTHER_COPY_BYTES


def test_the_page_says_the_same_constants() -> None:
    assert f"{FIRST_COPY_BYTES} bytes × distinct blocks + {FURTHER_COPY_BYTES} bytes × further copies" in TEXT
    assert f"{TRACKED_BYTES} bytes × tracked blocks" in TEXT
    assert f"{TRACKED_BLOCKS:,} at most in the bundled Redis" in TEXT
    assert f"({BUSY} − scraping)" in TEXT
    assert f"{MAX_SLOTS:,} sources" in TEXT
    assert f"asks for {HEADROOM} times as much" in TEXT


def test_the_bundled_redis_tracks_as_many_blocks() -> None:
    (stateful_set,) = (
        each
        for each in yaml.safe_load_all(
            (REPOSITORY / "manifests" / "components" / "redis-bundled" / "redis.yaml").read_text(encoding="utf-8")
        )
        if each["kind"] == "StatefulSet"
    )
    arguments = stateful_set["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments[arguments.index("--tracking-table-max-keys") + 1] == str(TRACKED_BLOCKS)


def test_the_example_is_the_fleet_that_its_sentence_describes() -> None:
    assert f"{EXAMPLE.pods} pods of {EXAMPLE.blocks_a_pod:,} blocks" in TEXT
    assert f"{EXAMPLE.requests_a_second:g} requests a second of {EXAMPLE.prompt_tokens:,} tokens" in TEXT
    assert f"{100 * EXAMPLE.cached:.0f} % cached, answers of {EXAMPLE.answer_tokens} tokens" in TEXT
    fast, slow = (needs(EXAMPLE, each) for each in MACHINES)
    assert f"--replicas {fast.pickers} --indexer-replicas {fast.indexers}" in TEXT
    memory = int(TEXT.partition("--redis-memory-mib ")[2].partition("`")[0])
    assert memory - 10 < fast.redis_bytes / 2**20 <= memory
    assert slow.pickers == 3


def test_the_line_to_run_is_the_example() -> None:
    words = TEXT.partition("tools.sizing fleet ")[2].split("`")[0].split()
    shown = [EXAMPLE.pods, EXAMPLE.blocks_a_pod, EXAMPLE.requests_a_second, EXAMPLE.prompt_tokens]
    assert [float(word) for word in words] == [*shown, EXAMPLE.cached, EXAMPLE.answer_tokens, EXAMPLE.shared]

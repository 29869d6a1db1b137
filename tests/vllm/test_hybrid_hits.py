"""What we make of the blocks that events report is the hit that vLLM's own cache manager finds.

Events go through the indexer and the index in memory, and a lookup answers, as in production.
"""

import json
import random
import struct
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_indexer.apply.apply_events import EventApplier, root_keys
from kv_indexer.events.sequence import Frame
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.source import Stream
from tests.unit.kv_indexer_follow.kv_fakes import CountingTelemetry
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex
from tests.vllm.environment import VllmEnvironment, offline

HERE = Path(__file__).parent
POD = Stream(endpoint="10.0.0.1:8000")
FULL = {"kind": "full_attention", "block_size": 16}
NARROW = {"kind": "sliding_window", "block_size": 16, "sliding_window": 33}
WIDE = {"kind": "sliding_window", "block_size": 16, "sliding_window": 97}
FINE = {"kind": "sliding_window", "block_size": 8, "sliding_window": 20}
COARSE = {"kind": "sliding_window", "block_size": 32, "sliding_window": 70}
STATE = {"kind": "mamba", "block_size": 16, "mode": "all"}
ALIGNED_STATE = {"kind": "mamba", "block_size": 16, "mode": "align"}
LAYOUTS: dict[str, list[dict[str, Any]]] = {
    "full": [FULL],
    "full and window": [FULL, NARROW],
    "full and wide window": [FULL, WIDE],
    "full and two windows": [FULL, NARROW, WIDE],
    "window before full": [NARROW, FULL],
    "full and two equal windows": [FULL, NARROW, NARROW],
    "full and finer window": [FULL, FINE],
    "coarser window before full": [COARSE, FULL],
    "full and state": [FULL, STATE],
    "full and aligned state": [FULL, ALIGNED_STATE],
    "full, window and state": [FULL, NARROW, STATE],
    "window only": [NARROW],
    "wide window only": [WIDE],
}
# what is kept of windows and states: all; where later prompts are known to go on (the default); that, and now and then
RETENTIONS: dict[str, int | None] = {"": None, ", sparse": 0, ", every 64": 64}
# blocks are left out, and there is no full attention with blocks of that size to say which
UNPLACED = {
    f"{layout}{suffix}"
    for layout in ("full and finer window", "window only", "wide window only")
    for suffix in (", sparse", ", every 64")
} - {"wide window only, every 64"}  # of which vLLM keeps all blocks
SEEDS = 30  # a layout


def random_case(groups: list[dict[str, Any]], seed: int, *, retention: int | None) -> dict[str, Any]:
    """Prompts that share beginnings, in a pool that is too small for all of them."""
    draw = random.Random(seed)
    trunks = [[draw.randrange(1000) for _ in range(400)] for _ in range(3)]

    def prompt() -> list[int]:
        trunk = draw.choice(trunks)
        return trunk[: draw.randrange(1, 400)] + [draw.randrange(1000) for _ in range(draw.choice((0, 1, 20)))]

    steps: list[dict[str, Any]] = []
    running: list[str] = []
    for number in range(25):
        steps.append({"start": f"{number}", "tokens": prompt(), "chunk": draw.choice((16, 64, 512))})
        running.append(f"{number}")
        if draw.random() < 0.5:
            grown = draw.choice(running)
            steps.append({"append": grown, "tokens": [draw.randrange(1000) for _ in range(draw.randrange(40))]})
        while len(running) > draw.randrange(1, 4):
            steps.append({"free": running.pop(draw.randrange(len(running)))})
        steps += [{"probe": prompt()} for _ in range(2)]
    hash_block_size = min(group["block_size"] for group in groups)
    blocks = draw.choice((50, 80, 140)) * len(groups)
    return {
        "groups": groups,
        "blocks": blocks,
        "hash_block_size": hash_block_size,
        "retention": retention,
        "steps": steps,
    }


def played(environment: VllmEnvironment, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    done = subprocess.run(
        [str(environment.python), str(HERE / "hybrid_oracle.py")],
        input=json.dumps({"cases": cases}),
        capture_output=True,
        text=True,
        env=offline(),
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: list[list[dict[str, Any]]] = json.loads(done.stdout)["cases"]
    return answer


class Known:
    """What an indexer makes of one pod's events, and a lookup of that."""

    def __init__(self) -> None:
        self.index = MemoryPrefixIndex()
        self.applied = 0
        self.telemetry = CountingTelemetry()

    async def begin(self) -> None:
        self.applier = EventApplier(
            claim=await self.index.claim(POD),
            roots=root_keys(hash_seed=self.index.hash_seed, model="tiny"),
            writer=self.index,
            telemetry=self.telemetry,
        )
        await self.applier.resume()

    async def apply(self, events: list[dict[str, Any]]) -> None:
        payload = msgspec.msgpack.encode([float(self.applied), [wire_event(event) for event in events], 0])
        assert await self.applier.apply([Frame(seq=self.applied, payload=payload)]) is None
        self.applied += 1

    async def hit(self, prompt: list[int]) -> int:
        root = root_key(hash_seed=self.index.hash_seed, model="tiny")
        found = await self.index.lookup(struct.pack(f"<{len(prompt)}I", *prompt), root=root)
        return found.matched_blocks.get(POD.endpoint, 0) * found.block_size.get(POD.endpoint, 0)


def wire_event(event: dict[str, Any]) -> dict[str, Any]:
    """Return an event of the oracle as vLLM publishes it."""
    if "removed" in event:
        return {"type": "BlockRemoved", "block_hashes": event["removed"], "medium": "GPU", "group_idx": event["group"]}
    window = event["sliding_window"]
    return {
        "type": "BlockStored",
        "block_hashes": event["stored"],
        "parent_block_hash": event["parent"],
        "token_ids": event["tokens"],
        "block_size": event["block_size"],
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": event["group"],
        "kv_cache_spec_kind": event["kind"],
        **({} if window is None else {"kv_cache_spec_sliding_window": window}),
    }


@pytest.fixture(scope="module")
def outcomes(vllm_environment: VllmEnvironment) -> dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    cases = {
        name + suffix: [random_case(groups, seed, retention=retention) for seed in range(SEEDS)]
        for name, groups in LAYOUTS.items()
        for suffix, retention in RETENTIONS.items()
        if retention is None or name != "full"
    }
    answers = iter(played(vllm_environment, [case for of_layout in cases.values() for case in of_layout]))
    return {name: [(case, next(answers)) for case in of_layout] for name, of_layout in cases.items()}


@pytest.mark.parametrize(
    "name", [name + suffix for name in LAYOUTS for suffix in RETENTIONS if not suffix or name != "full"]
)
async def test_every_hit_is_vllms(
    name: str, outcomes: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]
) -> None:
    hits, removals = 0, 0
    for case, answers in outcomes[name]:
        known = Known()
        await known.begin()
        for number, (step, answer) in enumerate(zip(case["steps"], answers, strict=True)):
            if answer["events"]:
                await known.apply(answer["events"])
                removals += sum("removed" in event for event in answer["events"])
            if "probe" in step:
                ours = await known.hit(step["probe"])
                assert ours == answer["hit"] or name in UNPLACED, (number, case["groups"])
                hits += answer["hit"] > 0
        assert known.applier.position.degraded == ""
        assert name in UNPLACED or known.telemetry.unindexed.keys() <= {"partial-block"}
    assert hits > 20 and removals > 30  # else the cases would prove nothing

"""What we make of the blocks that events report is the hit that vLLM's own cache manager finds."""

import json
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvmesh.blocks.events import CacheGroup
from kvmesh.index.group_match import HeldGroup, reusable_tokens
from tests.vllm.environment import VllmEnvironment, offline

HERE = Path(__file__).parent
FULL = {"kind": "full_attention", "block_size": 16}
NARROW = {"kind": "sliding_window", "block_size": 16, "sliding_window": 33}
WIDE = {"kind": "sliding_window", "block_size": 16, "sliding_window": 97}
FINE = {"kind": "sliding_window", "block_size": 8, "sliding_window": 20}
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
    "full and state": [FULL, STATE],
    "full and aligned state": [FULL, ALIGNED_STATE],
    "full, window and state": [FULL, NARROW, STATE],
    "window only": [NARROW],
    "wide window only": [WIDE],
}
SEEDS = 30  # a layout


def random_case(groups: list[dict[str, Any]], seed: int) -> dict[str, Any]:
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
    return {"groups": groups, "blocks": blocks, "hash_block_size": hash_block_size, "steps": steps}


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
    """What the events of one pod say: its groups, and how many copies of each block each group holds."""

    def __init__(self) -> None:
        self.groups: dict[int, CacheGroup] = {}
        self.copies: dict[int, Counter[int]] = {}

    def apply(self, event: dict[str, Any]) -> None:
        number = event["group"]
        copies = self.copies.setdefault(number, Counter())
        if "stored" in event:
            known = self.groups.get(number)
            # the end of a prompt within a block is reported with the size of a hash's piece: the largest size counts
            block_size = max(event["block_size"], known.block_size if known else 0)
            self.groups[number] = CacheGroup(
                kind=event["kind"], block_size=block_size, sliding_window=event["sliding_window"]
            )
            copies.update(event["stored"])
        else:
            copies.subtract(event["removed"])

    def hit(self, hashes: list[int], *, hash_block_size: int, prompt_tokens: int) -> int:
        """A block's hash is that of the prompt up to its end, whatever the block's size."""
        held = []
        for number, group in self.groups.items():
            ends = hashes[group.block_size // hash_block_size - 1 :: group.block_size // hash_block_size]
            held.append(HeldGroup(group=group, held=[self.copies[number][end] > 0 for end in ends]))
        return reusable_tokens(held, prompt_tokens=prompt_tokens)


@pytest.fixture(scope="module")
def outcomes(vllm_environment: VllmEnvironment) -> dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]:
    cases = {name: [random_case(groups, seed) for seed in range(SEEDS)] for name, groups in LAYOUTS.items()}
    answers = iter(played(vllm_environment, [case for of_layout in cases.values() for case in of_layout]))
    return {name: [(case, next(answers)) for case in of_layout] for name, of_layout in cases.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_hit_is_vllms(name: str, outcomes: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]]) -> None:
    hits, removals = 0, 0
    for case, answers in outcomes[name]:
        known = Known()
        for number, (step, answer) in enumerate(zip(case["steps"], answers, strict=True)):
            for event in answer["events"]:
                known.apply(event)
                removals += "removed" in event
            if "probe" in step:
                ours = known.hit(
                    answer["hashes"], hash_block_size=case["hash_block_size"], prompt_tokens=len(step["probe"])
                )
                assert ours == answer["hit"], (number, case["groups"])
                hits += ours > 0
    assert hits > 20 and removals > 100  # else the cases would prove nothing

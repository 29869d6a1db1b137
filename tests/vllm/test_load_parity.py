"""podsim's scheduler does with the legs of split requests what vLLM's does, step by step and event by event."""

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podsim.core.events import BlockStored
from podsim.core.scheduler import EngineSettings, Generation, Scheduler, State
from tests.vllm.environment import VllmEnvironment, offline

ORACLE = Path(__file__).parent / "load_oracle.py"
STORIES = 40
BLOCK_SIZE = 16  # tokens
BLOCKS = 48
SLOTS = 3


@dataclass
class Play:
    """The same as the oracle's, on podsim."""

    policy: str
    scheduler: Scheduler = field(
        default_factory=lambda: Scheduler(
            EngineSettings(block_size=BLOCK_SIZE, total_blocks=BLOCKS, max_running=SLOTS, max_step_tokens=2048)
        )
    )
    legs: dict[str, Generation] = field(default_factory=dict)
    loading: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    cached: dict[str, list[int]] = field(default_factory=dict)
    handed_over: dict[str, Any] = field(default_factory=dict)
    work: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    events: list[Any] = field(default_factory=list)

    def play(self, step: dict[str, Any]) -> dict[str, Any]:
        self.events, self.work, self.ended = [], {}, {}
        if "add" in step:
            self.add(**step)
        elif "abort" in step:
            self.scheduler.abort(self.legs[step["abort"]])
        else:
            self.step(**step)
        return self.state()

    def add(self, add: str, tokens: list[int], output: int, leg: str) -> None:
        self.legs[add] = one = Generation(token_ids=tokens + [7] * output, prompt_tokens=len(tokens), arrived_at=0.0)
        one.loads_prompt, one.keeps_blocks = leg == "decode", leg == "prefill"
        self.scheduler.add(one)

    def name(self, leg: Generation) -> str:
        return next(name for name, one in self.legs.items() if one is leg)

    def step(self, loaded: Sequence[str], failed: Sequence[str], sent: Sequence[str]) -> None:
        step = self.scheduler.begin_step(0.0)
        self.loading += [self.name(leg) for leg in self.scheduler.take_started_loads()]
        if step is not None:
            self.work = {self.name(leg): tokens for leg, tokens in step.work}
            outcome = self.scheduler.finish_step(step, 0.0)
            for leg in outcome.produced:
                self.count(leg)
            self.events = [
                ["BlockStored", len(event.block_hashes), len(event.token_ids), event.parent_hash is None]
                if isinstance(event, BlockStored)
                else [type(event).__name__, 1]
                for event in outcome.events
            ]
        for name in [name for name in self.loading if name in loaded]:
            self.loading.remove(name)
            self.scheduler.finish_load(self.legs[name])
        for name in [name for name in self.loading if name in failed]:
            self.loading.remove(name)
            was_loading = self.legs[name].state is State.LOADING
            self.scheduler.fail_load(self.legs[name], recompute=self.policy == "recompute")
            if was_loading and self.policy == "fail":
                self.ended[name] = "error"
        for name in sent:
            self.kept.remove(name)
            self.scheduler.release_kept(self.legs[name])

    def count(self, leg: Generation) -> None:
        name = self.name(leg)
        if leg.produced == 1:
            self.cached[name] = [leg.cached_tokens, leg.loaded_tokens]
        if leg.state is not State.FINISHED:
            return
        self.ended[name] = "length"
        if leg.keeps_blocks:
            self.kept.append(name)
            cached = leg.cached_tokens if leg.produced == 1 else None
            self.handed_over[name] = [len(leg.blocks), leg.computed, cached]

    def state(self) -> dict[str, Any]:
        scheduler, totals = self.scheduler, self.scheduler.totals
        return {
            "work": self.work,
            "events": self.events,
            "ended": self.ended,
            "running": scheduler.running,
            "waiting": scheduler.waiting,
            "deferred": scheduler.loading + scheduler.loaded,
            "stages": [scheduler.waiting_to_load(), scheduler.loading, scheduler.loaded],
            "used_blocks": BLOCKS - 1 - scheduler.pool.free_blocks,
            "cached": dict(self.cached),
            "handed_over": dict(self.handed_over),
            "queries": totals.queried_tokens,
            "hits": totals.hit_tokens,
            "external_queries": totals.queried_tokens - totals.hit_tokens,
            "external_hits": totals.loaded_tokens,
        }


def told(seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A story drawn as podsim goes through it, since only what is under way can end; and what podsim made of it."""
    rng = random.Random(seed)
    policy = rng.choice(["fail", "recompute"])
    play = Play(policy)
    steps: list[dict[str, Any]] = []
    seen: list[dict[str, Any]] = []

    def then(step: dict[str, Any]) -> None:
        steps.append(step)
        seen.append(play.play(step))

    def ends(names: list[str], share: float) -> list[str]:
        return [name for name in names if rng.random() < share]

    for number in range(14):
        family = rng.randrange(3)
        # vLLM looks prompts of one token up twice, before their load and after it
        tokens = [family * 1000 + position for position in range(rng.randint(2, 200))]
        leg = rng.choice(["plain", "prefill", "decode", "decode"])
        output = 1 if leg == "prefill" and rng.random() < 0.7 else rng.randint(1, 20)
        then({"add": f"r{number}", "tokens": tokens, "output": output, "leg": leg})
        if rng.random() < 0.15:
            then({"abort": f"r{rng.randrange(number + 1)}"})
        for _ in range(rng.randint(0, 3)):
            loaded = ends(play.loading, 0.4)
            failed = [name for name in ends(play.loading, 0.2) if name not in loaded]
            then({"loaded": loaded, "failed": failed, "sent": ends(play.kept, 0.3)})
    for _ in range(80):
        then({"loaded": list(play.loading), "failed": [], "sent": list(play.kept)})
    assert play.scheduler.waiting == play.scheduler.running == 0
    return {"policy": policy, "block_size": BLOCK_SIZE, "blocks": BLOCKS, "slots": SLOTS, "steps": steps}, seen


def test_legs_go_as_on_vllms_scheduler(vllm_environment: VllmEnvironment, tiny_model: Path) -> None:
    stories = [told(seed) for seed in range(STORIES)]
    played = subprocess.run(
        [str(vllm_environment.python), str(ORACLE), str(tiny_model)],
        input=json.dumps([story for story, _ in stories]),
        env=offline(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert played.returncode == 0, played.stderr[-3000:]
    for seed, ((story, ours), theirs) in enumerate(
        zip(stories, json.loads(played.stdout.splitlines()[-1]), strict=True)
    ):
        for number, (step, our, their) in enumerate(zip(story["steps"], ours, theirs, strict=False)):
            assert our == their, f"story {seed} ({story['policy']}), step {number}: {step}"

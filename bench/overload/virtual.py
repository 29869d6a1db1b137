"""The overload benchmark in virtual time: minutes of load in seconds of CPU, for trying policies.

    python -m bench.overload.virtual [--loads 0.5,1.5,3] [--seeds N] [--no-fall] [--try NAME=JSON]...

The picker's own admission, queue, estimates and decision, and the simulated pods' own engine, on an event loop whose
clock jumps: no processes, no sockets, no noise, the same result each time. It leaves out what takes time besides the
pods (Envoy, tokenizing, events on their way), so `run` has the last word. JSON is a policy as for
`kvmesh extproc --policy`, on top of the benchmark's own, merged field by field; lists are taken whole.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from rich.console import Console

from bench.overload.arms import KVMESH, LEAST_REQUEST, OFF, OverloadArm, arms
from bench.overload.load import Ask, Clients
from bench.overload.measure import Scenario, scenarios
from bench.overload.plan import QUICK, STANDARD, Plan, policy
from bench.overload.promises import (
    PROMISE_PLAN,
    QUICK_PROMISE_PLAN,
    promise_arms,
    promise_policy,
    promise_rows,
    promise_table,
    promise_verdicts,
)
from bench.overload.refusable_http import Answer
from bench.overload.script import Job, Outcome, Request
from bench.overload.summary import RunSummary, summarise
from bench.overload.tables import WIDTH, tables
from bench.overload.verdicts import verdicts
from bench.overload.virtual_picker import VirtualPicker
from bench.overload.virtual_pods import MODEL, Texts, VirtualPods
from bench.prompts import vocabulary_words
from bench.routing.arms import picker_arm
from bench.virtual_loop import run
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from podsim.model_folder import TINY_MODEL, load_model_folder

BETWEEN_SECONDS = 6.0  # of two loads: the picker forgets what it has just sent where
ARMS = (KVMESH, OFF, LEAST_REQUEST)


def play(
    played: Sequence[Scenario], document: Mapping[str, Any] | None, *, name: str, plan: Plan, texts: Texts, seed: int
) -> list[RunSummary]:
    """The loads of one arm, one after the other on the same pods and the same picker, which remembers the one before.

    Without a policy it is the less busy of two random pods, as Envoy's LEAST_REQUEST.
    """
    return [
        summarise(
            outcomes,
            arm=name,
            scenario=scenario.name,
            load=scenario.load,
            classes=plan.classes,
            measured_from=scenario.measured_from,
            ends=scenario.ends,
            falls_at=scenario.falls_at,
        )
        for scenario, outcomes in zip(
            played, run(_outcomes(played, document, plan=plan, texts=texts, seed=seed)), strict=True
        )
    ]


async def _outcomes(
    played: Sequence[Scenario], document: Mapping[str, Any] | None, *, plan: Plan, texts: Texts, seed: int
) -> list[list[Outcome]]:
    clock = asyncio.get_running_loop().time
    pods = VirtualPods(settings=plan.pods, texts=texts, clock=clock)
    picker = None
    if document is not None:
        picker = VirtualPicker(pods, pick_policy(read_policy_file(document))[0], seed=seed)
    ask: Ask = _least_request(pods, seed=seed) if picker is None else picker.ask
    beside = asyncio.ensure_future(pods.run(None if picker is None else picker.books.reported))
    found: list[list[Outcome]] = []
    try:
        for scenario in played:
            job = Job(
                host="",
                port=0,
                model=MODEL,
                requests=scenario.requests,
                patience_seconds=plan.patience_seconds,
                most_attempts=plan.most_attempts,
            )
            clients = Clients(job, ask=ask, clock=clock)
            await clients.run()
            found.append(clients.outcomes)
            await asyncio.sleep(BETWEEN_SECONDS)
            pods.empty_caches()
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        if picker is not None:
            picker.close()
    return found


def _least_request(pods: VirtualPods, *, seed: int) -> Ask:
    draw, busy = random.Random(seed), dict.fromkeys(pods.pods, 0)

    async def ask(request: Request, answer: Answer) -> None:
        address = min(draw.sample(list(busy), 2), key=busy.__getitem__)
        busy[address] += 1
        try:
            await pods.answer(address, request, answer, responded=lambda: None)
        finally:
            busy[address] -= 1

    return ask


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A policy with some of its fields changed, at whatever depth."""
    return {
        **base,
        **{
            key: merged(base.get(key, {}), value) if isinstance(value, Mapping) else value
            for key, value in changes.items()
        },
    }


def main() -> None:
    options = _options()
    if options.promise:
        plan = QUICK_PROMISE_PLAN if options.quick else PROMISE_PLAN
    else:
        plan = QUICK if options.quick else STANDARD
    if options.loads is not None:
        loads = tuple(sorted(float(load) for load in options.loads.split(",")))
        plan = replace(plan, loads=loads, few_loads=loads)
    words, texts = vocabulary_words(TINY_MODEL), Texts(load_model_folder(TINY_MODEL))
    known = promise_arms(plan) if options.promise else arms(plan)
    names = options.arms or (",".join(known) if options.promise else KVMESH)
    chosen = [known[name] for name in names.split(",")]
    base = promise_policy(promised=True) if options.promise else policy()
    for text in options.tries:
        name, _, document = text.partition("=")
        tried = picker_arm(name, policy=merged(base, json.loads(document)))
        chosen.append(OverloadArm(arm=tried, loads=plan.loads, falls=True))
    console = Console(width=WIDTH)
    for seed in range(options.seeds):
        seeded = replace(plan, seed=plan.seed + seed)
        began, runs = time.monotonic(), list[RunSummary]()
        for each in chosen:
            played = _scenarios(seeded, each, words=words, falls=options.fall)
            runs += play(played, each.arm.policy, name=each.arm.name, plan=seeded, texts=texts, seed=seed)
        if options.promise:
            rows = promise_rows(runs, classes=plan.classes)
            console.print(promise_table(rows), tables(runs, promise_verdicts(rows), capacity=plan.capacity))
            continue
        judged = [
            msgspec.structs.replace(verdict, target=f"{each.arm.name}: {verdict.target}")
            for each in chosen
            if each.falls
            for verdict in verdicts(runs, arm=each.arm.name)
        ]
        console.print(tables(runs, judged, capacity=plan.capacity), highlight=False)
        console.print(f"seed {seeded.seed}: {time.monotonic() - began:.0f} s\n", highlight=False)


def _scenarios(plan: Plan, arm: OverloadArm, *, words: Sequence[str], falls: bool) -> list[Scenario]:
    return [each for each in scenarios(plan, arm, words=words) if falls or each.falls_at is None]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", help=f"of {', '.join(ARMS)}; default: {KVMESH}; with --promise all of its own")
    parser.add_argument("--promise", action="store_true", help="the part with a promised inter-token time, by itself")
    parser.add_argument("--loads", help="times the capacity, as 0.5,3; default: what each arm usually gets")
    parser.add_argument("--seeds", type=int, default=1, help="different loads, one after the other (default: 1)")
    parser.add_argument("--quick", action="store_true", help="few and short runs")
    parser.add_argument("--no-fall", dest="fall", action="store_false", help="without the load that falls")
    parser.add_argument("--try", dest="tries", action="append", default=[], metavar="NAME=JSON", help="a policy")
    return parser.parse_args()


if __name__ == "__main__":
    main()

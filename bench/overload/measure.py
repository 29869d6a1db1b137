"""Plays the loads of one arm against fresh pods and a fresh router, one after the other."""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec

from bench.cpu_time import process_cpu_ms
from bench.overload.arms import OverloadArm
from bench.overload.load import HEAD_START_SECONDS
from bench.overload.plan import Plan
from bench.overload.script import Job, Outcome, Request
from bench.overload.summary import RunSummary, summarise
from bench.overload.workloads import falling_load, load_beside_bad_pod, steady_load
from bench.routing import pod_counters
from bench.routing.measure import TICKS_PER_SECOND, Say, machine_cores, machine_idle_ticks, turn_bad
from bench.routing.script import POD_MISSING, TURN_SECONDS, BadPod, Way
from bench.routing.stack import MODEL, Stack, running_arm
from bench.routing.subject import HERE, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all runs share."""

    plan: Plan
    subject: Subject
    words: Sequence[str]
    directory: Path
    say: Say


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One load on one arm."""

    name: str  # steady, falling, or that of a bad pod
    load: float
    requests: tuple[Request, ...]
    measured_from: float
    ends: float
    falls_at: float | None = None
    missing_pods: int = 0  # of the plan's
    bad_pod: BadPod | None = None


def scenarios(plan: Plan, arm: OverloadArm, *, words: Sequence[str]) -> list[Scenario]:
    """What the arm is measured with, lowest load first."""
    found = [
        Scenario(
            name="steady",
            load=load,
            requests=steady_load(plan, load, words=words),
            measured_from=plan.warm_seconds,
            ends=plan.seconds_at(load),
        )
        for load in arm.loads
    ]
    if arm.falls:
        found.append(
            Scenario(
                name="falling",
                load=plan.fall_high,
                requests=falling_load(plan, words=words),
                measured_from=0.0,
                ends=plan.fall_seconds,
                falls_at=plan.fall_after_seconds,
            )
        )
    return found


def bad_pod_scenarios(plan: Plan, *, words: Sequence[str]) -> Iterator[Scenario]:
    """The same requests without one of the pods, and with that pod turning bad in each way; on real pods only."""
    alone = Scenario(
        name=POD_MISSING,
        load=plan.bad_pod_load,
        requests=load_beside_bad_pod(plan, words=words),
        measured_from=plan.bad_pod_at_seconds + TURN_SECONDS,
        ends=plan.bad_pod_seconds,
        missing_pods=1,
    )
    yield alone
    for way in Way:
        bad = BadPod(pod=1, at=plan.bad_pod_at_seconds, way=way)
        yield replace(alone, name=way.value, missing_pods=0, bad_pod=bad)


async def measure_arm(bench: Bench, arm: OverloadArm) -> list[RunSummary]:
    """Every scenario on the same pods on one stack; the pods are idle and empty between two."""
    name, pods = arm.arm.name, bench.plan.pods
    stacks: dict[tuple[int, BadPod | None], list[Scenario]] = {}
    found = scenarios(bench.plan, arm, words=bench.words)
    if arm.meets_bad_pod:
        found += bad_pod_scenarios(bench.plan, words=bench.words)
    for scenario in found:
        stacks.setdefault((scenario.missing_pods, scenario.bad_pod), []).append(scenario)
    summaries: list[RunSummary] = []
    for (missing, _), played in stacks.items():
        settings = replace(pods, pods=pods.pods - missing)
        directory = bench.directory / f"{name}-{played[0].name}".replace(":", "-")
        directory.mkdir()
        async with (
            running_arm(arm.arm, subject=bench.subject, settings=settings, routers=1, directory=directory) as stack,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
        ):
            for scenario in played:
                bench.say(f"{name}: {scenario.name} {scenario.load:g}x, {len(scenario.requests)} requests")
                await pod_counters.empty_caches(http, stack.pods)
                summaries.append(await _run(bench, name, scenario, stack=stack, http=http, directory=directory))
    return summaries


async def _run(
    bench: Bench, name: str, scenario: Scenario, *, stack: Stack, http: aiohttp.ClientSession, directory: Path
) -> RunSummary:
    cpu, ticks, clock = _cpu_ms(stack), machine_idle_ticks(), time.monotonic()
    outcomes = await _play(bench, scenario, stack=stack, http=http, directory=directory)
    idle_seconds, seconds = (machine_idle_ticks() - ticks) / TICKS_PER_SECOND, time.monotonic() - clock
    spent = {key: value - cpu.get(key, 0.0) for key, value in _cpu_ms(stack).items()}
    return summarise(
        outcomes,
        arm=name,
        scenario=scenario.name,
        load=scenario.load,
        classes=bench.plan.classes,
        measured_from=scenario.measured_from,
        ends=scenario.ends,
        falls_at=scenario.falls_at,
        busy_cores=max(0.0, machine_cores() - idle_seconds / seconds),
        cpu_ms={key: round(value / max(1, len(outcomes)), 3) for key, value in spent.items()},
    )


async def _play(
    bench: Bench, scenario: Scenario, *, stack: Stack, http: aiohttp.ClientSession, directory: Path
) -> list[Outcome]:
    """Run the clients in their own process, and meanwhile turn a pod bad."""
    plan, (gateway,) = bench.plan, stack.gateways
    stem = f"{scenario.name}-{scenario.load:g}"
    job = Job(
        host=gateway.host,
        port=gateway.port,
        model=MODEL,
        requests=scenario.requests,
        patience_seconds=plan.patience_seconds,
        most_attempts=plan.most_attempts,
    )
    job_file, outcomes_file = directory / f"{stem}-job.json", directory / f"{stem}.json"
    job_file.write_bytes(msgspec.json.encode(job))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.overload.load", str(job_file), str(outcomes_file)),
        stdout=asyncio.subprocess.PIPE,
        cwd=HERE,
        start_new_session=True,  # Ctrl-C reaches the bench alone, which then ends it
    )
    assert process.stdout is not None
    try:
        async with asyncio.TaskGroup() as tasks:
            await process.stdout.readline()
            if scenario.bad_pod is not None:
                turn = turn_bad(scenario.bad_pod, stack=stack, http=http, head_start=HEAD_START_SECONDS)
                tasks.create_task(turn, name="turn bad")
            if await process.wait():
                raise SystemExit("the load generator failed; its message is above")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        job_file.unlink()
    return msgspec.json.decode(outcomes_file.read_bytes(), type=list[Outcome])


def _cpu_ms(stack: Stack) -> dict[str, float]:
    """What each process has used since its start."""
    return {name: process_cpu_ms(pid) for name, pid in stack.children.pids.items()}

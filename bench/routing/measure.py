"""Runs one workload against a running arm: clients, faults, counters; and all workloads of an arm in turn."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from bench.cpu_time import process_cpu_ms
from bench.routing import pod_counters
from bench.routing.arms import Arm, Kind
from bench.routing.one_cache import one_cache
from bench.routing.plan import Plan, PodSettings
from bench.routing.pod_counters import PodCounts
from bench.routing.script import BadPod, Job, PodRestart, Workload
from bench.routing.stack import MODEL, Stack, running_arm
from bench.routing.subject import HERE, Subject
from bench.routing.summary import RunSummary, summarise
from bench.routing.turning_pod import TURN_PATH
from operate.load.clients import HEAD_START_SECONDS
from operate.load.script import Record
from podsim.model_folder import ModelFolder

Say = Callable[[str], None]
CLIENT_SECONDS = 120.0
TICKS_PER_SECOND = 100  # sysconf(_SC_CLK_TCK) on every Linux of today


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What all runs share."""

    plan: Plan
    subject: Subject
    folder: ModelFolder
    directory: Path
    say: Say


async def measure_arm(bench: Bench, arm: Arm, workloads: Sequence[Workload]) -> list[RunSummary]:
    """Every workload on fresh pods and a fresh router, or on emptied ones where only the workload changes."""
    summaries: list[RunSummary] = []
    stacks: dict[tuple[int, PodSettings, BadPod | None], list[Workload]] = {}
    for workload in workloads:
        routers = 1 if arm.kind is Kind.PLAIN else workload.routers  # one Envoy is all that a plain arm has
        key = (routers, bench.plan.pods_of(workload.name), workload.bad_pod)
        stacks.setdefault(key, []).append(workload)
    for (routers, settings, _), played in stacks.items():
        directory = bench.directory / f"{arm.name}-{played[0].name}".replace(":", "-")
        directory.mkdir()
        async with (
            running_arm(arm, subject=bench.subject, settings=settings, routers=routers, directory=directory) as stack,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
        ):
            for workload in played:
                bench.say(f"{arm.name}: {workload.title}")
                await pod_counters.empty_caches(http, stack.pods)
                summaries.append(await _run(bench, arm, workload, stack=stack, http=http, directory=directory))
    return summaries


async def _run(
    bench: Bench, arm: Arm, workload: Workload, *, stack: Stack, http: aiohttp.ClientSession, directory: Path
) -> RunSummary:
    counters = _Counters(http=http, stack=stack, before=await pod_counters.read(http, stack.pods), lost={})
    cpu, ticks, clock = _cpu_ms(stack), machine_idle_ticks(), time.monotonic()
    records = await _play(bench, workload, stack=stack, directory=directory, counters=counters)
    seconds = time.monotonic() - clock
    idle_seconds = (machine_idle_ticks() - ticks) / TICKS_PER_SECOND
    spent = {key: value - cpu.get(key, 0.0) for key, value in _cpu_ms(stack).items()}
    (directory / f"{workload.name}.json").write_bytes(msgspec.json.encode(records))
    return summarise(
        arm=arm.name,
        workload=workload.name,
        records=records,
        measured_from=workload.measured_from,
        ttft_limit_ms=bench.plan.ttft_limit_ms,
        one_cache=one_cache(workload.sessions, records, folder=bench.folder, measured_from=workload.measured_from),
        pods=await counters.read(),
        busy_cores=max(0.0, machine_cores() - idle_seconds / seconds),
        cpu_ms={name: value for (name, _), value in spent.items()},
    )


async def _play(
    bench: Bench, workload: Workload, *, stack: Stack, directory: Path, counters: "_Counters"
) -> list[Record]:
    """The clients in a process of their own, and the faults beside them."""
    job_file, records_file = directory / "job.json", directory / "records.json"
    job = Job(
        gateways=tuple((gateway.host, gateway.port) for gateway in stack.gateways),
        model=MODEL,
        sessions=workload.sessions,
        request_seconds=bench.plan.request_seconds,
    )
    job_file.write_bytes(msgspec.json.encode(job))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.routing.load", str(job_file), str(records_file)),
        stdout=asyncio.subprocess.PIPE,
        cwd=HERE,
        start_new_session=True,  # Ctrl-C reaches the bench alone, which then ends it
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(CLIENT_SECONDS), asyncio.TaskGroup() as tasks:
            await process.stdout.readline()
            for restart in workload.restarts:
                tasks.create_task(_restart(restart, stack=stack, counters=counters), name=f"restart {restart.pod}")
            if workload.bad_pod is not None:
                turn = turn_bad(workload.bad_pod, stack=stack, http=counters.http, head_start=HEAD_START_SECONDS)
                tasks.create_task(turn, name="turn bad")
            if await process.wait():
                raise SystemExit("the load generator failed; its message is above")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return msgspec.json.decode(records_file.read_bytes(), type=list[Record])


@dataclass(slots=True, kw_only=True)
class _Counters:
    """The pods' counters since the run began; those of a killed pod are read before its end."""

    http: aiohttp.ClientSession
    stack: Stack
    before: list[PodCounts]
    lost: dict[int, PodCounts]

    async def keep(self, pod: int) -> None:
        (now,) = await pod_counters.read(self.http, [self.stack.pods[pod]])
        self.lost[pod], self.before[pod] = now.since(self.before[pod]), PodCounts()

    async def read(self) -> list[PodCounts]:
        counts = await pod_counters.read(self.http, self.stack.pods)
        since = [now.since(before) for now, before in zip(counts, self.before, strict=True)]
        return [count.plus(self.lost.get(pod, PodCounts())) for pod, count in enumerate(since)]


async def _restart(restart: PodRestart, *, stack: Stack, counters: _Counters) -> None:
    await asyncio.sleep(restart.at)
    await counters.keep(restart.pod)
    await stack.restart_pod(restart.pod, after_seconds=restart.back_after)


async def turn_bad(bad: BadPod, *, stack: Stack, http: aiohttp.ClientSession, head_start: float) -> None:
    """Let a pod turn bad in time; `head_start`: seconds until the clients' clock is at 0."""
    await asyncio.sleep(head_start + bad.at)
    async with http.post(f"http://{stack.pods[bad.pod]}{TURN_PATH}", params={"way": bad.way.value}) as response:
        response.raise_for_status()


def _cpu_ms(stack: Stack) -> dict[tuple[str, int], float]:
    """What each process has used since its start; a restarted pod is another process."""
    return {(name, pid): process_cpu_ms(pid) for name, pid in stack.children.pids.items()}


def machine_idle_ticks() -> int:
    """Ticks in which a core of this machine had nothing to do (proc(5), `/proc/stat`)."""
    first_line = Path("/proc/stat").read_text().split("\n", 1)[0]
    return sum(int(field) for field in first_line.split()[4:6])  # idle, iowait


def machine_cores() -> int:
    """All cores of the machine."""
    return sum(line.startswith("cpu") and line[3].isdigit() for line in Path("/proc/stat").read_text().splitlines())

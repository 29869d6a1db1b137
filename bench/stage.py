"""Sets the stage for the measurement: a stack, a bare picker, the bench's own Envoy, a load generator; and runs it.

Called by `run`. Every wait has a limit, and whatever was started is ended, also after an error or Ctrl-C.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.bench_envoy import EnvoyAddresses, envoy_process
from bench.load import LoadProcess
from bench.plan import SEED, SIMULATOR, Plan
from bench.prompts import PromptSet, chat_body, count_tokens, make_prompt_set, vocabulary_words
from bench.report import Case, Measurement
from bench.rounds import CHAT_PATH, BodySource, RoundRunner
from bench.running_stack import HOST, running_stack
from operate.local.envoy_config import SocketAddress
from operate.local.ports import pick_free_port
from operate.local.processes import GrpcReady, ProcessSpec, Supervisor
from operate.local.service import simulated_tokenizer

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Everything that one measurement talks to."""

    plan: Plan
    directory: Path
    model: str
    admin_url: str
    pod: str  # any of them, to count tokens
    gateway: SocketAddress  # the route with the picker
    session: aiohttp.ClientSession
    runner: RoundRunner
    say: Say


async def measure(plan: Plan, *, say: Say) -> Measurement:
    """Start everything, measure every case, end everything. Raise SystemExit with a line that says what failed."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as name:
        directory = Path(name)
        try:
            async with (
                asyncio.timeout(plan.limit_seconds),
                running_stack(directory=directory, pods=plan.pods, simulator=SIMULATOR) as facts,
            ):
                return await _beside(facts, plan, directory=directory, say=say)
        except TimeoutError:
            raise SystemExit(f"the measurement was not done within {plan.limit_seconds:g} s") from None


async def _beside(facts: dict[str, Any], plan: Plan, *, directory: Path, say: Say) -> Measurement:
    """Run the measurement beside the stack that `facts` describes."""
    taken: list[int] = []
    for _ in range(5):
        taken.append(pick_free_port(host=HOST, avoid=taken))
    bare_picker, *listening = (SocketAddress(host=HOST, port=port) for port in taken)
    addresses = EnvoyAddresses(picker=listening[0], bare=listening[1], direct=listening[2], admin=listening[3])
    envoy = envoy_process(
        addresses=addresses,
        picker=SocketAddress.parse(facts["extproc"]),
        bare_picker=bare_picker,
        pods=[SocketAddress.parse(pod) for pod in facts["endpoints"]],
        directory=directory,
    )
    supervisor = Supervisor(log_directory=directory)
    done: list[Measurement] = []

    async def when_ready() -> None:
        routes = {"picker": addresses.picker, "bare": addresses.bare, "direct": addresses.direct}
        # this Envoy in place of the stack's idle one
        pids = {**facts["pids"], **supervisor.pids}

        async def with_load(load: LoadProcess) -> None:
            async with aiohttp.ClientSession() as session:
                stage = Stage(
                    plan=plan,
                    directory=directory,
                    model=facts["model"],
                    admin_url=facts["admin"],
                    pod=facts["endpoints"][0],
                    gateway=addresses.picker,
                    session=session,
                    runner=RoundRunner(plan=plan, routes=routes, pids=pids, load=load),
                    say=say,
                )
                done.append(await _all_cases(stage))

        await _with_load_process(with_load)

    children = [[_bare_process(bare_picker, facts["endpoints"])], [envoy]]
    await supervisor.run(children, environment=os.environ, when_ready=when_ready)
    return done[0]


async def _with_load_process(use: Callable[[LoadProcess], Awaitable[None]]) -> None:
    load = await LoadProcess.start()
    try:
        await use(load)
    finally:
        await load.end()


def _bare_process(address: SocketAddress, pods: list[str]) -> ProcessSpec:
    flags = ("--host", address.host, "--port", str(address.port), "--pods", ",".join(pods))
    return ProcessSpec(
        name="bare",
        argv=(sys.executable, "-m", "bench.bare_picker", *flags),
        ready=(GrpcReady(address=str(address)),),
    )


async def _all_cases(stage: Stage) -> Measurement:
    """Idle CPU first, then every size at every concurrency."""
    plan, runner = stage.plan, stage.runner
    for _ in range(5):
        runner.calibrate()
    stage.say(f"idle for {plan.idle_seconds:g} s")
    idle = await runner.idle(plan.idle_seconds)
    words = vocabulary_words(simulated_tokenizer())
    cases = []
    for size in plan.sizes_tokens:
        prompts = make_prompt_set(size, model=stage.model, words=words, prefix_count=plan.prefixes, seed=SEED)
        bodies = BodySource(prompts=prompts, words=words, file=stage.directory / "bodies.jsonl")
        counted = await _counted_tokens(stage, bodies)
        await _warm(stage, prompts)
        await runner.warm_up(bodies)
        for concurrency, count in plan.requests:
            stage.say(f"{size} tokens, concurrency {concurrency}: {plan.rounds} rounds of {count} requests a route")
            rounds = await runner.rounds(bodies, count=count, concurrency=concurrency)
            cases.append(Case(size_tokens=size, counted_tokens=counted, concurrency=concurrency, rounds=rounds))
    for _ in range(5):
        runner.calibrate()
    return Measurement(cases=cases, idle_ms_per_second=idle, loop_ns=runner.loop_ns)


async def _counted_tokens(stage: Stage, bodies: BodySource) -> float:
    """The mean count of tokens of a sample; numbers from the far end, so that none is sent twice."""
    sample = [bodies.prompts.body(-1 - i, words=bodies.words, seed=SEED) for i in range(8)]
    counts = [await count_tokens(stage.session, stage.pod, body) for body in sample]
    return sum(counts) / len(counts)


async def _warm(stage: Stage, prompts: PromptSet) -> None:
    """Send every prefix once and wait until the picker finds it again."""
    for prefix in prompts.prefixes:
        body = chat_body(prompts.model, prefix, "warm")
        async with stage.session.post(
            f"http://{stage.gateway}{CHAT_PATH}", data=body, headers={"content-type": "application/json"}
        ) as response:
            response.raise_for_status()
        await _until_indexed(stage, body)


async def _until_indexed(stage: Stage, body: bytes) -> None:
    """Wait until the picker expects most of the prompt in a cache; `/v1/explain` sends and books nothing."""
    matched = total = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            while True:
                async with stage.session.post(
                    f"{stage.admin_url}/v1/explain", data=body, params={"path": CHAT_PATH}
                ) as response:
                    answer = await response.json()
                matched, total = answer["matched_tokens"], answer["prompt_tokens"]
                if matched >= 0.8 * total:
                    return
                await asyncio.sleep(0.02)
    raise SystemExit(f"the prefix index found {matched} of {total} warmed tokens after 20 s: nothing to measure")

"""What watching costs: `python -m bench.watched [--quick] [--audit-share 0.1] [--out FILE]`, part of `make bench`.

Two whole stacks of `kvmesh up`, alike but for their pickers: nobody looks at the first one and it writes nothing; the
second one writes an audit trail of a share of its decisions, and its /metrics are fetched as Prometheus would. They get
the same requests in turn. The counters themselves cannot be switched off and are in both (docs/reference/metrics.md).
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from bench.load import LoadProcess
from bench.machine import machine, revision, versions
from bench.plan import QUICK, SEED, SIMULATOR, Plan
from bench.prompts import chat_body, make_prompt_set, vocabulary_words
from bench.report import Case, cpu_ms_per_request, spread
from bench.rounds import CHAT_PATH, BodySource, RoundRunner
from bench.running_stack import running_stack
from operate.local.envoy_config import SocketAddress
from operate.local.service import simulated_tokenizer

RESULTS = Path(__file__).parent / "results"
SIZE_TOKENS = 2000
SCRAPE_SECONDS = 5.0  # Prometheus' usual intervals are longer
MOST_ABOVE = 0.10  # of the picker's CPU a request
FULL = Plan(sizes_tokens=(SIZE_TOKENS,), rounds=15)
OFF, ON = "off", "on"


def main() -> None:
    """Parse the flags, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds, for a first look")
    parser.add_argument("--audit-share", type=float, default=0.1, help="of the decisions (default: 0.1)")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-watched.json")
    arguments = parser.parse_args()
    began = datetime.now(UTC)
    plan = replace(QUICK, sizes_tokens=(SIZE_TOKENS,)) if arguments.quick else FULL
    try:
        cases = asyncio.run(_measured(plan, audit_share=arguments.audit_share))
    except KeyboardInterrupt:
        sys.exit("interrupted: everything that was started has ended, nothing is written")
    out = arguments.out or RESULTS / f"{began:%Y-%m-%d}-watched.json"
    result = {
        "date": began.isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "kvmesh": revision(RESULTS.parent),
        "audit_share": arguments.audit_share,
        "scrape_seconds": SCRAPE_SECONDS,
        "prompt_tokens": SIZE_TOKENS,
        "cases": cases,
    }
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\nWatched: /metrics every {SCRAPE_SECONDS:g} s, {arguments.audit_share:.0%} of the decisions audited;")
    print(f"picker CPU, ms a request of {SIZE_TOKENS} tokens above idle: median of the rounds (least..greatest)")
    for case in cases:
        off, on, above = case["off_cpu_ms"], case["on_cpu_ms"], case["above"]
        verdict = "MET   " if above["median"] <= MOST_ABOVE else "MISSED"
        print(
            f"{verdict} {case['concurrency']:>2} at once: off {_text(off)}, on {_text(on)}; on above off "
            f"{above['median']:+.1%} ({above['min']:+.1%}..{above['max']:+.1%}), at most {MOST_ABOVE:+.0%}"
        )
    print(f"written to {out}")


def _text(value: dict[str, float]) -> str:
    return f"{value['median']:.2f} ({value['min']:.2f}..{value['max']:.2f})"


async def _measured(plan: Plan, *, audit_share: float) -> list[dict[str, Any]]:
    """Start both stacks, measure every concurrency, end everything."""
    with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as name:
        directory = Path(name)
        for each in (OFF, ON):
            (directory / each).mkdir()
        policy = directory / "policy.yaml"
        policy.write_text(json.dumps({"observability": {"auditShare": audit_share}}))
        watched = {
            **SIMULATOR,
            "access_log": str(directory / "audit.jsonl"),
            "audit": True,
            "policy": str(policy),
        }
        async with (
            asyncio.timeout(plan.limit_seconds),
            running_stack(directory=directory / OFF, pods=plan.pods, simulator=SIMULATOR) as off,
            running_stack(directory=directory / ON, pods=plan.pods, simulator=watched) as on,
            aiohttp.ClientSession() as session,
            _scraped(session, on["admin"]),
        ):
            load = await LoadProcess.start()
            try:
                cases = await _cases(plan, {OFF: off, ON: on}, load=load, session=session, directory=directory)
            finally:
                await load.end()
        if not (directory / "audit.jsonl").stat().st_size:
            raise SystemExit("no decision was audited: nothing was measured")
        return cases


@asynccontextmanager
async def _scraped(session: aiohttp.ClientSession, admin_url: str) -> AsyncIterator[None]:
    async def scrape() -> None:
        while True:
            async with session.get(f"{admin_url}/metrics") as page:
                page.raise_for_status()
                await page.read()
            await asyncio.sleep(SCRAPE_SECONDS)

    async with asyncio.TaskGroup() as tasks:
        scraping = tasks.create_task(scrape(), name="scrape")
        yield
        scraping.cancel()


async def _cases(
    plan: Plan,
    stacks: dict[str, dict[str, Any]],
    *,
    load: LoadProcess,
    session: aiohttp.ClientSession,
    directory: Path,
) -> list[dict[str, Any]]:
    runner = RoundRunner(
        plan=plan,
        routes={name: SocketAddress.parse(facts["gateway"].removeprefix("http://")) for name, facts in stacks.items()},
        pids={name: facts["pids"]["extproc"] for name, facts in stacks.items()},
        load=load,
    )
    idle = await runner.idle(plan.idle_seconds)
    words = vocabulary_words(simulated_tokenizer())
    prompts = make_prompt_set(
        SIZE_TOKENS, model=stacks[OFF]["model"], words=words, prefix_count=plan.prefixes, seed=SEED
    )
    bodies = BodySource(prompts=prompts, words=words, file=directory / "bodies.jsonl")
    for facts in stacks.values():
        for prefix in prompts.prefixes:
            await _sent(session, facts["gateway"], chat_body(prompts.model, prefix, "warm"))
    await runner.warm_up(bodies)
    found = []
    for concurrency, count in plan.requests:
        rounds = await runner.rounds(bodies, count=count, concurrency=concurrency)
        case = Case(size_tokens=SIZE_TOKENS, counted_tokens=0.0, concurrency=concurrency, rounds=rounds)
        found.append(_facts(case, idle_ms_per_second=idle))
    return found


async def _sent(session: aiohttp.ClientSession, gateway_url: str, body: bytes) -> None:
    async with session.post(
        f"{gateway_url}{CHAT_PATH}", data=body, headers={"content-type": "application/json"}
    ) as response:
        response.raise_for_status()


def _facts(case: Case, *, idle_ms_per_second: dict[str, float]) -> dict[str, Any]:
    """Both pickers' CPU a request, and how much more the watched one takes, round by round."""

    def spent(name: str) -> Sequence[float]:
        return [cpu_ms_per_request(one.turns[name], name, idle_ms_per_second=idle_ms_per_second) for one in case.rounds]

    off, on = spent(OFF), spent(ON)
    return {
        "concurrency": case.concurrency,
        "rounds": len(case.rounds),
        "loop_ns": round(statistics.median(one.loop_ns_per_iteration for one in case.rounds), 1),
        "off_cpu_ms": spread(off),
        "on_cpu_ms": spread(on),
        "above": spread([each / other - 1.0 for each, other in zip(on, off, strict=True)]),
    }


if __name__ == "__main__":
    main()

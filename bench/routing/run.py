"""Which routing is best: `python -m bench.routing.run [--arms A,B] [--workloads W] [--quick] [--out FILE]`.

Plays the same workloads against simulated pods behind Envoy's own balancing, behind kvmesh, and behind other routers
where they are installed. Prints a table for each workload and writes JSON, which
docs/evidence/routing-benchmark.md explains.
"""

import argparse
import asyncio
import os
import shlex
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench.prompts import vocabulary_words
from bench.routing.arms import ARMS, STANDARD, Arm, Kind, picker_arm
from bench.routing.measure import Bench, Say, measure_arm
from bench.routing.plan import QUICK
from bench.routing.plan import STANDARD as STANDARD_PLAN
from bench.routing.result_file import run_to_end, write_result
from bench.routing.script import Workload
from bench.routing.subject import HERE, Subject
from bench.routing.summary import RunSummary, verdicts
from bench.routing.tables import WIDTH, tables
from bench.routing.workloads import WORKLOADS, build
from podsim.model_folder import TINY_MODEL, load_model_folder


def main() -> None:
    """Parse the flags, measure, write, print."""
    options = _options()
    began = datetime.now(UTC)
    plan = QUICK if options.quick else STANDARD_PLAN
    subject = Subject(checkout=options.kvmesh.resolve())
    console = Console(stderr=True)
    arms = _arms(options, subject, say=lambda line: console.print(line, style="yellow", highlight=False))
    words = vocabulary_words(TINY_MODEL)
    workloads = [build(name, plan, words=words) for name in options.workloads.split(",")]
    with tempfile.TemporaryDirectory(prefix="kvmesh-routing-") as name:
        bench = Bench(
            plan=plan,
            subject=subject,
            folder=load_model_folder(TINY_MODEL),
            directory=options.keep or Path(name),
            say=lambda line: console.print(f"{line} ...", highlight=False),
        )
        bench.directory.mkdir(parents=True, exist_ok=True)
        load_before = os.getloadavg()[0]
        runs = run_to_end(_all_arms(bench, arms, workloads), limit_seconds=plan.limit_seconds)
    titles = {workload.name: workload.title for workload in workloads}
    judged = [verdict for arm in arms if arm.kind is Kind.PICKER for verdict in verdicts(runs, arm=arm.name)]
    found = {
        "plan": asdict(plan),
        "arms": {arm.name: {"says": arm.says, "flags": arm.picker_flags, "policy": arm.policy} for arm in arms},
        "workloads": titles,
        "runs": runs,
        "verdicts": judged,
    }
    written = write_result(
        found, out=options.out, name=options.name, began=began, load_before=load_before, subject=subject
    )
    console = Console(width=WIDTH)
    console.print(tables(runs, titles, judged, limit_ms=plan.ttft_limit_ms), highlight=False)
    console.print(written, highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(STANDARD), help=f"of {', '.join(ARMS)}; default: %(default)s")
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=FLAGS",
        help="one more arm: kvmesh extproc with these flags, as --arm 'mine=--policy mine.yaml'",
    )
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="default: %(default)s")
    parser.add_argument("--kvmesh", type=Path, default=HERE, help="checkout to measure; default: this one")
    parser.add_argument("--quick", action="store_true", help="short runs, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-<name>.json")
    parser.add_argument("--name", default="routing", help="part of the default file name (default: routing)")
    parser.add_argument("--keep", type=Path, help="new folder for logs and the records of every request")
    options = parser.parse_args()
    unknown = [
        *(name for name in options.arms.split(",") if name not in ARMS),
        *(name for name in options.workloads.split(",") if name not in WORKLOADS),
    ]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    return options


def _arms(options: argparse.Namespace, subject: Subject, *, say: Say) -> list[Arm]:
    """The arms that can run here; the others are told."""
    arms = [ARMS[name] for name in options.arms.split(",") if name]
    for text in options.arm:
        name, _, flags = text.partition("=")
        arms.append(picker_arm(name, *shlex.split(flags)))
    runnable = []
    for arm in arms:
        if arm.peer is not None and not arm.peer.installed:
            say(f"{arm.name} is left out: not installed (python -m bench.routing.peers)")
        elif arm.name in ARMS and arm.picker_flags and not subject.understands(arm.picker_flags[0]):
            say(f"{arm.name} is left out: this kvmesh has no {arm.picker_flags[0]}")
        else:
            runnable.append(arm)
    return runnable


async def _all_arms(bench: Bench, arms: Sequence[Arm], workloads: Sequence[Workload]) -> list[RunSummary]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # as Ctrl-C: end the children first
    runs: list[RunSummary] = []
    async with asyncio.timeout(bench.plan.limit_seconds):
        for arm in arms:
            runs += await measure_arm(bench, arm, workloads)
    return runs


if __name__ == "__main__":
    main()

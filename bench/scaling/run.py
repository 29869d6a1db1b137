"""Whether pods come in time: `python -m bench.scaling.run [--loads L] [--quick] [--out FILE]`.

Plays loads that step and that have the shape of a day against pods that take 90 s to start. They are followed by
kvmesh's signal, by Kubernetes' autoscaler on cache use and on queue length, and by who knows what will come; in virtual
time. Prints a table and writes JSON, which docs/evidence/scaling.md explains.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench.routing.result_file import write_result
from bench.routing.subject import Subject
from bench.scaling.arms import ORACLE, SETTINGS, made
from bench.scaling.loads import requests
from bench.scaling.plan import MIXES, QUICK, SHAPES, STANDARD, Plan
from bench.scaling.world import World

TARGET = 0.95  # of the requests that are to be within both promises
WIDTH = 120


class Job(NamedTuple):
    """One run."""

    mix: str
    shape: str
    arm: str
    setting: float
    plan: Plan


class Run(NamedTuple):
    """What came of it."""

    mix: str
    shape: str
    arm: str
    setting: float
    requests: int
    attainment: float  # share of the requests within both promises
    ttft_attainment: float
    inter_token_attainment: float
    pod_hours: float
    most_pods: int
    changes: int  # of the wanted number


class Row(NamedTuple):
    """An arm's best run, beside the oracle's."""

    run: Run
    of_oracle: float  # its pod hours over those of the cheapest oracle that reaches the target
    of_equal_oracle: (
        float | None
    )  # over those of an oracle that keeps as many promises; None: none of them keeps so few


def main() -> None:
    """Parse the flags, play, write, print."""
    options = _options()
    began, load_before = datetime.now(UTC), os.getloadavg()[0]
    plan = QUICK if options.quick else STANDARD
    loads = [load.split("/") for load in options.loads.split(",")]
    jobs = [
        Job(mix, shape, arm, setting, plan)
        for mix, shape in loads
        for arm, settings in SETTINGS.items()
        for setting in settings
    ]
    with ProcessPoolExecutor(max_workers=options.processes) as processes:
        runs = list(processes.map(play, jobs))
    rows = [row for key in dict.fromkeys((run.mix, run.shape) for run in runs) for row in rows_of(runs, *key)]
    result = {
        "plan": asdict(plan),
        "mixes": {mix: asdict(MIXES[mix]) for mix, _ in loads},
        "settings": SETTINGS,
        "runs": [run._asdict() for run in runs],
        "rows": [
            {**row.run._asdict(), "of_oracle": row.of_oracle, "of_equal_oracle": row.of_equal_oracle} for row in rows
        ],
    }
    written = write_result(
        result, out=options.out, name="scaling", began=began, load_before=load_before, subject=Subject()
    )
    console = Console(width=WIDTH)
    console.print(table(rows), highlight=False)
    console.print(written, highlight=False)


def play(job: Job) -> Run:
    """Play one run."""
    seconds = job.plan.seconds[job.shape]
    coming = list(requests(MIXES[job.mix], job.shape, job.plan, seed=1))
    arm = made(job.arm, job.setting, coming, plan=job.plan, seconds=seconds)
    outcome = World(plan=job.plan, arm=arm, seconds=seconds).run(coming)
    return Run(
        mix=job.mix,
        shape=job.shape,
        arm=job.arm,
        setting=job.setting,
        requests=outcome.requests,
        attainment=round(outcome.kept / outcome.requests, 4),
        ttft_attainment=round(outcome.ttft_kept / outcome.requests, 4),
        inter_token_attainment=round(outcome.inter_token_kept / outcome.requests, 4),
        pod_hours=round(outcome.pod_seconds / 3600.0, 2),
        most_pods=outcome.most_pods,
        changes=outcome.changes,
    )


def rows_of(runs: Sequence[Run], mix: str, shape: str) -> list[Row]:
    """Return the best run of each arm: the cheapest that reaches the target, else that with most promises kept."""
    here = [run for run in runs if (run.mix, run.shape) == (mix, shape)]
    oracles = [run for run in here if run.arm == ORACLE]
    oracle = best(oracles)
    rows = []
    for arm in SETTINGS:
        run = best([each for each in here if each.arm == arm])
        equal = [each.pod_hours for each in oracles if each.attainment >= run.attainment]
        rows.append(
            Row(
                run=run,
                of_oracle=round(run.pod_hours / oracle.pod_hours, 3),
                of_equal_oracle=round(run.pod_hours / min(equal), 3) if equal else None,
            )
        )
    return rows


def best(runs: Sequence[Run]) -> Run:
    """Return the cheapest that reaches the target, else that with most promises kept."""
    reached = [run for run in runs if run.attainment >= TARGET]
    if reached:
        return min(reached, key=lambda run: run.pod_hours)
    return max(runs, key=lambda run: run.attainment)


def table(rows: Sequence[Row]) -> Table:
    """Return all rows for people."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("load", "arm"):
        shown.add_column(heading, vertical="bottom")
    for heading in (
        *("promises\nkept %", "TTFT\nkept %", "inter-token\nkept %", "pod\nhours", "of the\noracle"),
        *("of one that\nkeeps as many", "most\npods", "changes"),
    ):
        shown.add_column(heading, justify="right", vertical="bottom")
    for row in rows:
        run = row.run
        setting = f" {run.setting:g}" if run.setting else ""
        shown.add_row(
            f"{run.mix}, {run.shape}",
            run.arm + setting,
            *(f"{100 * share:.1f}" for share in (run.attainment, run.ttft_attainment, run.inter_token_attainment)),
            f"{run.pod_hours:.1f}",
            f"{row.of_oracle:.2f}",
            "" if row.of_equal_oracle is None else f"{row.of_equal_oracle:.2f}",
            f"{run.most_pods}",
            f"{run.changes}",
        )
    return shown


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [f"{mix}/{shape}" for shape in SHAPES for mix in MIXES]
    parser.add_argument("--loads", default=",".join(known), help="default: %(default)s")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a third of the day, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-scaling.json")
    options = parser.parse_args()
    if unknown := [each for each in options.loads.split(",") if each not in known]:
        parser.error(f"there is no {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    main()

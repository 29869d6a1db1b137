"""Whether pods come in time: `python -m bench.scaling.run [--loads L] [--quick] [--out FILE]`.

Plays loads that step and that have the shape of a day against pods that take 90 s to start. They are followed by
kvmesh's signal, by Kubernetes' autoscaler on cache use and on queue length, and by who knows what will come; in virtual
time. Prints a table and writes JSON, which docs/evidence/scaling.md explains.
"""

import argparse
import json
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from bench.routing.result_file import write_result
from bench.routing.subject import Subject
from bench.scaling.arms import KVMESH, ORACLE, SETTINGS, made
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
    seed: int


class Run(NamedTuple):
    """What came of it."""

    mix: str
    shape: str
    arm: str
    setting: float
    seed: int
    requests: int
    attainment: float  # share of the requests within both promises
    ttft_attainment: float
    inter_token_attainment: float
    pod_hours: float
    most_pods: int
    changes: int  # of the wanted number


class Row(NamedTuple):
    """An arm's best runs on all seeds, beside the oracle's: means, and from the least to the most."""

    mix: str
    shape: str
    arm: str
    settings: tuple[float, ...]  # of the best runs
    seeds: int
    attainment: float
    attainment_range: tuple[float, float]
    ttft_attainment: float
    inter_token_attainment: float
    pod_hours: float
    of_oracle: float  # pod hours over those of the cheapest oracle that reaches the target
    of_oracle_range: tuple[float, float]
    of_equal_oracle: float | None  # over those of one that keeps as many; None: on some seed none does
    most_pods: int
    changes: float


def main() -> None:
    """Parse the flags, play, write, print."""
    options = _options()
    began, load_before = datetime.now(UTC), os.getloadavg()[0]
    plan = QUICK if options.quick else STANDARD
    loads = [load.split("/") for load in options.loads.split(",")]
    jobs = [
        [Job(mix, shape, arm, setting, plan, seed) for setting in SETTINGS[arm]]
        for mix, shape in loads
        for seed in options.seeds
        for arm in options.arms
    ]
    with ProcessPoolExecutor(max_workers=options.processes) as processes:
        played = [run for runs in processes.map(play_arm, jobs) for run in runs]
    runs = [*_recorded(options.add_to), *played]
    rows = [row for key in dict.fromkeys((run.mix, run.shape) for run in runs) for row in rows_of(runs, *key)]
    result = {
        "plan": asdict(plan),
        "mixes": {run.mix: asdict(MIXES[run.mix]) for run in runs},
        "settings": SETTINGS,
        "runs": [run._asdict() for run in runs],
        "rows": [row._asdict() for row in rows],
    }
    written = write_result(
        result, out=options.out, name="scaling", began=began, load_before=load_before, subject=Subject()
    )
    console = Console(width=WIDTH)
    console.print(table(rows), highlight=False)
    console.print(written, highlight=False)


def play_arm(jobs: Sequence[Job]) -> list[Run]:
    """Play an arm with its settings; who knows all is given fewer and fewer pods until the promises break."""
    runs: list[Run] = []
    for job in jobs:
        runs.append(play(job))
        if job.arm == ORACLE and runs[-1].attainment < TARGET:
            break
    return runs


def play(job: Job) -> Run:
    """Play one run."""
    seconds = job.plan.seconds[job.shape]
    mix = MIXES[job.mix]
    plan = job.plan if mix.ttft_seconds is None else replace(job.plan, ttft_seconds=mix.ttft_seconds)
    coming = list(requests(mix, job.shape, plan, seed=job.seed))
    arm = made(job.arm, job.setting, coming, plan=plan, seconds=seconds)
    outcome = World(plan=plan, arm=arm, seconds=seconds).run(coming)
    return Run(
        mix=job.mix,
        shape=job.shape,
        arm=job.arm,
        setting=job.setting,
        seed=job.seed,
        requests=outcome.requests,
        attainment=round(outcome.kept / outcome.requests, 4),
        ttft_attainment=round(outcome.ttft_kept / outcome.requests, 4),
        inter_token_attainment=round(outcome.inter_token_kept / outcome.requests, 4),
        pod_hours=round(outcome.pod_seconds / 3600.0, 2),
        most_pods=outcome.most_pods,
        changes=outcome.changes,
    )


def rows_of(runs: Sequence[Run], mix: str, shape: str) -> list[Row]:
    """Return each arm's best runs: of each seed the cheapest that reaches the target, else the one that keeps most."""
    here = [run for run in runs if (run.mix, run.shape) == (mix, shape)]
    return [row_of(here, arm) for arm in SETTINGS if any(run.arm == arm for run in here)]


def row_of(runs: Sequence[Run], arm: str) -> Row:
    """Return one arm's line of one load."""
    chosen, ratios, equal = [], [], []
    for seed in sorted({run.seed for run in runs if run.arm == arm}):
        oracles = [run for run in runs if (run.arm, run.seed) == (ORACLE, seed)]
        run = best([each for each in runs if (each.arm, each.seed) == (arm, seed)])
        chosen.append(run)
        ratios.append(run.pod_hours / best(oracles).pod_hours)
        as_many = [each.pod_hours for each in oracles if each.attainment >= run.attainment]
        equal.append(run.pod_hours / min(as_many) if as_many else None)
    kept = [run.attainment for run in chosen]
    known = [each for each in equal if each is not None]
    return Row(
        mix=chosen[0].mix,
        shape=chosen[0].shape,
        arm=arm,
        settings=tuple(sorted({run.setting for run in chosen})),
        seeds=len(chosen),
        attainment=round(fmean(kept), 4),
        attainment_range=(min(kept), max(kept)),
        ttft_attainment=round(fmean(run.ttft_attainment for run in chosen), 4),
        inter_token_attainment=round(fmean(run.inter_token_attainment for run in chosen), 4),
        pod_hours=round(fmean(run.pod_hours for run in chosen), 2),
        of_oracle=round(fmean(ratios), 3),
        of_oracle_range=(round(min(ratios), 3), round(max(ratios), 3)),
        of_equal_oracle=round(fmean(known), 3) if len(known) == len(equal) else None,
        most_pods=max(run.most_pods for run in chosen),
        changes=round(fmean(run.changes for run in chosen), 1),
    )


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
        settings = "" if row.arm == KVMESH else f" {', '.join(f'{each:g}' for each in row.settings)}"
        low, high = row.of_oracle_range
        shown.add_row(
            f"{row.mix}, {row.shape}",
            row.arm + settings,
            *(f"{100 * share:.1f}" for share in (row.attainment, row.ttft_attainment, row.inter_token_attainment)),
            f"{row.pod_hours:.1f}",
            f"{row.of_oracle:.2f}" + (f" ({low:.2f}-{high:.2f})" if row.seeds > 1 else ""),
            "" if row.of_equal_oracle is None else f"{row.of_equal_oracle:.2f}",
            f"{row.most_pods}",
            f"{row.changes:.0f}",
        )
    return shown


def _recorded(file: Path | None) -> list[Run]:
    return [] if file is None else [Run(**run) for run in json.loads(file.read_text(encoding="utf-8"))["runs"]]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [f"{mix}/{shape}" for shape in SHAPES for mix in MIXES]
    parser.add_argument("--loads", default=",".join(known), help="default: %(default)s")
    parser.add_argument("--seeds", default="4,5,6", help="default: %(default)s; constants were chosen on 1 to 3")
    parser.add_argument("--arms", default=",".join(SETTINGS), help="default: %(default)s")
    parser.add_argument("--add-to", type=Path, help="result file whose runs are taken over, as if they had been played")
    parser.add_argument("--processes", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="a third of the day, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-scaling.json")
    options = parser.parse_args()
    if unknown := [each for each in options.loads.split(",") if each not in known]:
        parser.error(f"there is no {', '.join(unknown)}")
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    options.arms = options.arms.split(",")
    if unknown := [each for each in options.arms if each not in SETTINGS]:
        parser.error(f"there is no {', '.join(unknown)}")
    if ORACLE not in options.arms and options.add_to is None:
        parser.error(f"--arms needs {ORACLE}, too: the others are compared with it")
    return options


if __name__ == "__main__":
    main()

"""Whether prefill pods pay: `python -m bench.disaggregation.run [--mixes M] [--quick] [--out FILE]`.

Plays three mixes of requests against pods that do both, and against the same number of prefill and decode pods, with
each rule of the picker; in virtual time, so that a run needs no quiet machine and can be repeated. Prints a table and
writes JSON, which docs/evidence/disaggregation.md explains.
"""

import argparse
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bench.disaggregation.loads import build_load
from bench.disaggregation.plan import ARMS, BOTH, FLEETS, MIXES, QUICK, STANDARD, Plan
from bench.disaggregation.play import play
from bench.disaggregation.summary import Comparison, RunSummary, comparisons, mean_of, summarise
from bench.routing.result_file import write_result
from bench.routing.subject import Subject
from extproc.policy.disaggregation import Disaggregation

WIDTH = 120


class Job(NamedTuple):
    """One run of one seed."""

    mix: str
    prefill_pods: int
    arm: str
    rule: Disaggregation
    seed: int
    plan: Plan


def main() -> None:
    """Parse the flags, play, write, print."""
    options = _options()
    began, load_before = datetime.now(UTC), os.getloadavg()[0]
    plan = QUICK if options.quick else STANDARD
    given = {"load": options.load, "seeds": options.seeds, "first_seed": options.first_seed}
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})
    if options.link_rate is not None:
        plan = replace(plan, link=replace(plan.link, bytes_per_second=options.link_rate))
    arms = dict(ARMS)
    for text in options.arms:
        name, _, fields = text.partition("=")
        arms[name] = msgspec.convert({"enabled": True, **msgspec.json.decode(fields)}, Disaggregation)
    jobs = list(_jobs(options.mixes.split(","), arms, plan))
    with ProcessPoolExecutor() as processes:
        found = list(processes.map(_play, jobs, chunksize=4))
    runs = [mean_of(found[start : start + plan.seeds]) for start in range(0, len(found), plan.seeds)]
    compared = comparisons(runs)
    prefill = {
        mix: build_load(MIXES[mix], plan, seed=plan.first_seed).prefill_share for mix in options.mixes.split(",")
    }
    result = {
        "plan": asdict(plan),
        "mixes": {mix: {"kinds": {name: asdict(kind) for name, kind in MIXES[mix].items()}} for mix in prefill},
        "prefill_share_of_the_work": {mix: round(share, 3) for mix, share in prefill.items()},
        "arms": {name: msgspec.to_builtins(rule) for name, rule in arms.items()},
        "runs": runs,
        "comparisons": compared,
    }
    written = write_result(
        result, out=options.out, name="disaggregation", began=began, load_before=load_before, subject=Subject()
    )
    console = Console(width=WIDTH)
    console.print(tables(runs, compared, plan, prefill), highlight=False)
    console.print(written, highlight=False)


def tables(runs: list[RunSummary], compared: list[Comparison], plan: Plan, prefill: Mapping[str, float]) -> Group:
    """Return one table for each mix, and the comparisons."""
    parts: list[Table | Text] = []
    for mix, share in prefill.items():
        title = (
            f"{mix}: {share:.0%} of the work is prefill; {plan.load:.0%} of what {plan.pods} pods that do both can do"
        )
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
        table.add_column("pods", vertical="bottom")
        table.add_column("rule", vertical="bottom")
        for heading in (
            *("goodput\n%", "TTFT ms\nmean", "\np95", "inter-token ms\np50", "\np95", "\np99", "requests'\np95"),
            *("output\ntokens/s", "remote\n%", "prefill pods\nidle %"),
        ):
            table.add_column(heading, justify="right", vertical="bottom")
        for run in runs:
            if run.mix == mix:
                table.add_row(*_cells(run, plan))
        parts.append(table)
    for each in compared:
        parts.append(
            Text(
                f"{each.words:7}{each.mix}, {each.prefill_pods}:{plan.pods - each.prefill_pods}: estimate "
                f"{each.goodput:.1%}, the best of the others ({each.best_other}) {each.best_goodput:.1%}"
            )
        )
    return Group(*parts)


def _cells(run: RunSummary, plan: Plan) -> tuple[str, ...]:
    pods = f"{run.prefill_pods}:{plan.pods - run.prefill_pods}" if run.prefill_pods else str(plan.pods)
    return (
        pods,
        run.arm,
        f"{100 * run.goodput:.1f}",
        *(f"{value:.0f}" for value in (run.ttft_mean, run.ttft_p95)),
        *(f"{value:.0f}" for value in (run.inter_token_p50, run.inter_token_p95, run.inter_token_p99)),
        f"{run.request_inter_token_p95:.0f}",
        f"{run.tokens_per_second:,.0f}",
        f"{100 * run.remote:.0f}" if run.prefill_pods else "",
        f"{100 * run.prefill_idle:.0f}" if run.prefill_pods else "",
    )


def _jobs(mixes: list[str], arms: Mapping[str, Disaggregation], plan: Plan) -> Iterator[Job]:
    """All seeds of a run one after the other."""
    for mix in mixes:
        for prefill_pods in (0, *FLEETS):
            for arm, rule in arms.items():
                if (arm == BOTH) is (prefill_pods == 0):
                    for seed in range(plan.first_seed, plan.first_seed + plan.seeds):
                        yield Job(mix, prefill_pods, arm, rule, seed, plan)


def _play(job: Job) -> RunSummary:
    load = build_load(MIXES[job.mix], job.plan, seed=job.seed)
    world = play(load, job.rule, plan=job.plan, prefill_pods=job.prefill_pods, seed=job.seed)
    return summarise(world, job.plan, mix=job.mix, prefill_pods=job.prefill_pods, arm=job.arm)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=",".join(MIXES), help="default: %(default)s")
    parser.add_argument("--load", type=float, help=f"share of what pods that do both can do (default: {STANDARD.load})")
    parser.add_argument("--seeds", type=int, help=f"loads of each mix (default: {STANDARD.seeds})")
    parser.add_argument("--first-seed", type=int, help=f"of these loads (default: {STANDARD.first_seed})")
    parser.add_argument(
        "--link-rate",
        type=float,
        metavar="BYTES",
        help=f"bytes a second of a pod's link (default: {STANDARD.link.bytes_per_second:g})",
    )
    parser.add_argument(
        "--arm",
        dest="arms",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="one more rule, as the policy's section `disaggregation`: --arm 'mine={\"hand_over_seconds\": 0.02}'",
    )
    parser.add_argument("--quick", action="store_true", help="short runs, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-disaggregation.json")
    options = parser.parse_args()
    unknown = [name for name in options.mixes.split(",") if name not in MIXES]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}")
    return options


if __name__ == "__main__":
    main()

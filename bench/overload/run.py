"""Overload without collapse: `python -m bench.overload.run [--arms A,B] [--quick] [--out FILE]`.

Plays 0.5 to 3 times the simulated pods' capacity behind kvmesh with its priorities, behind kvmesh without them, and
behind Envoy alone, and a load beside a pod that turns bad (`--only-bad-pod`: that alone); then the part with a promised
inter-token time (`promises`; `--only-promise`: that alone). Prints tables and whether the targets are met, and writes
JSON, which docs/evidence/overload-benchmark.md explains.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.overload.arms import USUALLY, OverloadArm, arms
from bench.overload.measure import Bench, measure_arm
from bench.overload.plan import QUICK, STANDARD, Plan
from bench.overload.promises import (
    PROMISE_PLAN,
    QUICK_PROMISE_PLAN,
    promise_arms,
    promise_rows,
    promise_table,
    promise_verdicts,
)
from bench.overload.summary import RunSummary
from bench.overload.tables import WIDTH, tables, verdict_line
from bench.overload.verdicts import verdicts
from bench.prompts import vocabulary_words
from bench.routing.arms import picker_arm
from bench.routing.measure import Say
from bench.routing.result_file import run_to_end, write_result
from bench.routing.subject import HERE, Subject
from podsim.model_folder import TINY_MODEL

POLICY_CHECK = """
import json, sys
try:
    from extproc.policy.inference_policy import read_policy_file
    from extproc.policy.merged_policy import pick_policy
except ImportError:  # from before a policy was an InferencePolicy
    try:
        from extproc.policy.document import parse_policy
    except ImportError:
        from extproc.wire.policy_document import parse_policy
else:
    def parse_policy(document):
        pick_policy(read_policy_file(document))
parse_policy(json.load(sys.stdin))
"""
CHECK_SECONDS = 60.0


def main() -> None:
    """Parse the flags, measure, write, print."""
    options = _options()
    began = datetime.now(UTC)
    plan = _plan(options)
    subject = Subject(checkout=options.kvmesh.resolve())
    console = Console(stderr=True)
    chosen = _arms(options, plan, subject, say=lambda line: console.print(line, style="yellow", highlight=False))
    promise_plan = QUICK_PROMISE_PLAN if options.quick else PROMISE_PLAN
    promised = [_runnable(each, subject, say=_quiet) for each in promise_arms(promise_plan).values()]
    with tempfile.TemporaryDirectory(prefix="kvmesh-overload-") as name:
        bench = Bench(
            plan=plan,
            subject=subject,
            words=vocabulary_words(TINY_MODEL),
            directory=options.keep or Path(name),
            say=lambda line: console.print(f"{line} ...", highlight=False),
        )
        with_promise = replace(bench, plan=promise_plan, directory=bench.directory / "promise")
        for each in (bench, with_promise):
            each.directory.mkdir(parents=True, exist_ok=True)
        load_before = os.getloadavg()[0]
        with_promised = options.promise and not options.only_bad_pod
        parts = [(bench, () if options.only_promise else chosen), (with_promise, promised if with_promised else ())]
        runs, promise_runs = run_to_end(_all_parts(parts), limit_seconds=plan.limit_seconds)
    rows = promise_rows(promise_runs, classes=promise_plan.classes)
    judged = [*verdicts(runs), *promise_verdicts(rows)]
    found = {
        "plan": asdict(plan),
        "arms": {each.arm.name: {"says": each.arm.says, "policy": each.arm.policy} for each in chosen},
        "runs": runs,
        "verdicts": judged,
        "promise": {
            "plan": asdict(promise_plan),
            "arms": {each.arm.name: {"says": each.arm.says, "policy": each.arm.policy} for each in promised},
            "rows": rows,
            "runs": promise_runs,
        },
    }
    written = write_result(
        found,
        out=options.out,
        name=options.name or _usual_name(options),
        began=began,
        load_before=load_before,
        subject=subject,
    )
    console = Console(width=WIDTH)
    if runs:
        console.print(tables(runs, [], capacity=plan.capacity), highlight=False)
    if promise_runs:
        console.print(promise_table(rows), tables(promise_runs, [], capacity=promise_plan.capacity))
    for verdict in judged:
        console.print(verdict_line(verdict), highlight=False)
    console.print(written, highlight=False)


def _usual_name(options: argparse.Namespace) -> str:
    """Return a name of its own for a part: the docs' tables come from whole results."""
    if options.only_promise:
        return "overload-promise"
    return "overload-bad-pod" if options.only_bad_pod else "overload"


def _quiet(_: str) -> None:
    pass  # the arms before have said it


def _options() -> argparse.Namespace:
    known = arms(STANDARD)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", default=",".join(USUALLY), help=f"of {', '.join(known)}; default: %(default)s")
    parser.add_argument(
        "--arm",
        action="append",
        default=[],
        metavar="NAME=JSON",
        help="one more arm: kvmesh with this policy, a JSON object; at the loads of arm kvmesh",
    )
    parser.add_argument("--loads", help="times the capacity, as 0.5,3; default: what each arm usually gets")
    parser.add_argument(
        "--no-promise", dest="promise", action="store_false", help="without the part with a promised inter-token time"
    )
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--only-promise", action="store_true", help="that part alone")
    only.add_argument("--only-bad-pod", action="store_true", help="only the load beside a pod that turns bad")
    parser.add_argument("--kvmesh", type=Path, default=HERE, help="checkout to measure; default: this one")
    parser.add_argument("--quick", action="store_true", help="few and short runs, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-<name>.json")
    parser.add_argument("--name", help="part of the default file name (default: overload, or overload-PART)")
    parser.add_argument("--keep", type=Path, help="new folder for logs and the outcome of every request")
    options = parser.parse_args()
    if unknown := [name for name in options.arms.split(",") if name and name not in known]:
        parser.error(f"there is no {', '.join(unknown)}")
    return options


def _plan(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else STANDARD
    if options.loads is None:
        return plan
    loads = tuple(sorted(float(load) for load in options.loads.split(",")))
    return replace(plan, loads=loads, few_loads=loads)


def _arms(options: argparse.Namespace, plan: Plan, subject: Subject, *, say: Say) -> list[OverloadArm]:
    """The arms that can run here; the others are told."""
    known = arms(plan)
    chosen = [known[name] for name in options.arms.split(",") if name]
    for text in options.arm:
        name, _, document = text.partition("=")
        tried = picker_arm(name, policy=json.loads(document))
        chosen.append(OverloadArm(arm=tried, loads=plan.loads, falls=True, meets_bad_pod=True))
    if options.only_bad_pod:
        chosen = [replace(each, loads=(), falls=False) for each in chosen]
    return [_runnable(each, subject, say=say) for each in chosen]


def _runnable(each: OverloadArm, subject: Subject, *, say: Say) -> OverloadArm:
    """The arm, without its policy where this kvmesh does not know such a policy."""
    if each.arm.policy is None or (refusal := _refusal(subject, each.arm.policy)) is None:
        return each
    say(f"{each.arm.name} runs without a policy: {refusal}")
    return replace(each, arm=replace(each.arm, policy=None))


def _refusal(subject: Subject, policy: Mapping[str, Any]) -> str | None:
    """What the kvmesh under test has against a policy."""
    document = json.dumps(subject.policy_document(policy))
    asked = subprocess.run(
        (subject.python, "-c", POLICY_CHECK),
        cwd=subject.checkout, input=document, capture_output=True, text=True, check=False, timeout=CHECK_SECONDS,
    )  # fmt: skip
    return asked.stderr.strip().splitlines()[-1] if asked.returncode else None


async def _all_parts(parts: Sequence[tuple[Bench, Sequence[OverloadArm]]]) -> list[list[RunSummary]]:
    """The runs of each part, one part after the other."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # as Ctrl-C: end the children first
    found: list[list[RunSummary]] = []
    async with asyncio.timeout(parts[0][0].plan.limit_seconds):
        for bench, chosen in parts:
            runs: list[RunSummary] = []
            for arm in chosen:
                runs += await measure_arm(bench, arm)
            found.append(runs)
    return found


if __name__ == "__main__":
    main()

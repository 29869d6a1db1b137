"""Is what `kvmesh policy simulate` says true? `python -m bench.replay_log.run [--seconds S] [--load X] [--out FILE]`.

Records the access log of a real `kvmesh up` under one load with each of two policies, and simulates both policies from
each of the two logs: what a policy really did, what the simulation of its own log says, and what the simulation of the
other one's log would have said before it was ever in force. docs/guides/policy-authoring.md has the figures.
"""

import argparse
import asyncio
import os
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench.overload.measure import play_job
from bench.overload.script import Job
from bench.overload.workloads import steady_load
from bench.prompts import vocabulary_words
from bench.replay_log.plan import PODS, POLICIES, ReplayPlan
from bench.routing.result_file import write_result
from bench.routing.subject import HERE, Subject
from bench.running_stack import running_stack
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.replay_log.finding_view import render
from extproc.replay_log.question import Candidate, Finding, answer
from extproc.replay_log.read_log import read_log
from podsim.model_folder import TINY_MODEL

MODEL = "tiny"
WIDTH = 240
POD = {
    "running": PODS.max_num_seqs,
    "step-tokens": PODS.max_num_batched_tokens,
    "cache-tokens": (PODS.kv_blocks - 1) * 16,
}


def main() -> None:
    """Record, simulate, write, print."""
    options = _options()
    began, load_before = datetime.now(UTC), os.getloadavg()[0]
    plan = replace(ReplayPlan(), load=options.load, seconds=options.seconds)
    console = Console(stderr=True, width=WIDTH)
    with tempfile.TemporaryDirectory(prefix="kvmesh-replay-") as name:
        directory = options.keep or Path(name)
        if not options.again:
            for policy in POLICIES:
                console.print(f"recording {policy} for {plan.seconds:g} s ...", highlight=False)
                asyncio.run(record(plan, policy, directory=directory))
        found = {policy: simulated(directory / policy / "access.log") for policy in POLICIES}
    for policy, finding in found.items():
        console.print(f"\nrecorded under {policy}")
        render(finding, console=console)
    if options.out is not None or not options.again:
        document = {
            "plan": {"load": plan.load, "seconds": plan.seconds, "policies": POLICIES},
            "logs": {policy: finding.shown() for policy, finding in found.items()},
        }
        subject = Subject(checkout=HERE)
        line = write_result(
            document, out=options.out, name="replay-log", began=began, load_before=load_before, subject=subject
        )
        console.print(line, highlight=False)


async def record(plan: ReplayPlan, name: str, *, directory: Path) -> None:
    """Play the load on a stack of its own, which writes its access log."""
    own = directory / name
    own.mkdir(parents=True)
    settings = {
        "policy": POLICIES[name],
        "access_log_file": str(own / "access.log"),
        "kv_blocks": PODS.kv_blocks,
        "prefill_tokens_per_second": PODS.prefill_tokens_per_second,
        "inter_token_ms": PODS.inter_token_ms,
        "max_num_seqs": PODS.max_num_seqs,
        "max_num_batched_tokens": PODS.max_num_batched_tokens,
        "max_model_len": PODS.max_model_len,
    }
    overload = replace(plan.overload, seconds=plan.seconds, long_seconds=plan.seconds)
    requests = steady_load(overload, plan.load, words=vocabulary_words(TINY_MODEL))
    async with running_stack(directory=own, pods=PODS.pods, simulator=settings) as facts:
        host, _, port = facts["gateway"].removeprefix("http://").rpartition(":")
        job = Job(host=host, port=int(port), model=MODEL, requests=requests, patience_seconds=60.0, most_attempts=1)
        await play_job(job, directory=own, stem="clients")


def simulated(access_log: Path) -> Finding:
    """Both policies, by one log."""
    with access_log.open("rb") as lines:
        log = read_log(lines, pool=None, where=str(access_log))
    candidates = [Candidate(name, *pick_policy(read_policy_file(policy))) for name, policy in POLICIES.items()]
    return answer(log, candidates, names={}, pod=POD, pods=None, by_rules=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=ReplayPlan().load, help="times what the pods can do")
    parser.add_argument("--seconds", type=float, default=ReplayPlan().seconds, help="of each recording")
    parser.add_argument("--keep", type=Path, help="a folder for the logs, which stay")
    parser.add_argument("--again", action="store_true", help="simulate from the logs in --keep, and record nothing")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()

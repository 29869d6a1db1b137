"""Whether order costs throughput: `python -m bench.overload.conserved [--seeds N] [--mixes A,B] [--out FILE]`.

Twice what four simulated pods can do, of a few interactive and many batch prompts that no cache holds, behind kvmesh's
default classes and behind the less busy of two random pods (Envoy's LEAST_REQUEST), in virtual time. Judged is the time
to the first token of interactive requests, the share of least request's throughput that is served, and, below capacity,
whether a request was refused. docs/evidence/overload-benchmark.md explains it.
"""

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from bench.overload.measure import Scenario
from bench.overload.plan import CRITICAL, SHEDDABLE, STEADY, ClassLoad, Plan
from bench.overload.script import Request
from bench.overload.summary import RunSummary
from bench.overload.tables import WIDTH, table_of
from bench.overload.virtual import merged, play
from bench.overload.virtual_pods import Texts
from bench.prompts import vocabulary_words
from bench.routing.plan import PodSettings
from bench.routing.result_file import write_result
from bench.routing.subject import HERE, Subject
from operate.load.workloads import Texts as RandomTexts
from podsim.model_folder import TINY_MODEL, load_model_folder

HIGH, LOW = 2.0, 0.9  # of the pods' capacity
INTERACTIVE_SHARE = 2.0 / 62.0  # of the work, as in the load that was measured first
AIM_FACTOR = 1.2
AIM_THROUGHPUT = 0.97
POLICY = {"priorities": {"trustObjective": True}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What comes, and the pods that it comes to."""

    says: str
    interactive_tokens: tuple[int, int] = (1000, 1000)  # of a prompt, spread evenly over the logarithm
    batch_tokens: tuple[int, int] = (5000, 5000)
    answer_tokens: int = 16  # of interactive ones
    batch_answer_tokens: int = 16
    prefill_tokens_per_second: float = 8000.0
    seconds: float = 60.0


MIXES = {
    "plain": Mix(says="prompts of 5,000 and 1,000 tokens, answers of 16"),
    "long-answers": Mix(says="the same, answers of 256", answer_tokens=64, batch_answer_tokens=256),
    "fast-pods": Mix(says="the same, pods of 40,000 tokens/s", prefill_tokens_per_second=40_000.0, seconds=30.0),
    "short-prompts": Mix(
        says="prompts of 500 and 100 tokens", batch_tokens=(500, 500), interactive_tokens=(100, 100), seconds=30.0
    ),
    "spread": Mix(
        says="prompts of 300 to 12,000 and 100 to 2,000 tokens",
        batch_tokens=(300, 12_000),
        interactive_tokens=(100, 2000),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConservedPlan:
    """One run."""

    mixes: dict[str, Mix] = field(default_factory=lambda: dict(MIXES))
    pods: int = 4
    kv_blocks: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    inter_token_ms: float = 10.0
    warm_seconds: float = 10.0  # of each load, not measured
    first_seed: int = 1
    seeds: int = 3


class Conserved(msgspec.Struct, frozen=True, kw_only=True):
    """One mix; means over the seeds. Milliseconds; work in prompt tokens a second."""

    mix: str
    says: str
    interactive_p95: float
    interactive_aim: float
    least_request_p95: float
    throughput: float
    least_request_throughput: float
    share: float  # of least request's throughput
    shares: tuple[float, ...]  # of each seed
    refusals: int  # of all seeds, at a load below capacity
    requests: int  # then


def requests_of(mix: Mix, *, load: float, plan: ConservedPlan, seed: int, words: Sequence[str]) -> tuple[Request, ...]:
    """Poisson arrivals at `load` times what the pods can compute."""
    rate = load * plan.pods * mix.prefill_tokens_per_second
    found = [
        *_stream(mix, CRITICAL, mix.interactive_tokens, rate * INTERACTIVE_SHARE, seed=seed, words=words),
        *_stream(mix, SHEDDABLE, mix.batch_tokens, rate * (1.0 - INTERACTIVE_SHARE), seed=seed, words=words),
    ]
    found.sort(key=lambda each: each.due)
    return tuple(msgspec.structs.replace(each, number=number) for number, each in enumerate(found))


def _stream(
    mix: Mix, name: str, lengths: tuple[int, int], tokens_per_second: float, *, seed: int, words: Sequence[str]
) -> Iterator[Request]:
    draw = random.Random(f"{seed} {name}")
    texts = RandomTexts(words, seed=f"{seed} {name}")
    due, rate = 0.0, tokens_per_second / mean_of(lengths)
    while (due := due + draw.expovariate(rate)) < mix.seconds:
        tokens = round(lengths[0] * (lengths[1] / lengths[0]) ** draw.random())
        yield Request(
            number=0,
            due=due,
            tenant=STEADY,
            class_name=name,
            prompt=texts.draw(tokens),
            work_tokens=tokens,
            answer_tokens=mix.answer_tokens if name == CRITICAL else mix.batch_answer_tokens,
            obeys=False,
        )


def mean_of(lengths: tuple[int, int]) -> float:
    """The mean of lengths that are spread evenly over the logarithm."""
    shortest, longest = lengths
    return shortest if shortest == longest else (longest - shortest) / math.log(longest / shortest)


def aim_ms(mix: Mix, *, step_tokens: int) -> float:
    """One batch prompt's time and the request's own, the 95th percentile of each where they are spread, and 20 %.

    A batch prompt takes as long as a step, if that is more: short ones share it.
    """
    batch, own = (float(short * (long / short) ** 0.95) for short, long in (mix.batch_tokens, mix.interactive_tokens))
    return AIM_FACTOR * 1000 * (max(batch, step_tokens) + own) / mix.prefill_tokens_per_second


def conserved(
    name: str, mix: Mix, *, plan: ConservedPlan, words: Sequence[str], texts: Texts, policy: Mapping[str, Any] = POLICY
) -> Conserved:
    """Play a mix with both arms."""
    played = _plan(mix, plan)

    def runs(document: Mapping[str, Any] | None, *, load: float) -> list[RunSummary]:
        found: list[RunSummary] = []
        for seed in range(plan.first_seed, plan.first_seed + plan.seeds):
            requests = requests_of(mix, load=load, plan=plan, seed=seed, words=words)
            scenario = Scenario(
                name="steady", load=load, requests=requests, measured_from=plan.warm_seconds, ends=mix.seconds
            )
            found += play([scenario], document, name=name, plan=played, texts=texts, seed=seed)
        return found

    ours, theirs, calm = runs(policy, load=HIGH), runs(None, load=HIGH), runs(policy, load=LOW)
    shares = [our.throughput / their.throughput for our, their in zip(ours, theirs, strict=True)]
    return Conserved(
        mix=name,
        says=mix.says,
        interactive_p95=fmean(run.of_class(CRITICAL).ttft_p95 for run in ours),
        interactive_aim=aim_ms(mix, step_tokens=plan.max_num_batched_tokens),
        least_request_p95=fmean(run.of_class(CRITICAL).ttft_p95 for run in theirs),
        throughput=fmean(run.throughput for run in ours),
        least_request_throughput=fmean(run.throughput for run in theirs),
        share=fmean(shares),
        shares=tuple(shares),
        refusals=sum(run.refusals.count for run in calm),
        requests=sum(each.requests for run in calm for each in run.classes),
    )


def _plan(mix: Mix, plan: ConservedPlan) -> Plan:
    """What `play` needs: the pods, classes by name, and clients that wait for as long as it takes."""
    classes = tuple(
        ClassLoad(
            name=name,
            ttft_limit=60.0,
            shortest_tokens=lengths[0],
            longest_tokens=lengths[1],
            shared_tokens=0,
            answer_tokens=answer,
            steady_load=0.5,
            flood_load=0.0,
            flood_share=0.0,
        )
        for name, lengths, answer in (
            (CRITICAL, mix.interactive_tokens, mix.answer_tokens),
            (SHEDDABLE, mix.batch_tokens, mix.batch_answer_tokens),
        )
    )
    pods = PodSettings(
        pods=plan.pods,
        kv_blocks=plan.kv_blocks,
        prefill_tokens_per_second=mix.prefill_tokens_per_second,
        inter_token_ms=plan.inter_token_ms,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
    )
    return Plan(pods=pods, classes=classes, patience_seconds=1e6, most_attempts=1)


def table(rows: Sequence[Conserved]) -> Table:
    """The rows for a person."""
    shown = table_of(
        f"{HIGH:g} times the capacity: interactive TTFT, and prompt tokens served; refusals at {LOW:g} times",
        *("interactive\np95 ms", "\naim", "least\nrequest", "served of\nleast request's %", "least\nseed", "refusals"),
    )
    for row in rows:
        shown.add_row(
            row.mix,
            *(f"{value:,.0f}" for value in (row.interactive_p95, row.interactive_aim, row.least_request_p95)),
            f"{100 * row.share:.1f}",
            f"{100 * min(row.shares):.1f}",
            f"{row.refusals} of {row.requests}",
        )
    return shown


def main() -> None:
    """Parse the flags, play, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=",".join(MIXES), help="default: %(default)s")
    parser.add_argument("--seeds", type=int, default=3, help="loads of each mix (default: 3)")
    parser.add_argument(
        "--try", dest="changes", default="{}", metavar="JSON", help="a policy on top of the default one"
    )
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-conserved.json")
    parser.add_argument("--no-result", dest="writes", action="store_false", help="print only")
    options = parser.parse_args()
    if unknown := [name for name in options.mixes.split(",") if name not in MIXES]:
        parser.error(f"there is no mix {', '.join(unknown)}; known are {', '.join(MIXES)}")
    began, load_before, console = datetime.now(UTC), os.getloadavg()[0], Console(width=WIDTH)
    mixes = {name: MIXES[name] for name in options.mixes.split(",")}
    plan = replace(ConservedPlan(), mixes=mixes, seeds=options.seeds, first_seed=options.first_seed)
    policy = merged(POLICY, json.loads(options.changes))
    words, rows = vocabulary_words(TINY_MODEL), list[Conserved]()
    for name, mix in mixes.items():
        started, texts = time.monotonic(), Texts(load_model_folder(TINY_MODEL))
        rows.append(conserved(name, mix, plan=plan, words=words, texts=texts, policy=policy))
        console.print(f"{name}: {time.monotonic() - started:.0f} s", highlight=False)
    console.print(table(rows), highlight=False)
    if options.writes:
        found = {"plan": asdict(plan), "policy": policy, "rows": rows}
        subject = Subject(checkout=HERE)
        written = write_result(
            found, out=options.out, name="conserved", began=began, load_before=load_before, subject=subject
        )
        console.print(written, highlight=False)


if __name__ == "__main__":
    main()

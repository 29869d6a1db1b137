"""The part of the overload benchmark with a promised inter-token time: pods whose steps depend on what runs in them.

`run` and `virtual` play it after the others, with a plan of its own. The pods are an 8B model on an H200, scaled: there
a step takes 5.4 ms, and 0.007 ms more for each sequence and 0.030 us for each token of context (measured); a cache of
850,000 tokens that is full makes it 5.7 times as long. Here it is 10 ms and 5.6 times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from rich.table import Table

from bench.overload.arms import LEAST_REQUEST, OverloadArm
from bench.overload.plan import CRITICAL, SHEDDABLE, STANDARD_CLASS, ClassLoad, Plan
from bench.overload.summary import RunSummary
from bench.overload.tables import table_of
from bench.routing.arms import ARMS as ROUTING_ARMS
from bench.routing.arms import picker_arm
from bench.routing.plan import PodSettings
from bench.routing.summary import Verdict

PROMISED, UNPROMISED = "kvmesh:promise", "kvmesh:no-promise"
THROUGHPUT_SHARE = 0.97  # of least request's, which is to be served at least
CLASSES = (
    ClassLoad(
        name=CRITICAL,
        ttft_limit=1.0,
        inter_token_limit=0.05,
        shortest_tokens=100,
        longest_tokens=600,
        shared_tokens=0,
        answer_tokens=48,
        steady_load=0.1,
        flood_load=0.1,
        flood_share=0.0,
    ),
    ClassLoad(
        name=STANDARD_CLASS,
        ttft_limit=4.0,
        shortest_tokens=200,
        longest_tokens=2000,
        shared_tokens=256,
        answer_tokens=96,
        steady_load=0.05,
        flood_load=0.05,
        flood_share=0.2,
    ),
    ClassLoad(
        name=SHEDDABLE,
        ttft_limit=8.0,
        shortest_tokens=300,
        longest_tokens=2000,
        shared_tokens=0,
        answer_tokens=256,
        steady_load=0.1,
        flood_load=0.1,
        flood_share=0.8,
    ),
)
PROMISE_PLAN = Plan(
    pods=PodSettings(
        pods=4,
        kv_blocks=4096,
        prefill_tokens_per_second=7_000,
        inter_token_ms=10,
        stream_us=52,
        context_token_us=0.7,
        max_num_seqs=64,
        max_num_batched_tokens=256,
    ),
    capacity=12_000,
    classes=CLASSES,
    loads=(0.5, 3.0),
    few_loads=(3.0,),
    warm_seconds=10.0,
    seconds=32.0,
    long_seconds=32.0,
    patience_seconds=45.0,
)
QUICK_PROMISE_PLAN = replace(PROMISE_PLAN, loads=(3.0,), warm_seconds=4.0, seconds=12.0, long_seconds=12.0)


def promise_policy(*, promised: bool) -> Mapping[str, Any]:
    """The classes with targets scaled like the pods, with the promised inter-token time or without."""
    classes = []
    for each in CLASSES:
        fields: dict[str, Any] = {
            "name": each.name,
            "ttftSeconds": each.ttft_limit,
            "queueSeconds": 2 * each.ttft_limit,
        }
        if promised and each.inter_token_limit is not None:
            fields["interTokenSeconds"] = each.inter_token_limit
        classes.append(fields)
    return {"priorities": {"trustObjective": True, "classes": classes}}


def promise_arms(plan: Plan) -> dict[str, OverloadArm]:
    """The arms by name."""
    says = "critical answers are promised an inter-token time"
    return {
        PROMISED: OverloadArm(
            arm=picker_arm(PROMISED, policy=promise_policy(promised=True), says=says), loads=plan.loads
        ),
        UNPROMISED: OverloadArm(
            arm=picker_arm(UNPROMISED, policy=promise_policy(promised=False), says="the same without it"),
            loads=plan.few_loads,
        ),
        LEAST_REQUEST: OverloadArm(arm=ROUTING_ARMS[LEAST_REQUEST], loads=plan.few_loads),
    }


class PromiseRow(msgspec.Struct, frozen=True, kw_only=True):
    """What a run comes to as to the promise."""

    arm: str
    load: float
    class_name: str
    promised_ms: float
    inter_token_p50: float  # milliseconds; of requests, their mean inter-token times
    inter_token_p95: float
    ttft_p95: float
    answered_share: float  # of the class
    throughput: float  # prompt tokens a second of all classes, answered in time or not
    throughput_share: float | None  # of least request's at the same load; None: not measured

    @property
    def is_kept(self) -> bool:
        """Whether the class's p95 is within what it is promised."""
        return self.inter_token_p95 <= self.promised_ms


def promise_rows(runs: Sequence[RunSummary], *, classes: Sequence[ClassLoad] = CLASSES) -> list[PromiseRow]:
    """A row for each run and class with a promise."""
    least = {run.load: run.throughput for run in runs if run.arm == LEAST_REQUEST}
    return [
        PromiseRow(
            arm=run.arm,
            load=run.load,
            class_name=each.name,
            promised_ms=1000 * each.inter_token_limit,
            inter_token_p50=found.inter_token_p50,
            inter_token_p95=found.inter_token_p95,
            ttft_p95=found.ttft_p95,
            answered_share=found.answered / max(1, found.requests),
            throughput=run.throughput,
            throughput_share=run.throughput / least[run.load] if least.get(run.load) else None,
        )
        for run in runs
        for each in classes
        if each.inter_token_limit is not None
        for found in [run.of_class(each.name)]
    ]


def promise_verdicts(rows: Sequence[PromiseRow]) -> list[Verdict]:
    """Whether the promise is kept at the highest load, and what that costs in throughput."""
    mine = [row for row in rows if row.arm == PROMISED]
    if not mine:
        return []
    row = max(mine, key=lambda each: each.load)
    found = [
        Verdict(
            target=f"inter-token p95 of {row.class_name} at {row.load:g}x within the promised {row.promised_ms:g} ms",
            measured=f"{row.inter_token_p95:.1f} ms, {row.answered_share:.1%} answered",
            met=row.is_kept,
        )
    ]
    if row.throughput_share is not None:
        found.append(
            Verdict(
                target=f"at {row.load:g}x at least {THROUGHPUT_SHARE:.0%} of least request's throughput is served",
                measured=f"{row.throughput_share:.1%} ({row.throughput:.0f} prompt tokens/s)",
                met=row.throughput_share >= THROUGHPUT_SHARE,
            )
        )
    return found


def promise_table(rows: Sequence[PromiseRow]) -> Table:
    """The rows for a person."""
    table = table_of(
        "a promised inter-token time: p95 of requests' means, on pods whose steps take longer with streams and context",
        *("load", "class", "promised\nms", "token gap\nms p50", "\np95", "kept", "TTFT ms\np95", "answered\n%"),
        *("prompt\ntokens/s", "of least\nrequest's %"),
    )
    for row in rows:
        share = "" if row.throughput_share is None else f"{100 * row.throughput_share:.1f}"
        table.add_row(
            row.arm,
            f"{row.load:g}x",
            row.class_name,
            f"{row.promised_ms:g}",
            f"{row.inter_token_p50:.1f}",
            f"{row.inter_token_p95:.1f}",
            "yes" if row.is_kept else "no",
            f"{row.ttft_p95:.0f}",
            f"{100 * row.answered_share:.1f}",
            f"{row.throughput:.0f}",
            share,
        )
    return table

"""Whether the targets are met: pure, from the summaries of one run of the benchmark."""

from collections.abc import Sequence

from bench.overload.arms import KVMESH
from bench.overload.plan import CRITICAL, FLOOD, SHEDDABLE, STEADY
from bench.overload.summary import RunSummary
from bench.routing.script import POD_MISSING, Way
from bench.routing.summary import Verdict, beside_bad_pod

CRITICAL_FACTOR = 2.0
GOODPUT_SHARE = 0.95
REFUSAL_MS = 10.0
HOME_SHARE = 0.8
TENANT_SHARE = 0.95  # a request more or less is chance


def verdicts(runs: Sequence[RunSummary], *, arm: str = KVMESH) -> list[Verdict]:
    """The targets of `arm`; one that needs a run which was not made is left out."""
    steady = sorted((run for run in runs if run.arm == arm and run.scenario == "steady"), key=lambda each: each.load)
    falling = [run for run in runs if run.arm == arm and run.scenario == "falling"]
    found: list[Verdict] = []
    if len(steady) > 1:
        found += [_critical_latency(steady[0], steady[-1]), _no_collapse(steady)]
    if steady:
        found += [_no_critical_refusal([*steady, *falling]), _quick_refusals(steady), _fair(steady[-1])]
    found += [_home(run) for run in falling]
    goodput = {run.scenario: run.in_time_per_second for run in runs if run.arm == arm}
    if POD_MISSING in goodput:
        found += [beside_bad_pod(way, goodput[way], goodput[POD_MISSING], arm=arm) for way in Way if way in goodput]
    return found


def _critical_latency(low: RunSummary, high: RunSummary) -> Verdict:
    calm, busy = low.of_class(CRITICAL), high.of_class(CRITICAL)
    factor = busy.ttft_p99 / calm.ttft_p99
    return Verdict(
        target=f"critical p99 TTFT at {high.load:g}x within {CRITICAL_FACTOR:g} times its value at {low.load:g}x",
        measured=f"{factor:.2f} times ({busy.ttft_p99:.0f} against {calm.ttft_p99:.0f} ms)",
        met=factor <= CRITICAL_FACTOR and busy.answered == busy.requests,
    )


def _no_critical_refusal(runs: Sequence[RunSummary]) -> Verdict:
    mine = [run.of_class(CRITICAL) for run in runs]
    refused, lost = sum(each.refused for each in mine), sum(each.requests - each.answered for each in mine)
    return Verdict(
        target="no critical request is refused or lost",
        measured=f"{refused} refused, {lost} without an answer, of {sum(each.requests for each in mine)}",
        met=not refused and not lost,
    )


def _no_collapse(runs: Sequence[RunSummary]) -> Verdict:
    best, last = max(runs, key=lambda run: run.goodput), runs[-1]
    share = last.goodput / best.goodput
    return Verdict(
        target=f"goodput at {last.load:g}x at least {GOODPUT_SHARE:.0%} of the best over all loads",
        measured=f"{share:.1%} ({last.goodput:.0f} of {best.goodput:.0f} tokens/s at {best.load:g}x)",
        met=share >= GOODPUT_SHARE,
    )


def _quick_refusals(runs: Sequence[RunSummary]) -> Verdict:
    most = max(runs, key=lambda run: run.refusals.count).refusals
    return Verdict(
        target=f"refused requests are answered in p99 {REFUSAL_MS:g} ms",
        measured=f"{most.ms_p99:.1f} ms, p50 {most.ms_p50:.1f}, of {most.count} refusals",
        met=most.count > 0 and most.ms_p99 <= REFUSAL_MS,
    )


def _home(run: RunSummary) -> Verdict:
    share = run.retries.home / max(1, run.retries.count)
    return Verdict(
        target=f"Retry-After brings {HOME_SHARE:.0%} home at the first retry when load falls",
        measured=f"{share:.0%} ({run.retries.home} of {run.retries.count})",
        met=run.retries.count > 0 and share >= HOME_SHARE,
    )


def _fair(run: RunSummary) -> Verdict:
    share = run.share_of_own_half(SHEDDABLE)
    return Verdict(
        target=f"at {run.load:g}x tenant {FLOOD!r} does not push {STEADY!r} below its share of the sheddable class",
        measured=f"{share:.0%} of what half of the class for itself would have given it",
        met=share >= TENANT_SHARE,
    )

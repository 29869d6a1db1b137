"""What one run comes to, and whether the targets are met: pure, from records and counters to numbers.

TTFT counts answered requests only, so it is never told without the success rate; goodput counts what was answered in
time, over all that was asked.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from bench.routing.one_cache import OneCacheHits
from bench.routing.pod_counters import PodCounts
from bench.routing.script import POD_MISSING, TURN_SECONDS, Way
from operate.load.script import Record
from operate.load.summary import percentile

SHOWN_ERRORS = 3
UNIFORM_TOLERANCE = 1.05  # two runs of one arm differ by as much
TTFT_FACTOR = 3.0
HIT_SHARE = 0.95
BAD_POD_GOODPUT = 0.95  # of the same pods' without the bad one
LONG_HIT_RATE = 0.70  # of the 0.75 that four questions of a document can hit


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly the pods worked: the most loaded pod over the mean of all, 1.0 is even."""

    requests: float
    prefill: float  # prompt tokens that had to be computed
    requests_by_pod: tuple[int, ...]
    prefill_tokens_by_pod: tuple[int, ...]


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm under one workload; times in milliseconds, rates from 0 to 1."""

    arm: str
    workload: str
    requests: int
    succeeded: int
    success_rate: float
    goodput_per_second: float  # answered within the TTFT limit
    goodput_share: float  # of all that was asked
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    hit_rate: float  # cached tokens over prompt tokens, as the answers' usage says
    one_cache_hit_rate: float
    hit_share: float  # of what one unlimited cache would have hit
    spread: Spread
    preemptions: int
    errors: dict[str, int]
    # how far to trust the run
    late_p99: float  # requests that the clients sent late
    busy_cores: float  # CPU of the whole machine
    router_cpu_ms: float  # CPU of everything between clients and pods, a request
    router_cpu_ms_by_process: dict[str, float]
    pods_cpu_ms: float  # CPU of the simulation, a request
    miscounted_prompts: int


def summarise(
    *,
    arm: str,
    workload: str,
    records: Sequence[Record],
    measured_from: float,
    ttft_limit_ms: float,
    one_cache: OneCacheHits,
    pods: Sequence[PodCounts],
    busy_cores: float,
    cpu_ms: Mapping[str, float],
) -> RunSummary:
    """The numbers of one run; `cpu_ms` is what each process used, those of pods begin with "pod-"."""
    measured = [record for record in records if record.due >= measured_from]
    ttfts = [ttft for record in measured if (ttft := record.ttft_ms) is not None]
    good = sum(ttft <= ttft_limit_ms for ttft in ttfts)
    seconds = max((record.due for record in measured), default=0.0) - measured_from
    prompt_tokens = sum(record.prompt_tokens for record in measured)
    hit_rate = sum(record.cached_tokens for record in measured) / max(1, prompt_tokens)
    cpu = {name: value / max(1, len(records)) for name, value in cpu_ms.items()}
    routers = {name: value for name, value in cpu.items() if not name.startswith("pod-")}
    return RunSummary(
        arm=arm,
        workload=workload,
        requests=len(measured),
        succeeded=len(ttfts),
        success_rate=len(ttfts) / max(1, len(measured)),
        goodput_per_second=good / max(seconds, 1e-3),
        goodput_share=good / max(1, len(measured)),
        ttft_mean=statistics.fmean(ttfts) if ttfts else float("nan"),
        ttft_p50=percentile(ttfts, 0.50),
        ttft_p95=percentile(ttfts, 0.95),
        ttft_p99=percentile(ttfts, 0.99),
        hit_rate=hit_rate,
        one_cache_hit_rate=one_cache.rate,
        hit_share=hit_rate / one_cache.rate if one_cache.rate > 0 else 1.0,
        spread=_spread(pods),
        preemptions=int(sum(pod.preemptions for pod in pods)),
        errors=dict(Counter(record.error for record in measured if record.error).most_common(SHOWN_ERRORS)),
        late_p99=percentile([(record.sent - record.ready) * 1000 for record in records], 0.99),
        busy_cores=busy_cores,
        router_cpu_ms=sum(routers.values()),
        router_cpu_ms_by_process={name: round(value, 3) for name, value in routers.items()},
        pods_cpu_ms=sum(cpu.values()) - sum(routers.values()),
        miscounted_prompts=one_cache.miscounted,
    )


def _spread(pods: Sequence[PodCounts]) -> Spread:
    requests = [pod.requests for pod in pods]
    prefill = [pod.prompt_tokens - pod.hit_tokens for pod in pods]
    return Spread(
        requests=_most_over_mean(requests),
        prefill=_most_over_mean(prefill),
        requests_by_pod=tuple(int(value) for value in requests),
        prefill_tokens_by_pod=tuple(int(value) for value in prefill),
    )


def _most_over_mean(values: Sequence[float]) -> float:
    mean = statistics.fmean(values)
    return max(values) / mean if mean else 1.0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One target, and what was measured of it."""

    arm: str = "kvmesh"
    target: str
    measured: str
    met: bool


def verdicts(runs: Sequence[RunSummary], *, arm: str, baseline: str = "round-robin") -> list[Verdict]:
    """The targets of `arm` against `baseline`; one that needs a run which was not made is left out."""
    by_key = {(run.arm, run.workload): run for run in runs}

    def pair(ours: str, theirs: str) -> tuple[RunSummary, RunSummary] | None:
        mine, other = by_key.get((arm, ours)), by_key.get((baseline, theirs))
        return None if mine is None or other is None else (mine, other)

    found: list[Verdict] = []
    if both := pair("qa", "qa"):
        found.append(_mean_ttft(*both))
    if both := pair("qa-x2", "qa"):
        found.append(_twice_the_rate(*both))
    found += [_hit_share(run) for name in ("qa", "qa-x2") if (run := by_key.get((arm, name)))]
    if long := by_key.get((arm, "long")):
        found.append(_long_hit_rate(long))
    if both := pair("uniform", "uniform"):
        found.append(_no_worse(*both))
    if alone := by_key.get((arm, POD_MISSING)):
        found += [
            beside_bad_pod(way, run.goodput_per_second, alone.goodput_per_second, arm=arm)
            for way in Way
            if (run := by_key.get((arm, way)))
        ]
    return found


def beside_bad_pod(way: Way, goodput: float, alone: float, *, arm: str) -> Verdict:
    """Judge the goodput, in requests/s, beside a pod that has turned bad, by that of the other pods alone."""
    share = goodput / alone if alone else float("nan")
    return Verdict(
        arm=arm,
        target=f"{way}: goodput after {TURN_SECONDS:g} s at least {BAD_POD_GOODPUT:.0%} of that without the pod",
        measured=f"{share:.1%} ({goodput:.1f} of {alone:.1f} requests/s)",
        met=share >= BAD_POD_GOODPUT,
    )


def _mean_ttft(ours: RunSummary, theirs: RunSummary) -> Verdict:
    factor = theirs.ttft_mean / ours.ttft_mean
    return Verdict(
        arm=ours.arm,
        target=f"multi-round QA: mean TTFT at least {TTFT_FACTOR:g} times lower than {theirs.arm}'s at the same rate",
        measured=f"{factor:.1f} times ({ours.ttft_mean:.0f} against {theirs.ttft_mean:.0f} ms)",
        met=factor >= TTFT_FACTOR and ours.success_rate >= theirs.success_rate,
    )


def _twice_the_rate(ours: RunSummary, theirs: RunSummary) -> Verdict:
    return Verdict(
        arm=ours.arm,
        target=f"multi-round QA: at twice the rate p95 TTFT is not above {theirs.arm}'s at the single rate",
        measured=f"{ours.ttft_p95:.0f} against {theirs.ttft_p95:.0f} ms",
        met=ours.ttft_p95 <= theirs.ttft_p95 and ours.success_rate >= theirs.success_rate,
    )


def _hit_share(run: RunSummary) -> Verdict:
    return Verdict(
        arm=run.arm,
        target=f"{run.workload}: hit rate at least {HIT_SHARE:.0%} of one unlimited cache",
        measured=f"{run.hit_share:.1%} ({run.hit_rate:.3f} of {run.one_cache_hit_rate:.3f})",
        met=run.hit_share >= HIT_SHARE,
    )


def _long_hit_rate(run: RunSummary) -> Verdict:
    return Verdict(
        arm=run.arm,
        target=f"long documents, four questions each: hit rate at least {LONG_HIT_RATE:.2f}",
        measured=f"{run.hit_rate:.3f}",
        met=run.hit_rate >= LONG_HIT_RATE,
    )


def _no_worse(ours: RunSummary, theirs: RunSummary) -> Verdict:
    return Verdict(
        arm=ours.arm,
        target=f"no shared prefixes: mean TTFT no worse than {theirs.arm}'s (within {UNIFORM_TOLERANCE - 1:.0%})",
        measured=f"{ours.ttft_mean:.0f} against {theirs.ttft_mean:.0f} ms",
        met=ours.ttft_mean <= UNIFORM_TOLERANCE * theirs.ttft_mean and ours.success_rate >= theirs.success_rate,
    )

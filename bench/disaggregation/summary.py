"""What one run comes to, and where the conditional rule is better than always and never: pure."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from bench.disaggregation.plan import BOTH, ESTIMATE, Plan
from bench.disaggregation.world import World
from operate.load.summary import percentile

EVEN = 0.01  # of goodput: two seeds differ by more


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one fleet under one mix; means of all seeds. Times in milliseconds, shares from 0 to 1."""

    mix: str
    prefill_pods: int  # 0: every pod does both
    arm: str
    requests: float
    goodput: float  # of the requests: those within both limits
    ttft_mean: float
    ttft_p95: float
    inter_token_p50: float  # of all gaps between tokens
    inter_token_p95: float
    inter_token_p99: float
    request_inter_token_p95: float  # of the requests' means; goodput uses these
    tokens_per_second: float
    remote: float  # of the prompts
    fell_back: float  # legs that were given up
    prefill_idle: float  # of the prefill pods' time; nan where there is none


def summarise(world: World, plan: Plan, *, mix: str, prefill_pods: int, arm: str) -> RunSummary:
    """Count the requests sent after the caches were warm."""
    records = [record for record in world.records if record.sent >= plan.warm_seconds]
    ttfts = [record.ttft * 1000 for record in records]
    good = sum(
        record.ttft <= plan.ttft_limit_seconds and record.inter_token <= plan.inter_token_limit_seconds
        for record in records
    )
    seconds = plan.seconds - plan.warm_seconds
    busy = list(world.busy.values())[:prefill_pods]
    return RunSummary(
        mix=mix,
        prefill_pods=prefill_pods,
        arm=arm,
        requests=len(records),
        goodput=good / max(len(records), 1),
        ttft_mean=statistics.fmean(ttfts) if ttfts else float("nan"),
        ttft_p95=percentile(ttfts, 0.95),
        inter_token_p50=percentile(world.gaps, 0.50) * 1000,
        inter_token_p95=percentile(world.gaps, 0.95) * 1000,
        inter_token_p99=percentile(world.gaps, 0.99) * 1000,
        request_inter_token_p95=percentile([record.inter_token * 1000 for record in records], 0.95),
        tokens_per_second=world.tokens / seconds,
        remote=sum(record.remote for record in records) / max(len(records), 1),
        fell_back=sum(record.fell_back for record in records),
        prefill_idle=1.0 - statistics.fmean(busy) / seconds if busy else float("nan"),
    )


def mean_of(runs: Sequence[RunSummary]) -> RunSummary:
    """Return the means of the same run with several seeds."""
    numbers = {
        name: statistics.fmean(getattr(run, name) for run in runs)
        for name in RunSummary.__struct_fields__
        if name not in ("mix", "prefill_pods", "arm")
    }
    return msgspec.structs.replace(runs[0], **numbers)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The conditional rule beside the others of the same mix and fleet."""

    mix: str
    prefill_pods: int
    goodput: float
    best_other: str
    best_goodput: float

    @property
    def words(self) -> str:
        """Better, as good, or worse."""
        gap = self.goodput - self.best_goodput
        return "even" if abs(gap) <= EVEN else "better" if gap > 0 else "WORSE"


def comparisons(runs: Sequence[RunSummary]) -> list[Comparison]:
    """Compare `estimate` with the best of the other ways to use the same fleet."""
    by_key: dict[tuple[str, int], dict[str, RunSummary]] = {}
    for run in runs:
        if run.arm != BOTH:
            by_key.setdefault((run.mix, run.prefill_pods), {})[run.arm] = run
    return [_compare(mix, pods, arms) for (mix, pods), arms in by_key.items() if ESTIMATE in arms and len(arms) > 1]


def _compare(mix: str, prefill_pods: int, arms: Mapping[str, RunSummary]) -> Comparison:
    best = max((run for arm, run in arms.items() if arm != ESTIMATE), key=lambda run: run.goodput)
    return Comparison(
        mix=mix,
        prefill_pods=prefill_pods,
        goodput=arms[ESTIMATE].goodput,
        best_other=best.arm,
        best_goodput=best.goodput,
    )

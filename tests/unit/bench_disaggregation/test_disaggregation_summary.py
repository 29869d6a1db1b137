"""What a run comes to: means of seeds, and where the conditional rule is better, even or worse."""

import pytest

from bench.disaggregation.plan import BOTH
from bench.disaggregation.summary import RunSummary, comparisons, mean_of


def run(arm: str, goodput: float, *, prefill_pods: int = 1) -> RunSummary:
    return RunSummary(
        mix="mix",
        prefill_pods=prefill_pods,
        arm=arm,
        requests=10,
        goodput=goodput,
        ttft_mean=100.0 * goodput,
        ttft_p95=0.0,
        inter_token_p50=0.0,
        inter_token_p95=0.0,
        inter_token_p99=0.0,
        request_inter_token_p95=0.0,
        tokens_per_second=0.0,
        remote=0.0,
        fell_back=0.0,
        prefill_idle=0.0,
    )


@pytest.mark.parametrize(
    ("goodput", "words"), [(0.52, "better"), (0.505, "even"), (0.5, "even"), (0.495, "even"), (0.48, "WORSE")]
)
def test_the_conditional_rule_is_compared_with_the_best_of_the_others(goodput: float, words: str) -> None:
    others = [run("never", 0.1), run("always", 0.5), run("thresholds", 0.4)]
    (found,) = comparisons([*others, run("estimate", goodput), run(BOTH, 1.0, prefill_pods=0)])
    assert (found.best_other, found.best_goodput, found.words) == ("always", 0.5, words)


def test_each_fleet_is_compared_by_itself_and_one_rule_alone_with_nothing() -> None:
    runs = [run("estimate", 0.9), run("estimate", 0.3, prefill_pods=2), run("always", 0.8, prefill_pods=2)]
    assert [(each.prefill_pods, each.words) for each in comparisons(runs)] == [(2, "WORSE")]


def test_numbers_are_means_of_all_seeds() -> None:
    mean = mean_of([run("always", 0.4), run("always", 0.6)])
    assert (mean.arm, mean.goodput, mean.ttft_mean) == ("always", 0.5, 50.0)

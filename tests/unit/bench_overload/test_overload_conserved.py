"""Work is conserved: the loads, what is aimed at, and a run."""

from dataclasses import replace

import pytest

from bench.overload.conserved import HIGH, MIXES, ConservedPlan, aim_ms, conserved, mean_of, requests_of
from bench.overload.plan import CRITICAL, SHEDDABLE
from bench.overload.virtual_pods import Texts
from bench.prompts import vocabulary_words
from podsim.model_folder import TINY_MODEL, load_model_folder

WORDS, PLAN = vocabulary_words(TINY_MODEL), ConservedPlan()


@pytest.mark.parametrize("name", MIXES)
def test_a_load_is_a_multiple_of_what_the_pods_compute(name: str) -> None:
    mix = replace(MIXES[name], seconds=600.0) if name in ("plain", "spread") else MIXES[name]
    words = WORDS[:50]
    requests = requests_of(replace(mix, seconds=mix.seconds), load=HIGH, plan=PLAN, seed=1, words=words)
    asked = sum(each.work_tokens for each in requests) / mix.seconds
    assert asked == pytest.approx(HIGH * PLAN.pods * mix.prefill_tokens_per_second, rel=0.15)
    assert [each.number for each in requests] == list(range(len(requests)))
    assert sorted({each.class_name for each in requests}) == [CRITICAL, SHEDDABLE]


def test_the_aim_is_one_batch_prompt_s_time_the_own_one_and_a_fifth() -> None:
    def aim(name: str) -> float:
        return aim_ms(MIXES[name], step_tokens=2048)

    assert aim("plain") == pytest.approx(1.2 * 1000 * (5000 + 1000) / 8000)
    assert aim("short-prompts") == pytest.approx(1.2 * 1000 * (2048 + 100) / 8000)  # four share a step
    assert 1.2 * 1000 * (10_000 + 1_700) / 8000 < aim("spread") < 1.2 * 1000 * (12_000 + 2_000) / 8000
    assert mean_of((100, 100)) == 100


@pytest.mark.thorough
def test_order_costs_no_throughput_and_below_capacity_nothing_is_refused() -> None:
    mix = replace(MIXES["short-prompts"], seconds=15.0)
    plan = replace(PLAN, pods=2, warm_seconds=5.0, seeds=1)
    found = conserved("it", mix, plan=plan, words=WORDS, texts=Texts(load_model_folder(TINY_MODEL)))
    assert found.share > 0.97
    assert found.interactive_p95 < found.least_request_p95 / 5
    assert found.refusals == 0 < found.requests

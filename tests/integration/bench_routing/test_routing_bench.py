"""The routing benchmark end to end, as small as it gets: every request is answered, counted, and nothing is left."""

import asyncio
from pathlib import Path

import pytest

from bench.prompts import vocabulary_words
from bench.routing.arms import ARMS
from bench.routing.measure import Bench, measure_arm
from bench.routing.plan import Plan, PodSettings
from bench.routing.subject import Subject
from bench.routing.workloads import build
from extproc.load.workloads import QaSize
from podsim.model_folder import TINY_MODEL, load_model_folder

SMALL = QaSize(users=4, rounds=3, system_tokens=64, history_tokens=128, question_tokens=8, answer_tokens=2)
PLAN = Plan(
    pods=PodSettings(pods=2),
    qa=SMALL,
    qa_rate=10,
    qa_seconds=1.2,
    churn=SMALL,
    churn_rate=10,
    churn_seconds=1.2,
    churn_pickers=2,
    churn_kill_at_seconds=0.3,
    churn_back_after_seconds=0.1,
)
PROCESSES = {
    "round-robin": {"envoy"},
    "kvmesh": {"envoy", "redis", "indexer", "picker-0", "picker-1"},
    "llm-d-guide": {"llm-d-guide-0", "llm-d-guide-1"},
}


@pytest.mark.parametrize("arm", PROCESSES)
async def test_an_arm_answers_the_same_load_through_its_router(arm: str, tmp_path: Path) -> None:
    bench = Bench(
        plan=PLAN,
        subject=Subject(),
        folder=load_model_folder(TINY_MODEL),
        directory=tmp_path,
        say=lambda _: None,
    )
    words = vocabulary_words(TINY_MODEL)
    async with asyncio.timeout(90):
        runs = await measure_arm(bench, ARMS[arm], [build(name, PLAN, words=words) for name in ("qa", "churn")])

    qa, churn = runs
    assert (qa.requests, qa.success_rate, qa.errors, qa.miscounted_prompts) == (8, 1.0, {}, 0)
    assert sum(qa.spread.requests_by_pod) == 12
    assert 0 < qa.hit_rate <= qa.one_cache_hit_rate
    # what the killed pod was answering is lost
    assert churn.requests == 12
    assert churn.succeeded + sum(churn.errors.values()) == 12
    assert churn.succeeded >= 8
    assert set(churn.router_cpu_ms_by_process) == PROCESSES[arm]

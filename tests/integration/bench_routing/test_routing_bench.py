"""The routing benchmark end to end, as small as it gets: every request is answered, counted, and nothing is left."""

import asyncio
from pathlib import Path

import pytest

from bench.prompts import vocabulary_words
from bench.routing.arms import ARMS
from bench.routing.measure import Bench, measure_arm
from bench.routing.plan import Plan, PodSettings
from bench.routing.script import POD_MISSING, Way
from bench.routing.subject import Subject
from bench.routing.summary import RunSummary
from bench.routing.workloads import build
from operate.load.workloads import QaSize
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
    bad_pod=SMALL,
    bad_pod_rate=20,
    bad_pod_at_seconds=0.2,
    bad_pod_seconds=4.2,
)
PROCESSES = {
    "round-robin": {"envoy"},
    "kvmesh": {"envoy", "redis", "indexer", "picker-0", "picker-1"},
    "llm-d-guide": {"llm-d-guide-0", "llm-d-guide-1"},
}


async def runs_of(arm: str, directory: Path, *workloads: str) -> list[RunSummary]:
    bench = Bench(
        plan=PLAN,
        subject=Subject(),
        folder=load_model_folder(TINY_MODEL),
        directory=directory,
        say=lambda _: None,
    )
    words = vocabulary_words(TINY_MODEL)
    async with asyncio.timeout(90):
        return await measure_arm(bench, ARMS[arm], [build(name, PLAN, words=words) for name in workloads])


@pytest.mark.parametrize("arm", PROCESSES)
async def test_an_arm_answers_the_same_load_through_its_router(arm: str, tmp_path: Path) -> None:
    qa, churn = await runs_of(arm, tmp_path, "qa", "churn")
    assert (qa.requests, qa.success_rate, qa.errors, qa.miscounted_prompts) == (8, 1.0, {}, 0)
    assert sum(qa.spread.requests_by_pod) == 12
    assert 0 < qa.hit_rate <= qa.one_cache_hit_rate
    # what the killed pod was answering is lost
    assert churn.requests == 12
    assert churn.succeeded + sum(churn.errors.values()) == 12
    assert churn.succeeded >= 8
    assert set(churn.router_cpu_ms_by_process) == PROCESSES[arm]


async def test_a_pod_that_turns_bad_fails_its_requests_and_the_others_serve_theirs(tmp_path: Path) -> None:
    alone, refuses, breaks_off = await runs_of("round-robin", tmp_path, POD_MISSING, *Way)

    assert (alone.requests, alone.success_rate, len(alone.spread.requests_by_pod)) == (20, 1.0, 1)
    for run in (refuses, breaks_off):
        assert 0 < run.succeeded == 20 - sum(run.errors.values()) < 20
    assert set(refuses.errors) == {"status 429: local_rate_limited"}
    assert not any("429" in error for error in breaks_off.errors)

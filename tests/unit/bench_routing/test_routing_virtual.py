"""Workloads in virtual time: all requests are answered, a run can be repeated, policies can be told apart."""

from dataclasses import replace

import pytest

from bench.prompts import vocabulary_words
from bench.routing.plan import STANDARD, Plan, PodSettings
from bench.routing.script import Workload
from bench.routing.summary import LONG_HIT_RATE, RunSummary
from bench.routing.virtual import ARMS, Routers, picker, play
from bench.routing.workloads import build
from extproc.policy.values import PickPolicy
from operate.load.workloads import QaSize
from podsim.model_folder import TINY_MODEL, load_model_folder

SMALL = QaSize(users=6, rounds=3, system_tokens=32, history_tokens=160, question_tokens=8, answer_tokens=4)
PODS = PodSettings(pods=2, prefill_tokens_per_second=2000, max_model_len=2000, kv_blocks=256)
PLAN = Plan(
    pods=PODS,
    qa=SMALL,
    qa_rate=6,
    qa_seconds=3,
    churn=SMALL,
    churn_rate=20,
    churn_seconds=1,
    churn_pickers=2,
    churn_kill_at_seconds=0.4,
)
FOLDER = load_model_folder(TINY_MODEL)
WORDS = vocabulary_words(TINY_MODEL)


KVMESH = picker(PickPolicy())


def played(workload: Workload, routers: Routers) -> RunSummary:
    return play(workload, routers, name="it", settings=PODS, folder=FOLDER, seed=1).summary


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_answers_everything_and_can_be_repeated(arm: str) -> None:
    workload = build("qa", PLAN, words=WORDS)
    run = played(workload, ARMS[arm])

    assert (run.requests, run.success_rate, run.miscounted_prompts) == (12, 1.0, 0)
    assert sum(run.spread.requests_by_pod) == 18
    assert run == played(workload, ARMS[arm])


def test_the_picker_keeps_chats_where_their_history_is() -> None:
    workload = build("qa", PLAN, words=WORDS)

    assert played(workload, KVMESH).hit_share > 0.95


def test_a_killed_pod_loses_what_it_was_answering_and_its_cache() -> None:
    run = played(build("churn", PLAN, words=WORDS), KVMESH)

    assert run.requests == 20
    assert 0 < run.errors["killed"] == run.requests - run.succeeded < 10


@pytest.mark.parametrize("arm", ["llm-d-guide", "kvmesh"])
def test_each_that_knows_caches_keeps_chats_and_regrets_less_than_one_that_does_not(arm: str) -> None:
    workload = build("qa", replace(PLAN, qa=replace(SMALL, users=5)), words=WORDS)  # not twice in turn at the same pod
    aware, blind = (
        play(workload, ARMS[each], name="it", settings=PODS, folder=FOLDER, seed=1) for each in (arm, "round-robin")
    )

    assert aware.summary.hit_share > 0.95
    assert aware.regret_ms < blind.regret_ms / 4


def test_a_request_whose_pod_is_killed_is_in_flight_at_the_guide_no_longer() -> None:
    run = played(build("churn", PLAN, words=WORDS), ARMS["llm-d-guide"])

    assert run.errors["killed"] == run.requests - run.succeeded


def test_questions_about_a_long_document_go_where_it_was_computed() -> None:
    plan = replace(STANDARD, seed=1, long_documents=40)
    workload = build("long", plan, words=WORDS)
    run = play(workload, KVMESH, name="it", settings=plan.long_pods, folder=FOLDER, seed=1).summary

    assert run.one_cache_hit_rate > 0.74
    assert run.hit_rate >= LONG_HIT_RATE

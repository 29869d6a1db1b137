"""Overload in virtual time: a run can be repeated, and arms can be told apart."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from bench.overload.arms import arms
from bench.overload.measure import scenarios
from bench.overload.plan import CRITICAL, Plan, policy
from bench.overload.summary import RunSummary
from bench.overload.virtual import merged, play
from bench.overload.virtual_pods import Texts
from bench.prompts import vocabulary_words
from bench.routing.plan import PodSettings
from podsim.model_folder import TINY_MODEL, load_model_folder

PODS = PodSettings(pods=2, kv_blocks=1024, prefill_tokens_per_second=4_000, inter_token_ms=10, max_num_seqs=8)
PLAN = Plan(
    pods=PODS, capacity=8_000, loads=(0.5, 3.0), few_loads=(3.0,), seconds=4.0, long_seconds=4.0, warm_seconds=1.0
)
TEXTS, WORDS = Texts(load_model_folder(TINY_MODEL)), vocabulary_words(TINY_MODEL)


def played(document: Any, *, load: float) -> RunSummary:
    kvmesh = replace(arms(PLAN)["kvmesh"], loads=(load,), falls=False)
    (found,) = play(scenarios(PLAN, kvmesh, words=WORDS), document, name="it", plan=PLAN, texts=TEXTS, seed=1)
    return found


@pytest.mark.parametrize("document", [None, policy()], ids=["least request", "picker"])
def test_a_run_can_be_repeated(document: Any) -> None:
    first, second = (msgspec.json.encode(played(document, load=1.0)) for _ in range(2))

    assert first == second


def test_below_capacity_everything_is_answered_and_nothing_refused() -> None:
    run = played(policy(), load=0.5)

    assert all(each.answered == each.requests > 0 for each in run.classes)
    assert run.refusals.count == 0


def test_priorities_keep_critical_requests_quick_where_least_request_does_not() -> None:
    ours, theirs = (played(document, load=3.0).of_class(CRITICAL) for document in (policy(), None))

    assert ours.answered == ours.requests
    assert ours.ttft_p95 < theirs.ttft_p95 / 2


def test_a_policy_is_changed_at_whatever_depth() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "e": {"f": 5}}) == {
        "a": {"b": 4, "c": 2},
        "d": 3,
        "e": {"f": 5},
    }

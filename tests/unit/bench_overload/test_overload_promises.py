"""What a run shows of a promised inter-token time."""

from dataclasses import replace
from math import nan

import msgspec
import pytest

from bench.overload.arms import LEAST_REQUEST
from bench.overload.measure import scenarios
from bench.overload.plan import CRITICAL
from bench.overload.promises import (
    CLASSES,
    PROMISE_PLAN,
    PROMISED,
    UNPROMISED,
    PromiseRow,
    promise_arms,
    promise_policy,
    promise_rows,
    promise_verdicts,
)
from bench.overload.summary import RunSummary
from bench.overload.virtual import play
from bench.overload.virtual_pods import Texts
from bench.prompts import vocabulary_words
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from podsim.model_folder import TINY_MODEL, load_model_folder

PLAN = replace(
    PROMISE_PLAN,
    pods=replace(PROMISE_PLAN.pods, pods=2),
    capacity=6_000,
    loads=(3.0,),
    seconds=20.0,
    long_seconds=20.0,
    warm_seconds=8.0,
)


def row(arm: str = PROMISED, **values: float | None) -> PromiseRow:
    usual: dict[str, float | None] = {
        "load": 3.0,
        "promised_ms": 50.0,
        "inter_token_p50": 40.0,
        "inter_token_p95": 48.0,
        "ttft_p95": 500.0,
        "answered_share": 1.0,
        "throughput": 980.0,
        "throughput_share": 0.98,
    }
    return msgspec.convert({"arm": arm, "class_name": CRITICAL, **usual, **values}, PromiseRow)


def test_the_targets_are_those_of_the_highest_load_of_the_arm_with_the_promise() -> None:
    calm, other = row(load=0.5, inter_token_p95=99.0), row(UNPROMISED, inter_token_p95=99.0)
    assert [verdict.met for verdict in promise_verdicts([calm, row(), other])] == [True, True]
    assert [verdict.met for verdict in promise_verdicts([row(inter_token_p95=50.1)])] == [False, True]
    assert [verdict.met for verdict in promise_verdicts([row(throughput_share=0.969)])] == [True, False]
    assert len(promise_verdicts([row(throughput_share=None)])) == 1
    assert promise_verdicts([other]) == []
    assert not promise_verdicts([row(inter_token_p95=nan)])[0].met  # nothing was answered


def test_the_policies_differ_in_the_promise_alone() -> None:
    with_promise, without = (
        pick_policy(read_policy_file(promise_policy(promised=promised)))[0].priorities.classes
        for promised in (True, False)
    )
    assert with_promise[CRITICAL].inter_token_seconds == CLASSES[0].inter_token_limit
    assert without[CRITICAL].inter_token_seconds is None
    assert {name for name in with_promise if with_promise[name] != without[name]} == {CRITICAL}


@pytest.mark.thorough
def test_a_promise_is_kept_where_it_would_be_broken_without_it() -> None:
    texts, words = Texts(load_model_folder(TINY_MODEL)), vocabulary_words(TINY_MODEL)
    runs: list[RunSummary] = []
    for name, each in promise_arms(PLAN).items():
        played = scenarios(PLAN, replace(each, loads=(3.0,)), words=words)
        runs += play(played, each.arm.policy, name=name, plan=PLAN, texts=texts, seed=1)
    rows = {each.arm: each for each in promise_rows(runs, classes=PLAN.classes)}
    assert [rows[name].is_kept for name in (PROMISED, UNPROMISED, LEAST_REQUEST)] == [True, False, False]
    assert all(verdict.met for verdict in promise_verdicts(list(rows.values())))

"""What was predicted against what came true: the comparison, the window, the findings."""

from typing import Any

import pytest

from extproc.answers.realised import (
    OTHER_TOKENS,
    OVERPREDICTED,
    UNDERPREDICTED,
    Comparison,
    DriftPolicy,
    RealisedWatch,
    Usage,
    compare,
)
from extproc.answers.response_plan import Prediction

PREDICTION = Prediction(
    model="m",
    requested="alias",
    arm="a",
    endpoint="10.0.0.1:8000",
    prompt_tokens=100,
    matched_tokens=64,
    best_matched_tokens=80,
)
POLICY = DriftPolicy(window_requests=10, window_seconds=60.0, least_requests=4, least_tokens=100)


def compared(
    *, predicted: int = 64, realised: int = 64, best: int = 64, prompt: int = 100, ours: int = 100
) -> Comparison:
    prediction = Prediction(
        model="m", endpoint="e", prompt_tokens=ours, matched_tokens=predicted, best_matched_tokens=best
    )
    found = compare(prediction, Usage(prompt_tokens=prompt, cached_tokens=realised))
    assert found is not None
    return found


def test_a_comparison_has_error_and_regret() -> None:
    assert compare(
        PREDICTION, Usage(prompt_tokens=102, cached_tokens=48, output_tokens=7), first_token_seconds=0.25
    ) == Comparison(
        model="m",
        arm="a",
        endpoint="10.0.0.1:8000",
        prompt_tokens=102,
        predicted_tokens=64,
        realised_tokens=48,
        error_tokens=-16,
        regret_tokens=16,
        prompt_error_tokens=2,
        requested="alias",
        generated_tokens=7,
        first_token_seconds=0.25,
    )


@pytest.mark.parametrize("usage", [Usage(), Usage(prompt_tokens=100), Usage(cached_tokens=3)])
def test_a_pod_that_does_not_tell_is_not_compared(usage: Usage) -> None:
    assert compare(PREDICTION, usage) is None


def test_tokens_that_we_did_not_count_are_not_other_tokens() -> None:
    assert compared(ours=0).prompt_error_tokens == 0


def watched(*comparisons: Comparison, every_seconds: float = 1.0) -> RealisedWatch:
    watch = RealisedWatch(POLICY)
    for i, comparison in enumerate(comparisons):
        watch.add(comparison, now=i * every_seconds)
    return watch


def findings(watch: RealisedWatch) -> list[tuple[str, str, float]]:
    return [(model, finding.reason, finding.since) for model, finding in watch.findings.items()]


@pytest.mark.parametrize(
    ("comparison", "expected"),
    [
        ({}, []),
        ({"predicted": 64, "realised": 63}, []),
        ({"predicted": 64, "realised": 0}, [("m", OVERPREDICTED, 3.0)]),
        ({"predicted": 0, "realised": 64}, [("m", UNDERPREDICTED, 3.0)]),
        ({"prompt": 101}, [("m", OTHER_TOKENS, 3.0)]),
    ],
    ids=["right", "nearly right", "too much", "too little", "other tokens"],
)
def test_predictions_that_do_not_come_true_are_a_finding(
    comparison: dict[str, Any], expected: list[tuple[str, str, float]]
) -> None:
    assert findings(watched(*[compared(**comparison)] * 4)) == expected


def test_errors_in_both_directions_do_not_cancel_out() -> None:
    wrong = (compared(predicted=64, realised=0), compared(predicted=0, realised=64))
    assert findings(watched(*wrong * 2)) == [("m", OVERPREDICTED, 3.0)]


def test_a_few_requests_or_a_few_tokens_prove_nothing() -> None:
    assert findings(watched(*[compared(realised=0)] * 3)) == []
    assert findings(watched(*[compared(predicted=20, realised=0)] * 4)) == []


def test_a_finding_keeps_its_time_while_it_stands_and_goes_when_the_window_is_right_again() -> None:
    watch = watched(*[compared(realised=0)] * 6)
    assert findings(watch) == [("m", OVERPREDICTED, 3.0)]
    for i in range(10):
        watch.add(compared(), now=6.0 + i)
    assert findings(watch) == []


def test_a_finding_says_what_to_do() -> None:
    watch = watched(*[compared(realised=0)] * 4)
    assert watch.findings["m"].message.startswith(
        "m: of 4 responses, 256 cached tokens were predicted and 0 reported: the index holds blocks that"
    )


def test_the_window_is_bounded_by_number_and_by_age() -> None:
    watch = watched(*[compared(best=70)] * 25)
    window = watch._windows["m"]
    assert (len(window.taken), window.predicted, window.realised, window.over, window.under) == (10, 640, 640, 0, 0)
    watch.expire(now=24.0 + 60.5)
    assert (len(window.taken), window.predicted) == (0, 0)


def test_where_nothing_is_asked_for_a_finding_ends() -> None:
    watch = watched(*[compared(realised=0)] * 4)
    watch.expire(now=100.0)
    assert findings(watch) == []

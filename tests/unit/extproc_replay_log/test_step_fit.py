"""The pods' step times are found again in the answers of a log."""

import pytest

from extproc.replay_log.step_fit import fit_steps, non_negative, served_answers, uncached_tokens
from tests.unit.extproc_replay_log.recorded import ALONE, PROMPT, STREAM, alone, line, refused


def test_what_a_step_and_a_prompt_token_take_is_found() -> None:
    fit, answers = fit_steps(alone(100), step_tokens=2048)
    assert fit is not None
    assert len(answers) == fit.answers == 100
    # of one stream at a time, what it adds cannot be told from what a step takes anyway
    assert fit.alone_seconds + fit.seconds_a_stream == pytest.approx(ALONE + STREAM, rel=0.01)
    assert fit.seconds_a_prompt_token == pytest.approx(PROMPT, rel=0.01)
    assert fit.error < 0.01
    assert fit.output_tokens(100 * (ALONE + STREAM) + 500 * PROMPT, streams=1, prompt_tokens=500) == 100


def test_too_few_answers_with_counted_tokens_say_nothing() -> None:
    uncounted = [line(float(number)) for number in range(200)]
    assert fit_steps([*uncounted, *alone(20)], step_tokens=2048)[0] is None


def test_answers_are_beside_those_of_their_own_pod_alone() -> None:
    records = [
        line(0.0, ended_us=1_001_000, prompt_tokens=100),
        line(0.5, ended_us=1_001_000, prompt_tokens=200, predicted_cached_tokens=150),
        line(0.5, ended_us=1_001_000, prompt_tokens=900, endpoint="10.0.0.2:8000"),
        refused(0.6),
        line(0.7, status=0, ended_us=10_000_000),
    ]
    first, second, other = served_answers(records)
    assert (first.streams, second.streams, other.streams) == pytest.approx((1.5, 1.5, 1.0), rel=0.01)
    assert (first.prompt_tokens, second.prompt_tokens, other.prompt_tokens) == (150.0, 50.0, 900.0)


def test_prompts_are_computed_one_after_the_other() -> None:
    records = [
        line(0.0, ended_us=1_001_000, prompt_tokens=1000),
        line(0.5, ended_us=1_001_000, prompt_tokens=1000),
    ]
    first, second = served_answers(records, prompt_seconds=0.001)  # the second one's begins when the first has ended
    assert first.prompt_tokens == pytest.approx(1000, abs=5)
    assert second.prompt_tokens == pytest.approx(1000, abs=5)  # 500 of each


def test_what_the_pod_counted_goes_before_what_was_expected() -> None:
    assert uncached_tokens(line(0.0, prompt_tokens=100, predicted_cached_tokens=90)) == 10
    counted = line(0.0, predicted_cached_tokens=90, realised_prompt_tokens=120, realised_cached_tokens=20)
    assert uncached_tokens(counted) == 100
    assert uncached_tokens(line(0.0, prompt_tokens=None, predicted_cached_tokens=None)) == 1


def test_no_factor_is_negative_and_what_cannot_be_told_apart_is_nothing() -> None:
    assert non_negative([[1.0, 0.0], [0.0, 1.0]], [2.0, -1.0]) == [2.0, 0.0]
    assert non_negative([[4.0, 2.0], [2.0, 3.0]], [8.0, 8.0]) == pytest.approx([1.0, 2.0])
    twice = non_negative([[1.0, 1.0], [1.0, 1.0]], [3.0, 3.0])
    assert sum(twice) == pytest.approx(3.0)
    assert non_negative([[0.0]], [0.0]) == [0.0]

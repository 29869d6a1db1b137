"""Answers are judged by what came of them, and when."""

import pytest

from extproc.answers.judgement import NO_TOKENS, Judgement, StreamTimes, judge_document, judge_stream
from extproc.answers.promise import TokenTargets

TARGETS = TokenTargets(ttft_seconds=1.0, inter_token_seconds=0.1)
NOT_JUDGED = Judgement()


def judged(*tokens_at: float, tokens: int | None = None, ended: bool = True, now: float = 9.0) -> Judgement:
    times = NO_TOKENS
    if tokens_at:
        times = StreamTimes.since(0.0, first_at=tokens_at[0], last_at=tokens_at[-1])
    return judge_stream(TARGETS, times, tokens=len(tokens_at) if tokens is None else tokens, ended=ended, now=now)


def test_a_stream_within_both_targets_is_met() -> None:
    assert judged(1.0, 1.1, 1.2) == Judgement(ttft=True, inter_token=True, whole=True)


def test_a_late_first_token_is_late_however_quick_the_others_are() -> None:
    assert judged(1.01, 1.02) == Judgement(ttft=False, inter_token=True, whole=False)


def test_tokens_that_come_too_slowly_are_late_although_the_first_was_not() -> None:
    assert judged(0.5, 0.7) == Judgement(ttft=True, inter_token=False, whole=False)


def test_the_mean_of_the_stream_is_judged_and_not_each_gap() -> None:
    assert judged(0.5, 0.51, 0.7) == Judgement(ttft=True, inter_token=True, whole=True)


def test_tokens_that_came_together_count_one_by_one() -> None:
    assert judged(0.5, 0.9, tokens=5) == Judgement(ttft=True, inter_token=True, whole=True)


@pytest.mark.parametrize("tokens", [0, 1])
def test_one_token_has_no_time_between_tokens(tokens: int) -> None:
    assert judged(0.5, tokens=tokens) == Judgement(ttft=True, inter_token=None, whole=True)


def test_where_tokens_cannot_be_counted_the_first_one_is_judged() -> None:
    times = StreamTimes(first_seconds=0.5, last_seconds=0.5)
    assert judge_stream(TARGETS, times, tokens=None, ended=True, now=9.0) == Judgement(ttft=True, whole=True)


def test_a_client_that_left_is_judged_by_what_came() -> None:
    assert judged(0.5, 0.9, ended=False) == Judgement(ttft=True, inter_token=False, whole=False)
    assert judged(0.5, ended=False) == Judgement(ttft=True, inter_token=None, whole=True)


def test_a_client_that_left_before_the_first_token_was_kept_waiting_too_long_or_is_not_judged() -> None:
    assert judged(ended=False, now=1.0) == NOT_JUDGED
    assert judged(ended=False, now=1.1) == Judgement(ttft=False, whole=False)


def test_a_stream_without_tokens_is_judged_by_its_end() -> None:
    assert judged(now=0.9) == Judgement(ttft=True, whole=True)
    assert judged(now=1.1) == Judgement(ttft=False, whole=False)


def test_a_clock_that_is_set_back_makes_no_time_negative() -> None:
    assert judged(0.5, 0.1) == Judgement(ttft=True, inter_token=True, whole=True)
    assert StreamTimes.since(9.0, first_at=8.0, last_at=8.5) == StreamTimes(first_seconds=0.0, last_seconds=0.0)


@pytest.mark.parametrize(
    ("seconds", "tokens", "expected"),
    [
        (1.9, 10, Judgement(whole=True)),
        (1.91, 10, Judgement(whole=False)),
        (1.0, 1, Judgement(whole=True)),
        (1.0, 0, Judgement(whole=True)),
        (0.1, None, NOT_JUDGED),
    ],
)
def test_an_answer_at_once_is_judged_by_what_a_stream_of_its_length_may_take(
    seconds: float, tokens: int | None, expected: Judgement
) -> None:
    assert judge_document(TARGETS, seconds=seconds, tokens=tokens) == expected

"""Expected answer lengths: the most specific group with enough answers decides."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.answers.answer_lengths import (
    LEAST_ANSWERS,
    MOST_GROUPS,
    UNKNOWN_LENGTH,
    AnswerKind,
    AnswerLength,
    AnswerLengths,
)

ACME = AnswerKind(model="tiny", class_name="batch", tenant="acme")


def learned(*lengths: int, kind: AnswerKind = ACME) -> AnswerLengths:
    lengths_of = AnswerLengths()
    for tokens in lengths:
        lengths_of.note(kind, tokens)
    return lengths_of


def test_nothing_is_expected_without_data() -> None:
    assert AnswerLengths().expected(ACME, most=None) is UNKNOWN_LENGTH
    few = learned(*[100] * (LEAST_ANSWERS - 1))
    assert few.expected(ACME, most=None) is UNKNOWN_LENGTH
    few.note(ACME, 100)
    assert few.expected(ACME, most=None) == AnswerLength(tokens=100, spread=0)
    assert few.expected(AnswerKind(model="other"), most=None) is UNKNOWN_LENGTH


def test_the_most_specific_group_with_enough_answers_decides() -> None:
    lengths = learned(*[100] * 10)
    session = AnswerKind(model="tiny", class_name="batch", tenant="acme", session="tiny\0s")
    for _ in range(LEAST_ANSWERS):
        lengths.note(session, 500)
        lengths.note(AnswerKind(model="tiny", class_name="batch", tenant="other"), 30)

    def tokens(kind: AnswerKind) -> float:
        return lengths.expected(kind, most=None).tokens

    assert tokens(session) == 500
    assert 100 < tokens(ACME) < 500  # the tenant's, with those of its session
    assert tokens(AnswerKind(model="tiny", class_name="batch", tenant="other")) == 30
    assert tokens(AnswerKind(model="tiny", class_name="batch", tenant="new")) == tokens(AnswerKind(model="tiny"))


def test_the_spread_is_that_of_the_answers() -> None:
    expected = learned(*[50, 150] * 200).expected(ACME, most=None)
    assert expected.tokens == pytest.approx(100, abs=10)
    assert expected.spread == pytest.approx(50, abs=5)


def test_the_request_s_own_limit_bounds_both() -> None:
    lengths = learned(*[50, 150] * 50)
    assert lengths.expected(ACME, most=20) == AnswerLength(tokens=20, spread=0)
    bounded = lengths.expected(ACME, most=120)
    assert bounded.tokens + bounded.spread <= 120


def test_choices_add_up() -> None:
    lengths = learned(*[400] * LEAST_ANSWERS, kind=AnswerKind(model="tiny", choices=4))
    assert lengths.expected(AnswerKind(model="tiny"), most=None) == AnswerLength(tokens=100, spread=0)
    assert lengths.expected(AnswerKind(model="tiny", choices=3), most=None) == AnswerLength(tokens=300, spread=0)


def test_errors_are_known_by_model() -> None:
    lengths = AnswerLengths()
    lengths.note(ACME, 100)  # nothing was expected
    assert lengths.errors() == {}
    lengths.note(ACME, 100, expected=160.0)
    lengths.note(ACME, 100, expected=80.0)
    assert lengths.errors() == {"tiny": 40}


def test_clients_cannot_make_it_grow() -> None:
    lengths = AnswerLengths()
    for number in range(MOST_GROUPS):
        lengths.note(AnswerKind(model="tiny", tenant=f"tenant {number}", session=f"session {number}"), 7)
    assert lengths.expected(AnswerKind(model="tiny"), most=None) == AnswerLength(tokens=7, spread=0)
    assert len(lengths._groups) == MOST_GROUPS


@given(st.lists(st.integers(0, 1 << 40), min_size=LEAST_ANSWERS), st.integers(1, 1000), st.none() | st.integers(0))
def test_a_length_is_a_number_between_the_answers_and_within_the_limit(
    seen: list[int], choices: int, most: int | None
) -> None:
    kind = AnswerKind(model="tiny", choices=choices)
    expected = learned(*[each * choices for each in seen], kind=kind).expected(kind, most=most)
    limit = inf if most is None else most
    assert min(min(seen) * choices * 0.999, limit) <= expected.tokens <= min(max(seen) * choices * 1.001, limit)
    assert 0 <= expected.spread < inf

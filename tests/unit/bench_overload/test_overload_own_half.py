"""What a tenant would have got of a class that it had half of for itself."""

from collections.abc import Iterable

import pytest

from bench.overload.own_half import own_half_tokens
from bench.overload.plan import SHEDDABLE, STEADY
from bench.overload.script import Attempt, Outcome

# 200 tokens a second from 0 to 10, then nothing until 20, then all at once: a half of it is 100 a second
BEGUN = [(float(second), 200) for second in range(1, 11)] + [(20.0, 0), (20.0, 1000)]


def asked(due: float, tokens: int) -> Outcome:
    return Outcome(
        due=due,
        tenant=STEADY,
        class_name=SHEDDABLE,
        work_tokens=tokens,
        obeys=False,
        attempts=(Attempt(sent=due, ended=due, status=503, error="status 503"),),
    )


def given(*outcomes: Outcome, begun: Iterable[tuple[float, int]] = BEGUN, limit_seconds: float = 3.0) -> int:
    return own_half_tokens(outcomes, begun=begun, limit_seconds=limit_seconds, begins=1.0, ends=30.0)


def test_one_begins_when_those_before_it_are_done_and_is_refused_where_that_is_too_late() -> None:
    assert given(asked(2.0, 250), asked(2.0, 100)) == 350  # the second one after 2.5 s
    assert given(asked(2.0, 350), asked(2.0, 100)) == 350  # after 3.5 s
    assert given(asked(2.0, 350), asked(2.0, 100), asked(5.0, 30)) == 380


def test_they_come_in_the_order_in_which_they_are_due() -> None:
    assert given(asked(2.1, 100), asked(2.0, 350)) == 350


def test_what_was_not_used_is_gone() -> None:
    assert given(asked(8.0, 301), asked(8.0, 10)) == 301  # as if nothing had been free before


def test_nothing_is_given_while_the_class_gets_nothing() -> None:
    assert given(asked(9.0, 101), asked(11.0, 10)) == 101  # there is one token to do, and none is done before 20
    assert given(asked(9.0, 101), asked(18.0, 10)) == 111


def test_only_what_begins_in_the_measured_seconds_counts() -> None:
    assert given(asked(0.5, 100), asked(0.6, 10)) == 10


@pytest.mark.parametrize("begun", [[], [(5.0, 0)]])
def test_of_nothing_a_half_is_nothing_but_what_begins_at_once(begun: list[tuple[float, int]]) -> None:
    assert given(asked(6.0, 10), asked(6.0, 10), begun=begun) == 10

"""What `kvmesh load` plans to send: the same for the same seed, as much as was asked for, and nothing that is warm."""

from collections import Counter
from dataclasses import replace

import pytest

from extproc.errors import ConfigError
from operate.load.plan import Load, LoadSize, bursts, questions, replay, salt_of
from operate.load.trace import RecordedBody, TraceRow
from operate.load.workloads import WORDS

SMALL = LoadSize(rate=4.0, seconds=12.0, users=6, prompt_tokens=50, answer_tokens=7)


def dues(load: Load) -> list[float]:
    return sorted(turn.due for session in load.sessions for turn in session.turns)


@pytest.mark.parametrize("plan", [questions, bursts])
def test_the_same_seed_is_the_same_load_and_another_one_is_another(plan: type) -> None:
    assert plan(SMALL) == plan(SMALL)
    assert plan(SMALL) != plan(replace(SMALL, seed=1))


def test_questions_come_at_the_rate_for_the_time_asked_for() -> None:
    load = questions(SMALL)
    counted = [due for due in dues(load) if due >= load.measured_from]

    assert load.measured_from == 6 / 4 * 1.5
    assert max(dues(load)) <= 12.0
    assert len(counted) / (12.0 - load.measured_from) == pytest.approx(4.0, rel=0.15)
    assert load.requests == len(dues(load))


def test_when_the_measured_part_begins_every_user_has_asked() -> None:
    load = questions(SMALL)
    first = {session.name.split("-")[1]: session.turns[0].due for session in reversed(load.sessions)}

    assert len(first) == 6
    assert max(first.values()) < load.measured_from


def test_users_share_instructions_and_bring_their_history_once() -> None:
    sessions = questions(SMALL).sessions

    assert len({session.system for session in sessions}) == 1
    assert {len(session.turns[0].text.split()) for session in sessions} == {80}
    assert {len(turn.text.split()) for session in sessions for turn in session.turns[1:]} == {30}
    assert {turn.answer_tokens for session in sessions for turn in session.turns} == {7}


def test_taking_turns_does_not_meet_the_same_pod_by_the_clock() -> None:
    order = sorted((turn.due, session.name) for session in questions(LoadSize()).sessions for turn in session.turns)
    pods: dict[str, set[int]] = {}
    for place, (_, user) in enumerate(order):
        pods.setdefault(user, set()).add(place % 4)

    assert Counter(map(len, pods.values())).most_common(1)[0][0] > 1


def test_half_of_a_burst_asks_about_one_document() -> None:
    load = bursts(replace(SMALL, rate=10.0))
    documents = Counter(session.system for session in load.sessions)

    assert load.requests == 3 * 40
    assert sorted(documents.values()) == [4] * 12 + [24] * 3
    assert all(due % 4.0 <= 1.0 for due in dues(load))


@pytest.mark.parametrize(
    ("plan", "size", "says"),
    [
        (questions, replace(SMALL, seconds=2.0), r"--duration 2s: 6 users at 4 requests a second .* after 2\.2 s"),
        (bursts, replace(SMALL, rate=1.0), r"--rate 1: .* give 2\.5 or more"),
    ],
)
def test_a_size_that_shows_nothing_is_refused_with_what_would_do(plan: type, size: LoadSize, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(size)


ROWS = [TraceRow(1000 + 500 * i, 1024, 64, [1, 2 + i]) for i in range(5)]


def test_a_trace_keeps_its_times_or_comes_at_the_rate() -> None:
    asis = replay(ROWS, LoadSize(), name="t")
    assert dues(asis) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert dues(replay(ROWS, LoadSize(rate=5.0), name="t")) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert dues(replay(ROWS, LoadSize(seconds=1.2), name="t")) == [0.0, 0.5, 1.0]
    assert {len(session.turns[0].text.split()) for session in asis.sessions} == {1024}


def test_a_shrunk_trace_shares_what_the_long_one_shares() -> None:
    first, second, *_ = replay(ROWS, LoadSize(shrink=8), name="t").sessions
    words = [session.turns[0].text.split() for session in (first, second)]

    assert [len(each) for each in words] == [128, 128]
    assert words[0][:64] == words[1][:64]
    assert words[0][64:] != words[1][64:]
    assert first.turns[0].answer_tokens == 8


def test_bodies_come_as_written_at_the_rate_or_by_chance() -> None:
    timed = [RecordedBody(at=10.0 + i, body={"prompt": "x", "max_tokens": 3}) for i in range(3)]
    untimed = [RecordedBody(at=None, body={"prompt": "x"}) for _ in range(400)]

    assert dues(replay(timed, LoadSize(), name="f")) == [0.0, 1.0, 2.0]
    assert dues(replay(timed, LoadSize(rate=3.0), name="f")) == [0.0, 0.5, 1.0]
    by_chance = dues(replay(untimed, LoadSize(rate=20.0), name="f"))
    assert by_chance[-1] == pytest.approx(20.0, rel=0.2)
    assert len(set(by_chance)) == 400


def test_a_trace_that_ends_before_it_begins_is_refused() -> None:
    late = [RecordedBody(at=None, body={"prompt": "x"})]
    with pytest.raises(ConfigError, match=r"--duration 1e-06s: no request of f is due by then"):
        replay(late, LoadSize(seconds=1e-6), name="f")


def test_a_salt_is_some_words_that_another_text_does_not_have() -> None:
    assert salt_of("a") == salt_of("a") != salt_of("b")
    assert set(salt_of("a").split()) <= set(WORDS)
    assert len(WORDS) == len(set(WORDS))

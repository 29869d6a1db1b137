"""The scripts of the routing benchmark: the same for each arm, with the sharing that their names promise."""

import pytest

from bench.routing.plan import Plan
from bench.routing.script import POD_MISSING, TURN_SECONDS, Way
from bench.routing.workloads import TRACE_FILE, WORKLOADS, build
from operate.load.script import Session
from operate.load.trace import TraceRow, TraceSize, trace_sessions
from operate.load.workloads import QaSize, Texts

WORDS = [f"{first}{second}" for first in "abcdefghijklm" for second in "nopqrstuvwxyz"]
SMALL = Plan(
    qa=QaSize(users=4, rounds=3, system_tokens=5, history_tokens=7, question_tokens=2), qa_rate=2, qa_seconds=12
)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_the_same_each_time_it_is_built(name: str) -> None:
    assert build(name, SMALL, words=WORDS) == build(name, SMALL, words=WORDS)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_has_its_own_name_and_sessions_with_names_of_their_own(name: str) -> None:
    workload = build(name, SMALL, words=WORDS)
    names = [session.name for session in workload.sessions]

    assert workload.name == name
    assert len(set(names)) == len(names) > 0
    assert all(session.turns for session in workload.sessions)


def test_users_ask_at_the_rate_and_each_waits_for_all_others() -> None:
    workload = build("qa", SMALL, words=WORDS)
    dues = sorted(turn.due for session in workload.sessions for turn in session.turns)

    assert dues == [number / 2 for number in range(24)]
    assert all(
        later.due - earlier.due == 2.0
        for session in workload.sessions
        for earlier, later in zip(session.turns, session.turns[1:], strict=False)
    )
    assert workload.measured_from == 2.0


def test_users_share_the_system_prompt_and_bring_their_history_once() -> None:
    sessions = build("qa", SMALL, words=WORDS).sessions

    assert len({session.system for session in sessions}) == 1
    assert {_words(session) for session in sessions} <= {(9,), (9, 2), (9, 2, 2)}


def test_twice_the_rate_is_the_same_users_in_half_the_time() -> None:
    slow, fast = build("qa", SMALL, words=WORDS), build("qa-x2", SMALL, words=WORDS)

    assert len([turn for session in fast.sessions for turn in session.turns]) == 48
    assert fast.measured_from == slow.measured_from / 2


@pytest.mark.parametrize("way", Way)
def test_a_pod_turns_bad_under_the_very_load_that_the_other_pods_get_alone(way: Way) -> None:
    plan = Plan()
    alone, beside = build(POD_MISSING, plan, words=WORDS), build(way, plan, words=WORDS)

    assert beside.sessions == alone.sessions
    assert (plan.pods_of(way), plan.pods_of(POD_MISSING).pods) == (plan.pods, plan.pods.pods - 1)
    assert (alone.bad_pod, beside.bad_pod and beside.bad_pod.way) == (None, way)
    assert beside.bad_pod is not None and beside.bad_pod.pod < plan.pods.pods
    assert beside.measured_from == alone.measured_from == beside.bad_pod.at + TURN_SECONDS < plan.bad_pod_seconds


def test_the_chats_beside_a_bad_pod_fit_into_the_caches_of_the_others() -> None:
    plan = Plan()
    size, pods = plan.bad_pod, plan.pods_of(POD_MISSING)
    longest = size.system_tokens + size.history_tokens + size.rounds * (size.question_tokens + size.answer_tokens)

    assert size.users * longest < 0.95 * pods.pods * pods.kv_blocks * 16


def test_the_first_prefix_of_a_burst_is_asked_for_most() -> None:
    plan = Plan()
    sessions = build("burst", plan, words=WORDS).sessions
    systems = [session.system for session in sessions]
    counts = sorted((systems.count(system) for system in set(systems)), reverse=True)

    hot, others = plan.burst.hot_requests, plan.burst.requests_each
    assert counts == [hot] * plan.burst.bursts + [others] * (plan.burst.prefixes - 1) * plan.burst.bursts


def test_nothing_is_shared_where_nothing_is_promised() -> None:
    texts = [session.turns[0].text for session in build("uniform", Plan(), words=WORDS).sessions]

    assert len({text[:30] for text in texts}) == len(texts)


def test_rows_with_equal_leading_blocks_share_that_much_text_and_no_more() -> None:
    rows = [
        TraceRow(timestamp=0, input_length=1500, output_length=160, hash_ids=[0, 1, 2]),
        TraceRow(timestamp=64_000, input_length=1400, output_length=16_000, hash_ids=[0, 1, 3]),
        TraceRow(timestamp=640_000, input_length=512, output_length=1, hash_ids=[0]),
    ]
    size = TraceSize(times_faster=320, tokens_divisor=8, answer_divisor=16, longest_answer_tokens=48)

    first, second = trace_sessions(rows, size, seconds=1, texts=Texts(WORDS, seed="x"))
    (turn,), (other,) = first.turns, second.turns

    assert (turn.due, other.due) == (0.0, 0.2)
    assert (turn.answer_tokens, other.answer_tokens) == (10, 48)
    assert (len(turn.text.split()), len(other.text.split())) == (1500 // 8, 1400 // 8)
    assert turn.text.split()[:128] == other.text.split()[:128]
    assert turn.text.split()[128:] != other.text.split()[128:]


def test_the_cut_of_the_trace_fits_into_the_pods() -> None:
    plan = Plan()
    longest = max(len(session.turns[0].text.split()) for session in build("trace", plan, words=WORDS).sessions)

    assert len(TRACE_FILE.read_text().splitlines()) == len(build("trace", plan, words=WORDS).sessions)
    assert longest + plan.trace.longest_answer_tokens < 0.95 * plan.pods.max_model_len


def _words(session: Session) -> tuple[int, ...]:
    return tuple(len(turn.text.split()) for turn in session.turns)

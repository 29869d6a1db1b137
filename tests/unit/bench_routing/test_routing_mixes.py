"""The mixes of the benchmark in virtual time: the same each time, on the pods that they need."""

import pytest

from bench.prompts import vocabulary_words
from bench.routing.mixes import EIGHT_PODS, MIXES, WIDE, mix
from bench.routing.plan import STANDARD
from bench.routing.script import POD_MISSING, Way
from podsim.model_folder import TINY_MODEL

WORDS = vocabulary_words(TINY_MODEL)


@pytest.mark.parametrize("name", WIDE)
def test_a_mix_is_the_same_each_time_and_fits_its_pods(name: str) -> None:
    made = mix(name, STANDARD, words=WORDS)
    turns = [turn for session in made.workload.sessions for turn in session.turns]

    assert made.workload == mix(name, STANDARD, words=WORDS).workload
    assert made.workload.name == name
    assert len({session.name for session in made.workload.sessions}) == len(made.workload.sessions) > 50
    assert made.pods.pods == 8
    assert max(turn.due for turn in turns) > made.workload.measured_from
    longest = max(
        len((session.system or "").split()) + sum(len(turn.text.split()) + turn.answer_tokens for turn in session.turns)
        for session in made.workload.sessions
    )
    assert longest < 0.95 * min(made.pods.max_model_len, made.pods.kv_blocks * 16)


def test_the_benchmark_s_own_workloads_are_mixes_on_its_own_pods() -> None:
    assert mix("burst", STANDARD, words=WORDS).pods == STANDARD.pods
    assert mix("long", STANDARD, words=WORDS).pods == STANDARD.long_pods
    assert set(WIDE) < set(MIXES)
    assert not {POD_MISSING, *Way} & set(MIXES)  # virtual pods do not turn bad


def test_a_denser_trace_has_as_many_conversations_of_its_own() -> None:
    once = len(mix("trace", STANDARD, words=WORDS).workload.sessions)
    dense = mix("trace-x3", STANDARD, words=WORDS)

    assert len(dense.workload.sessions) == 3 * once
    assert dense.pods == EIGHT_PODS


def test_users_of_quiet_chats_ask_in_order_however_long_they_think() -> None:
    for session in mix("qa-25", STANDARD, words=WORDS).workload.sessions:
        dues = [turn.due for turn in session.turns]
        assert dues == sorted(dues)

import random
from itertools import pairwise

from podsim.core.generate import Answer, Limits, Vocabulary, cut_at_stop, generate_answer, prompt_seed

VOCABULARY = Vocabulary(
    words=[10, 11, 12, 13],
    punctuation=[5],
    texts={10: " a", 11: " b", 12: " c", 13: " d", 5: ".", 2: ""},
    end_of_turn=2,
)


def answer_of(limits: Limits, *, seed: int = 1) -> Answer:
    return generate_answer(random.Random(seed), VOCABULARY, limits)


def test_the_same_prompt_and_seed_give_the_same_answer() -> None:
    assert answer_of(Limits(max_tokens=200)) == answer_of(Limits(max_tokens=200))
    assert prompt_seed([1, 2, 3], seed=0) == prompt_seed([1, 2, 3], seed=0)
    assert len({prompt_seed(prompt, seed=seed) for prompt in ([1, 2, 3], [1, 2, 4]) for seed in (0, 1)}) == 4


def test_a_shorter_limit_cuts_the_same_answer() -> None:
    whole, cut = answer_of(Limits(max_tokens=200)), answer_of(Limits(max_tokens=5))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    assert whole.finish_reason == "stop"


def test_an_answer_ends_by_itself_with_the_end_of_turn_token_that_has_no_text() -> None:
    answer = answer_of(Limits(max_tokens=1000))
    assert (answer.token_ids[-1], answer.pieces[-1], answer.finish_reason) == (2, "", "stop")
    assert 2 not in answer.token_ids[:-1]


def test_ignore_eos_generates_exactly_max_tokens() -> None:
    answer = answer_of(Limits(max_tokens=1000, ignore_eos=True))
    assert (len(answer.token_ids), answer.finish_reason, 2 in answer.token_ids) == (1000, "length", False)


def test_min_tokens_keeps_an_answer_from_ending_early() -> None:
    assert len(answer_of(Limits(max_tokens=1000, min_tokens=500)).token_ids) > 500


def test_no_two_punctuation_marks_meet() -> None:
    tokens = answer_of(Limits(max_tokens=1000, ignore_eos=True)).token_ids
    assert 5 in tokens
    assert all(pair != (5, 5) for pair in pairwise(tokens))


def test_a_stop_string_ends_the_answer_before_it_even_across_tokens() -> None:
    answer = Answer(token_ids=[10, 11, 12, 13], pieces=[" a", " b", " c", " d"], finish_reason="length")
    assert cut_at_stop(answer, ["b c", "zzz"]) == Answer(
        token_ids=[10, 11, 12], pieces=[" a", " ", ""], finish_reason="stop", stop_reason="b c"
    )
    assert cut_at_stop(answer, ["zzz"]) == answer

"""Why a pod was picked, in the words that the page has for a decision."""

import pytest
from msgspec.structs import replace

from extproc.pages.decision_words import why
from extproc.pages.picker_state import CandidateState, DecisionState


def candidate(endpoint: str, total: float | None, **scores: float) -> CandidateState:
    """Return a candidate; `cache_room=` is the scorer cache-room."""
    return CandidateState(
        endpoint=endpoint, total=total, scores={name.replace("_", "-"): score for name, score in scores.items()}
    )


DECISION = DecisionState(
    endpoint="a",
    prompt_tokens=1000,
    matched_tokens=800,
    best_matched_tokens=800,
    strategy="kv-aware",
    weights={"prefill-work": 16.0, "queue-depth": 1.0},
    candidates=[
        candidate("a", 16.5, prefill_work=1.0, queue_depth=0.5),
        candidate("b", 9.0, prefill_work=0.5, queue_depth=1.0),
    ],
    candidates_left_out=2,
)
CACHE = "800 of 1,000 prompt tokens are expected in its cache, as many as anywhere."


def test_it_says_by_what_it_is_ahead_and_in_what_behind() -> None:
    assert why(DECISION) == (
        f"Best of 4: 7.50 points ahead of b, for its prefill-work (+8.00); behind in queue-depth (−0.50). {CACHE}"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"candidates": DECISION.candidates[:1], "candidates_left_out": 0}, "It was the only pod that could take it."),
        (
            {"candidates": [candidate("a", 1.0), candidate("b", 1.0)], "as_good": 3},
            "3 pods were as good as each other: one of them was taken.",
        ),
        (
            {"candidates": [candidate("a", 1.0), candidate("b", 1.0)], "as_good": 2},
            "Two pods were as good as each other: one of them was taken.",
        ),
        (
            {"candidates": [candidate("a", 1.0), candidate("b", 2.5)]},
            "b scored 1.50 more, but did not get it: strategy kv-aware.",
        ),
    ],
)
def test_it_says_what_the_numbers_bear_out(changes: dict[str, object], words: str) -> None:
    assert why(replace(DECISION, **changes)) == f"{words} {CACHE}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"best_matched_tokens": 900},
            "800 of 1,000 prompt tokens are expected in its cache; another pod has 900. "
            "100 tokens are computed again for a shorter wait.",
        ),
        (
            {"matched_tokens": 0, "best_matched_tokens": 0},
            "No pod is known to have the beginning of this prompt in its cache.",
        ),
        (
            {"matched_tokens": 0},
            "None of the prompt is in its cache; another pod has 800. "
            "800 tokens are computed again for a shorter wait.",
        ),
        (
            {"matched_tokens": 0, "best_matched_tokens": 0, "degraded": ["prefix-index-timeout"]},
            "What the pods have in their caches was not known: the index gave no answer.",
        ),
    ],
)
def test_it_says_what_the_cache_gave(changes: dict[str, object], words: str) -> None:
    only = replace(DECISION, candidates=DECISION.candidates[:1], candidates_left_out=0)
    assert why(replace(only, **changes)) == f"It was the only pod that could take it. {words}"


def test_of_a_refusal_and_without_candidates_it_says_nothing() -> None:
    assert why(replace(DECISION, endpoint=None)) == ""
    assert why(replace(DECISION, candidates=[])) == ""

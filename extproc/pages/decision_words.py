"""Explains a routing decision in two sentences, using only reasons that the numbers support. Pure.

The page for browsers shows exactly the same words for an opened decision (`page/explanation.js`):
`tests/browser/test_decision_words.py` compares them.
"""

from collections.abc import Iterator, Sequence
from decimal import ROUND_HALF_UP, Decimal

from extproc.pages.picker_state import CandidateState, DecisionState

TELLING = 0.005  # points; a smaller difference is no reason
UNREAD = frozenset({"prefix-index-unavailable", "prefix-index-timeout"})  # the index gave no answer
MOST_AHEAD = 3  # scorers named
MOST_BEHIND = 2


def why(decision: DecisionState) -> str:
    """Return the explanation, or "" for a refused request or one without known candidates.

    The winner and the best other candidate suffice.
    """
    winner = next((each for each in decision.candidates if each.endpoint == decision.endpoint), None)
    return "" if winner is None else " ".join(_sentences(decision, winner))


def _sentences(decision: DecisionState, winner: CandidateState) -> Iterator[str]:
    if len(decision.candidates) == 1 and not decision.candidates_left_out:
        yield "It was the only pod that could take it."
    else:
        yield from _comparison(decision, winner)
    if decision.prompt_tokens:
        yield _cache(decision)


def _comparison(decision: DecisionState, winner: CandidateState) -> Iterator[str]:
    others = sorted((each for each in decision.candidates if each is not winner), key=lambda each: -(each.total or 0.0))
    following = others[0] if others else None
    if following is None or winner.total is None or following.total is None:
        return
    margin = winner.total - following.total
    points = {
        name: weight * (winner.scores.get(name, 0.0) - following.scores.get(name, 0.0))
        for name, weight in decision.weights.items()
    }
    ahead = sorted((item for item in points.items() if item[1] > TELLING), key=lambda item: -item[1])[:MOST_AHEAD]
    behind = sorted((item for item in points.items() if item[1] < -TELLING), key=lambda item: item[1])[:MOST_BEHIND]
    if margin < -TELLING:
        why_not = "the notes say why" if decision.notes else f"strategy {decision.strategy}"
        yield f"{following.endpoint} scored {_hundredths(-margin)} more, but did not get it: {why_not}."
    elif margin <= TELLING and not ahead and not behind:
        count = "Two pods were" if decision.as_good == 2 else f"{decision.as_good} pods were"
        yield f"{count} as good as each other: one of them was taken."
    else:
        known = len(decision.candidates) + decision.candidates_left_out
        lead = f"Best of {known}: {_hundredths(max(margin, 0.0))} points ahead of {following.endpoint}"
        for_its = f", for its {_listed(ahead)}" if ahead else ""
        yield f"{lead}{for_its}{f'; behind in {_listed(behind)}' if behind else ''}."


def _listed(items: Sequence[tuple[str, float]]) -> str:
    return ", ".join(f"{name} ({'+' if points > 0 else '−'}{_hundredths(abs(points))})" for name, points in items)


def _hundredths(points: float) -> Decimal:
    """Round half up, as the page's `toFixed(2)` does."""
    return Decimal(points).quantize(Decimal("0.01"), ROUND_HALF_UP)


def _cache(decision: DecisionState) -> str:
    matched, best = decision.matched_tokens, decision.best_matched_tokens
    if not best and UNREAD & set(decision.degraded):
        return "What the pods have in their caches was not known: the index gave no answer."
    if not best:
        return "No pod is known to have the beginning of this prompt in its cache."
    here = (
        f"{matched:,} of {decision.prompt_tokens:,} prompt tokens are expected in its cache"
        if matched
        else "None of the prompt is in its cache"
    )
    if best <= matched:
        return f"{here}, as many as anywhere."
    return f"{here}; another pod has {best:,}. {best - matched:,} tokens are computed again for a shorter wait."

"""From candidates to a decision: filter, score, order. A pure function, called by `pick_endpoint` once a request."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.core.endpoint import Candidate
from extproc.core.filters import FILTERS
from extproc.core.policy import PickPolicy
from extproc.core.scorers import SCORERS
from extproc.errors import NoReadyEndpointError


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request goes and everything that led there."""

    endpoints: tuple[str, ...]  # the winner, then the fallbacks in order
    kept: tuple[Candidate, ...]  # what passed the filters
    rejected: Mapping[str, str]  # address -> filter and its words
    scores: Mapping[str, Sequence[float]]  # scorer -> one score per kept candidate
    totals: Sequence[float]  # weighted sums, one per kept candidate
    weights: Mapping[str, float]
    prompt_tokens: int  # 0 when unknown
    matched_tokens: int  # what the winner is predicted to find in its cache
    degraded: Mapping[str, str]  # inputs that were missing: name -> what happened, for people

    def reasons(self) -> list[str]:
        """Return the winner's scores as a person reads them, the weightiest first."""
        winner = next(i for i, candidate in enumerate(self.kept) if candidate.address == self.endpoints[0])
        parts = sorted(
            ((self.weights[name] * scores[winner], name, scores[winner]) for name, scores in self.scores.items()),
            reverse=True,
        )
        return [f"{name} {score:.2f} × {self.weights[name]:g}" for _, name, score in parts]


def decide(
    candidates: Sequence[Candidate],
    *,
    policy: PickPolicy,
    prompt_tokens: int,
    degraded: Mapping[str, str],
    tie_break: Callable[[], float],
) -> Decision:
    """Filter and score the candidates and order them, best first; ties are broken by `tie_break` (a random number).

    Raise NoReadyEndpointError when no candidate passes the filters.
    """
    kept, rejected = apply_filters(candidates)
    if not kept:
        raise NoReadyEndpointError(
            "no endpoint is ready: every one of them is unreachable"
            if candidates
            else "no endpoint is configured for this picker"
        )
    scores = {name: SCORERS[name](kept) for name, weight in policy.weights.items() if weight > 0}
    totals = [0.0] * len(kept)
    for name, values in scores.items():
        weight = policy.weights[name]
        totals = [total + weight * value for total, value in zip(totals, values, strict=True)]
    order = sorted(range(len(kept)), key=lambda i: (-totals[i], tie_break()))
    return Decision(
        endpoints=tuple(kept[i].address for i in order[: 1 + policy.fallbacks]),
        kept=tuple(kept),
        rejected=rejected,
        scores=scores,
        totals=totals,
        weights=policy.weights,
        prompt_tokens=prompt_tokens,
        matched_tokens=kept[order[0]].matched_tokens,
        degraded=degraded,
    )


def apply_filters(candidates: Sequence[Candidate]) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that every filter keeps, and for the others the filter and its words by address."""
    kept: list[Candidate] = []
    rejected: dict[str, str] = {}
    for candidate in candidates:
        for name, keep in FILTERS.items():
            objection = keep(candidate)
            if objection is not None:
                rejected[candidate.address] = f"{name}: {objection}"
                break
        else:
            kept.append(candidate)
    return kept, rejected

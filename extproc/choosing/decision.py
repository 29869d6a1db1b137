"""From candidates to a decision: filter, score, order. Pure."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.choosing.filters import CLIENTS_ONLY, FILTERS, LENIENT
from extproc.choosing.scorers import SCORERS
from extproc.errors import NoReadyEndpointError
from extproc.pods.endpoint import NOTHING_ASKED, Ask, Candidate, Role
from extproc.policy.values import PickPolicy

DIGITS = 9  # of a total; what is beyond is noise
CLEAR_GAP = 1e-8  # between totals: rounding to these digits makes equal only what is closer


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
    best_matched_tokens: int = 0  # of all kept candidates; less the matched ones: what the pick gave up
    notes: tuple[str, ...] = ()  # what else was done and is no fault, for people

    @property
    def winner(self) -> Candidate:
        """The candidate that was picked."""
        address = self.endpoints[0]
        for candidate in self.kept:
            if candidate.address == address:
                return candidate
        raise LookupError(f"{address} is not among those that may serve")

    def reasons(self) -> list[str]:
        """Return the winner's scores as a person reads them, the weightiest first."""
        winner = next(i for i, candidate in enumerate(self.kept) if candidate.address == self.endpoints[0])
        parts = sorted(
            ((self.weights[name] * scores[winner], name, scores[winner]) for name, scores in self.scores.items()),
            reverse=True,
        )
        return [f"{name} {score:.2f} × {self.weights[name]:g}" for _, name, score in parts]


def decide(
    kept: Sequence[Candidate],
    *,
    rejected: Mapping[str, str],
    policy: PickPolicy,
    prompt_tokens: int,
    degraded: Mapping[str, str],
    tie_break: Callable[[], float],
    ask: Ask = NOTHING_ASKED,
    notes: Sequence[str] = (),
    reserve: Sequence[str] = (),
) -> Decision:
    """Score the candidates that may serve and order them, best first; ties are broken by `tie_break` (a random number).

    `kept` and `rejected` are what `require_some` and the endpoints' room have left; there is at least one. `reserve`
    are endpoints that may serve and have no room: Envoy's retries go there before they go to a stranger.
    """
    scores: dict[str, Sequence[float]] = {}
    totals = [0.0] * len(kept)
    scales, weights = policy.scales, policy.weights
    for name, weight in weights.items():
        if weight > 0:
            scores[name] = column = SCORERS[name](kept, ask, scales)
            for i, score in enumerate(column):
                totals[i] += weight * score
    order = best_first(totals, tie_break)
    best_matched = 0
    for candidate in kept:
        best_matched = max(best_matched, candidate.matched_tokens)
    winner = kept[order[0]]
    missing = degraded
    if winner.source_state:
        missing = {
            **degraded,
            "prefix-source-" + winner.source_state: (
                f"the index's blocks of {winner.address} may not be all that it holds"
            ),
        }
    places = [kept[i].address for i in order[: 1 + policy.fallbacks]]
    if reserve:
        places = [*places, *reserve][: 1 + policy.fallbacks]
    return Decision(
        endpoints=tuple(places),
        kept=tuple(kept),
        rejected=rejected,
        scores=scores,
        totals=totals,
        weights=weights,
        prompt_tokens=prompt_tokens,
        matched_tokens=winner.matched_tokens,
        degraded=missing,
        best_matched_tokens=best_matched,
        notes=tuple(notes),
    )


def require_some(
    candidates: Sequence[Candidate], *, ask: Ask, strict: frozenset[str] = frozenset()
) -> tuple[Sequence[Candidate], dict[str, str]]:
    """Apply the filters; raise NoReadyEndpointError when no candidate passes them."""
    kept, rejected = apply_filters(candidates, ask=ask, strict=strict)
    if not kept:
        raise NoReadyEndpointError(_why_none(rejected))
    return kept, rejected


def apply_filters(
    candidates: Sequence[Candidate], *, ask: Ask = NOTHING_ASKED, strict: frozenset[str] = frozenset()
) -> tuple[Sequence[Candidate], dict[str, str]]:
    """Return the candidates that every filter keeps, and for the others the filter and its words by address.

    A lenient filter that would leave no candidate gives way, unless `strict` names it.
    """
    kept: Sequence[Candidate] = candidates
    rejected: dict[str, str] = {}
    for name, dropped_by in FILTERS.items():
        dropped = dropped_by(kept, ask)
        if not dropped or (len(dropped) == len(kept) and name in LENIENT and name not in strict):
            continue
        for address, why in dropped.items():
            rejected[address] = f"{name}: {why}"
        kept = [candidate for candidate in kept if candidate.address not in dropped]
    return kept, rejected


def prefillers(candidates: Sequence[Candidate], ask: Ask) -> Sequence[Candidate]:
    """Return the prefill pods that may compute the prompt of such a request; no filter gives way for them."""
    kept: Sequence[Candidate] = [candidate for candidate in candidates if candidate.role is Role.PREFILL]
    for name, dropped_by in FILTERS.items():
        if not kept:
            break
        if name not in CLIENTS_ONLY and (dropped := dropped_by(kept, ask)):
            kept = [candidate for candidate in kept if candidate.address not in dropped]
    return kept


def best_first(totals: Sequence[float], tie_break: Callable[[], float]) -> list[int]:
    """Return the places of the totals, the highest one's first; equal but for the noise of adding floats is equal."""
    ranks = [(-total, tie_break()) for total in totals]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    before = totals[order[0]]
    for i in order:
        gap = before - totals[i]
        if gap and not gap > CLEAR_GAP:
            # only now is it worth its price, a third of a decision: how floats are written is code of its own
            ranks = [(-round(total, DIGITS), tie) for total, (_, tie) in zip(totals, ranks, strict=True)]
            return sorted(range(len(ranks)), key=ranks.__getitem__)
        before = totals[i]
    return order


def _why_none(rejected: Mapping[str, str]) -> str:
    if not rejected:
        return "no endpoint is configured for this picker"
    words = {why.partition(": ")[0] for why in rejected.values()}
    if words == {"ready"}:
        return "no endpoint is ready: every one of them is unreachable"
    return "no endpoint may serve this request: " + ", ".join(sorted({f"{why}" for why in rejected.values()}))

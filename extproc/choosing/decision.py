"""Filter, score and order the candidates. Pure.

Each filter returns the addresses to drop and a short reason. A filter in `LENIENT` is skipped where it would leave no
candidate: its input may be stale or a guess, and then the pod's own answer is better than ours.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from operator import mul

import msgspec

from extproc.choosing.scorers import SCORERS
from extproc.errors import NoReadyEndpointError, PluginSkippedError
from extproc.pods.endpoint import NOTHING_ASKED, Ask, Candidate, Reachability, Role
from extproc.pods.pod_ranks import MARK, one_a_pod, pod_of
from extproc.policy.values import PickPolicy

DIGITS = 9  # decimals of a total that count; the rest is floating-point noise
CLEAR_GAP = 1e-8  # totals that differ by more stay different after rounding to DIGITS
NONE_DROPPED: Mapping[str, str] = {}

# a look at an enum's member is a call of its descriptor
_READY, _UNKNOWN, _PREFILL = Reachability.READY, Reachability.UNKNOWN, Role.PREFILL


def ready(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that are ready or whose load is unknown."""
    return {
        candidate.address: reachability.value
        for candidate in candidates
        if (reachability := candidate.reachability) is not _READY and reachability is not _UNKNOWN
    }


def subset(candidates: Sequence[Candidate], ask: Ask) -> Mapping[str, str]:
    """Keep the endpoints that the route allows (`envoy.lb.subset_hint`)."""
    if ask.subset is None:
        return NONE_DROPPED
    return {
        candidate.address: "not in the route's subset"
        for candidate in candidates
        if candidate.address not in ask.subset and pod_of(candidate.address) not in ask.subset
    }


def cordoned(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that the policy does not cordon."""
    return {candidate.address: "closed by the policy" for candidate in candidates if candidate.cordoned}


def role(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that answer clients: all but prefill pods."""
    return {candidate.address: "computes prompts for others" for candidate in candidates if candidate.role is _PREFILL}


def model(candidates: Sequence[Candidate], ask: Ask) -> Mapping[str, str]:
    """Keep endpoints that serve the model or adapter; an endpoint with an unknown model list is kept."""
    name = ask.model
    if name is None:
        return NONE_DROPPED
    return {
        candidate.address: "does not serve the model"
        for candidate in candidates
        if (models := candidate.models) is not None and name not in models.models and name not in models.adapters
    }


def context_length(candidates: Sequence[Candidate], ask: Ask) -> Mapping[str, str]:
    """Keep endpoints whose context length fits the prompt and one output token; the pod cuts a longer output."""
    dropped, tokens = {}, ask.prompt_tokens
    for candidate in candidates:
        models = candidate.models  # `context_limit` inlined: this runs for each endpoint at each pick
        limit = ask.max_model_len if models is None or models.max_model_len is None else models.max_model_len
        if limit is not None and tokens >= limit:
            dropped[candidate.address] = f"takes {limit} tokens, the prompt has {tokens}"
    return dropped


def context_limit(candidate: Candidate, ask: Ask) -> int | None:
    """Return an endpoint's context length (prompt and output tokens), or None if unknown."""
    limit = candidate.models.max_model_len if candidate.models is not None else None
    return limit if limit is not None else ask.max_model_len


def healthy(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that neither fail nor lag far behind the others; if none is left, all but failing ones."""
    dropped = [candidate for candidate in candidates if candidate.unhealthy is not None]
    if not dropped:
        return NONE_DROPPED
    if len(dropped) == len(candidates):
        dropped = [candidate for candidate in dropped if candidate.failing]
    return {candidate.address: candidate.unhealthy or "" for candidate in dropped}


FILTERS: dict[str, Callable[[Sequence[Candidate], Ask], Mapping[str, str]]] = {
    "ready": ready,
    "subset": subset,
    "cordoned": cordoned,
    "role": role,
    "model": model,
    "context-length": context_length,
    "healthy": healthy,
}
LENIENT = frozenset({"model", "context-length"})
# filters that no retry may pass; Envoy may try an unhealthy pod
STRICT = ("subset", "cordoned", "role", "model", "context-length")
RETRY_SECONDS = 5  # with no endpoint: when an avoided one is tried again
CLIENTS_ONLY = frozenset({"role"})  # these filter who answers clients, not who may prefill


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The chosen endpoints and everything that led to the choice."""

    # the winner, then one for each retry; they repeat if other pods may not serve: beyond its list, Envoy tries any pod
    endpoints: tuple[str, ...]
    kept: tuple[Candidate, ...]  # passed the filters and the check for room
    rejected: Mapping[str, str]  # address -> filter (or "room") and reason
    scores: Mapping[str, Sequence[float]]  # scorer -> one score per kept candidate
    totals: Sequence[float]  # weighted sums, one per kept candidate
    weights: Mapping[str, float]
    prompt_tokens: int  # 0 when unknown
    matched_tokens: int  # predicted prefix hit of the winner
    degraded: Mapping[str, str]  # missing inputs: name -> explanation for people
    best_matched_tokens: int = 0  # best hit of all kept candidates; minus matched_tokens: the hit that was given up
    notes: tuple[str, ...] = ()  # for people: other effects on the choice that are no fault

    @property
    def winner(self) -> Candidate:
        """The picked candidate."""
        address = self.endpoints[0]
        for candidate in self.kept:
            if candidate.address == address:
                return candidate
        raise LookupError(f"{address} is not among those that may serve")

    @property
    def fallbacks(self) -> list[str]:
        """The further endpoints, each once."""
        return [endpoint for endpoint in dict.fromkeys(self.endpoints) if endpoint != self.endpoints[0]]

    def reasons(self) -> list[str]:
        """Return the winner's scores as text, the largest contribution first."""
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
    """Score the eligible candidates and order them, best first; `tie_break` (a random number) breaks ties.

    `kept` (at least one) and `rejected` come from `require_some` and the check for room. `reserve` are eligible
    endpoints without room: they fill up the fallbacks, so that Envoy does not retry on an arbitrary pod.
    """
    scores: dict[str, Sequence[float]] = {}
    weights, missing = policy.weights, degraded
    for name in weights:
        try:
            scores[name] = SCORERS[name](kept, ask)
        except PluginSkippedError as skipped:
            missing = {**missing, f"plugin-{name}": str(skipped)}
    if len(scores) < len(weights):
        weights = {name: weights[name] for name in scores}
    factors = list(weights.values())
    totals = [sum(map(mul, factors, column)) for column in zip(*scores.values(), strict=True)] or [0.0] * len(kept)
    order = best_first(totals, tie_break)
    winner = kept[order[0]]
    if winner.source_state:
        missing = {
            **missing,
            "prefix-source-" + winner.source_state: (
                f"the index's blocks of {winner.address} may not be all that it holds"
            ),
        }
    is_ranked, places = MARK in winner.address, [kept[i].address for i in order[: 1 + policy.fallbacks]]
    if is_ranked:
        places = one_a_pod((kept[i].address for i in order), most=1 + policy.fallbacks)
    if reserve:
        places = [*places, *reserve][: 1 + policy.fallbacks]
    if len(places) <= policy.fallbacks and (is_ranked or any(why.startswith(STRICT) for why in rejected.values())):
        places = (places * (1 + policy.fallbacks))[: 1 + policy.fallbacks]
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
        best_matched_tokens=max([candidate.matched_tokens for candidate in kept]),
        notes=tuple(notes),
    )


def require_some(
    candidates: Sequence[Candidate], *, ask: Ask, strict: frozenset[str] = frozenset()
) -> tuple[Sequence[Candidate], dict[str, str], dict[str, str]]:
    """Apply the filters as `apply_filters`; raise NoReadyEndpointError when no candidate passes them."""
    kept, rejected, skipped = apply_filters(candidates, ask=ask, strict=strict)
    if not kept:
        passes = any(why.startswith(("ready: ", "healthy: ")) for why in rejected.values())
        raise NoReadyEndpointError(_why_none(rejected), retry_after_seconds=RETRY_SECONDS if passes else None)
    return kept, rejected, skipped


def apply_filters(
    candidates: Sequence[Candidate], *, ask: Ask = NOTHING_ASKED, strict: frozenset[str] = frozenset()
) -> tuple[Sequence[Candidate], dict[str, str], dict[str, str]]:
    """Return the candidates that pass every filter, address -> filter and reason of the others, and skipped plug-ins.

    A lenient filter that would leave no candidate is skipped unless `strict` names it.
    """
    kept: Sequence[Candidate] = candidates
    rejected: dict[str, str] = {}
    missing: dict[str, str] = {}
    for name, dropped_by in FILTERS.items():
        try:
            dropped = dropped_by(kept, ask)
        except PluginSkippedError as skipped:
            missing[f"plugin-{name}"] = str(skipped)
            continue
        if not dropped or (len(dropped) == len(kept) and name in LENIENT and name not in strict):
            continue
        for address, why in dropped.items():
            rejected[address] = f"{name}: {why}"
        kept = [candidate for candidate in kept if candidate.address not in dropped]
    return kept, rejected, missing


def prefillers(candidates: Sequence[Candidate], ask: Ask) -> Sequence[Candidate]:
    """Return the prefill pods that may compute the request's prompt; here no filter is lenient."""
    kept: Sequence[Candidate] = [candidate for candidate in candidates if candidate.role is Role.PREFILL]
    for name, dropped_by in FILTERS.items():
        if not kept:
            break
        if name not in CLIENTS_ONLY:
            with suppress(PluginSkippedError):
                dropped = dropped_by(kept, ask)
                kept = [candidate for candidate in kept if candidate.address not in dropped] if dropped else kept
    return kept


def best_first(totals: Sequence[float], tie_break: Callable[[], float]) -> list[int]:
    """Return the indices of the totals, highest first; totals that differ only by rounding noise are ties."""
    ranks = [(-total, tie_break()) for total in totals]
    order = sorted(range(len(ranks)), key=ranks.__getitem__)
    before = totals[order[0]]
    for i in order:
        gap = before - totals[i]
        if gap and not gap > CLEAR_GAP:
            # rounding (CPython formats the float as text) costs a third of a decision: only when it matters
            ranks = [(-round(total, DIGITS), tie) for total, (_, tie) in zip(totals, ranks, strict=True)]
            return sorted(range(len(ranks)), key=ranks.__getitem__)
        before = totals[i]
    return order


def _why_none(rejected: Mapping[str, str]) -> str:
    if not rejected:
        return "no endpoint is configured for this picker"
    if {why.partition(": ")[0] for why in rejected.values()} == {"ready"}:
        return "no endpoint is ready: " + ", ".join(sorted({why.partition(": ")[2] for why in rejected.values()}))
    return "no endpoint may serve this request: " + ", ".join(sorted({f"{why}" for why in rejected.values()}))

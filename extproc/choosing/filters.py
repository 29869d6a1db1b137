"""Filters: which endpoints may serve a request at all. Each returns the addresses to drop, with a few words why.

A filter of `LENIENT` gives way where it would leave no candidate: what it goes by may be out of date or a guess, and
then the pod's own answer is better than ours.
"""

from collections.abc import Callable, Mapping, Sequence

from extproc.pods.endpoint import Ask, Candidate, Reachability, Role

NONE_DROPPED: Mapping[str, str] = {}

_READY, _UNKNOWN = Reachability.READY, Reachability.UNKNOWN


def ready(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that accept connections and may get requests; unknown load is no reason to drop one."""
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
        if candidate.address not in ask.subset
    }


def cordoned(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that the operator has not closed."""
    return {candidate.address: "closed by the policy" for candidate in candidates if candidate.cordoned}


def role(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that answer clients."""
    return {
        candidate.address: "computes prompts for others" for candidate in candidates if candidate.role is Role.PREFILL
    }


def model(candidates: Sequence[Candidate], ask: Ask) -> Mapping[str, str]:
    """Keep endpoints that serve the model or adapter, where they say what they serve."""
    if ask.model is None:
        return NONE_DROPPED
    return {
        candidate.address: "does not serve the model"
        for candidate in candidates
        if candidate.models is not None and not candidate.models.serves(ask.model)
    }


def context_length(candidates: Sequence[Candidate], ask: Ask) -> Mapping[str, str]:
    """Keep endpoints whose context takes the prompt and one token more; what the client allows beyond is cut there."""
    dropped = {}
    for candidate in candidates:
        limit = context_limit(candidate, ask)
        if limit is not None and ask.prompt_tokens >= limit:
            dropped[candidate.address] = f"takes {limit} tokens, the prompt has {ask.prompt_tokens}"
    return dropped


def context_limit(candidate: Candidate, ask: Ask) -> int | None:
    """Return the tokens of prompt and output that an endpoint takes; None where nobody says."""
    limit = candidate.models.max_model_len if candidate.models is not None else None
    return limit if limit is not None else ask.max_model_len


def healthy(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Keep endpoints that have not failed much lately and are not far slower than the others."""
    return {candidate.address: candidate.unhealthy for candidate in candidates if candidate.unhealthy is not None}


FILTERS: Mapping[str, Callable[[Sequence[Candidate], Ask], Mapping[str, str]]] = {
    "ready": ready,
    "subset": subset,
    "cordoned": cordoned,
    "role": role,
    "model": model,
    "context-length": context_length,
    "healthy": healthy,
}
LENIENT = frozenset({"model", "context-length", "healthy"})
CLIENTS_ONLY = frozenset({"role"})  # says who may answer clients, and nothing of who may compute a prompt

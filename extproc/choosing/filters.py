"""Filters: which endpoints may serve a request at all. Each returns None to keep a candidate or a few words why not.

A filter of `LENIENT` gives way where it would leave no candidate: what it goes by may be out of date or a guess, and
then the pod's own answer is better than ours.
"""

from collections.abc import Callable, Mapping

from extproc.pods.endpoint import Ask, Candidate, Reachability, Role

_READY, _UNKNOWN = Reachability.READY, Reachability.UNKNOWN


def ready(candidate: Candidate, _: Ask) -> str | None:
    """Keep endpoints that accept connections and may get requests; unknown load is no reason to drop one."""
    reachability = candidate.reachability
    return None if reachability is _READY or reachability is _UNKNOWN else reachability.value


def subset(candidate: Candidate, ask: Ask) -> str | None:
    """Keep the endpoints that the route allows (`envoy.lb.subset_hint`)."""
    return None if ask.subset is None or candidate.address in ask.subset else "not in the route's subset"


def cordoned(candidate: Candidate, _: Ask) -> str | None:
    """Keep endpoints that the operator has not closed."""
    return "closed by the policy" if candidate.cordoned else None


def role(candidate: Candidate, _: Ask) -> str | None:
    """Keep endpoints that answer clients."""
    return "computes prompts for others" if candidate.role is Role.PREFILL else None


def model(candidate: Candidate, ask: Ask) -> str | None:
    """Keep endpoints that serve the model or adapter, where they say what they serve."""
    if candidate.models is None or ask.model is None or candidate.models.serves(ask.model):
        return None
    return "does not serve the model"


def context_length(candidate: Candidate, ask: Ask) -> str | None:
    """Keep endpoints whose context takes the prompt and one token more; what the client allows beyond is cut there."""
    limit = candidate.models.max_model_len if candidate.models is not None else None
    limit = limit if limit is not None else ask.max_model_len
    if limit is None or ask.prompt_tokens < limit:
        return None
    return f"takes {limit} tokens, the prompt has {ask.prompt_tokens}"


def healthy(candidate: Candidate, _: Ask) -> str | None:
    """Keep endpoints that have not failed much lately and are not far slower than the others."""
    return candidate.unhealthy


FILTERS: Mapping[str, Callable[[Candidate, Ask], str | None]] = {
    "ready": ready,
    "subset": subset,
    "cordoned": cordoned,
    "role": role,
    "model": model,
    "context-length": context_length,
    "healthy": healthy,
}
LENIENT = frozenset({"model", "context-length", "healthy"})

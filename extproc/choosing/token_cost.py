"""What a request would cost on each endpoint, in tokens: prompts to be computed before it and its own, and decoding.

Tokens and not requests: one long prompt is hundreds of short ones. Pure; used by `scorers` and by `pick` for
hot prefixes. Columns over all candidates, because they are made once a request.
"""

from collections.abc import Sequence

from extproc.pods.endpoint import Candidate
from extproc.policy.values import Scales


def prefill_waits(candidates: Sequence[Candidate], *, scales: Scales) -> list[float]:
    """Return the tokens that each endpoint computes before it begins with this request's prompt.

    Those are the uncached tokens that all pickers have sent there, less what it has computed since. Waiting requests
    that the pod reports count at least `scales.waiting_tokens` each: they may come past the pickers. An endpoint of
    unknown load is taken for one with the longest queue.
    """
    each = scales.waiting_tokens
    waits = []
    unknown = False
    for candidate in candidates:
        wait, load = candidate.backlog_tokens, candidate.load
        if load is None:
            unknown = True
        elif load.waiting_requests and load.waiting_requests * each > wait:
            wait = load.waiting_requests * each
        waits.append(wait)
    if unknown:
        longest = max(waits)
        waits = [longest if candidate.load is None else wait for candidate, wait in zip(candidates, waits, strict=True)]
    return waits


def prefill_costs(candidates: Sequence[Candidate], *, scales: Scales) -> list[float]:
    """Return for each endpoint that wait and the uncached rest of this prompt, in tokens.

    The rest counts `scales.recompute_factor` times: waiting for a prefix that is being computed and computing it once
    more elsewhere take the client equally long, but the second one takes the work from others.
    """
    costs, factor = prefill_waits(candidates, scales=scales), scales.recompute_factor
    for i, candidate in enumerate(candidates):
        # a prompt that is cached as a whole has still one token to compute
        costs[i] += factor * max(candidate.prompt_tokens - candidate.saved_tokens, 1.0)
    return costs


def decode_loads(candidates: Sequence[Candidate], *, scales: Scales) -> list[float | None]:
    """Return what decoding costs an endpoint a token: its sequences, and the context that they attend to.

    None where the load is unknown.
    """
    loads: list[float | None] = []
    for candidate in candidates:
        load = candidate.load
        if load is None:
            loads.append(None)
            continue
        active = load.waiting_requests + load.running_requests + candidate.booked_requests
        held = load.kv_usage * load.kv_capacity_tokens if load.kv_capacity_tokens is not None else 0.0
        loads.append(max(active, candidate.open_requests) * scales.request_tokens + max(candidate.context_tokens, held))
    return loads

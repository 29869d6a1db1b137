"""Scorers: how good each candidate is on one count, from 0.0 (worst) to 1.0 (best). Weights are in `policy`.

Each takes all candidates at once and returns a column. Where all are equal, all get the same, so that a scorer which
has nothing to say decides nothing. A scorer with a scale counts a difference of that size as one whole point; where the
differences are larger, they are spread over the point.
"""

from collections.abc import Callable, Mapping, Sequence

from extproc.pods.endpoint import Ask, Candidate
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
        active = load.unfinished_requests + candidate.booked_requests
        held = load.kv_usage * load.kv_capacity_tokens if load.kv_capacity_tokens is not None else 0.0
        loads.append(max(active, candidate.open_requests) * scales.request_tokens + max(candidate.context_tokens, held))
    return loads


Column = list[float]


def prefix(candidates: Sequence[Candidate], _: Ask, __: Scales) -> Column:
    """Score the share of the prompt's tokens that the endpoint already holds; slower tiers count less."""
    return [
        candidate.saved_tokens / candidate.prompt_tokens if candidate.prompt_tokens else 0.0 for candidate in candidates
    ]


def recent_prefix(candidates: Sequence[Candidate], _: Ask, __: Scales) -> Column:
    """Score the share of the prompt's tokens that was sent to the endpoint a short while ago."""
    return [
        candidate.recent_tokens / candidate.prompt_tokens if candidate.prompt_tokens else 0.0
        for candidate in candidates
    ]


def prefill_work(candidates: Sequence[Candidate], _: Ask, scales: Scales) -> Column:
    """Score 1.0 where the first token comes after the fewest computed tokens: queued ones and this prompt's own."""
    return _least_is_best(prefill_costs(candidates, scales=scales), scale=scales.prefill_tokens)


def decode_work(candidates: Sequence[Candidate], _: Ask, scales: Scales) -> Column:
    """Score 1.0 where a token costs least: few sequences with little context."""
    return _fewest_is_best(decode_loads(candidates, scales=scales), scale=scales.decode_tokens)


def queue_depth(candidates: Sequence[Candidate], _: Ask, scales: Scales) -> Column:
    """Score 1.0 for the shortest queue; an unknown queue counts as the longest."""
    return _fewest_is_best([candidate.queue_depth for candidate in candidates], scale=scales.queue_requests)


def active_requests(candidates: Sequence[Candidate], _: Ask, scales: Scales) -> Column:
    """Score 1.0 for the fewest requests waiting, running or on their way there; unknown counts as the most."""
    return _fewest_is_best([candidate.active_requests for candidate in candidates], scale=scales.active_requests)


def kv_usage(candidates: Sequence[Candidate], _: Ask, __: Scales) -> Column:
    """Score the share of KV cache blocks that this prompt would leave free; unknown counts as full."""
    column = []
    for candidate in candidates:
        load = candidate.load
        if load is None:
            column.append(0.0)
            continue
        used = load.kv_usage
        if load.kv_capacity_tokens:
            used += (candidate.prompt_tokens - candidate.matched_tokens) / load.kv_capacity_tokens
        column.append(max(1.0 - used, 0.0))
    return column


def cache_room(candidates: Sequence[Candidate], _: Ask, scales: Scales) -> Column:
    """Score 1.0 where this prompt displaces least: share of the cache filled of late x share of the prompt to add."""
    shares = [
        candidate.filled_tokens
        / ((candidate.load and candidate.load.kv_capacity_tokens) or scales.cache_tokens)
        * (1.0 - candidate.matched_tokens / candidate.prompt_tokens)
        if candidate.prompt_tokens
        else 0.0
        for candidate in candidates
    ]
    return _least_is_best(shares, scale=1.0)


def lora(candidates: Sequence[Candidate], ask: Ask, _: Scales) -> Column:
    """Score 1.0 where the adapter is loaded or on its way, 0.8 where a slot is free, 0.6 where it waits for one."""
    adapter = ask.adapter
    if adapter is None:
        return [1.0] * len(candidates)
    return [_adapter_score(candidate, adapter) for candidate in candidates]


def session(candidates: Sequence[Candidate], _: Ask, __: Scales) -> Column:
    """Score 1.0 for the endpoint of this session's last request."""
    return [1.0 if candidate.session else 0.0 for candidate in candidates]


def memory_bandwidth(candidates: Sequence[Candidate], _: Ask, scales: Scales) -> Column:
    """Score the share of memory bandwidth that is free; says nothing unless every endpoint reports it."""
    rates = [candidate.trend.memory_bytes_per_second for candidate in candidates]
    if None in rates:
        return [1.0] * len(candidates)  # not reported is not idle
    return [max(1.0 - (rate or 0.0) / scales.memory_bytes_per_second, 0.0) for rate in rates]


def turn(candidates: Sequence[Candidate], ask: Ask, _: Scales) -> Column:
    """Score 1.0 for the endpoint whose turn it is, and less the later another's comes."""
    count = len(candidates)
    return [1.0 - ((i - ask.turn) % count) / count for i in range(count)]


def _adapter_score(candidate: Candidate, adapter: str) -> float:
    load = candidate.load
    if candidate.adapter_placed:
        return 1.0
    if load is None:
        return 0.0
    listed = load.running_adapters | load.waiting_adapters
    if load.max_adapters is None or len(listed) < load.max_adapters:
        return 1.0 if adapter in load.running_adapters else 0.8
    # vLLM 0.32 lists waiting adapters among the running ones: with more names than slots, it is not
    # known which are loaded
    if adapter in load.running_adapters and len(load.running_adapters) <= load.max_adapters:
        return 1.0
    return 0.6 if adapter in listed else 0.0


def _fewest_is_best(values: Sequence[float | None], *, scale: float) -> Column:
    known = [value for value in values if value is not None]
    if len(known) == len(values):  # nearly always
        return _least_is_best(known, scale=scale)
    if not known:
        return [0.0] * len(values)
    fewest, most = min(known), max(known)
    span = max(most - fewest, scale)
    return [0.0 if value is None else 1.0 - (value - fewest) / span for value in values]


def _least_is_best(values: Sequence[float], *, scale: float) -> Column:
    fewest, most = min(values), max(values)
    if fewest == most:
        return [1.0] * len(values)
    span = max(most - fewest, scale)
    return [1.0 - (value - fewest) / span for value in values]


SCORERS: Mapping[str, Callable[[Sequence[Candidate], Ask, Scales], Column]] = {
    "prefill-work": prefill_work,
    "decode-work": decode_work,
    "prefix": prefix,
    "recent-prefix": recent_prefix,
    "queue-depth": queue_depth,
    "active-requests": active_requests,
    "kv-usage": kv_usage,
    "cache-room": cache_room,
    "lora": lora,
    "session": session,
    "memory-bandwidth": memory_bandwidth,
    "turn": turn,
}

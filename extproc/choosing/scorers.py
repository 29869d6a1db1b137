"""Scorers: how good each candidate is on one count, from 0.0 (worst) to 1.0 (best). Weights are in `policy`.

Each takes all candidates at once and returns a column. Where all are equal, all get the same, so that a scorer which
has nothing to say decides nothing. A scorer with a scale counts a difference of that size as one whole point; where the
differences are larger, they are spread over the point.
"""

from collections.abc import Callable, Mapping, Sequence

from extproc.choosing.token_cost import decode_loads, prefill_costs
from extproc.pods.endpoint import Ask, Candidate
from extproc.policy.values import Scales

Column = list[float]

USUAL = "prefill-work"  # who weighs it weighs the other ones of `usual_columns`, too: the default strategy
NO_COLUMNS: Mapping[str, Column] = {}


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


def usual_columns(candidates: Sequence[Candidate], ask: Ask, scales: Scales) -> Mapping[str, Column]:
    """Return the columns of the default strategy's scorers by name, in one pass over what all of them look at.

    None at all where a load is not known: each has its own way with it. Says no more and no less than the scorers
    themselves, which a test compares.
    """
    waiting_tokens, request_tokens = scales.waiting_tokens, scales.request_tokens
    recompute_factor, cache_tokens = scales.recompute_factor, scales.cache_tokens
    prefills: list[float] = []
    decodes: list[float] = []
    shares: list[float] = []
    depths: list[float] = []
    free: Column = []
    sessions: Column = []
    for candidate in candidates:
        load = candidate.load
        if load is None:
            return NO_COLUMNS
        prompt, matched, worth = candidate.prompt_tokens, candidate.matched_tokens, candidate.worth_tokens
        waiting, capacity, used = load.waiting_requests, load.kv_capacity_tokens, load.kv_usage
        depth = waiting + candidate.booked_requests
        depths.append(depth)
        # as `token_cost` has it
        wait: float = candidate.backlog_tokens
        if waiting and waiting * waiting_tokens > wait:
            wait = waiting * waiting_tokens
        rest: float = prompt - (matched if worth is None else worth)
        prefills.append(wait + recompute_factor * (1.0 if rest < 1.0 else rest))
        active, opened = depth + load.running_requests, candidate.open_requests
        context, held = candidate.context_tokens, used * capacity if capacity is not None else 0.0
        decodes.append((opened if opened > active else active) * request_tokens + (held if held > context else context))
        # as `cache_room` and `kv_usage` have it
        shares.append(
            candidate.filled_tokens / (capacity or cache_tokens) * (1.0 - matched / prompt) if prompt else 0.0
        )
        if capacity:
            used += (prompt - matched) / capacity
        left = 1.0 - used
        free.append(0.0 if left < 0.0 else left)
        sessions.append(1.0 if candidate.session else 0.0)
    return {
        "prefill-work": _least_is_best(prefills, scale=scales.prefill_tokens),
        "decode-work": _least_is_best(decodes, scale=scales.decode_tokens),
        "cache-room": _least_is_best(shares, scale=1.0),
        "queue-depth": _least_is_best(depths, scale=scales.queue_requests),
        "kv-usage": free,
        "lora": lora(candidates, ask, scales) if ask.adapter is not None else [1.0] * len(prefills),
        "session": sessions,
    }


def _adapter_score(candidate: Candidate, adapter: str) -> float:
    load = candidate.load
    if candidate.adapter_placed:
        return 1.0
    if load is None:
        return 0.0
    listed = load.running_adapters | load.waiting_adapters
    if load.max_adapters is None or len(listed) < load.max_adapters:
        return 1.0 if adapter in load.running_adapters else 0.8
    # vLLM 0.32 lists waiting adapters among the running ones: with more names than slots, nobody knows who is loaded
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

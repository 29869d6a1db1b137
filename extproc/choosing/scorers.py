"""Scorers: each rates the candidates on one criterion, from 0.0 (worst) to 1.0 (best). Weights are in `policy`.

Each takes all candidates at once and returns a column. Equal candidates get equal scores, so that a scorer without an
opinion decides nothing. A scale is the difference that is worth one whole point; a larger spread is scaled down to one
point.
"""

from collections.abc import Callable, Sequence

from extproc.errors import PluginSkippedError
from extproc.pods.endpoint import Ask, Candidate

# the differences worth one whole point
PREFILL_TOKENS, DECODE_TOKENS = 16384.0, 65536.0
QUEUE_REQUESTS, ACTIVE_REQUESTS = 4.0, 8.0
REQUEST_TOKENS = 512.0  # cost of a sequence besides its context
RECOMPUTE_FACTOR = 2.0  # waiting tokens that one computed token counts as: it delays the requests behind it, too
WAITING_TOKENS = 512.0  # least tokens of a waiting request in a pod's report
CACHE_TOKENS = 100_000.0  # size of a cache that the pod does not report
MEMORY_BYTES_PER_SECOND = 2e12  # bandwidth of a pod's memory


def prefill_waits(candidates: Sequence[Candidate]) -> list[float]:
    """Return the tokens that each endpoint computes before it starts this request's prompt.

    These are the uncached tokens sent by all pickers, less the tokens computed since. Waiting requests in the pod's
    report count at least WAITING_TOKENS each: they may have bypassed the pickers. An endpoint with unknown
    load counts as having the longest wait.
    """
    each = WAITING_TOKENS
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


def prefill_costs(candidates: Sequence[Candidate]) -> list[float]:
    """Return for each endpoint the prefill wait plus this prompt's uncached tokens.

    The uncached tokens are multiplied by RECOMPUTE_FACTOR: waiting for a prefix that is being computed takes
    the client as long as recomputing it elsewhere, but recomputing takes capacity from other requests.
    """
    costs, factor = prefill_waits(candidates), RECOMPUTE_FACTOR
    for i, candidate in enumerate(candidates):
        # a fully cached prompt still computes one token
        costs[i] += factor * max(candidate.prompt_tokens - candidate.saved_tokens, 1.0)
    return costs


def decode_loads(candidates: Sequence[Candidate]) -> list[float | None]:
    """Return each endpoint's cost per decoded token: its sequences and their context; None if the load is unknown."""
    loads: list[float | None] = []
    for candidate in candidates:
        load = candidate.load
        if load is None:
            loads.append(None)
            continue
        active = load.unfinished_requests + candidate.booked_requests
        held = load.kv_usage * load.kv_capacity_tokens if load.kv_capacity_tokens is not None else 0.0
        loads.append(max(active, candidate.open_requests) * REQUEST_TOKENS + max(candidate.context_tokens, held))
    return loads


Column = list[float]


def prefix(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score the share of the prompt's tokens in the endpoint's cache; slower tiers count less."""
    return [
        candidate.saved_tokens / candidate.prompt_tokens if candidate.prompt_tokens else 0.0 for candidate in candidates
    ]


def recent_prefix(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score the share of the prompt's tokens that recent requests sent to the endpoint."""
    return [
        candidate.recent_tokens / candidate.prompt_tokens if candidate.prompt_tokens else 0.0
        for candidate in candidates
    ]


def prefill_work(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score 1.0 where the fewest tokens are computed before the first token: queued prompts and this one."""
    return _least_is_best(prefill_costs(candidates), scale=PREFILL_TOKENS)


def decode_work(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score 1.0 where decoding is cheapest: few sequences with little context."""
    return _fewest_is_best(decode_loads(candidates), scale=DECODE_TOKENS)


def queue_depth(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score 1.0 for the shortest queue; an unknown queue counts as the longest."""
    return _fewest_is_best([candidate.queue_depth for candidate in candidates], scale=QUEUE_REQUESTS)


def active_requests(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score 1.0 for the fewest requests waiting, running or on their way; unknown counts as the most."""
    return _fewest_is_best([candidate.active_requests for candidate in candidates], scale=ACTIVE_REQUESTS)


def kv_usage(candidates: Sequence[Candidate], _: Ask) -> Column:
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


def cache_room(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score 1.0 where this prompt evicts least: recently filled share of the cache x uncached share of the prompt."""
    shares = [
        candidate.filled_tokens
        / ((candidate.load and candidate.load.kv_capacity_tokens) or CACHE_TOKENS)
        * (1.0 - candidate.matched_tokens / candidate.prompt_tokens)
        if candidate.prompt_tokens
        else 0.0
        for candidate in candidates
    ]
    return _least_is_best(shares, scale=1.0)


def lora(candidates: Sequence[Candidate], ask: Ask) -> Column:
    """Score 1.0 if the adapter is loaded or was sent there, 0.8 if a slot is free, 0.6 if it waits for one."""
    adapter = ask.adapter
    if adapter is None:
        return [1.0] * len(candidates)
    return [_adapter_score(candidate, adapter) for candidate in candidates]


def session(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score 1.0 for the endpoint of this session's last request."""
    return [1.0 if candidate.session else 0.0 for candidate in candidates]


def memory_bandwidth(candidates: Sequence[Candidate], _: Ask) -> Column:
    """Score the free share of the memory bandwidth; all score 1.0 unless every endpoint reports it."""
    rates = [candidate.trend.memory_bytes_per_second for candidate in candidates]
    if None in rates:
        return [1.0] * len(candidates)  # a missing report does not mean idle
    return [max(1.0 - (rate or 0.0) / MEMORY_BYTES_PER_SECOND, 0.0) for rate in rates]


def turn(candidates: Sequence[Candidate], ask: Ask) -> Column:
    """Round robin: score 1.0 for the endpoint whose turn it is, and less the later the turn."""
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
    # vLLM 0.32 lists waiting adapters among the running ones: with more names than slots,
    # the loaded ones are unknown
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


class Scorers(dict[str, Callable[[Sequence[Candidate], Ask], Column]]):
    """Name -> scorer; `plugins` adds the scorers of other packages at start."""

    def __missing__(self, name: str) -> Callable[[Sequence[Candidate], Ask], Column]:
        raise PluginSkippedError(f"{name} is not installed in this picker")


SCORERS = Scorers(
    {
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
)

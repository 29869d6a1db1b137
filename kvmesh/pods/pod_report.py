"""The result of one scrape of a pod's /metrics: its load, its latencies, and facts to check its events against.

Values, made by `engine_metrics`. Counters begin at zero when the pod starts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec


class EndpointLoad(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One pod's reported load, summed over its engines."""

    waiting_requests: int  # for their turn
    running_requests: int
    kv_usage: float  # 0..1, share of cache blocks in use
    prefix_hit_tokens: int  # since the pod started
    prefix_query_tokens: int  # since the pod started
    reported_at: float  # monotonic seconds at which the report was requested
    fetching_requests: int = 0  # that wait for a cache on its way; among the waiting if the pod does not distinguish
    kv_capacity_tokens: int | None = None  # that the pod's cache blocks hold; None if it does not say
    preemptions: int = 0  # since the pod started
    running_adapters: frozenset[str] = frozenset()  # LoRA adapters in use now
    waiting_adapters: frozenset[str] = frozenset()
    max_adapters: int | None = None  # limit on loaded adapters; None if LoRA is off, or unused since the start
    inter_token_seconds_sum: float = 0.0  # since the pod started
    inter_token_count: int = 0
    memory_bytes_moved: float | None = None  # since the pod started; None without MFU metrics
    # Also since the pod started; 0 if a pod does not count it. The prefill values are of finished requests.
    prefill_seconds_sum: float = 0.0  # from being scheduled to the first token
    prefill_count: int = 0  # finished requests
    prefill_computed_tokens: int = 0  # of their prompts, without cached tokens
    first_token_seconds_sum: float = 0.0  # from arrival at the pod
    first_token_count: int = 0
    # fetched from other pods' caches since the pod started; 0 if it fetches none
    fetched_tokens: int = 0  # from anywhere outside its own GPU cache
    fetched_bytes: float = 0.0
    fetch_seconds_sum: float = 0.0  # of all fetches together, which may overlap
    caches_prefixes: bool = True  # False only if it says so
    is_asleep: bool = False  # its weights are not in GPU memory: requests would hang
    is_dealt: bool = False  # the pod itself deals its requests among ranks: a prompt may be at any of them
    shows_last_step: bool = False  # the engine's numbers stay unchanged while it takes no step

    def is_stale(self, *, now: float, limit_seconds: float) -> bool:
        """Tell whether the report is too old to be used."""
        return now - self.reported_at > limit_seconds

    @property
    def keeps_prompts(self) -> bool:
        """Whether a prompt that was sent there is in the cache for the next request."""
        return self.caches_prefixes and not self.is_dealt

    @property
    def unfinished_requests(self) -> int:
        """All requests in the pod: waiting, fetching or running."""
        return self.waiting_requests + self.fetching_requests + self.running_requests

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of prompt tokens found in the pod's cache since it started, or None before the first prompt."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None


def sum_loads(ranks: Sequence[EndpointLoad]) -> EndpointLoad:
    """Return the load of a pod with these ranks: sums, the mean use of the cache, and the oldest report."""
    oldest = min(ranks, key=lambda load: load.reported_at)
    sums = {}
    for name in [name for name in EndpointLoad.__struct_fields__ if name not in ("kv_usage", "reported_at")]:
        values = [getattr(load, name) for load in ranks]
        if all(type(value) in (int, float) for value in values):
            sums[name] = sum(values)
    return msgspec.structs.replace(oldest, kv_usage=sum(load.kv_usage for load in ranks) / len(ranks), **sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodHistogram:
    """One histogram as a pod shows it: cumulative counts of observations up to each bound, since its start."""

    bounds: tuple[float, ...]  # seconds, ascending; the last one is inf
    counts: tuple[float, ...]  # one per bound, cumulative
    seconds: float  # sum of all observations


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCounters:
    """One engine (data-parallel rank) of the pod; counters since it started."""

    prompt_tokens: int  # of requests whose prefill is complete
    cached_prompt_tokens: int | None  # part of these, from any cache; None before vLLM 0.13 or so
    generated_tokens: int
    prefills: int  # requests that have had their first token
    unfinished: int  # requests running or waiting now
    queried_tokens: int  # looked up in the prefix cache; counted before the prefill, perhaps more than once
    hit_tokens: int  # part of these, found in the pod's own cache


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReport:
    """One scrape."""

    scraped_at: float  # monotonic seconds at which it was asked for
    started_at: float | None = None  # of the API server's process, in unix seconds by its own clock; None if unknown
    block_size: int | None = None  # tokens that a block must have before the pod caches it; the largest known
    other_block_sizes: frozenset[int] = frozenset()  # other valid sizes of blocks in its events
    caches_prefixes: bool | None = None  # None if it does not say
    engines: Mapping[int, EngineCounters] | None = None  # None if it counts nothing (--disable-log-stats)

    @property
    def block_sizes(self) -> frozenset[int]:
        """All valid sizes of blocks in its events."""
        return self.other_block_sizes if self.block_size is None else self.other_block_sizes | {self.block_size}


def is_restart(before: EngineCounters, after: EngineCounters) -> bool:
    """Tell whether the counters were reset in between."""
    return after.prefills < before.prefills or after.prompt_tokens < before.prompt_tokens


def least_new_blocks(before: EngineCounters, after: EngineCounters, *, block_size: int, caches: bool = True) -> int:
    """Return how many full blocks the engine must at least have filled between two scrapes.

    A request begins to compute at a block boundary and leaves at most block_size - 1 tokens in a partial last block;
    its last generated token is never computed. So n requests that computed t tokens filled at least (t - n *
    block_size) / block_size blocks, however the tokens are spread. Exact repeats and prompts shorter than a block count
    for nothing, as they should: no event is due for them.
    """
    computed = after.prompt_tokens - before.prompt_tokens
    if caches:
        # A prefill counts when it is complete, its look-up when it begins, and again whenever it is put off: neither
        # number alone is right for a request that was under way at the first scrape.
        # figure alone would do for one that was under way at the first scrape
        hits = after.hit_tokens - before.hit_tokens
        cached = hits
        if after.cached_prompt_tokens is not None and before.cached_prompt_tokens is not None:
            cached = after.cached_prompt_tokens - before.cached_prompt_tokens
        computed = min(computed - cached, after.queried_tokens - before.queried_tokens - hits)
    computed = max(computed, 0) + after.generated_tokens - before.generated_tokens
    requests = after.prefills - before.prefills + before.unfinished
    return max(computed - requests * block_size, 0) // block_size


def sum_counters(engines: Collection[EngineCounters]) -> EngineCounters | None:
    """Add engines up, or return None if there are none."""
    if not engines:
        return None
    cached = [engine.cached_prompt_tokens for engine in engines if engine.cached_prompt_tokens is not None]
    return EngineCounters(
        prompt_tokens=sum(engine.prompt_tokens for engine in engines),
        cached_prompt_tokens=sum(cached) if len(cached) == len(engines) else None,
        generated_tokens=sum(engine.generated_tokens for engine in engines),
        prefills=sum(engine.prefills for engine in engines),
        unfinished=sum(engine.unfinished for engine in engines),
        queried_tokens=sum(engine.queried_tokens for engine in engines),
        hit_tokens=sum(engine.hit_tokens for engine in engines),
    )

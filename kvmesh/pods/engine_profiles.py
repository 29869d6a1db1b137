"""The names under which each engine shows its load: one table, as data. No I/O.

An engine is known by the prefix of its names. Another engine needs an entry here, and nothing else.

* vLLM 0.8 to 0.32: vllm/v1/metrics/loggers.py.
* SGLang 0.4.6 to 0.5.23: sglang/srt/observability/metrics_collector.py. Its tokenizer counts a request's tokens when
  the request ends, its schedulers as they compute them. With --enable-metrics-for-all-schedulers, each tensor-parallel
  rank shows the same gauges; with priority scheduling, each priority has a series beside the total.
* TensorRT-LLM, main branch of 2026 (050f80d): tensorrt_llm/metrics/collector.py. Its /metrics is JSON, and reading
  empties it. What is read here is /prometheus/metrics, which it has with `return_perf_metrics: true`. Its gauges are
  those of the last step, also long after it.
"""

from dataclasses import dataclass
from typing import NamedTuple

METRICS_PATHS = ("/metrics", "/prometheus/metrics")  # tried in this order; a pod keeps to the one that it has


class Source(NamedTuple):
    """A metric, or its series with this label, as written on the page."""

    name: bytes
    label: bytes = b""


Sum = tuple[Source, ...]  # summed up; present if its first source is
Choices = tuple[Sum, ...]  # the first one present counts


def _sum(*names: str) -> Sum:
    return tuple(Source(name.encode()) for name in names)


def _either(*names: str) -> Choices:
    """Return the names of one metric, newest first."""
    return tuple(_sum(name) for name in names)


class CacheInfo(NamedTuple):
    """A metric whose labels describe the cache."""

    name: bytes
    block_tokens: bytes
    blocks: bytes
    # a block is cached once it has this many tokens; the largest counts. `finer_sizes`: other valid sizes in events
    sizes: tuple[bytes, ...]
    finer_sizes: tuple[bytes, ...] = ()
    caches: bytes = b""  # "True" or "False": whether prefixes are cached


class Adapters(NamedTuple):
    """A metric whose labels describe LoRA adapters."""

    name: bytes
    most: bytes
    running: bytes
    waiting: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """How one engine shows the values that we read. Histograms are named without `_sum` and similar suffixes."""

    name: str
    prefix: bytes  # of all its names
    waiting: Sum  # requests that are not computed yet, in any queue
    running: Choices
    kv_usage: Choices  # a fraction of 1, whatever the name says
    queried_tokens: Choices  # of prompts, looked up in the prefix cache
    hit_tokens: Choices  # of these, found
    prompt_tokens: Choices
    cached_tokens: Choices
    generated_tokens: Choices
    first_token: tuple[bytes, ...]  # histograms of seconds, newest name first
    inter_token: tuple[bytes, ...]
    cache_info: CacheInfo | None = None
    fetching: Sum = ()  # waiting requests that wait for a cache on its way, not for their turn
    awake: Sum = ()  # 0 while the engine sleeps; absent if it cannot
    capacity_tokens: Choices = ()
    block_tokens: Choices = ()
    blocks: Choices = ()
    preemptions: Choices = ()
    moved_bytes: Sum = ()
    fetched_tokens: Choices = ()
    fetched_bytes: bytes = b""  # histogram
    fetch_seconds: bytes = b""  # histogram
    prefill_seconds: bytes = b""  # histogram, of finished requests
    prefill_computed: bytes = b""  # histogram of tokens; without it computed tokens are prompt tokens minus cached ones
    adapters: Adapters | None = None
    hits_in_blocks: bytes = b""  # a counter of hits that counts blocks if its help says so
    rank_label: bytes = b"engine"
    # series that differ only in these are replicas; those with a non-empty `parts_label` are parts of another series
    replica_labels: tuple[bytes, ...] = ()
    parts_label: bytes = b""
    shows_last_step: bool = False  # unchanged numbers prove nothing: there may have been no step since


VLLM = EngineProfile(
    name="vLLM",
    prefix=b"vllm:",
    waiting=_sum("vllm:num_requests_waiting"),
    running=_either("vllm:num_requests_running"),
    kv_usage=_either("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),  # the latter before 0.10
    queried_tokens=_either("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    hit_tokens=_either("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    prompt_tokens=_either("vllm:prompt_tokens_total"),
    cached_tokens=_either("vllm:prompt_tokens_cached_total"),
    generated_tokens=_either("vllm:generation_tokens_total"),
    first_token=(b"vllm:time_to_first_token_seconds",),
    inter_token=(b"vllm:inter_token_latency_seconds", b"vllm:time_per_output_token_seconds"),
    cache_info=CacheInfo(
        name=b"vllm:cache_config_info",
        block_tokens=b"block_size",
        blocks=b"num_gpu_blocks",
        sizes=(b"block_size", b"effective_attention_block_size"),
        finer_sizes=(b"hash_block_size", b"prefix_match_unit", b"cache_hit_alignment_tokens"),
        caches=b"enable_prefix_caching",
    ),
    # Of consumers. The "deferred" requests of num_requests_waiting_by_reason are more: they include, until they run,
    # requests whose cache has come, whose grammar is ready, or whose LoRA adapter finds no place, all of which wait for
    # their turn.
    fetching=(Source(b"vllm:num_requests_kv_fetch_by_stage", b'stage="in_progress"'),),
    awake=(Source(b"vllm:engine_sleep_state", b'sleep_state="awake"'),),
    preemptions=_either("vllm:num_preemptions_total"),
    # with --enable-mfu-metrics only
    moved_bytes=_sum("vllm:estimated_read_bytes_per_gpu_total", "vllm:estimated_write_bytes_per_gpu_total"),
    fetched_tokens=_either("vllm:external_prefix_cache_hits_total"),
    fetched_bytes=b"vllm:nixl_bytes_transferred",
    fetch_seconds=b"vllm:nixl_xfer_time_seconds",
    prefill_seconds=b"vllm:request_prefill_time_seconds",
    prefill_computed=b"vllm:request_prefill_kv_computed_tokens",  # not in older versions
    adapters=Adapters(
        b"vllm:lora_requests_info", most=b"max_lora", running=b"running_lora_adapters", waiting=b"waiting_lora_adapters"
    ),
    hits_in_blocks=b"vllm:gpu_prefix_cache_hits",  # 0.8; tokens since
)
_LIVE = b"sglang:realtime_tokens_total"
_LIVE_HITS, _LIVE_COMPUTED = Source(_LIVE, b'mode="prefill_cache"'), Source(_LIVE, b'mode="prefill_compute"')
SGLANG = EngineProfile(
    name="SGLang",
    prefix=b"sglang:",
    waiting=_sum(
        *("sglang:num_queue_reqs", "sglang:num_grammar_queue_reqs"),
        # for separate prefill and decode; the second is the older name of the first
        *("sglang:num_prefill_bootstrap_queue_reqs", "sglang:num_prefill_prealloc_queue_reqs"),
        *("sglang:num_decode_prealloc_queue_reqs", "sglang:num_decode_transfer_queue_reqs"),
    ),
    running=_either("sglang:num_running_reqs"),
    kv_usage=_either("sglang:token_usage"),
    queried_tokens=((_LIVE_COMPUTED, _LIVE_HITS), *_either("sglang:prompt_tokens_total")),
    hit_tokens=((_LIVE_HITS,), *_either("sglang:cached_tokens_total")),
    prompt_tokens=_either("sglang:prompt_tokens_total"),
    cached_tokens=_either("sglang:cached_tokens_total"),
    generated_tokens=_either("sglang:generation_tokens_total"),
    first_token=(b"sglang:time_to_first_token_seconds",),
    inter_token=(b"sglang:inter_token_latency_seconds", b"sglang:time_per_output_token_seconds"),
    cache_info=CacheInfo(
        name=b"sglang:cache_config_info", block_tokens=b"page_size", blocks=b"num_pages", sizes=(b"page_size",)
    ),
    fetching=_sum("sglang:num_decode_transfer_queue_reqs"),
    capacity_tokens=_either("sglang:max_total_num_tokens"),
    block_tokens=_either("sglang:page_size"),
    blocks=_either("sglang:num_pages"),
    preemptions=_either("sglang:num_retracted_requests_total"),
    moved_bytes=_sum("sglang:estimated_read_bytes_per_gpu_total", "sglang:estimated_write_bytes_per_gpu_total"),
    rank_label=b"dp_rank",
    replica_labels=(b"tp_rank", b"pp_rank", b"moe_ep_rank"),
    parts_label=b"priority",
)
TRTLLM = EngineProfile(
    name="TensorRT-LLM",
    prefix=b"trtllm_",
    waiting=_sum("trtllm_num_requests_waiting"),
    running=_either("trtllm_num_requests_running"),
    kv_usage=_either("trtllm_kv_cache_utilization"),
    queried_tokens=_either("trtllm_prompt_tokens_total"),
    hit_tokens=_either("trtllm_prompt_cached_tokens_total"),
    prompt_tokens=_either("trtllm_prompt_tokens_total"),
    cached_tokens=_either("trtllm_prompt_cached_tokens_total"),
    generated_tokens=_either("trtllm_generation_tokens_total"),
    first_token=(b"trtllm_time_to_first_token_seconds",),
    inter_token=(b"trtllm_time_per_output_token_seconds",),  # a request's mean
    block_tokens=_either("trtllm_kv_cache_tokens_per_block"),
    blocks=_either("trtllm_kv_cache_max_blocks"),
    prefill_seconds=b"trtllm_request_prefill_time_seconds",
    shows_last_step=True,
)
PROFILES = (VLLM, SGLANG, TRTLLM)
ENGINES = ", ".join(profile.name for profile in PROFILES)

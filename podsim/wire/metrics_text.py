"""vLLM's Prometheus metrics of one pod: the counters, and the text of /metrics.

The pod counts, and the server renders the text on each scrape. Since several pods are scraped many times a second, the
text is joined from prefixes made in advance. Names, labels and buckets are those of vLLM 0.32.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

_TOKEN_TIMES = (0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)  # seconds
_ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, *_TOKEN_TIMES)
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_BUCKETS = tuple(float(bound) for bound in (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384))
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


def length_buckets(max_model_len: int) -> list[float]:
    """Return 1, 2, 5, 10, 20, 50, … up to the longest sequence."""
    bounds = (digit * 10.0**exponent for exponent in range(12) for digit in (1, 2, 5))
    return [bound for bound in bounds if bound <= max_model_len]


class Histogram:
    """A Prometheus histogram with its text prefixes made in advance."""

    def __init__(self, name: str, help_text: str, *, labels: str, buckets: Sequence[float]) -> None:
        self._bounds = list(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._head = f"# HELP {name} {help_text}\n# TYPE {name} histogram\n"
        engine, model = labels.split(",", 1)
        bounds = [*map(str, self._bounds), "+Inf"]
        self._prefixes = [f'{name}_bucket{{{engine},le="{bound}",{model}}} ' for bound in bounds]
        self._count_prefix = f"{name}_count{{{labels}}} "
        self._sum_prefix = f"{name}_sum{{{labels}}} "

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def render(self) -> str:
        """Return the histogram's lines."""
        totals = list(accumulate(self._counts))
        lines = [f"{prefix}{total}.0\n" for prefix, total in zip(self._prefixes, totals, strict=True)]
        return f"{self._head}{''.join(lines)}{self._count_prefix}{totals[-1]}.0\n{self._sum_prefix}{self._sum}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """The engine's numbers at the moment of a scrape."""

    running: int
    waiting: int  # including the deferred ones
    kv_usage: float  # 0 to 1
    prefix_queries: int  # tokens
    prefix_hits: int  # tokens
    preemptions: int
    deferred: int = 0  # waiting for their prompt's KV rather than for room
    external_queries: int = 0  # tokens that the connector was asked for
    external_hits: int = 0  # tokens


class PodMetrics:
    """The counts of one pod since its start."""

    def __init__(
        self,
        *,
        model: str,
        max_model_len: int,
        block_size: int,
        total_blocks: int,
        started_at: float,  # unix seconds
    ) -> None:
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self.labels = labels = f'engine="0",model_name="{escaped}"'
        self._model = f'model_name="{escaped}"'
        self.started_at = started_at
        self.prompt_tokens = self.generation_tokens = 0
        self.cached_prompt_tokens = 0  # including loaded ones
        self.loaded_prompt_tokens = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejections = dict.fromkeys(REJECTION_REASONS, 0)

        def histogram(name: str, help_text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", help_text, labels=labels, buckets=buckets)

        lengths = length_buckets(max_model_len)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Number of prefill tokens processed.", lengths)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Number of generation tokens processed.", lengths
        )
        self.step_tokens = histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", _STEP_BUCKETS
        )
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _ITL_BUCKETS
        )
        self.request_latency = histogram(
            "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _REQUEST_BUCKETS
        )
        self.queue_time = histogram(
            "request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _REQUEST_BUCKETS
        )
        # of ended requests, like those above
        self.inference_time = histogram(
            "request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", _REQUEST_BUCKETS
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _REQUEST_BUCKETS
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _REQUEST_BUCKETS
        )
        self.prefill_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            lengths,
        )
        self._histograms = (
            self.request_prompt_tokens,
            self.request_generation_tokens,
            self.step_tokens,
            self.time_to_first_token,
            self.inter_token_latency,
            self.request_latency,
            self.queue_time,
            self.inference_time,
            self.prefill_time,
            self.decode_time,
            self.prefill_computed_tokens,
        )
        self._fixed = _fixed_lines(labels, block_size=block_size, total_blocks=total_blocks, started_at=started_at)

    def render(self, state: EngineState) -> bytes:
        """Return the text of /metrics (`text/plain; version=1.0.0`)."""
        labels = self.labels
        scalars = (
            ("num_requests_running", "gauge", "Number of requests in model execution batches.", state.running),
            ("num_requests_waiting", "gauge", "Number of requests waiting to be processed.", state.waiting),
            ("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", state.kv_usage),
            (
                "prefix_cache_queries_total",
                "counter",
                "Prefix cache queries, in terms of number of queried tokens.",
                state.prefix_queries,
            ),
            (
                "prefix_cache_hits_total",
                "counter",
                "Prefix cache hits, in terms of number of cached tokens.",
                state.prefix_hits,
            ),
            (
                "external_prefix_cache_queries_total",
                "counter",
                "External prefix cache queries from KV connector cross-instance cache sharing, "
                "in terms of number of queried tokens.",
                state.external_queries,
            ),
            (
                "external_prefix_cache_hits_total",
                "counter",
                "External prefix cache hits from KV connector cross-instance cache sharing, "
                "in terms of number of cached tokens.",
                state.external_hits,
            ),
            ("num_preemptions_total", "counter", "Cumulative number of preemption from the engine.", state.preemptions),
            ("prompt_tokens_total", "counter", "Number of prefill tokens processed.", self.prompt_tokens),
            (
                "prompt_tokens_cached_total",
                "counter",
                "Number of cached prompt tokens (local + external).",
                self.cached_prompt_tokens,
            ),
            ("generation_tokens_total", "counter", "Number of generation tokens processed.", self.generation_tokens),
        )  # fmt: skip
        parts = [self._fixed]
        parts += [
            f"# HELP vllm:{name} {text}\n# TYPE vllm:{name} {kind}\nvllm:{name}{{{labels}}} {float(value)}\n"
            for name, kind, text, value in scalars
        ]
        parts.append(self._prompt_tokens_by_source())
        parts.append(self._waiting_by_reason(state))
        parts.append(self._finished())
        parts.append(self._rejections())
        parts += [histogram.render() for histogram in self._histograms]
        return "".join(parts).encode()

    def _prompt_tokens_by_source(self) -> str:
        name = "vllm:prompt_tokens_by_source_total"
        cached, loaded = self.cached_prompt_tokens, self.loaded_prompt_tokens
        lines: Iterable[str] = (
            f'{name}{{{self.labels},source="{source}"}} {count}.0\n'
            for source, count in (
                ("local_compute", self.prompt_tokens - cached),
                ("local_cache_hit", cached - loaded),
                ("external_kv_transfer", loaded),
            )
        )
        return f"# HELP {name} Number of prompt tokens by source.\n# TYPE {name} counter\n" + "".join(lines)

    def _waiting_by_reason(self, state: EngineState) -> str:
        name = "vllm:num_requests_waiting_by_reason"
        return (
            f"# HELP {name} Number of waiting requests by reason.\n# TYPE {name} gauge\n"
            f'{name}{{{self.labels},reason="capacity"}} {float(state.waiting - state.deferred)}\n'
            f'{name}{{{self.labels},reason="deferred"}} {float(state.deferred)}\n'
        )

    def _finished(self) -> str:
        name = "vllm:request_success_total"
        lines: Iterable[str] = (
            f'{name}{{engine="0",finished_reason="{reason}",{self._model}}} {count}.0\n'
            for reason, count in self.finished.items()
        )
        return f"# HELP {name} Count of successfully processed requests.\n# TYPE {name} counter\n" + "".join(lines)

    def _rejections(self) -> str:
        name = "vllm:admission_rejections_total"
        lines: Iterable[str] = (
            f'{name}{{{self._model},reason="{reason}"}} {count}.0\n' for reason, count in self.rejections.items()
        )
        head = f"# HELP {name} Number of admission attempts rejected by a queue limit, by reason.\n"
        return f"{head}# TYPE {name} counter\n" + "".join(lines)


def _fixed_lines(labels: str, *, block_size: int, total_blocks: int, started_at: float) -> str:
    """Return the metrics that never change while the pod runs."""
    config = {
        "block_size": block_size,
        "cache_dtype": "auto",
        "effective_attention_block_size": block_size,
        "enable_prefix_caching": True,
        "engine": 0,
        "hash_block_size": None,
        "is_attention_free": False,
        "kv_cache_size_tokens": block_size * total_blocks,
        "num_cpu_blocks": None,
        "num_gpu_blocks": total_blocks,
        "num_gpu_blocks_override": total_blocks,
        "prefix_caching_hash_algo": "sha256",
        "sliding_window": None,
        "user_specified_block_size": True,
    }
    config_labels = ",".join(f'{key}="{value}"' for key, value in config.items())
    sleep = "vllm:engine_sleep_state"
    return (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
        "# TYPE process_start_time_seconds gauge\n"
        f"process_start_time_seconds {started_at}\n"
        "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n"
        "# TYPE vllm:cache_config_info gauge\n"
        f"vllm:cache_config_info{{{config_labels}}} 1.0\n"
        f"# HELP {sleep} Engine sleep state.\n# TYPE {sleep} gauge\n"
        f'{sleep}{{{labels},sleep_state="awake"}} 1.0\n'
        f'{sleep}{{{labels},sleep_state="weights_offloaded"}} 0.0\n'
        f'{sleep}{{{labels},sleep_state="discard_all"}} 0.0\n'
    )

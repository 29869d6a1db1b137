"""What a run measures: the pods' settings, the sizes of each workload, and the limits that every run keeps.

`run` chooses STANDARD or QUICK. Tokens and seconds are scaled down from real deployments so that two cores carry pods,
router and clients; docs/evidence/routing-benchmark.md says which ratios are kept.
"""

from dataclasses import dataclass, field, replace

from bench.routing.script import POD_MISSING
from operate.load.trace import TraceSize
from operate.load.workloads import BurstSize, QaSize


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """The simulated pods, all alike; together they hold `pods * kv_blocks * 16` tokens."""

    pods: int = 4
    kv_blocks: int = 2048
    prefill_tokens_per_second: float = 16_000
    inter_token_ms: float = 10
    stream_us: float = 0.0  # that each sequence adds to a step
    context_token_us: float = 0.0  # likewise each token that is attended to
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_model_len: int = 16_000

    def flags(self, *, render: bool) -> tuple[str, ...]:
        """Flags of `podsim` for one pod; `render` for routers that let a pod tokenize."""
        return (
            *("--pods", "1", "--kv-blocks", str(self.kv_blocks), "--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--prefill-tokens-per-second", f"{self.prefill_tokens_per_second:g}"),
            *("--inter-token-ms", f"{self.inter_token_ms:g}", "--max-model-len", str(self.max_model_len)),
            *("--stream-us", f"{self.stream_us:g}", "--context-token-us", f"{self.context_token_us:g}"),
            "--enable-scale-out" if render else "--no-enable-scale-out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformSize:
    """Prompts that share nothing, at a Poisson rate."""

    rate: float = 22.0
    shortest_tokens: int = 500
    longest_tokens: int = 2500
    answer_tokens: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    seed: int = 7
    pods: PodSettings = field(default_factory=PodSettings)
    ttft_limit_ms: float = 500.0
    qa: QaSize = field(default_factory=QaSize)
    qa_rate: float = 16.0  # requests/s; measured again at twice this
    qa_seconds: float = 9.0
    burst: BurstSize = field(default_factory=BurstSize)
    uniform: UniformSize = field(default_factory=UniformSize)
    uniform_seconds: float = 6.0
    trace: TraceSize = field(default_factory=TraceSize)
    trace_seconds: float = 10.0  # the whole cut
    churn: QaSize = field(default_factory=lambda: QaSize(users=38))
    churn_rate: float = 14.0
    churn_seconds: float = 10.0
    churn_pickers: int = 3
    churn_kill_at_seconds: float = 4.0
    churn_back_after_seconds: float = 1.0
    long_documents: int = 85
    long_rate: float = 3.0  # new documents/s
    long_pods: PodSettings = field(
        default_factory=lambda: PodSettings(pods=8, kv_blocks=4096, prefill_tokens_per_second=8000)
    )
    bad_pod: QaSize = field(default_factory=lambda: QaSize(users=24))  # they fit into the caches of the other pods
    bad_pod_rate: float = 16.0
    bad_pod_seconds: float = 15.0
    bad_pod_at_seconds: float = 4.0
    request_seconds: float = 20.0  # a request that takes longer has failed
    limit_seconds: float = 2100.0  # start to end

    def pods_of(self, workload: str) -> PodSettings:
        """What the workload is played on."""
        if workload == POD_MISSING:
            return replace(self.pods, pods=self.pods.pods - 1)
        return self.long_pods if workload == "long" else self.pods


STANDARD = Plan()
QUICK = Plan(
    qa_seconds=4,
    uniform_seconds=2,
    trace_seconds=3,
    churn_seconds=4,
    churn_kill_at_seconds=1.5,
    long_documents=12,
    bad_pod_seconds=8,
    bad_pod_at_seconds=2,
)

"""A pool of pods that compute prompts as a fluid, with the counters that vLLM has: what `PoolScaling` looks at."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import structs

from extproc.policy.autoscale import Autoscale, ScalePolicy
from extproc.scaling.plan import Demand, PlannedRole, PlannedVariant
from extproc.scaling.pool_scaling import PoolScaling
from extproc.scaling.seen import PodSeen, PoolSeen, Signal, Source, State
from kvmesh.pods.pod_report import EndpointLoad

LOOK_SECONDS = 2.0
TOKENS_PER_SECOND = 8000.0
PROMPT_TOKENS = 800.0


@dataclass(slots=True, kw_only=True)
class FluidPod:
    """One pod; `changes` are made to its next reports."""

    address: str
    role: str = "both"
    variant: str = ""
    speed: float = 1.0
    serves: bool = True
    computed: float = 0.0
    streams: float = 0.0
    generated: float = 0.0
    stream_seconds: float = 0.0  # seconds of generation, summed over tokens
    requests: float = 0.0
    waiting: float = 0.0  # tokens
    kv_usage: float = 0.1
    changes: dict[str, Any] = field(default_factory=dict)

    def load(self, now: float) -> EndpointLoad:
        """Return what a scrape of it gives."""
        load = EndpointLoad(
            waiting_requests=round(self.waiting / PROMPT_TOKENS),
            running_requests=round(self.streams),
            kv_usage=self.kv_usage,
            prefix_hit_tokens=0,
            prefix_query_tokens=round(self.computed),
            first_token_count=round(self.requests),
            inter_token_count=round(self.generated),
            inter_token_seconds_sum=self.stream_seconds,
            reported_at=now,
        )
        return structs.replace(load, **self.changes)


@dataclass(slots=True, kw_only=True)
class FluidPool:
    """Time goes on by `run`: prompts come at `rate(now)` tokens a second, and are shared by the pods that serve."""

    policy: ScalePolicy = field(default_factory=ScalePolicy)
    role: str = "both"
    rate: Callable[[float], float] = lambda _: 0.0
    output_each: float = 0.0  # tokens that each request generates
    base_seconds: float = 0.01  # of a token on a pod that runs nothing else
    seconds_a_stream: float = 0.0002
    ttft_seconds: float | None = 2.0
    inter_token_seconds: float | None = None
    start_seconds: float | None = None  # after which a wanted pod serves; None: the pods stay as they are
    shadow: bool = False
    pod_hour_price: float | None = None
    pods: list[FluidPod] = field(default_factory=list)
    now: float = 1000.0
    queued_requests: int = 0
    queued_tokens: float = 0.0
    refused_requests: float = 0.0
    refused_tokens: float = 0.0
    pickers: int = 1
    look_seconds: float = LOOK_SECONDS
    speeds: Mapping[str, float] = field(default_factory=dict)  # by variant
    wanted: list[int] = field(default_factory=list)  # at each look
    scaling: PoolScaling = field(init=False)
    _served_from: dict[str, float] = field(default_factory=dict)
    _made: int = 0

    def __post_init__(self) -> None:
        policies: dict[str, Any] = {self.role: self.policy}
        self.scaling = PoolScaling(Autoscale(**policies))
        self.scaling.reconfigure(Autoscale(**policies), shadow=self.shadow, pod_hour_price=self.pod_hour_price)

    def add(self, count: int, variant: str = "") -> "FluidPool":
        """Have so many pods more, which serve."""
        for _ in range(count):
            self.pods.append(self._pod(serves=True, variant=variant))
        return self

    def run(self, seconds: float) -> Signal:
        """Let so much time go by, and return the last signal."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += self.look_seconds
            self._work()
            self.look()
        return self.signal

    def look(self) -> Mapping[str, Signal]:
        """Look once."""
        signals = self.scaling.look(self.seen(), now=self.now)
        self.wanted.append(signals[self.role].wanted)
        if self.start_seconds is not None:
            for variant in signals[self.role].variants:
                self._follow(variant.name, variant.told)
        return signals

    @property
    def signal(self) -> Signal:
        """The last signal."""
        return self.scaling.signals[self.role]

    def seen(self) -> PoolSeen:
        """Return what a look finds."""
        return PoolSeen(
            pods=[
                PodSeen(
                    address=pod.address,
                    role=pod.role,
                    serves=pod.serves,
                    load=pod.load(self.now) if pod.serves else None,
                    tokens_per_second=TOKENS_PER_SECOND * pod.speed,
                    request_seconds=PROMPT_TOKENS / (TOKENS_PER_SECOND * pod.speed),
                    variant=pod.variant,
                )
                for pod in self.pods
            ],
            pickers=self.pickers,
            queued_requests=self.queued_requests,
            queued_tokens=self.queued_tokens,
            refused_requests=self.refused_requests,
            refused_tokens=self.refused_tokens,
            ttft_seconds=self.ttft_seconds,
            inter_token_seconds=self.inter_token_seconds,
        )

    def _work(self) -> None:
        serving = [pod for pod in self.pods if pod.serves]
        for pod in serving:
            pod.waiting += self.rate(self.now) * self.look_seconds * pod.speed / sum(each.speed for each in serving)
            done = min(pod.waiting, TOKENS_PER_SECOND * pod.speed * self.look_seconds)
            pod.waiting -= done
            pod.computed += done
            pod.requests += done / PROMPT_TOKENS
            self._generate(pod, done / PROMPT_TOKENS / self.look_seconds)

    def _generate(self, pod: FluidPod, requests_a_second: float) -> None:
        # Little's law: as many streams as come while one lasts, which depends on how many there are
        work = requests_a_second * self.output_each
        pod.streams = work * self.base_seconds / max(1.0 - work * self.seconds_a_stream, 0.05)
        tokens = work * self.look_seconds
        pod.generated += tokens
        pod.stream_seconds += tokens * (self.base_seconds + self.seconds_a_stream * pod.streams)

    def count(self, variant: str) -> int:
        """Return how many pods of a variant there are."""
        return sum(pod.variant == variant for pod in self.pods)

    def _follow(self, variant: str, told: int) -> None:
        for pod in self.pods:
            if not pod.serves and self.now >= self._served_from[pod.address]:
                pod.serves = True
        while self.count(variant) < told:
            pod = self._pod(serves=False, variant=variant)
            self._served_from[pod.address] = self.now + (self.start_seconds or 0.0)
            self.pods.append(pod)
        while self.count(variant) > told:
            gone = next(pod for pod in reversed(self.pods) if pod.variant == variant)
            self.pods.remove(gone)
            for pod in self.pods[:1]:
                pod.waiting += gone.waiting

    def _pod(self, *, serves: bool, variant: str = "") -> FluidPod:
        self._made += 1
        speed = self.speeds.get(variant, 1.0)
        return FluidPod(
            address=f"10.0.0.{self._made}:8000", role=self.role, serves=serves, variant=variant, speed=speed
        )


def planned_role(*variants: str, role: str = "both", wanted: int = 0) -> PlannedRole:
    """Return a role of which nothing but these is known."""
    return PlannedRole(
        role=role,
        state=State.OK,
        reason="",
        present=0,
        wanted=wanted,
        min_replicas=0,
        max_replicas=None,
        demand=Demand(),
        variants=tuple(PlannedVariant(name=each, source=Source.LEARNED) for each in variants),
    )

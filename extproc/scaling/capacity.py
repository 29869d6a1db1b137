"""Capacity of one pod of each variant within the SLO: learned from pod reports, or as declared. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from extproc.pods.step_times import StepTimes
from extproc.scaling.seen import PodSeen, Source

PROMISE_SHARE = 0.9  # of the inter-token target; the mean must stay below it, as some streams are slower
KV_SHARE = 0.9  # usable share of a pod's cache; above it streams are preempted


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity of one pod of a variant."""

    source: Source
    prefill: float | None = None  # prompt tokens a second; None if unknown
    request_seconds: float = 0.0  # prefill time of the average prompt
    decode: float | None = None  # generated tokens a second at the inter-token target; None if unknown
    streams: float | None = None  # concurrent streams within the SLO
    stream_seconds: float | None = None  # inter-token time with that number of streams
    limit: str = ""  # what bounds the streams: "promise", "places" or "cache"
    is_out_of_reach: bool = False  # even a single stream misses the inter-token target


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens a second that a policy declares for one pod of a variant, or None."""

    prefill: float | None = None
    decode: float | None = None


@dataclass(slots=True, eq=False)
class _Variant:
    """Measurements of one variant; they outlive its pods."""

    steps: StepTimes = field(default_factory=StepTimes)
    line: tuple[float, float] | None = None  # fit of the inter-token time; kept until there is a better one
    prefill: float | None = None
    is_learned: bool = False
    request_seconds: float = 0.0
    places: float | None = None
    cached: float | None = None  # streams that fit into the cache

    def note(self, pods: Sequence[PodSeen]) -> None:
        """Take the current reports of its pods, at least one."""
        self.line = self.steps.line(self.line)
        learned = [pod for pod in pods if pod.is_learned]
        if learned or not self.is_learned:
            told = learned or pods
            self.prefill = sum(pod.tokens_per_second for pod in told) / len(told)
            self.request_seconds = sum(pod.request_seconds for pod in told) / len(told)
            self.is_learned = bool(learned)
        places = [pod.running_limit for pod in pods if pod.running_limit is not None]
        self.places = sum(places) / len(places) if places else None
        cached = [
            KV_SHARE * pod.load.running_requests / pod.load.kv_usage
            for pod in pods
            if pod.load is not None and pod.load.running_requests and pod.load.kv_usage > 0.01
        ]
        self.cached = sum(cached) / len(cached) if cached else None

    def capacity(self, declared: Declared, promise: float | None) -> Capacity:
        """Return one pod's capacity; `promise` is the inter-token target in seconds."""
        bounds: dict[str, float] = {}
        within = None if promise is None else self.steps.streams_within(PROMISE_SHARE * promise, self.line)
        if within:
            bounds["promise"] = within
        if self.places is not None:
            bounds["places"] = self.places
        if self.cached is not None:
            bounds["cache"] = self.cached
        limit = min(bounds, key=bounds.__getitem__, default="")
        streams = max(bounds[limit], 1.0) if limit else None
        seconds = None if streams is None else self.steps.seconds_at(streams, self.line)
        is_declared = not self.is_learned and declared.prefill is not None
        source = Source.DECLARED if is_declared else Source.LEARNED if self.is_learned else Source.ASSUMED
        prefill, request_seconds = self.prefill, self.request_seconds
        if is_declared and declared.prefill is not None:
            request_seconds *= (prefill or declared.prefill) / declared.prefill
            prefill = declared.prefill
        return Capacity(
            source=source if prefill is not None else Source.UNKNOWN,
            prefill=prefill,
            request_seconds=request_seconds,
            decode=streams / seconds if streams and seconds else declared.decode,
            streams=streams,
            stream_seconds=seconds,
            limit=limit,
            is_out_of_reach=within == 0.0,
        )


@dataclass(slots=True, eq=False)
class Capacities:
    """Capacities of one role's variants; a role without variants has one, `OTHERS`."""

    _variants: dict[str, _Variant] = field(default_factory=dict)

    def steps_of(self, variant: str) -> StepTimes:
        """Return the measured inter-token times of this variant."""
        return self._variants.setdefault(variant, _Variant()).steps

    def note(self, told: Sequence[PodSeen]) -> None:
        """Take the reports of pods with plausible numbers."""
        by_variant: dict[str, list[PodSeen]] = {}
        for pod in told:
            by_variant.setdefault(pod.variant, []).append(pod)
        for name, pods in by_variant.items():
            self._variants.setdefault(name, _Variant()).note(pods)

    def fade(self, seconds: float) -> None:
        """Let the measured inter-token times lose weight over `seconds`."""
        for each in self._variants.values():
            each.steps.fade(seconds)

    def keep(self, variants: Sequence[str]) -> None:
        """Forget variants that are no longer in the policy."""
        self._variants = {name: each for name, each in self._variants.items() if name in variants}

    def of(self, variant: str, *, declared: Declared, promise: float | None) -> Capacity:
        """Return the capacity of one pod of the variant; `promise` is the inter-token target in seconds."""
        seen = self._variants.get(variant)
        if seen is not None and (seen.prefill is not None or declared.prefill is None):
            return seen.capacity(declared, promise)
        source = Source.UNKNOWN if declared.prefill is None and declared.decode is None else Source.DECLARED
        return Capacity(source=source, prefill=declared.prefill, decode=declared.decode)

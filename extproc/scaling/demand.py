"""Work in busy pods: what the requests of one role would keep busy, from what its pods count themselves. Pure.

The pods' counters are true for all pickers together. To what they have done comes what waits more than before, in pods
and pickers, and what was refused: that is what has come. Prompts are counted in uncached tokens over a pod's rate,
decoding in generated tokens over those that a pod generates at the promised time a token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import msgspec

from extproc.pods.step_times import StepTimes
from extproc.scaling.seen import PodSeen
from kvmesh.pods.pod_report import EndpointLoad

MEANS_SECONDS = 120.0  # half-life of what an average request brings
MOST_REQUESTS = 1_000_000  # at one pod; more is nonsense
MOST_TOKENS_PER_SECOND = 1e7  # likewise
PROMISE_SHARE = 0.9  # of the promised time a token that is to be the mean: some streams are slower
KV_SHARE = 0.9  # of a pod's cache that is to be used: beyond, streams are preempted
MOST_REFUSED = 1.0  # of what was served: clients that are refused come back, and would be counted again and again


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What waits for pods of the role in all pickers, and what they have refused since the last look."""

    requests: float = 0.0
    tokens: float = 0.0
    refused_requests: float = 0.0
    refused_tokens: float = 0.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What has come since the last look."""

    prefill: float | None = None  # busy pods; None: not known
    decode: float | None = None
    streams: float | None = None  # that one pod runs within the promise
    limit: str = ""  # what bounds the streams: "promise", "places" or "cache"
    is_out_of_reach: bool = False  # not even one stream alone has its tokens in time
    backlog_tokens: float = 0.0  # of prompts that wait
    waiting_seconds: float = 0.0  # that one pod would take for all prompts that wait
    waiting_decode_seconds: float = 0.0  # and for their answers
    request_seconds: float = 0.0  # that a pod takes for the average prompt
    uncached_rate: float = 0.0  # tokens a second that have come
    cached_rate: float = 0.0
    output_rate: float = 0.0
    reporting: int = 0  # pods with reports that make sense
    nonsense: tuple[str, ...] = ()  # pods with others


class _Sums(msgspec.Struct, kw_only=True):
    """Of pods between two reports of each."""

    uncached: float = 0.0
    cached: float = 0.0
    generated: float = 0.0
    begun: float = 0.0  # requests


@dataclass(slots=True, eq=False)
class RoleDemand:
    """Of the pods of one role."""

    steps: StepTimes = field(default_factory=StepTimes)
    _last: dict[str, EndpointLoad] = field(default_factory=dict)
    _means: _Sums = field(default_factory=_Sums)
    _backlog_tokens: float | None = None
    _backlog_requests: float = 0.0

    def look(
        self, pods: Sequence[PodSeen], waiting: Waiting, *, seconds: float, inter_token_seconds: float | None
    ) -> Work | None:
        """Return the work that has come in the last `seconds`; None at the first look, and where no pod reports."""
        nonsense = tuple(pod.address for pod in pods if pod.load is not None and not is_sane(pod.load))
        told = [pod for pod in pods if pod.load is not None and pod.address not in nonsense]
        loads = {pod.address: pod.load for pod in told if pod.load is not None}
        sums, absurd = self._sums(loads)
        nonsense += absurd
        is_first = self._backlog_tokens is None
        late = {pod.address for pod in pods}.difference(loads)
        self._last = {**loads, **{address: load for address, load in self._last.items() if address in late}}
        for address in absurd:
            del loads[address]
        told = [pod for pod in told if pod.address in loads]
        if not loads:
            return Work(nonsense=nonsense) if nonsense else None
        self._remember(sums, seconds)
        whole = sum(pod.serves for pod in pods) / len(told) if told else 1.0  # those that do not report do as much
        means = self._means
        tokens_each = means.uncached / means.begun if means.begun else 0.0
        output_each = means.generated / means.begun if means.begun else 0.0
        requests = waiting.requests + whole * sum(load.waiting_requests for load in loads.values())
        tokens = waiting.tokens + whole * sum(load.waiting_requests for load in loads.values()) * tokens_each
        grown_tokens = 0.0 if self._backlog_tokens is None else tokens - self._backlog_tokens
        grown_requests = 0.0 if is_first else requests - self._backlog_requests
        self._backlog_tokens, self._backlog_requests = tokens, requests
        if is_first or seconds <= 0.0:
            return None
        served = whole * sums.uncached
        refused = min(waiting.refused_tokens, MOST_REFUSED * max(served, tokens_each))
        uncached_rate = max(served + grown_tokens + refused, 0.0) / seconds
        refused_requests = min(waiting.refused_requests, MOST_REFUSED * max(whole * sums.begun, 1.0))
        begun = whole * sums.begun
        # by the requests that have come: their tokens take as long to come as their streams last
        came = begun * output_each if means.begun else whole * sums.generated
        output_rate = max(came + (grown_requests + refused_requests) * output_each, 0.0) / seconds
        rate = sum(pod.tokens_per_second for pod in told) / len(told)
        streams, limit, is_out_of_reach = self._streams(told, inter_token_seconds)
        return Work(
            prefill=uncached_rate / rate if rate > 0.0 else None,
            decode=self._decode(output_rate, loads, whole, streams),
            streams=streams,
            limit=limit,
            is_out_of_reach=is_out_of_reach,
            backlog_tokens=tokens,
            waiting_seconds=tokens / rate if rate > 0.0 else 0.0,
            waiting_decode_seconds=self._decode(requests * output_each, loads, 0.0, streams) or 0.0,
            request_seconds=sum(pod.request_seconds for pod in told) / len(told),
            uncached_rate=uncached_rate,
            cached_rate=whole * sums.cached / seconds,
            output_rate=whole * sums.generated / seconds,
            reporting=len(told),
            nonsense=nonsense,
        )

    def _sums(self, loads: dict[str, EndpointLoad]) -> tuple[_Sums, tuple[str, ...]]:
        """Return what the pods have counted since their last reports, and those that cannot have."""
        sums, absurd = _Sums(), []
        for address, load in loads.items():
            last = self._last.get(address)
            seconds = 0.0 if last is None else load.reported_at - last.reported_at
            if last is None or seconds <= 0.0 or _has_begun_anew(last, load):
                continue
            uncached, cached = _prompt_tokens(last, load)
            generated = load.inter_token_count - last.inter_token_count
            if max(uncached, cached, generated) > MOST_TOKENS_PER_SECOND * seconds:
                absurd.append(address)
                continue
            sums.uncached += uncached
            sums.cached += cached
            sums.generated += generated
            sums.begun += max(load.first_token_count - last.first_token_count, 0)
            if generated > 0:
                took = load.inter_token_seconds_sum - last.inter_token_seconds_sum
                running = (load.running_requests + last.running_requests) / 2
                self.steps.add(running=running, tokens=generated, seconds_a_token=max(took, 0.0) / generated)
        return sums, tuple(absurd)

    def _remember(self, sums: _Sums, seconds: float) -> None:
        share = 0.5 ** (max(seconds, 0.0) / MEANS_SECONDS)
        means = self._means
        means.uncached = means.uncached * share + sums.uncached
        means.generated = means.generated * share + sums.generated
        means.begun = means.begun * share + sums.begun
        self.steps.fade(max(seconds, 0.0))

    def _streams(self, told: Sequence[PodSeen], promise: float | None) -> tuple[float | None, str, bool]:
        """Return how many streams one pod runs, what bounds them, and whether the promise is out of reach."""
        bounds: dict[str, float] = {}
        within = None if promise is None else self.steps.streams_within(PROMISE_SHARE * promise)
        if within:
            bounds["promise"] = within
        places = [pod.running_limit for pod in told if pod.running_limit is not None]
        if places:
            bounds["places"] = sum(places) / len(places)
        cached = [
            KV_SHARE * pod.load.running_requests / pod.load.kv_usage
            for pod in told
            if pod.load is not None and pod.load.running_requests and pod.load.kv_usage > 0.01
        ]
        if cached:
            bounds["cache"] = sum(cached) / len(cached)
        limit = min(bounds, key=bounds.__getitem__, default="")
        return (max(bounds[limit], 1.0) if limit else None), limit, within == 0.0

    def _decode(
        self, output_rate: float, loads: dict[str, EndpointLoad], whole: float, streams: float | None
    ) -> float | None:
        """Return the pods that decoding keeps busy.

        By generated tokens where the time a token is known as it depends on the streams: streams that run beside few
        others are quick and gone soon, and their number alone would say too little. Else by the streams.
        """
        if streams is None:
            return None
        seconds = self.steps.seconds_at(streams)
        if seconds:
            return output_rate * seconds / streams
        return whole * sum(load.running_requests for load in loads.values()) / streams


def is_sane(load: EndpointLoad) -> bool:
    """Tell whether a report can be true."""
    numbers = (
        *(load.kv_usage, load.prefix_hit_tokens, load.prefix_query_tokens, load.inter_token_seconds_sum),
        *(load.inter_token_count, load.prefill_computed_tokens, load.fetched_tokens, load.reported_at),
    )
    if not all(isfinite(number) and number >= 0 for number in numbers):
        return False
    return (
        load.kv_usage <= 1.0
        and 0 <= load.waiting_requests <= MOST_REQUESTS
        and 0 <= load.running_requests <= MOST_REQUESTS
    )


def _has_begun_anew(last: EndpointLoad, load: EndpointLoad) -> bool:
    return (
        load.prefix_query_tokens < last.prefix_query_tokens
        or load.inter_token_count < last.inter_token_count
        or load.first_token_count < last.first_token_count
    )


def _prompt_tokens(last: EndpointLoad, load: EndpointLoad) -> tuple[float, float]:
    """Return the prompt tokens that were begun to be computed since the last report, and those that were cached.

    What was fetched from elsewhere was computed elsewhere. A pod that keeps no prefixes looks none up: then those of
    requests that have ended count.
    """
    queried = load.prefix_query_tokens - last.prefix_query_tokens
    hits = load.prefix_hit_tokens - last.prefix_hit_tokens
    fetched = load.fetched_tokens - last.fetched_tokens
    if load.prefix_query_tokens:
        return max(queried - hits - fetched, 0), max(hits, 0) + max(fetched, 0)
    return max(load.prefill_computed_tokens - last.prefill_computed_tokens, 0), 0.0

"""Offered load of one role in busy pods, from the pods' own counters. Pure.

The pods' counters cover the requests of all pickers. Offered load is served work, plus the growth of the queues in
pods and pickers, plus refused work. Prompts count as uncached tokens over one pod's prefill rate, decoding as
generated tokens over one pod's rate at the inter-token target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from statistics import median_low

import msgspec
from msgspec import structs

from extproc.pods.endpoint_samples import restarted
from extproc.policy.scale_variants import OTHERS
from extproc.scaling.capacity import Capacities, Capacity, Declared
from extproc.scaling.seen import PodSeen
from kvmesh.pods.pod_report import EndpointLoad

MEANS_SECONDS = 120.0  # half-life of the averages per request
MOST_REQUESTS = 1_000_000  # at one pod; a larger number is nonsense
BELIEVED, LEAST_BELIEVED = 4, 4  # times a pod's bookings, and four: its waiting requests; times the mean: an answer
MOST_TOKENS_PER_SECOND = 1e7  # of one pod; a larger number is nonsense
MOST_REFUSED = 1.0  # times the served load: refused clients retry, and every retry would count again


UNDECLARED = Declared()


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The role's queue in all pickers, and their refusals since the last look."""

    requests: float = 0.0
    tokens: float = 0.0
    foreseen_requests: float = 0.0  # of the requests, those with an expected length of their answers
    answer_tokens: float = 0.0  # of these answers
    refused_requests: float = 0.0
    refused_tokens: float = 0.0


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Offered load since the last look."""

    prefill: float | None = None  # busy pods; None if unknown
    decode: float | None = None
    streams: float | None = None  # of one pod within the SLO
    limit: str = ""  # what bounds the streams: "promise", "places" or "cache"
    is_out_of_reach: bool = False  # even a single stream misses the inter-token target
    backlog_tokens: float = 0.0  # of queued prompts
    waiting_seconds: float = 0.0  # for one pod to compute all queued prompts
    waiting_decode_seconds: float = 0.0  # and to generate their answers
    request_seconds: float = 0.0  # for one pod to compute the average prompt
    uncached_rate: float = 0.0  # offered tokens a second
    cached_rate: float = 0.0
    output_rate: float = 0.0
    served_input_rate: float = 0.0  # in the last minutes: prompt tokens, including cached ones
    served_output_rate: float = 0.0
    reporting: int = 0  # pods with plausible reports
    nonsense: tuple[str, ...] = ()  # pods with impossible reports


class _Sums(msgspec.Struct, kw_only=True):
    uncached: float = 0.0
    cached: float = 0.0
    generated: float = 0.0
    begun: float = 0.0  # requests
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class RoleDemand:
    """The offered load of one role's pods."""

    capacities: Capacities = field(default_factory=Capacities)
    reference: str = OTHERS  # the variant whose pods are the unit of work
    _last: dict[str, EndpointLoad] = field(default_factory=dict)
    _means: _Sums = field(default_factory=_Sums)
    _backlog_tokens: float | None = None
    _backlog_answers: float = 0.0  # tokens of the foreseen ones
    _backlog_unforeseen: float = 0.0  # requests

    def look(
        self,
        pods: Sequence[PodSeen],
        waiting: Waiting,
        *,
        seconds: float,
        inter_token_seconds: float | None,
        declared: Declared = UNDECLARED,
    ) -> Work | None:
        """Return the load offered in the last `seconds`, or None at the first look or if no pod reports.

        `declared` is for the reference variant.
        """
        nonsense = tuple(pod.address for pod in pods if pod.load is not None and not is_sane(pod.load))
        told = [pod for pod in pods if pod.load is not None and pod.address not in nonsense]
        loads = {pod.address: pod.load for pod in told if pod.load is not None}
        sums, absurd = self._sums(loads, {pod.address: pod.variant for pod in told})
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
        # silent pods count like the others; cordoned ones still work off their load
        whole = sum(pod.serves or pod.address in loads for pod in pods) / len(told)
        means = self._means
        tokens_each = means.uncached / means.begun if means.begun else 0.0
        output_each = means.generated / means.begun if means.begun else 0.0
        requests = waiting.requests + whole * sum(load.waiting_requests for load in loads.values())
        tokens = waiting.tokens + whole * sum(load.waiting_requests for load in loads.values()) * tokens_each
        grown_tokens = 0.0 if self._backlog_tokens is None else tokens - self._backlog_tokens
        unforeseen = requests - waiting.foreseen_requests
        foreseen = min(waiting.answer_tokens, BELIEVED * waiting.foreseen_requests * output_each)
        answers = foreseen + unforeseen * output_each
        grown_answers = answers - self._backlog_answers - self._backlog_unforeseen * output_each
        self._backlog_tokens = tokens
        self._backlog_answers, self._backlog_unforeseen = foreseen, unforeseen
        if is_first or seconds <= 0.0:
            return None
        served = whole * sums.uncached
        refused = min(waiting.refused_tokens, MOST_REFUSED * max(served, tokens_each))
        uncached_rate = max(served + grown_tokens + refused, 0.0) / seconds
        refused_requests = min(waiting.refused_requests, MOST_REFUSED * max(whole * sums.begun, 1.0))
        begun = whole * sums.begun
        # by new requests, not generated tokens: those lag behind by the length of the streams
        came = begun * output_each if means.begun else whole * sums.generated
        output_rate = max(came + grown_answers + refused_requests * output_each, 0.0) / seconds
        self.capacities.note(told)
        unit = self.capacities.of(self.reference, declared=declared, promise=inter_token_seconds)
        rate = unit.prefill or 0.0
        return Work(
            prefill=uncached_rate / rate if rate > 0.0 else None,
            decode=_decode(output_rate, loads, whole, unit),
            streams=unit.streams,
            limit=unit.limit,
            is_out_of_reach=unit.is_out_of_reach,
            backlog_tokens=tokens,
            waiting_seconds=tokens / rate if rate > 0.0 else 0.0,
            waiting_decode_seconds=_decode(answers, loads, 0.0, unit) or 0.0,
            request_seconds=unit.request_seconds,
            uncached_rate=uncached_rate,
            cached_rate=whole * sums.cached / seconds,
            output_rate=whole * sums.generated / seconds,
            served_input_rate=whole * (means.uncached + means.cached) / means.seconds,
            served_output_rate=whole * means.generated / means.seconds,
            reporting=len(told),
            nonsense=nonsense,
        )

    def _sums(self, loads: dict[str, EndpointLoad], variants: Mapping[str, str]) -> tuple[_Sums, tuple[str, ...]]:
        sums, absurd = _Sums(), []
        for address, load in loads.items():
            last = self._last.get(address)
            seconds = 0.0 if last is None else load.reported_at - last.reported_at
            if last is None or seconds <= 0.0:
                continue
            if restarted(last, load) or load.first_token_count < last.first_token_count:
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
                steps = self.capacities.steps_of(variants[address])
                steps.add(running=running, tokens=generated, seconds_a_token=max(took, 0.0) / generated)
        return sums, tuple(absurd)

    def _remember(self, sums: _Sums, seconds: float) -> None:
        share = 0.5 ** (max(seconds, 0.0) / MEANS_SECONDS)
        means = self._means
        means.uncached = means.uncached * share + sums.uncached
        means.cached = means.cached * share + sums.cached
        means.generated = means.generated * share + sums.generated
        means.seconds = means.seconds * share + max(seconds, 0.0)
        means.begun = means.begun * share + sums.begun
        self.capacities.fade(max(seconds, 0.0))


def believed(pods: Sequence[PodSeen], booked: Mapping[str, int]) -> Sequence[PodSeen]:
    """Return the pods with plausible numbers of waiting requests: one pod's lie must not start others.

    The limit is BELIEVED times the pod's bookings of all pickers, or times the pods' median: requests past the pickers
    wait at all pods.
    """
    waits = [pod.load.waiting_requests for pod in pods if pod.load is not None]
    usual = median_low(waits) if len(waits) > 1 else 0
    return [_at_most(BELIEVED * max(booked.get(pod.address, 0), usual, LEAST_BELIEVED), pod) for pod in pods]


def _at_most(waiting: int, pod: PodSeen) -> PodSeen:
    if pod.load is None or not waiting < pod.load.waiting_requests <= MOST_REQUESTS:  # above: left to `is_sane`
        return pod
    return structs.replace(pod, load=structs.replace(pod.load, waiting_requests=waiting))


def is_sane(load: EndpointLoad) -> bool:
    """Tell whether a report is plausible."""
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


def _decode(output_rate: float, loads: dict[str, EndpointLoad], whole: float, unit: Capacity) -> float | None:
    """Return the pods that decoding keeps busy.

    Counts generated tokens if the inter-token time is known as a function of the streams: with few streams each one is
    fast and ends early, so the number of streams alone understates the load. Otherwise counts streams, or uses the
    declared rate.
    """
    if unit.streams is None:
        return output_rate / unit.decode if unit.decode else None
    if unit.stream_seconds:
        return output_rate * unit.stream_seconds / unit.streams
    return whole * sum(load.running_requests for load in loads.values()) / unit.streams


def _prompt_tokens(last: EndpointLoad, load: EndpointLoad) -> tuple[float, float]:
    """Return the computed and the cached prompt tokens since the last report, counted when their prefill begins.

    Fetched tokens count as cached: another pod has computed them. A pod without prefix caching looks no prefixes up:
    for it the tokens of ended requests count.
    """
    queried = load.prefix_query_tokens - last.prefix_query_tokens
    hits = load.prefix_hit_tokens - last.prefix_hit_tokens
    fetched = load.fetched_tokens - last.fetched_tokens
    if load.prefix_query_tokens:
        return max(queried - hits - fetched, 0), max(hits, 0) + max(fetched, 0)
    return max(load.prefill_computed_tokens - last.prefill_computed_tokens, 0), 0.0

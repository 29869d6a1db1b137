"""Metrics of the endpoints: the picker's view of them, their reported latencies, and the desired replicas by role.

Removed endpoints are not shown. Every replica shows all endpoints: do not add up their series.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from operator import gt

from extproc.answers.latency_history import LatencyHistory
from extproc.ledger import metrics, scale_metrics
from extproc.ledger.pool_history import PoolHistory
from extproc.pods.endpoint import EndpointStatus, Reachability, Role
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.scaling.seen import Signal, State
from kvmesh.metrics.metric import Metric
from kvmesh.metrics.registry import Family, Histogram, Reading, Registry, Rows
from kvmesh.pods.engine_metrics import parse_latencies, parse_started_at
from kvmesh.pods.page_steps import Steps
from kvmesh.pods.pod_report import EndpointLoad, PodHistogram

READ_EVERY_SECONDS = 5.0
MOST_MODELS = 100  # with their own series


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointView:
    """The sources of the endpoints' metrics."""

    known: Callable[[float], Sequence[EndpointStatus]]  # at a time in monotonic seconds
    estimates: LatencyEstimates
    role_of: Callable[[str], str]
    index_problem: Callable[[], str | None]
    links: LinkEstimates
    refusing: Callable[[], Collection[str]] = tuple  # endpoints that do not list their models
    clock: Callable[[], float] = time.monotonic


_REPORTED: Mapping[Metric, Callable[[EndpointLoad, float], float]] = {
    metrics.ENDPOINT_WAITING: lambda load, _: load.waiting_requests,
    metrics.ENDPOINT_FETCHING: lambda load, _: load.fetching_requests,
    metrics.ENDPOINT_RUNNING: lambda load, _: load.running_requests,
    metrics.ENDPOINT_KV_USAGE: lambda load, _: load.kv_usage,
    metrics.ENDPOINT_REPORT_AGE: lambda load, now: max(now - load.reported_at, 0.0),
    metrics.ENDPOINT_PREEMPTIONS: lambda load, _: load.preemptions,
}
_FETCHED: Mapping[Metric, Callable[[EndpointLoad], float]] = {
    metrics.KV_FETCHED_BYTES: lambda load: load.fetched_bytes,
    metrics.KV_FETCH_SECONDS: lambda load: load.fetch_seconds_sum,
}


def endpoint_metrics(view: EndpointView) -> Iterator[tuple[Metric, Rows]]:
    """Yield metric by metric, so that with many endpoints the event loop can run in between."""
    now = view.clock()
    statuses, errors, pace = view.known(now), view.estimates.errors(), view.estimates.pace
    addresses = [(status.address,) for status in statuses]
    yield metrics.ENDPOINT_INFO, (((address, view.role_of(address)), 1) for (address,) in addresses)
    yield metrics.ENDPOINT_REPORTING, (((status.address,), status.load is not None) for status in statuses)
    yield (
        metrics.ENDPOINT_STATE,
        (
            ((status.address, state.value), status.reachability is state)
            for status in statuses
            for state in Reachability
        ),
    )
    refusing = frozenset(view.refusing())
    yield metrics.ENDPOINT_WANTS_KEY, ((key, key[0] in refusing) for key in addresses)
    yield metrics.ENDPOINT_PACE, ((key, pace(key[0]).prefill.seconds_a_token) for key in addresses)
    paced = [(status.address, status.load, pace(status.address).streams) for status in statuses]
    learned = [(address, load, streams) for address, load, streams in paced if load is not None and streams is not None]
    yield metrics.ENDPOINT_STREAM, (((address,), streams.seconds_a_stream) for address, _, streams in learned)
    yield (
        metrics.ENDPOINT_NEXT_STREAM,
        (((address,), streams.seconds_after(load)) for address, load, streams in learned),
    )
    yield metrics.ESTIMATE_BIAS, ((key, errors[key[0]].bias_seconds) for key in addresses if key[0] in errors)
    yield metrics.KV_LINK_RATE, (((address,), rate) for address, rate in view.links.seen().items())
    fetched = [(status.address, status.load) for status in statuses if status.load and status.load.fetched_bytes]
    for metric, of_fetches in _FETCHED.items():
        yield metric, (((address, view.role_of(address)), of_fetches(load)) for address, load in fetched)
    for metric, read in _REPORTED.items():
        loads = ((status.address, status.load) for status in statuses if status.load is not None)
        yield metric, (((address,), read(load, now)) for address, load in loads)
    yield metrics.INDEX_PROBLEM, [((), view.index_problem() is not None)]


class LatencyTelemetry:
    """TTFT and inter-token time by model and role, from the histograms on the pods' pages: the scraper's `PageReader`.

    The scraper passes in the pages that it fetches anyway; each pod's page is parsed every few seconds, which costs
    0.1 ms. A pod's counts are added up from its first page on. A reset histogram (the pod's process has restarted)
    counts from zero.
    """

    def __init__(
        self,
        registry: Registry,
        *,
        history: PoolHistory | None = None,
        read_every_seconds: float = READ_EVERY_SECONDS,
    ) -> None:
        """`history` also gets all counts, with the time of each page."""
        history = history or PoolHistory()
        self.role_of: Callable[[str], str] = lambda _: Role.BOTH.value  # endpoint -> role
        # by model and role, over all pods
        self.ttft = registry.histograms(metrics.TTFT)
        self.inter_token = registry.histograms(metrics.INTER_TOKEN)
        self._ttft = PodLatencies(self.ttft, history=history.pods_ttft)
        self._inter_token = PodLatencies(self.inter_token, history=history.pods_inter_token)
        self._read_every_seconds = read_every_seconds
        self._due: dict[str, float] = {}  # endpoint -> monotonic seconds
        self._started: dict[str, float | None] = {}  # endpoint -> start of its process in unix seconds, or None
        self._read: dict[str, tuple[int, int]] = {}  # endpoint -> both counts when its page was last parsed

    def page(self, endpoint: str, text: bytes, *, load: EndpointLoad) -> Steps[None]:
        """Take an endpoint's page and its load; most pages are not parsed, and an idle pod's never.

        Raise UnreadablePageError.
        """
        now = load.reported_at
        if now < self._due.get(endpoint, now):
            return
        self._due[endpoint] = now + self._read_every_seconds
        observed = load.first_token_count, load.inter_token_count
        if self._read.get(endpoint) == observed:
            return
        self._read[endpoint] = observed
        self._note_start(endpoint, (yield from parse_started_at(text)))
        ttft, inter_token = yield from parse_latencies(text)
        role = self.role_of(endpoint)
        self._ttft.report(endpoint, ttft, role=role, now=now)
        self._inter_token.report(endpoint, inter_token, role=role, now=now)

    def restarted(self, endpoint: str) -> None:
        """Note that the endpoint's process has restarted."""
        self._due.pop(endpoint, None)
        self._read.pop(endpoint, None)
        self._ttft.restarted(endpoint)
        self._inter_token.restarted(endpoint)

    def forget(self, endpoint: str) -> None:
        """Note that the endpoint was removed."""
        self._due.pop(endpoint, None)
        self._read.pop(endpoint, None)
        self._started.pop(endpoint, None)
        self._ttft.forget(endpoint)
        self._inter_token.forget(endpoint)

    def _note_start(self, endpoint: str, started: float | None) -> None:
        """Detect a restarted process by its start time, as its counts may already exceed the former ones."""
        before = self._started.get(endpoint)
        self._started[endpoint] = started
        if started is not None and before is not None and started != before:
            self._ttft.restarted(endpoint)
            self._inter_token.restarted(endpoint)


class PodLatencies:
    """Adds up one kind of latency over the pods, by model and role."""

    def __init__(self, family: Family[Histogram], *, history: LatencyHistory, most_models: int = MOST_MODELS) -> None:
        self._family = family
        self._history = history
        self._most_models = most_models
        self._last: dict[str, Mapping[str, PodHistogram]] = {}  # endpoint -> model -> last histogram
        self._models: set[str] = set()

    def report(self, endpoint: str, shown: Mapping[str, PodHistogram], *, role: str, now: float) -> None:
        """Take a pod's histograms by model; `now` is monotonic seconds."""
        before = self._last.get(endpoint)
        self._last[endpoint] = shown
        for model, its in shown.items():
            label = self._label(model)
            merged = self._family.of(label, role)
            if before is None:
                continue  # the baseline: only later counts are added
            last = before.get(model)
            is_new = last is None or last.bounds != its.bounds or any(map(gt, last.counts, its.counts))
            self._history.add_counts((label, role), _add(merged, its, None if is_new else last), now=now)

    def restarted(self, endpoint: str) -> None:
        """Count the endpoint's next histograms in full: its new process has begun at zero."""
        if endpoint in self._last:
            self._last[endpoint] = {}

    def forget(self, endpoint: str) -> None:
        """Forget a removed endpoint; its counts stay in the sums."""
        self._last.pop(endpoint, None)

    def _label(self, model: str) -> str:
        if model not in self._models:
            if len(self._models) >= self._most_models:
                model = metrics.OTHER
            self._models.add(model)
        return model


def _add(merged: Histogram, now: PodHistogram, last: PodHistogram | None) -> list[tuple[int, float]]:
    """Add the counts since `last`, and return them by our buckets."""
    counted, added = 0.0, []  # up to the bound before
    for i, place in enumerate(_places(merged.bounds, now.bounds)):
        more = now.counts[i] - (last.counts[i] if last is not None else 0.0)
        if more > counted:
            merged.counts[place] += more - counted
            added.append((place, more - counted))
            counted = more
    if counted:
        merged.sum += max(now.seconds - (last.seconds if last is not None else 0.0), 0.0)
    return added


@lru_cache(maxsize=64)
def _places(own: tuple[float, ...], theirs: tuple[float, ...]) -> tuple[int, ...]:
    """Map a pod's buckets to ours: the first with a bound not below, so that no time looks shorter."""
    return tuple(len(own) if bound == inf else bisect_left(own, bound) for bound in theirs)


def show_scale(registry: Registry, signals: Callable[[], Mapping[str, Signal]]) -> None:
    """Show the signals by role at each scrape; call it once."""

    def read() -> Reading:
        by_role = signals()
        yield scale_metrics.WANTED_REPLICAS, (((role,), each.wanted) for role, each in by_role.items())
        yield scale_metrics.SCALE_TO_REPLICAS, (((role,), each.told) for role, each in by_role.items())
        yield scale_metrics.READY_REPLICAS, (((role,), each.ready) for role, each in by_role.items())
        yield (
            scale_metrics.SCALE_STATE,
            (((role, state.value), each.state is state) for role, each in by_role.items() for state in State),
        )
        yield (
            scale_metrics.SATURATION,
            (((role,), each.saturation) for role, each in by_role.items() if each.saturation is not None),
        )
        yield (
            scale_metrics.BUSY_PODS,
            (
                ((role, work), busy)
                for role, each in by_role.items()
                for work, busy in (("prefill", each.prefill_busy), ("decode", each.decode_busy))
                if busy is not None
            ),
        )
        yield scale_metrics.QUEUED_TOKENS, (((role,), each.queued_tokens) for role, each in by_role.items())
        yield (
            scale_metrics.TOKEN_RATE,
            (
                ((role, kind), rate)
                for role, each in by_role.items()
                for kind, rate in (
                    ("input", each.input_tokens_per_second),
                    ("cached", each.cached_tokens_per_second),
                    ("output", each.output_tokens_per_second),
                )
            ),
        )
        yield from _variants(by_role)
        yield from _costs(by_role)

    registry.read(read)


def _variants(by_role: Mapping[str, Signal]) -> Reading:
    named = [(role, each) for role, signal in by_role.items() for each in signal.variants if each.name]
    yield scale_metrics.VARIANT_WANTED_REPLICAS, (((role, each.name), each.wanted) for role, each in named)
    yield scale_metrics.VARIANT_SCALE_TO_REPLICAS, (((role, each.name), each.told) for role, each in named)
    yield (
        scale_metrics.POD_CAPACITY,
        (
            ((role, each.name, work), rate)
            for role, signal in by_role.items()
            for each in signal.variants
            for work, rate in (
                ("prefill", each.prefill_tokens_per_second if role != "decode" else None),
                ("decode", each.decode_tokens_per_second if role != "prefill" else None),
            )
            if rate is not None
        ),
    )


def _costs(by_role: Mapping[str, Signal]) -> Reading:
    yield (
        scale_metrics.PODS_COST,
        (((role,), cost) for role, each in by_role.items() if (cost := each.costs.per_hour) is not None),
    )
    yield (
        scale_metrics.TOKENS_COST,
        (
            ((role, tokens), cost)
            for role, each in by_role.items()
            for tokens, cost in (
                ("all", each.costs.per_million_tokens),
                ("output", each.costs.per_million_output_tokens),
            )
            if cost is not None
        ),
    )
    yield (
        scale_metrics.PREFILL_LEAN,
        (((role,), lean) for role, each in by_role.items() if (lean := each.prefill_lean) is not None),
    )

"""The indexer's metrics, and its memory of what each stream did lately: `ports.IndexerTelemetry` for Prometheus.

Every instance has a registry of its own, so that tests and several indexers in one process do not meet.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kv_indexer.telemetry.process_telemetry import add_process_metrics
from kv_indexer.telemetry.redis_telemetry import RedisFacts, RedisTelemetry
from kv_indexer.watch.stream_activity import StreamActivity
from kvmesh.blocks.findings import Finding, FindingReason
from kvmesh.blocks.source import SourceState, SourceStatus, Stream

_STREAM = ("endpoint", "dp_rank")
LAG_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """One stream's part of the metrics that each change touches: looking them up by label costs more than counting."""

    batches: Counter
    lag: Gauge


class PrometheusTelemetry:
    """Counts what the indexer does."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.activities: dict[Stream, StreamActivity] = {}
        self._series: dict[Stream, _Series] = {}
        self._events_by_type: dict[str, Counter] = {}
        self._clock = clock
        self.states: dict[Stream, tuple[SourceState, str]] = {}
        self._counted: set[Stream] = set()  # that have series
        self._departed: set[str] = (
            set()
        )  # endpoints that are ours no more, though a follower may count for a moment yet
        self.registry = registry = CollectorRegistry()
        name = "kvmesh_indexer"
        self._events = Counter(f"{name}_events", "Events read, by type.", ("type",), registry=registry)
        self._undecodable = Counter(
            f"{name}_decode_errors",
            "Events, batches and messages that could not be understood, by reason.",
            ("reason",),
            registry=registry,
        )
        self._not_indexed = Counter(
            f"{name}_events_not_indexed",
            "Events that were understood and are not in the index, by reason.",
            ("reason",),
            registry=registry,
        )
        self._batches = Counter(f"{name}_batches", "Event batches applied.", _STREAM, registry=registry)
        self._gaps = Counter(f"{name}_gaps", "Gaps in live sequences.", _STREAM, registry=registry)
        self._replayed = Counter(f"{name}_replayed_batches", "Batches got by replay.", _STREAM, registry=registry)
        self._state = Gauge(
            f"{name}_source_state", "1 for the state a stream is in.", (*_STREAM, "state"), registry=registry
        )
        self._blocks = Gauge(f"{name}_blocks", "Blocks indexed.", (*_STREAM, "tier"), registry=registry)
        self._lag = Gauge(
            f"{name}_lag_seconds", "Age of the newest batch when it was applied.", _STREAM, registry=registry
        )
        self._lags = Histogram(
            f"{name}_event_lag_seconds",
            "Age of the newest event of each batch when it was applied, of all streams.",
            buckets=LAG_SECONDS,
            registry=registry,
        )
        self._orphans = Gauge(
            f"{name}_orphan_events", "Stores that wait for their parent block.", _STREAM, registry=registry
        )
        self._ready = Gauge(f"{name}_ready", "1 while the indexer is ready.", registry=registry)
        self._redis = RedisTelemetry(registry)
        add_process_metrics(registry)
        self._redis_up = Gauge(f"{name}_redis_up", "1 while Redis can be written and read.", registry=registry)
        self._eviction = Gauge(
            f"{name}_redis_eviction_policy",
            "1 for what Redis does when its memory is full; must be noeviction.",
            ("policy",),
            registry=registry,
        )
        self._unreadable = Gauge(
            f"{name}_unreadable_records", "Streams and slots in Redis that cannot be read.", registry=registry
        )
        self._held = Gauge(f"{name}_streams_held", "Streams that this indexer follows.", registry=registry)
        self._finding = Gauge(
            f"{name}_finding",
            "1 while something is wrong with a pod although nothing has failed; docs/findings.md says what to do.",
            ("reason", "endpoint"),
            registry=registry,
        )
        self._found: dict[str, set[str]] = {}  # endpoint -> reasons, as shown
        self._findings = Counter(f"{name}_findings", "Findings that have appeared.", ("reason",), registry=registry)

    def applied(self, stream: Stream, *, batches: int, events: Mapping[str, int], last_ts: float) -> None:
        """See `ports.IndexerTelemetry`."""
        self._activity(stream).received(batches, now=self._clock())
        series = self._series.get(stream) or self._add_series(stream)
        series.batches.inc(batches)
        lag = max(time.time() - last_ts, 0.0)
        series.lag.set(lag)
        self._lags.observe(lag)
        for kind, count in events.items():
            counter = self._events_by_type.get(kind)
            if counter is None:
                counter = self._events_by_type[kind] = self._events.labels(kind)
            counter.inc(count)

    def undecodable(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """See `ports.IndexerTelemetry`. The metric has one series a reason."""
        for reason, count in reasons.items():
            self._activity(stream).undecodable.add(reason, count, now=self._clock())
            self._undecodable.labels(reason).inc(count)

    def not_indexed(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """See `ports.IndexerTelemetry`. The metric has one series a reason."""
        for reason, count in reasons.items():
            self._activity(stream).not_indexed.add(reason, count, now=self._clock())
            self._not_indexed.labels(reason).inc(count)

    def orphans(self, stream: Stream, *, waiting: int) -> None:
        """Show how many stores of a stream wait for their parents."""
        self._counted.add(stream)
        self._orphans.labels(*_labels(stream)).set(waiting)

    def gap(self, stream: Stream) -> None:
        """See `ports.IndexerTelemetry`."""
        self._gaps.labels(*_labels(stream)).inc()

    def replayed(self, stream: Stream, *, batches: int) -> None:
        """See `ports.IndexerTelemetry`."""
        self._replayed.labels(*_labels(stream)).inc(batches)

    def state(self, stream: Stream, *, state: SourceState, reason: str) -> None:
        """See `ports.IndexerTelemetry`."""
        self._counted.add(stream)
        self.states[stream] = (state, reason)
        self._activity(stream).became(state, reason, now=self._clock())
        for known in SourceState:
            self._state.labels(*_labels(stream), known.value).set(known is state)

    def forget(self, stream: Stream) -> None:
        """See `ports.IndexerTelemetry`."""
        self.states.pop(stream, None)
        self.activities.pop(stream, None)
        self._series.pop(stream, None)  # what is removed below would be counted into the void
        for known in SourceState:
            self._state.remove(*_labels(stream), known.value)
        for gauge in (self._lag, self._orphans):
            gauge.remove(*_labels(stream))
        if stream.endpoint in self._departed:
            self._counted.discard(stream)
            for metric in (self._batches, self._gaps, self._replayed):
                metric.remove(*_labels(stream))

    def findings(
        self, standing: Collection[Finding], *, appeared: Collection[Finding], endpoints: Collection[str]
    ) -> None:
        """See `ports.IndexerTelemetry`. A gauge of 0 tells that the endpoint is watched, and well."""
        self._departed.difference_update(endpoints)
        found: dict[str, set[str]] = {}
        for finding in standing:
            found.setdefault(finding.endpoint, set()).add(finding.reason)
        for endpoint in endpoints:
            now = found.get(endpoint, set())
            if self._found.get(endpoint) == now:
                continue  # most are well, and setting their series anew each time would cost more than all the rest
            self._found[endpoint] = now
            for reason in FindingReason:
                self._finding.labels(reason.value, endpoint).set(reason.value in now)
        for finding in appeared:
            self._findings.labels(finding.reason).inc()

    def forget_endpoints(self, endpoints: Collection[str]) -> None:
        """Remove the series of endpoints that will not come back: in a cluster every new pod is another one."""
        self._departed.update(endpoints)
        for stream in [stream for stream in self._counted if stream.endpoint in endpoints]:
            self.forget(stream)
        for endpoint in endpoints:
            if self._found.pop(endpoint, None) is not None:
                for reason in FindingReason:
                    self._finding.remove(reason.value, endpoint)

    def held(self, streams: int) -> None:
        """Show how many streams this indexer follows."""
        self._held.set(streams)

    def ready(self, is_ready: bool) -> None:
        """Show whether the indexer is ready."""
        self._ready.set(is_ready)

    def redis_facts(self, facts: RedisFacts | None, *, seconds: float) -> None:
        """Show what Redis says of itself, and how long it took to; None: it did not."""
        self._redis.show(facts, seconds=seconds)

    def redis(self, *, up: bool) -> None:
        """Show whether Redis can be written and read."""
        self._redis_up.set(up)

    def eviction_policy(self, policy: str) -> None:
        """Show what Redis does when its memory is full."""
        self._eviction.clear()
        self._eviction.labels(policy).set(1)

    def unreadable(self, records: int) -> None:
        """Show how many records in Redis cannot be read."""
        self._unreadable.set(records)

    def sources(self, lines: Iterable[SourceStatus]) -> None:
        """Show how many blocks each source holds."""
        self._blocks.clear()
        for line in lines:
            if line.tier is not None:
                self._blocks.labels(line.endpoint, str(line.dp_rank), line.tier).set(line.cached_blocks)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def _activity(self, stream: Stream) -> StreamActivity:
        return self.activities.get(stream) or self.activities.setdefault(stream, StreamActivity())

    def _add_series(self, stream: Stream) -> _Series:
        labels = _labels(stream)
        series = _Series(batches=self._batches.labels(*labels), lag=self._lag.labels(*labels))
        self._series[stream] = series
        return series


def _labels(stream: Stream) -> tuple[str, str]:
    return stream.endpoint, str(stream.dp_rank)

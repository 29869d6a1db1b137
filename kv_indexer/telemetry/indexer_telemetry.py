"""The indexer's counters, and its memory of each stream's recent activity: implements `ports.IndexerTelemetry`.

Every instance has its own registry, so that several indexers in one process (tests) do not mix.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from kv_indexer.pools.pool_report import PoolsReport
from kv_indexer.telemetry import metrics
from kv_indexer.telemetry.redis_telemetry import REDIS_METRICS, RedisFacts
from kv_indexer.watch.stream_activity import StreamActivity
from kvmesh.blocks.findings import Finding, FindingReason
from kvmesh.blocks.source import SourceState, SourceStatus, Stream
from kvmesh.metrics.exposition import Form
from kvmesh.metrics.metric import Metric
from kvmesh.metrics.process_metrics import show_process
from kvmesh.metrics.registry import Registry, Rows


class PrometheusTelemetry:
    """Counts the indexer's work."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.activities: dict[Stream, StreamActivity] = {}
        self.states: dict[Stream, tuple[SourceState, str]] = {}
        self._clock = clock
        self._departed: set[str] = set()  # endpoints that have left, whose followers may still count for a moment
        self.registry = registry = Registry()
        self._events = registry.values(metrics.EVENTS)
        self._undecodable = registry.values(metrics.DECODE_ERRORS)
        self._not_indexed = registry.values(metrics.NOT_INDEXED)
        self._batches = registry.values(metrics.BATCHES)
        self._gaps = registry.values(metrics.GAPS)
        self._replayed = registry.values(metrics.REPLAYED)
        self._state = registry.values(metrics.STATE)
        self._blocks = registry.values(metrics.BLOCKS)
        self._lag = registry.values(metrics.LAG)
        self._lags = registry.histograms(metrics.EVENT_LAG).of()
        self._orphans = registry.values(metrics.ORPHANS)
        self._ready = registry.values(metrics.READY).of()
        self._round_trips = registry.histograms(metrics.REDIS_ROUND_TRIP).of()
        self._redis_facts: RedisFacts = {}
        registry.read(self._read_redis)
        show_process(registry, process="indexer")
        self._redis_up = registry.values(metrics.REDIS_UP).of()
        self._eviction = registry.values(metrics.REDIS_EVICTION)
        self._unreadable = registry.values(metrics.UNREADABLE).of()
        self._pod_key_unusable = registry.values(metrics.POD_KEY_UNUSABLE).of()
        self._held = registry.values(metrics.STREAMS_HELD).of()
        self._finding = registry.values(metrics.FINDING)
        self._found: dict[str, set[str]] = {}  # endpoint -> reasons, as shown
        self._findings = registry.values(metrics.FINDINGS)

    def applied(self, stream: Stream, *, batches: int, events: Mapping[str, int], last_ts: float) -> None:
        """See `ports.IndexerTelemetry`."""
        self._activity(stream).received(batches, now=self._clock())
        labels = _labels(stream)
        lag = max(time.time() - last_ts, 0.0)
        self._batches.of(*labels).value += batches
        self._lag.of(*labels).value = lag
        self._lags.observe(lag)
        for kind, count in events.items():
            self._events.of(kind).value += count

    def undecodable(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """See `ports.IndexerTelemetry`. The metric has one series per reason."""
        for reason, count in reasons.items():
            self._activity(stream).undecodable.add(reason, count, now=self._clock())
            self._undecodable.of(reason).value += count

    def not_indexed(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """See `ports.IndexerTelemetry`. The metric has one series per reason."""
        for reason, count in reasons.items():
            self._activity(stream).not_indexed.add(reason, count, now=self._clock())
            self._not_indexed.of(reason).value += count

    def orphans(self, stream: Stream, *, waiting: int) -> None:
        """Show how many stores of a stream wait for their parents."""
        self._orphans.of(*_labels(stream)).value = waiting

    def gap(self, stream: Stream) -> None:
        """See `ports.IndexerTelemetry`."""
        self._gaps.of(*_labels(stream)).value += 1

    def replayed(self, stream: Stream, *, batches: int) -> None:
        """See `ports.IndexerTelemetry`."""
        self._replayed.of(*_labels(stream)).value += batches

    def state(self, stream: Stream, *, state: SourceState, reason: str) -> None:
        """See `ports.IndexerTelemetry`."""
        self.states[stream] = (state, reason)
        self._activity(stream).became(state, now=self._clock())
        for known in SourceState:
            self._state.of(*_labels(stream), known.value).value = known is state

    def forget(self, stream: Stream) -> None:
        """See `ports.IndexerTelemetry`. Counters stay, unless the endpoint has left."""
        self.states.pop(stream, None)
        self.activities.pop(stream, None)
        labels = _labels(stream)
        for known in SourceState:
            self._state.remove(*labels, known.value)
        for family in (self._lag, self._orphans):
            family.remove(*labels)
        if stream.endpoint in self._departed:
            for family in (self._batches, self._gaps, self._replayed):
                family.remove(*labels)

    def findings(
        self, standing: Collection[Finding], *, appeared: Collection[Finding], endpoints: Collection[str]
    ) -> None:
        """See `ports.IndexerTelemetry`. A gauge of 0 shows that the endpoint is watched and healthy."""
        self._departed.difference_update(endpoints)
        found: dict[str, set[str]] = {}
        for finding in standing:
            found.setdefault(finding.endpoint, set()).add(finding.reason)
        for endpoint in endpoints:
            now = found.get(endpoint, set())
            if self._found.get(endpoint) == now:
                continue  # most are healthy, and setting all their series each time would cost more than the rest
            self._found[endpoint] = now
            for reason in FindingReason:
                self._finding.of(reason.value, endpoint).value = reason.value in now
        for finding in appeared:
            self._findings.of(finding.reason).value += 1

    def forget_endpoints(self, endpoints: Collection[str]) -> None:
        """Remove the series of departed endpoints: in a cluster every new pod has another address."""
        gone = set(endpoints)
        self._departed.update(gone)
        for by_stream in (self.states, self.activities):
            for stream in [stream for stream in by_stream if stream.endpoint in gone]:
                del by_stream[stream]
        self.registry.drop("endpoint", gone)
        for endpoint in gone:
            self._found.pop(endpoint, None)

    def held(self, streams: int) -> None:
        """Show how many streams this indexer follows."""
        self._held.value = streams

    def ready(self, is_ready: bool) -> None:
        """Show whether the indexer is ready."""
        self._ready.value = is_ready

    def redis_facts(self, facts: RedisFacts | None, seconds: float) -> None:
        """Show Redis' own statistics and its response time; None if it did not answer, which clears old ones."""
        self._redis_facts = facts or {}
        if facts is not None:
            self._round_trips.observe(seconds)

    def redis(self, *, up: bool) -> None:
        """Show whether Redis can be written and read."""
        self._redis_up.value = up

    def eviction_policy(self, policy: str) -> None:
        """Show Redis' policy for full memory."""
        self._eviction.series.clear()
        self._eviction.of(policy).value = 1

    def unreadable(self, records: int) -> None:
        """Show how many records in Redis cannot be read."""
        self._unreadable.value = records

    def pod_key(self, *, unusable: bool) -> None:
        """Show whether the file with the pods' key can be used."""
        self._pod_key_unusable.value = unusable

    def sources(self, lines: Iterable[SourceStatus]) -> None:
        """Show how many blocks each source holds."""
        self._blocks.series.clear()
        for line in lines:
            if line.tier is not None:
                self._blocks.of(line.endpoint, str(line.dp_rank), line.tier).value = line.cached_blocks

    def show_pools(self, report: Callable[[], PoolsReport]) -> None:
        """Show the pools of `report()`, called for each page."""
        self.registry.read(lambda: pool_metrics(report()))

    def render(self, form: Form = Form.TEXT) -> bytes:
        """Return the page of metrics; may be called in another thread."""
        return self.registry.text(created=True, form=form) + form.end

    def _activity(self, stream: Stream) -> StreamActivity:
        return self.activities.get(stream) or self.activities.setdefault(stream, StreamActivity())

    def _read_redis(self) -> Iterator[tuple[Metric, Rows]]:
        for metric in REDIS_METRICS:
            value = self._redis_facts.get(metric)
            yield metric, [] if value is None else [((), value)]


def _labels(stream: Stream) -> tuple[str, str]:
    return stream.endpoint, str(stream.dp_rank)


def pool_metrics(report: PoolsReport) -> Iterator[tuple[Metric, Rows]]:
    """Yield the metrics of the pools; `kvmesh_indexer_pool_endpoint_info` joins a pool to an endpoint's series."""
    yield (
        metrics.POOL_ENDPOINT_INFO,
        [
            ((pool.name, endpoint.address), 1)
            for pool in report.pools
            for endpoint in pool.endpoints
            if endpoint.indexed_for == pool.name
        ],
    )
    yield metrics.POOL_CONFLICTS, [((), report.conflicts)]
    problems = Counter((problem.reason,) for problem in report.problems)
    yield metrics.POOL_PROBLEMS, sorted(problems.items())

"""Metrics read from counters kept elsewhere: quotas, lookups, records, and the process itself."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from extproc.ext_proc.exchange import Uploads
from extproc.ledger import metrics
from extproc.ledger.access_log import RecordBuffer
from extproc.ledger.feature_telemetry import ANY, MOST_TENANTS
from extproc.shared.shared_quotas import Quotas
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.metrics.exposition import Form
from kvmesh.metrics.process_metrics import show_process
from kvmesh.metrics.registry import Reading, Registry, Value
from kvmesh.pods.pod_key import PodKey

if TYPE_CHECKING:
    from extproc.ledger.tracing import ExchangeTraces  # an optional extra


WRITTEN, EXPORTED, DROPPED = "written", "exported", "dropped"


def show_quotas(registry: Registry, quotas: Quotas) -> None:
    """Show the decisions and the state of one pool's quotas on this replica."""
    registry.read(lambda: _quotas(quotas))


def _quotas(quotas: Quotas) -> Reading:
    facts = quotas.facts()
    yield metrics.QUOTA_DECISIONS, sorted(quotas.decisions.items())
    yield metrics.TENANT_QUOTA_DECISIONS, _by_tenant(quotas.decisions_by_tenant)
    yield metrics.SHADOW_QUOTA_REFUSALS, _by_tenant(quotas.shadow_refusals)
    yield metrics.QUOTA_WRITES_FAILING, [((), facts["writes_failing"])]
    yield metrics.QUOTA_OPEN_REQUESTS, [((), facts["open_requests"])]


def _by_tenant(decisions: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, ...], int]]:
    """Return the counts by tenant named in a quota, and of all other tenants together."""
    known = sorted({tenant for tenant, _ in decisions if tenant != ANY})[:MOST_TENANTS]
    counts: Counter[tuple[str, ...]] = Counter()
    for (tenant, outcome), count in decisions.items():
        counts[tenant if tenant in known else metrics.OTHER, outcome] += count
    return sorted(counts.items())


def show_lookups(registry: Registry, reader: PrefixIndexReader) -> None:
    """Show how many blocks the process's lookups had to ask Redis for."""
    registry.read(
        lambda: (
            (metrics.LOOKUP_BLOCKS, [(("redis",), reader.asked_blocks), (("known",), reader.known_blocks)]),
            (metrics.TRACKED_BLOCKS, [((), reader.tracked_blocks)]),
        )
    )


def show_uploads(registry: Registry, uploads: Uploads) -> None:
    """Show the bytes held by the process's unfinished request bodies."""
    registry.read(
        lambda: (
            (metrics.UNFINISHED_BODY_BYTES, [((), uploads.held_bytes)]),
            (metrics.UPLOADS_GAVE_WAY, [((), uploads.gave_way)]),
        )
    )


def show_records(registry: Registry, *, targets: Sequence[RecordBuffer], traces: "ExchangeTraces | None") -> None:
    """Show the written and dropped lines and spans of the process; `traces` is None if tracing is off."""
    registry.read(lambda: _records(targets, traces))


def _records(targets: Sequence[RecordBuffer], traces: "ExchangeTraces | None") -> Reading:
    lines = [((each.target, WRITTEN), each.written) for each in targets]
    yield metrics.ACCESS_LOG_LINES, lines + [((each.target, DROPPED), each.dropped) for each in targets]
    spans = [] if traces is None else [((EXPORTED,), traces.exported_spans), ((DROPPED,), traces.dropped_spans)]
    yield metrics.TRACE_SPANS, spans


def show_pod_key(registry: Registry, key: PodKey | None) -> None:
    """Show whether the pods' key file is unusable; `key` is None if there is no file."""
    registry.read(lambda: [(metrics.POD_KEY_UNUSABLE, [((), key is not None and bool(key.problem))])])


@cache
def _process() -> tuple[Registry, Value]:
    registry = Registry()
    show_process(registry, process="picker")
    return registry, registry.values(metrics.READY).of()


def process_text(*, ready: bool, form: Form = Form.TEXT) -> bytes:
    """Return the process's part, the last of a page; `ready`: the picker may get traffic."""
    registry, shown = _process()
    shown.value = ready
    return registry.text(form=form) + form.end

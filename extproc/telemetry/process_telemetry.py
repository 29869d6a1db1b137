"""Metrics that are read from what others have counted: quotas, lookups, records, and the process itself."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

from extproc.ext_proc.uploads import Uploads
from extproc.quotas.shared_quotas import Quotas
from extproc.records.access_log import RecordBuffer
from extproc.telemetry import metrics, scale_metrics
from extproc.telemetry.tenant_telemetry import ANY, MOST_TENANTS
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.metrics.exposition import Form
from kvmesh.metrics.process_metrics import show_process
from kvmesh.metrics.registry import Reading, Registry, Value
from kvmesh.pods.pod_key import PodKey

if TYPE_CHECKING:
    from extproc.records.tracing import ExchangeTraces  # an optional extra


WRITTEN, EXPORTED, DROPPED = "written", "exported", "dropped"


class AskedApi(Protocol):
    """See `external_metrics.api_server`."""

    answers: Counter[int]

    @property
    def is_listening(self) -> bool:
        """Whether it is served."""


def show_quotas(registry: Registry, quotas: Quotas) -> None:
    """Show what one pool's quotas have decided on this replica, and how they stand."""
    registry.read(lambda: _quotas(quotas))


def _quotas(quotas: Quotas) -> Reading:
    facts = quotas.facts()
    yield metrics.QUOTA_DECISIONS, sorted(quotas.decisions.items())
    yield metrics.TENANT_QUOTA_DECISIONS, _by_tenant(quotas.decisions_by_tenant)
    yield metrics.SHADOW_QUOTA_REFUSALS, _by_tenant(quotas.shadow_refusals)
    yield metrics.QUOTA_WRITES_FAILING, [((), facts["writes_failing"])]
    yield metrics.QUOTA_OPEN_REQUESTS, [((), facts["open_requests"])]


def _by_tenant(decisions: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, ...], int]]:
    """Return the counts of the tenants that quotas name, and of all others together."""
    known = sorted({tenant for tenant, _ in decisions if tenant != ANY})[:MOST_TENANTS]
    counts: Counter[tuple[str, ...]] = Counter()
    for (tenant, outcome), count in decisions.items():
        counts[tenant if tenant in known else metrics.OTHER, outcome] += count
    return sorted(counts.items())


def show_lookups(registry: Registry, reader: PrefixIndexReader) -> None:
    """Show what the lookups of the process had to ask of Redis."""
    registry.read(
        lambda: (
            (metrics.LOOKUP_BLOCKS, [(("redis",), reader.asked_blocks), (("known",), reader.known_blocks)]),
            (metrics.TRACKED_BLOCKS, [((), reader.tracked_blocks)]),
        )
    )


def show_uploads(registry: Registry, uploads: Uploads) -> None:
    """Show what the request bodies of the process hold that have not ended."""
    registry.read(
        lambda: (
            (metrics.UNFINISHED_BODY_BYTES, [((), uploads.held_bytes)]),
            (metrics.UPLOADS_GAVE_WAY, [((), uploads.gave_way)]),
        )
    )


def show_records(registry: Registry, *, targets: Sequence[RecordBuffer], traces: "ExchangeTraces | None") -> None:
    """Show what the access log and the traces of the process have written and dropped; None: there are no traces."""
    registry.read(lambda: _records(targets, traces))


def _records(targets: Sequence[RecordBuffer], traces: "ExchangeTraces | None") -> Reading:
    lines = [((each.target, WRITTEN), each.written) for each in targets]
    yield metrics.ACCESS_LOG_LINES, lines + [((each.target, DROPPED), each.dropped) for each in targets]
    spans = [] if traces is None else [((EXPORTED,), traces.exported_spans), ((DROPPED,), traces.dropped_spans)]
    yield metrics.TRACE_SPANS, spans


def show_pod_key(registry: Registry, key: PodKey | None) -> None:
    """Show whether the file with the pods' key can be used; None: there is none."""
    registry.read(lambda: [(metrics.POD_KEY_UNUSABLE, [((), key is not None and bool(key.problem))])])


def show_external_metrics(registry: Registry, server: AskedApi) -> None:
    """Show whether the external-metrics API is served, and what was answered."""
    registry.read(
        lambda: (
            (scale_metrics.EXTERNAL_METRICS_SERVED, [((), server.is_listening)]),
            (
                scale_metrics.EXTERNAL_METRICS_ANSWERS,
                [((str(code),), count) for code, count in sorted(server.answers.items())],
            ),
        )
    )


@cache
def _process() -> tuple[Registry, Value]:
    registry = Registry()
    show_process(registry, process="picker")
    return registry, registry.values(metrics.READY).of()


def process_text(*, ready: bool, form: Form = Form.TEXT) -> bytes:
    """Return the last part of a page: of the process, whatever pools it serves; `ready`: traffic may come."""
    registry, shown = _process()
    shown.value = ready
    return registry.text(form=form) + form.end

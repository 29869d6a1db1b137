"""Facts of a mesh in which all is well, to be changed in one place by a test."""

from dataclasses import replace
from typing import Any

from extproc.models.models import ModelTable, ServedModel
from extproc.pages.findings import Finding
from extproc.pods.endpoint import EndpointModels
from kvmesh.blocks.source import SourceState, SourceStatus
from operate.doctor.checks import CHECKS
from operate.doctor.facts import Expected, Facts, IndexFacts, PodFacts, Publisher, RedisFacts

NOW = 1_000_000.0
POD = "10.0.0.1:8000"
TINY = ServedModel(name="tiny")
PUBLISHER = Publisher(rank="0", enabled=True, kind="zmq", events="tcp://*:5557", replay="tcp://*:5558")
SOURCE = SourceStatus(
    endpoint=POD,
    dp_rank=0,
    tier="GPU",
    slot=0,
    epoch=1,
    state=SourceState.LIVE,
    reason="",
    last_seq=9,
    last_batch_at=NOW - 10,
    block_size=16,
    cached_blocks=100,
    applied_at=NOW - 10,
)


def pod(**changes: Any) -> PodFacts:
    well = PodFacts(
        endpoint=POD,
        served=EndpointModels(models=frozenset({"tiny"}), adapters={}, max_model_len=4096),
        version="0.32.0",
        block_sizes=frozenset({16}),
        prefix_caching=True,
        prompt_tokens=10_000,
        sources_status=200,
        publishers=(PUBLISHER,),
        clock_ahead_seconds=0.2,
    )
    return replace(well, **changes)


def redis(**changes: Any) -> RedisFacts:
    well = RedisFacts(label="redis://r", version="7.2.4", role="master", maxmemory_policy="noeviction")
    return replace(well, **changes)


def index(*sources: SourceStatus, **changes: Any) -> IndexFacts:
    return replace(IndexFacts(indexer_alive=True, sources=sources or (SOURCE,)), **changes)


def facts(*pods: PodFacts, **changes: Any) -> Facts:
    pods = pods or (pod(),)
    endpoints = tuple(each.endpoint for each in pods)
    well = Facts(
        expected=Expected(endpoints=endpoints, models=ModelTable(served=(TINY,)), hash_seed="kvmesh"),
        now=NOW,
        pods=pods,
        redis=redis(),
        index=index(*(replace(SOURCE, endpoint=endpoint) for endpoint in endpoints)),
    )
    return replace(well, **changes)


def found(check: str, seen: Facts) -> list[Finding]:
    """What one check finds."""
    return list(CHECKS[check].judge(seen))


def lines(check: str, seen: Facts) -> list[tuple[str, str, str]]:
    """The same as severity, subject and what was seen."""
    return [(finding.severity.value, finding.subject, finding.seen) for finding in found(check, seen)]

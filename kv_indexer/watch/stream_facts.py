"""What the rules look at, and what they say: the vocabulary of `finding_rules` and `silence_rules`. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from kv_indexer.watch.stream_activity import Spell, StreamActivity
from kvmesh.blocks.findings import FindingReason
from kvmesh.blocks.source import SourceState
from kvmesh.pods.pod_report import EngineCounters, PodReport

ASSUMED_BLOCK_SIZE = 128  # of a pod that does not say; few have larger ones
NAMED_REASONS = 3  # in one message
JUDGED = (SourceState.LIVE, SourceState.DEGRADED)  # in other states the index is not expected to know


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingPolicy:
    """How sure is sure."""

    silent_seconds: float = 30.0  # since events were due, or blocks should have been indexed
    stuck_seconds: float = 30.0  # replaying without a batch
    settle_seconds: float = 2.0  # a pod's counters lag behind its events
    least_blocks: int = 2  # due, before their events are missed
    large_block_tokens: int = 128  # hybrid models; others have 16 to 64
    large_block_requests: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """One look at one stream, or at a pod that has none."""

    endpoint: str
    dp_rank: int | None  # None: the pod publishes no stream that we know of
    activity: StreamActivity
    report: PodReport | None = None
    counters: EngineCounters | None = None  # of the engine behind the stream
    blocks: int = 0  # that the index holds of it, over all tiers
    gpu_block_size: int | None = None  # as the index has it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A rule's verdict."""

    reason: FindingReason
    message: str
    began_at: float  # monotonic seconds


def is_judged(facts: StreamFacts) -> bool:
    """Tell whether the index is expected to know what the pod holds."""
    return facts.dp_rank is None or facts.activity.state in JUDGED


def due_size(facts: StreamFacts, report: PodReport) -> int:
    """Return how many tokens make a block whose event is due."""
    return max(report.block_size or 0, facts.gpu_block_size or 0) or ASSUMED_BLOCK_SIZE


def name_spells(spells: Mapping[str, Spell]) -> str:
    """Name the most frequent reasons."""
    named = [f"{reason} ×{spell.count}" for reason, spell in list(spells.items())[:NAMED_REASONS]]
    return ", ".join([*named, "…"] if len(spells) > NAMED_REASONS else named)

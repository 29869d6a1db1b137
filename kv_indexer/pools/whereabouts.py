"""Which streams there are, as far as pods have said: what `find_streams` gathers and `share_streams` acts upon.

Pure rules. Who follows which stream is decided in Redis, where all indexers meet, and not here.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvmesh.blocks.source import EventAddresses, Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAnswer:
    """What a pod last said about where it publishes."""

    asked_at: float  # monotonic seconds
    ranks: Mapping[int, EventAddresses]  # empty: it publishes nothing


def known_streams(answers: Mapping[str, PodAnswer]) -> dict[Stream, EventAddresses]:
    """Return every stream that its pod says it has, and where it is published; `answers` is by endpoint."""
    return {
        Stream(endpoint=endpoint, dp_rank=rank): addresses
        for endpoint, answer in answers.items()
        for rank, addresses in answer.ranks.items()
    }


def vanished_streams(answers: Mapping[str, PodAnswer], registered_at: Mapping[Stream, float]) -> frozenset[Stream]:
    """Return the registered streams that their pod does not have.

    `registered_at` says when we first saw each in the registry, in monotonic seconds: an answer older than that proves
    nothing, because another indexer may have asked the pod after us. A pod that has not answered proves nothing either.
    """
    return frozenset(
        stream
        for stream, seen_at in registered_at.items()
        if (answer := answers.get(stream.endpoint)) and stream.dp_rank not in answer.ranks and answer.asked_at > seen_at
    )

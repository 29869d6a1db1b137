"""A scorer that prefers the lowest address, and a filter that drops the ports of $DRAINED_PORTS."""

import os
from collections.abc import Mapping, Sequence

from extproc.pods.endpoint import Ask, Candidate

DRAINED = frozenset(os.environ.get("DRAINED_PORTS", "").split(","))


def score(candidates: Sequence[Candidate], _: Ask) -> list[float]:
    """Score 1.0 for the lowest address and 0.0 for the others."""
    first = min(candidate.address for candidate in candidates)
    return [float(candidate.address == first) for candidate in candidates]


def drop(candidates: Sequence[Candidate], _: Ask) -> Mapping[str, str]:
    """Drop the pods at drained ports."""
    ports = {candidate.address: candidate.address.rpartition(":")[2] for candidate in candidates}
    return {address: "its port is drained" for address, port in ports.items() if port in DRAINED}

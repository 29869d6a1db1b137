"""`llm_d_guide` as a router in virtual time. It gets tokens where the real one would estimate them from the text."""

import random
from array import array
from collections.abc import Sequence

import xxhash

from bench.routing.llm_d_guide import BLOCK_TOKENS, Guide, GuidePick, GuideSettings
from bench.routing.virtual_world import Arrival
from extproc.pods.endpoint import EndpointStatus


class GuideRouter:
    """One replica; it hears nothing of the others, nor of the pods."""

    def __init__(self, pods: int, settings: GuideSettings, *, seed: int) -> None:
        self._guide = Guide(pods, settings, random=random.Random(seed).random)
        self._unanswered: set[int] = set()

    def pick(self, arrival: Arrival, *, now: float) -> tuple[int, GuidePick]:  # noqa: ARG002 - a port
        """Choose and count."""
        pick = self._guide.pick(_blocks(arrival.tokens), tokens=len(arrival.tokens))
        self._unanswered.add(id(pick))
        return pick.pod, pick

    def answered(self, ticket: GuidePick) -> None:
        self._unanswered.discard(id(ticket))
        self._guide.answered(ticket)

    def ended(self, ticket: GuidePick) -> None:
        """Only a request without an answer is still counted."""
        if id(ticket) in self._unanswered:
            self.answered(ticket)

    def scraped(self, statuses: Sequence[EndpointStatus], *, now: float) -> None: ...


def _blocks(token_ids: Sequence[int]) -> list[int]:
    """A key for each block and all before it; the last one need not be full."""
    keys, parent, tokens = [], 0, array("I", token_ids)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        parent = xxhash.xxh3_64_intdigest(tokens[start : start + BLOCK_TOKENS].tobytes(), seed=parent)
        keys.append(parent)
    return keys

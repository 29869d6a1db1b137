"""`llm_d_guide` as a router in virtual time: of tokens, four bytes each, where the real one has but the text."""

import random
from array import array
from collections.abc import Sequence

from bench.routing.llm_d_guide import Guide, GuidePick, GuideSettings, block_keys
from bench.routing.virtual_world import Arrival
from extproc.pods.endpoint import EndpointStatus


class GuideRouter:
    """One replica; it hears nothing of the others, nor of the pods."""

    def __init__(self, pods: int, settings: GuideSettings, *, seed: int) -> None:
        self._guide = Guide(pods, settings, random=random.Random(seed).random)
        self._unanswered: set[int] = set()

    def pick(self, arrival: Arrival, *, now: float) -> tuple[int, GuidePick]:  # noqa: ARG002 - a port
        """Choose and count."""
        pick = self._guide.pick(block_keys(array("I", arrival.tokens).tobytes()), tokens=len(arrival.tokens))
        self._unanswered.add(id(pick))
        return pick.pod, pick

    def tokens_to_compute(self, arrival: Arrival, *, now: float) -> int:  # noqa: ARG002 - a port
        return 0

    def answered(self, ticket: GuidePick) -> None:
        self._unanswered.discard(id(ticket))
        self._guide.answered(ticket)

    def ended(self, ticket: GuidePick, *, now: float) -> None:  # noqa: ARG002 - a port
        """Only a request without an answer is still counted."""
        if id(ticket) in self._unanswered:
            self.answered(ticket)

    def scraped(self, statuses: Sequence[EndpointStatus], *, now: float) -> None: ...

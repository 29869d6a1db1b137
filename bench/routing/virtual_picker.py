"""The picker's own decision as a router in virtual time, with the steps of `extproc.pick` in their order.

Called by `virtual`. The index is never late, and the replicas hear of each other at once.
"""

import itertools
import random
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.routing.one_cache import BLOCK_TOKENS, block_keys
from bench.routing.virtual_world import Arrival, Pod
from extproc.choosing.candidates import candidates_of
from extproc.choosing.decision import decide, require_some
from extproc.choosing.health import EndpointHealth
from extproc.choosing.hotspot import HotPrefixes
from extproc.choosing.spread_hot_prefix import copy_of_hot_prefix
from extproc.pods.endpoint import Ask, EndpointStatus
from extproc.pods.inflight import Booking, Bookings
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptKeys, match_prompts
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.replicas.shared_load import EndpointBookings, SharedView


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hits:
    matched_blocks: Mapping[str, int]
    block_size: Mapping[str, int]
    tiers: Mapping[str, Mapping[str, int]]


class Picker:
    """One replica of the picker, with the steps of `pick` in their order, on an index that is never late."""

    def __init__(self, pods: Sequence[Pod], policy: PickPolicy, *, seed: int) -> None:
        self._pods, self._policy = pods, policy
        self.bookings = Bookings(tokens_per_second=policy.prefill_tokens_per_second)
        self._memory, self._hot = RoutingMemory(policy), HotPrefixes(policy.hotspot)
        self._health, self._turns = EndpointHealth(policy.health), itertools.count()
        self._random = random.Random(seed)
        self._numbers = {pod.address: number for number, pod in enumerate(pods)}
        self._states = {pod.address: LIVE for pod in pods}
        self._statuses: Sequence[EndpointStatus] = [pod.report(0.0) for pod in pods]
        self.others: Sequence[Picker] = ()  # the other replicas, as Redis would tell of them

    def pick(self, arrival: Arrival, *, now: float) -> tuple[int, Booking]:
        policy, count = self._policy, len(arrival.tokens)
        keys = block_keys(arrival.tokens)
        prompts = (PromptKeys(keys=struct.pack(f"<{len(keys)}Q", *keys), tokens_each=BLOCK_TOKENS),)
        hits = IndexHits(
            prompts=(self._held(arrival.hashes, count),), keys=prompts, states=self._states, view=self._view(now)
        )
        recent = self._memory.matches(prompts, states=self._states, endpoints=self._numbers, now=now)
        match = match_prompts(count, hits.prompts, recent=recent, tier_weights=policy.tier_weights)
        candidates: Sequence[Any] = candidates_of(
            self._statuses,
            match,
            hits,
            bookings=self.bookings,
            memory=self._memory,
            health=self._health,
            policy=policy,
            session=None,
            adapter=None,
            now=now,
        )
        ask = Ask(prompt_tokens=count, turn=next(self._turns))
        kept, rejected = require_some(candidates, ask=ask)
        kept, copy = copy_of_hot_prefix(kept, prompts, hot=self._hot, policy=policy, now=now)
        decision = decide(
            kept,
            rejected=rejected,
            policy=policy,
            ask=ask,
            prompt_tokens=count,
            degraded={},
            tie_break=self._random.random,
        )
        winner = decision.endpoints[0]
        if copy is not None and winner == copy.endpoint:
            self._hot.copied(copy.prefix, endpoint=winner, now=now)
        self._memory.note(winner, prompts=prompts, session=None, adapter=None, now=now)
        uncached = max(0, count - decision.matched_tokens)
        return self._numbers[winner], self.bookings.book(
            winner, now=now, uncached_tokens=uncached, context_tokens=count
        )

    def ended(self, ticket: Booking) -> None:
        self.bookings.release(ticket)

    def scraped(self, statuses: Sequence[EndpointStatus], *, now: float) -> None:
        self._statuses = statuses
        for status in statuses:
            if status.trend.prefill_tokens_per_second is not None:
                self.bookings.prefill_rate(
                    status.address, tokens_per_second=status.trend.prefill_tokens_per_second, now=now
                )

    def _held(self, hashes: Sequence[bytes], count: int) -> _Hits:
        most = (count - 1) // BLOCK_TOKENS
        held = {
            pod.address: len(blocks)
            for pod in self._pods
            if (blocks := pod.scheduler.pool.cached_prefix(list(hashes), max_blocks=most))
        }
        return _Hits(
            matched_blocks=held,
            block_size=dict.fromkeys(held, BLOCK_TOKENS),
            tiers={address: {"GPU": blocks} for address, blocks in held.items()},
        )

    def _view(self, now: float) -> SharedView:
        sums: dict[str, EndpointBookings] = {}
        for other in self.others:
            for endpoint, totals in other.bookings.all_totals(now=now).items():
                before = sums.get(endpoint, EndpointBookings())
                sums[endpoint] = EndpointBookings(
                    before.requests + totals.requests,
                    before.uncached_tokens + round(totals.uncached_tokens),
                    before.context_tokens + totals.context_tokens,
                )
        return SharedView(others=sums, replicas=len(self.others))

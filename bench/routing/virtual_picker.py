"""The picker's own decision as a router in virtual time: `look` and `choose`, as `extproc.pick` calls them.

The index is never late, and the replicas hear of each other at once.
"""

import random
import struct
from collections.abc import Mapping, Sequence

from bench.routing.one_cache import BLOCK_TOKENS, block_keys
from bench.routing.virtual_pod import Pod
from bench.routing.virtual_world import Arrival
from extproc.choosing.choose import Choice, PoolView, Query, RoundRobin, choose, look
from extproc.choosing.health import EndpointHealth
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.pods.endpoint import Ask, EndpointStatus
from extproc.pods.endpoint_samples import restarted
from extproc.pods.inflight import Booking, Bookings
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptKeys
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.replicas.shared_load import EndpointBookings, SharedView
from kvmesh.blocks.source import Registry
from kvmesh.index.prefix_match import PrefixLookup


class Picker:
    """One replica of the picker, on an index that is never late."""

    def __init__(self, pods: Sequence[Pod], policy: PickPolicy, *, seed: int) -> None:
        self._pods = pods
        self._statuses: Sequence[EndpointStatus] = [pod.report(0.0) for pod in pods]
        self._numbers = {pod.address: number for number, pod in enumerate(pods)}
        self._states = {pod.address: LIVE for pod in pods}
        self.bookings = Bookings(tokens_per_second=policy.prefill_tokens_per_second)
        self.learned_adapters: Mapping[str, str] = {}
        self._estimates = LatencyEstimates(tokens_per_second=policy.prefill_tokens_per_second)
        self._memory = RoutingMemory(policy)
        self._view = PoolView(
            endpoints=self,
            bookings=self.bookings,
            memory=self._memory,
            health=EndpointHealth(policy.health),
            estimates=self._estimates,
            links=LinkEstimates(),
            hot=HotPrefixes(policy.hotspot),
            turns=RoundRobin(),
            policy=policy,
            random=random.Random(seed).random,
        )
        self.others: Sequence[Picker] = ()  # the other replicas, as Redis would tell of them

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:  # noqa: ARG002 - a port
        """Return the pods as they were scraped last."""
        return self._statuses

    def pick(self, arrival: Arrival, *, now: float) -> tuple[int, Booking]:
        """Choose as if there were room everywhere, and book."""
        view, count = self._view, len(arrival.tokens)
        keys = block_keys(arrival.tokens)
        prompts = (PromptKeys(keys=struct.pack(f"<{len(keys)}Q", *keys), tokens_each=BLOCK_TOKENS),)
        query = Query(
            ask=Ask(prompt_tokens=count),
            hits=IndexHits(
                prompts=(self._held(arrival.hashes, count),), keys=prompts, states=self._states, view=self._shared(now)
            ),
            prompts=prompts,
            estimated_tokens=count,
        )
        found = choose(view, query, look(view, query, now=now), ceiling=None)
        assert isinstance(found, Choice), "without a ceiling there is always a choice"
        decision = found.decision
        winner = decision.endpoints[0]
        view.turns.count(None)
        if found.warm_wait is not None:
            view.hot.note(found.warm_wait, endpoint=winner, now=now)
        view.memory.note(
            winner,
            prompts=prompts,
            session=None,
            adapter=None,
            now=now,
            indexed=decision.winner.indexed_tokens >= len(keys) * BLOCK_TOKENS,
        )
        uncached = max(0, count - decision.matched_tokens)
        return self._numbers[winner], self.bookings.book(
            winner, now=now, uncached_tokens=uncached, context_tokens=count
        )

    def answered(self, ticket: Booking) -> None:
        """Of streams the picker sees no first piece."""

    def ended(self, ticket: Booking) -> None:
        self.bookings.release(ticket)

    def scraped(self, statuses: Sequence[EndpointStatus], *, now: float) -> None:
        """Take the reports as `extproc.pools.picker_books` does."""
        before, self._statuses = self._statuses, statuses
        for last, status in zip(before, statuses, strict=True):
            endpoint, load = status.address, status.load
            assert load is not None, "a simulated pod reports always"
            if last.load is not None and restarted(last.load, load):
                self._estimates.forget(endpoint)
                self._memory.forget(endpoint)
                self.bookings.emptied(endpoint)
            self._estimates.report(endpoint, load, now=now)
            self._estimates.trend(endpoint, status.trend)
            seconds = self._estimates.pace(endpoint).first_token_seconds
            self.bookings.reported(endpoint, load, first_token_seconds=seconds)
            rate = self._estimates.tokens_per_second(endpoint)
            if rate is not None:
                self.bookings.prefill_rate(endpoint, tokens_per_second=rate, now=now)

    def _held(self, hashes: Sequence[bytes], count: int) -> PrefixLookup:
        most = (count - 1) // BLOCK_TOKENS
        held = {
            pod.address: len(blocks)
            for pod in self._pods
            if (blocks := pod.scheduler.pool.cached_prefix(list(hashes), max_blocks=most))
        }
        return PrefixLookup(
            matched_blocks=held,
            block_size=dict.fromkeys(held, BLOCK_TOKENS),
            tiers={address: {"GPU": blocks} for address, blocks in held.items()},
            endpoints={},
            registry=Registry(version=b""),
            indexer_alive=True,
        )

    def _shared(self, now: float) -> SharedView:
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

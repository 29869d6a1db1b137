"""The picker's own decision as a router in virtual time: `look` and `choose`, as `extproc.pick` calls them.

The index is never late, and the replicas hear of each other at once. A request waits where no pod has room for its
class; `World` has the queue.
"""

import random
import struct
from collections.abc import Mapping, Sequence

from bench.perfect_index import cached_blocks
from bench.routing.one_cache import BLOCK_TOKENS, block_keys
from bench.routing.virtual_pod import Pod
from bench.routing.virtual_world import Arrival
from extproc.choosing.choose import Choice, PoolView, Query, RoundRobin, choose, look
from extproc.choosing.endpoint_health import EndpointHealth
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.pods.endpoint import Ask, EndpointStatus
from extproc.pods.endpoint_samples import restarted
from extproc.pods.inflight import Booking, Bookings
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptKeys
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.shared.shared_load import EndpointBookings, SharedView


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
        self._prompts: dict[Booking, Sequence[PromptKeys]] = {}
        self._view = PoolView(
            endpoints=self,
            bookings=self.bookings,
            memory=self._memory,
            health=EndpointHealth(policy.health),
            estimates=self._estimates,
            links=LinkEstimates(),
            hot=HotPrefixes(),
            turns=RoundRobin(),
            policy=policy,
            random=random.Random(seed).random,
        )
        overload, classes = policy.priorities.overload, policy.priorities.classes
        self._ceiling = classes[policy.priorities.default_class].ceiling if overload.enabled else None
        self.others: Sequence[Picker] = ()  # the other replicas, as Redis would tell of them

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:  # noqa: ARG002 - a port
        """Return the pods as they were scraped last."""
        return self._statuses

    def pick(self, arrival: Arrival, *, now: float) -> tuple[int, Booking] | None:
        """Choose and book where a pod has room."""
        view, count = self._view, len(arrival.tokens)
        query = self._query(arrival, now)
        found = choose(view, query, look(view, query, now=now), ceiling=self._ceiling)
        if not isinstance(found, Choice):
            return None
        decision = found.decision
        winner = decision.endpoints[0]
        view.turns.count(None)
        if found.warm_wait is not None:
            view.hot.note(found.warm_wait, endpoint=winner, now=now)
        view.memory.note(winner, prompts=query.prompts, session=None, adapter=None, now=now)
        view.memory.began(winner, query.prompts, now=now)
        uncached = max(0, count - decision.matched_tokens)
        booking = self.bookings.book(winner, now=now, uncached_tokens=uncached, context_tokens=count)
        self._prompts[booking] = query.prompts
        return self._numbers[winner], booking

    def tokens_to_compute(self, arrival: Arrival, *, now: float) -> int:
        """Tokens of a prompt that the warmest pod lacks."""
        return look(self._view, self._query(arrival, now), now=now).uncached_tokens

    def answered(self, ticket: Booking) -> None:
        """Of streams the picker sees no first piece."""

    def ended(self, ticket: Booking, *, now: float) -> None:
        self.bookings.release(ticket)
        self._memory.ended(ticket.endpoint, self._prompts.pop(ticket), computed=True, now=now)

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

    def _query(self, arrival: Arrival, now: float) -> Query:
        count, keys = len(arrival.tokens), block_keys(arrival.tokens)
        engines = {pod.address: pod.scheduler for pod in self._pods}  # of now: a pod that restarts has another
        held = cached_blocks(engines, arrival.hashes, prompt_tokens=count)
        prompts = (PromptKeys(keys=struct.pack(f"<{len(keys)}Q", *keys), tokens_each=BLOCK_TOKENS),)
        return Query(
            ask=Ask(prompt_tokens=count),
            hits=IndexHits(prompts=(held,), keys=prompts, states=self._states, view=self._shared(now)),
            prompts=prompts,
            estimated_tokens=count,
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

"""The picker's own decision in virtual time: `look`, `choose` and `plan_prefill` over its real books.

The index is never late. A request that finds no room in the pool waits at a pod and not in the picker.
"""

import random
from collections.abc import Callable, Mapping, Sequence

import msgspec

from bench.disaggregation.loads import Request
from bench.disaggregation.pods import Pod
from bench.perfect_index import cached_blocks
from extproc.choosing.choose import Choice, PoolView, Query, RoundRobin, choose, look, open_prefillers
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.choosing.room import expected_ttft
from extproc.disaggregation.prefill_plan import PrefillPlan, plan_prefill
from extproc.pods.endpoint import Ask, EndpointStatus, Role
from extproc.pods.inflight import Booking
from extproc.policy.priority import PriorityClass
from extproc.policy.values import PickPolicy
from extproc.pools.picker_books import PickerBooks
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptKeys

EVENT_HASH_BYTES = 8  # of a block's hash, in the pods' events


class Leg(msgspec.Struct, kw_only=True, eq=False):
    """A prompt that a prefill pod computes."""

    plan: PrefillPlan
    endpoint: str
    booking: Booking
    seconds: float  # after which it is given up


class Pick(msgspec.Struct, kw_only=True, eq=False):
    """Where a request goes; `ended` gets it back."""

    endpoint: str
    booking: Booking
    prompts: Sequence[PromptKeys]
    leg: Leg | None = None  # None without a prefill request, or after it


class Picker:
    """One replica."""

    def __init__(
        self,
        pods: Mapping[str, Pod],
        policy: PickPolicy,
        *,
        priority_class: PriorityClass,
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.learned_adapters: Mapping[str, str] = {}
        self._pods = pods
        self._class = priority_class
        self._clock = clock
        self._statuses = {address: pod.report(0.0) for address, pod in pods.items()}
        self._states = dict.fromkeys(pods, LIVE)
        self.books = books = PickerBooks(
            pods,
            policy=policy,
            clock=clock,
        )
        self._view = PoolView(
            endpoints=self,
            bookings=books.bookings,
            memory=books.memory,
            health=books.health,
            estimates=books.estimates,
            links=books.links,
            hot=HotPrefixes(),
            turns=RoundRobin(),
            policy=policy,
            random=random.Random(seed).random,
        )

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:  # noqa: ARG002 - a port
        """Return the pods as they were scraped last."""
        return list(self._statuses.values())

    def scraped(self, status: EndpointStatus) -> None:
        """Take a pod's report."""
        assert status.load is not None, "the pods report their load"
        self._statuses[status.address] = status
        self.books.reported(status.address, status.load, status.trend)

    def pick(self, request: Request) -> Pick:
        """Choose the pod, decide where the prompt is computed, and book both."""
        now, view, books, count = self._clock(), self._view, self.books, request.prompt_tokens
        keys = b"".join(digest[-EVENT_HASH_BYTES:] for digest in request.hashes[: count // self._block_size])
        prompts = (PromptKeys(keys=keys, tokens_each=self._block_size),)
        engines = {address: pod.scheduler for address, pod in self._pods.items()}
        held = cached_blocks(engines, request.hashes, prompt_tokens=count)
        hits = IndexHits(prompts=(held,), keys=prompts, states=self._states)
        query = Query(ask=Ask(prompt_tokens=count), hits=hits, prompts=prompts, estimated_tokens=count)
        snapshot, ceiling = look(view, query, now=now), self._class.ceiling
        found = choose(view, query, snapshot, ceiling=ceiling)
        if not isinstance(found, Choice):
            found = choose(view, query, snapshot, ceiling=None)
        assert isinstance(found, Choice), "without a ceiling there is always a choice"
        decision, winner = found.decision, found.decision.winner
        plan = self._plan(found)
        is_remote = plan is not None and plan.is_remote
        view.turns.count(None)
        if found.warm_wait is not None:
            view.hot.note(found.warm_wait, endpoint=winner.address, now=now)
        books.health.sent(winner.address, now=now)
        booking = books.bookings.book(
            winner.address,
            now=now,
            uncached_tokens=1 if is_remote else max(count - decision.matched_tokens, 1),
            context_tokens=count,
        )
        promised = expected_ttft(winner, books.estimates, now=now)
        books.estimates.promised(
            winner.address, seconds=plan.sides.transfer_seconds if plan is not None and is_remote else promised
        )
        leg = None
        if plan is not None and is_remote:
            leg = self._book_leg(plan, prompts, count)
        books.memory.began(winner.address, prompts, now=now)
        books.memory.note(winner.address, prompts=prompts, session=None, adapter=None, now=now)
        return Pick(endpoint=winner.address, booking=booking, prompts=prompts, leg=leg)

    def leg_ended(self, pick: Pick, *, brought: bool) -> None:
        """End a leg's booking; a prompt that it has not brought is computed where it is decoded."""
        assert pick.leg is not None, "a leg ends once"
        leg, pick.leg = pick.leg, None
        self.books.release_leg(leg.booking)
        if not brought:
            bookings, old = self.books.bookings, pick.booking
            bookings.release(old)
            pick.booking = bookings.book(
                pick.endpoint,
                now=self._clock(),
                uncached_tokens=leg.plan.sides.uncached_tokens,
                context_tokens=old.context_tokens,
            )

    def ended(self, pick: Pick) -> None:
        """The answer is complete."""
        self.books.bookings.release(pick.booking)
        self.books.memory.ended(pick.endpoint, pick.prompts, computed=True, now=self._clock())

    @property
    def _block_size(self) -> int:
        return next(iter(self._pods.values())).scheduler.settings.block_size

    def _plan(self, found: Choice) -> PrefillPlan | None:
        """As `extproc.pools.prefill_legs.plan_of` does for a request that can be split."""
        view, snapshot = self._view, found.snapshot
        return plan_prefill(
            found.decision.winner,
            open_prefillers(view, snapshot),
            policy=view.policy.disaggregation,
            labels=view.policy.pair_labels,
            estimates=view.estimates,
            links=view.links,
            target_seconds=self._class.targets.ttft_seconds,
            yields=self._class.sheddable,
            tie_break=view.random,
            now=snapshot.at,
        )

    def _book_leg(self, plan: PrefillPlan, prompts: Sequence[PromptKeys], count: int) -> Leg:
        """As `extproc.pools.prefill_legs.PrefillLegs.book` does."""
        first = plan.places[0]
        left = self._class.targets.ttft_seconds - plan.sides.local_seconds
        return Leg(
            plan=plan,
            endpoint=first.endpoint,
            booking=self.books.book_leg(first, prompts, context_tokens=count),
            seconds=min(plan.policy.timeout_seconds, max(left, 2.0 * first.leg_seconds)),
        )


def roles_of(pods: Sequence[str], *, prefill: int) -> Mapping[str, Role]:
    """Return the roles of a fleet whose first `prefill` pods prefill and whose others decode."""
    return {address: Role.PREFILL if number < prefill else Role.DECODE for number, address in enumerate(pods)}

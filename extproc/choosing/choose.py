"""Where one request goes: the endpoints as it sees them, those with room, and the decision between them.

Nothing here changes anything: `look` and `choose` read a pool, and the caller books what they return. A request that
waits is looked at and chosen for again, until an endpoint has room. Time is an argument, monotonic seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from extproc.choosing.candidates import candidates_of
from extproc.choosing.decision import Decision, decide, prefillers, require_some
from extproc.choosing.filters import context_limit
from extproc.choosing.health import EndpointHealth
from extproc.choosing.hot_prefixes import HotPrefixes, WarmWait, copy_of_hot_prefix
from extproc.choosing.room import Room, expected_ttft, places_of, rooms_of, takes_prompts
from extproc.choosing.stream_room import unkept
from extproc.pods.endpoint import NOTHING_ASKED, Ask, Candidate, EndpointStatus
from extproc.pods.inflight import Bookings
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import (
    NO_HITS,
    NO_MATCH,
    IndexHits,
    PromptKeys,
    PromptMatch,
    indexed_tokens,
    match_prompts,
    reported_tokens,
)
from extproc.prefixes.routing_memory import NOTHING_HELD, RecentHits, RoutingMemory
from extproc.replicas.shared_load import EndpointBookings, SharedView
from extproc.slo.stream_promises import NO_PROMISES, StreamPromises

SURELY_TOO_LONG = 4  # times a context, by an estimate from the text: no tokenizer makes so much less of it
MOST_FILL = 3.0  # of an endpoint that is still the best place for what it holds


class Endpoints(Protocol):
    """The pods that may serve, and their load."""

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every configured endpoint as it is known at `now` (monotonic seconds)."""

    @property
    def learned_adapters(self) -> Mapping[str, str]:
        """LoRA adapter -> its base model's name, as the pods tell."""


class RoundRobin:
    """The requests of each model, counted. Of too many models the one that was unused for longest goes."""

    def __init__(self, *, most_models: int = 1024) -> None:
        self._most_models = most_models
        self._counts: dict[str | None, int] = {}

    def turn(self, model: str | None) -> int:
        """Return how many requests of this model there were before."""
        return self._counts.get(model, 0)

    def count(self, model: str | None) -> None:
        """Note that a request of this model was sent."""
        self._counts[model] = self._counts.pop(model, 0) + 1  # the latest goes last
        if len(self._counts) > self._most_models:
            del self._counts[next(iter(self._counts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """What a choice reads of a pool."""

    endpoints: Endpoints
    bookings: Bookings
    memory: RoutingMemory
    health: EndpointHealth
    estimates: LatencyEstimates
    links: LinkEstimates
    hot: HotPrefixes
    turns: RoundRobin
    policy: PickPolicy
    random: Callable[[], float]  # breaks ties
    promises: StreamPromises = NO_PROMISES  # that the policy's classes make, as `stream_promises` has them


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """What a choice reads of a request; it stays as it is while the request waits."""

    ask: Ask = NOTHING_ASKED
    hits: IndexHits = NO_HITS
    prompts: Sequence[PromptKeys] = ()  # what each prompt is remembered by
    are_chunks: bool = False  # these are of text, of which no event tells
    estimated_tokens: int = 0  # of all prompts
    session: str | None = None
    degraded: Mapping[str, str] = {}  # word -> what happened, for people
    notes: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()  # filters that do not give way


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints as one request sees them at one time."""

    kept: Sequence[Candidate]  # those that may serve it; at least one
    rejected: Mapping[str, str]  # address -> filter and its words
    ask: Ask
    prompt_tokens: int
    degraded: Mapping[str, str]
    at: float  # monotonic seconds
    prefillers: Sequence[Candidate] = ()  # those that may compute its prompt for one of them

    @property
    def uncached_tokens(self) -> int:
        """The tokens that the warmest endpoint would have to compute."""
        return max(self.prompt_tokens - max(candidate.matched_tokens for candidate in self.kept), 0)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for a request, and what is to be noted once it is booked."""

    decision: Decision
    snapshot: Snapshot
    needed_room: bool  # only endpoints with room were chosen from
    warm_wait: WarmWait | None = None
    by_promise: bool = False  # a promised inter-token time has kept it from an endpoint


class Full(msgspec.Struct, frozen=True, kw_only=True):
    """No endpoint has room for the request now."""

    opens_in_seconds: float | None  # where time alone makes room; None: an event has to
    by_promise: bool = False  # at one of them a promised inter-token time is in the way


def look(view: PoolView, query: Query, *, now: float, others: Mapping[str, EndpointBookings] | None = None) -> Snapshot:
    """Return the endpoints as they are at `now`; `others`: what other replicas have booked, newer than the lookup.

    Raise NoReadyEndpointError where none may serve the request.
    """
    hits = query.hits
    if others is not None:
        hits = msgspec.structs.replace(hits, view=msgspec.structs.replace(hits.view or SharedView(), others=others))
    statuses = view.endpoints.snapshot(now=now)
    match = _match(view, query, hits, statuses, now=now)
    ask = msgspec.structs.replace(query.ask, turn=view.turns.turn(query.ask.model))
    candidates = _candidates(view, query, hits, statuses, match, now=now)
    degraded = query.degraded
    unknown = [candidate.address for candidate in candidates if candidate.load is None]
    if unknown:
        degraded = {**degraded, "load-unknown": f"no recent report of {', '.join(unknown)}"}
    kept, rejected = require_some(candidates, ask=ask, strict=query.strict)
    if view.promises.seconds:
        words = unkept(kept, view.estimates, class_name=ask.class_name, promises=view.promises)
        degraded = {**degraded, **words} if words else degraded
    if _will_be_refused(kept, query):
        match = NO_MATCH
        candidates = _candidates(view, query, hits, statuses, match, now=now)
        kept, rejected = require_some(candidates, ask=ask, strict=query.strict)
    return Snapshot(
        kept=kept,
        rejected=rejected,
        ask=ask,
        prompt_tokens=match.prompt_tokens,
        degraded=degraded,
        at=now,
        prefillers=prefillers(candidates, ask) if view.policy.disaggregation.enabled else (),
    )


def choose(view: PoolView, query: Query, snapshot: Snapshot, *, ceiling: float | None) -> Choice | Full:
    """Decide between the endpoints that have room for a class that may fill `ceiling` (0..1) of their limits.

    None: between all of them, whether they have room or not.
    """
    places, rejected = snapshot.kept, snapshot.rejected
    reserve: Sequence[str] = ()
    by_promise = False
    if ceiling is not None:
        rooms = rooms_in(view, snapshot, ceiling=ceiling)
        has_place = places_of(rooms)
        if not any(has_place):
            opens_in = [room.opens_in_seconds for room in rooms if room.opens_in_seconds is not None]
            by_promise = any(room.by_promise for room in rooms)
            return Full(opens_in_seconds=min(opens_in, default=None), by_promise=by_promise)
        if not all(has_place):
            by_promise = any(room.by_promise and not has for room, has in zip(rooms, has_place, strict=True))
            places, rejected, reserve = _with_room(view, snapshot, rooms, has_place)
    kept, warm_wait = copy_of_hot_prefix(places, query.prompts, hot=view.hot, policy=view.policy, now=snapshot.at)
    decision = decide(
        kept,
        rejected=rejected,
        policy=view.policy,
        ask=snapshot.ask,
        prompt_tokens=snapshot.prompt_tokens,
        degraded=snapshot.degraded,
        tie_break=view.random,
        notes=query.notes,
        reserve=reserve,
    )
    # other scorers may have had their way
    if warm_wait is not None and warm_wait.hot is not None and decision.endpoints[0] == warm_wait.endpoint:
        decision = msgspec.structs.replace(decision, notes=(*decision.notes, warm_wait.words))
    return Choice(
        decision=decision,
        snapshot=snapshot,
        needed_room=ceiling is not None,
        warm_wait=warm_wait,
        by_promise=by_promise,
    )


def rooms_in(view: PoolView, snapshot: Snapshot, *, ceiling: float) -> Sequence[Room]:
    """Return how full each kept endpoint is for a class with this ceiling."""
    return rooms_of(
        snapshot.kept,
        ceiling=ceiling,
        policy=view.policy.priorities.overload,
        estimates=view.estimates,
        full_until=view.health.full_until(now=snapshot.at),
        now=snapshot.at,
        class_name=snapshot.ask.class_name,
        promises=view.promises,
    )


def open_prefillers(view: PoolView, snapshot: Snapshot) -> Sequence[Candidate]:
    """Return the prefill pods that take one more prompt."""
    policy, full_until = view.policy.priorities.overload, view.health.full_until(now=snapshot.at)
    return [
        pod for pod in snapshot.prefillers if takes_prompts(pod, policy=policy, full_until=full_until, now=snapshot.at)
    ]


def any_request(view: PoolView, *, now: float) -> Sequence[Candidate]:
    """Return every endpoint as a request that was never seen before sees it at `now`."""
    query = Query()
    statuses = view.endpoints.snapshot(now=now)
    match = _match(view, query, NO_HITS, statuses, now=now)
    return _candidates(view, query, NO_HITS, statuses, match, now=now)


def _with_room(
    view: PoolView, snapshot: Snapshot, rooms: Sequence[Room], has_place: Sequence[bool]
) -> tuple[Sequence[Candidate], Mapping[str, str], tuple[str, ...]]:
    """Return the endpoints to choose from, the rejected ones, and those of them that may still serve as a fallback.

    A full endpoint stays among them where what it holds makes the wait there the shorter one: only where prompts to be
    computed fill it, and little beyond its limit. What is not sent there goes elsewhere at once, and computing a prompt
    again takes room from all others.
    """
    now = snapshot.at
    free = [candidate for candidate, has in zip(snapshot.kept, has_place, strict=True) if has]
    best_seconds = min(expected_ttft(candidate, view.estimates, now=now) for candidate in free)
    rejected = dict(snapshot.rejected)
    places: list[Candidate] = []
    reserve: list[tuple[float, str]] = []
    for candidate, room, has in zip(snapshot.kept, rooms, has_place, strict=True):
        is_worth_the_wait = (
            room.by_backlog
            and room.fill < MOST_FILL
            and expected_ttft(candidate, view.estimates, now=now) < best_seconds
        )
        if has or is_worth_the_wait:
            places.append(candidate)
        else:
            rejected[candidate.address] = f"room: {room.why}"
            reserve.append((room.fill, candidate.address))
    return places, rejected, tuple(address for _, address in sorted(reserve))


def _match(
    view: PoolView, query: Query, hits: IndexHits, statuses: Sequence[EndpointStatus], *, now: float
) -> PromptMatch:
    """Merge what the index knows with what was routed lately."""
    indexed = indexed_tokens(hits.prompts[0]) if len(hits.prompts) == 1 else None
    recent: Sequence[RecentHits] = ()
    if query.prompts:
        recent = view.memory.matches(
            query.prompts,
            states={} if query.are_chunks else hits.states,
            endpoints=[status.address for status in statuses],
            indexed=reported_tokens(hits.prompts[0], indexed)
            if indexed is not None and len(query.prompts) == 1
            else NOTHING_HELD,
            now=now,
        )
    return match_prompts(
        query.estimated_tokens, hits.prompts, recent=recent, tier_weights=view.policy.tier_weights, indexed=indexed
    )


def _will_be_refused(kept: Sequence[Candidate], query: Query) -> bool:
    """Tell whether every endpoint will refuse the prompt at once, because it takes no prompt so long.

    It costs them nothing then. Booked as it is, one such prompt would make every endpoint look full.
    """
    for candidate in kept:
        limit = context_limit(candidate, query.ask)
        if limit is None or query.ask.prompt_tokens < limit:
            return False
        if query.ask.prompt_tokens < SURELY_TOO_LONG * limit and _keyed_tokens(query) < limit:
            return False
    return True


def _keyed_tokens(query: Query) -> int:
    """Return the tokens that the longest prompt has for certain; where only its text is known, none are."""
    return 0 if query.are_chunks else max([prompt.tokens for prompt in query.prompts], default=0)


def _candidates(
    view: PoolView,
    query: Query,
    hits: IndexHits,
    statuses: Sequence[EndpointStatus],
    match: PromptMatch,
    *,
    now: float,
) -> Sequence[Candidate]:
    return candidates_of(
        statuses,
        match,
        hits,
        bookings=view.bookings,
        memory=view.memory,
        health=view.health,
        policy=view.policy,
        session=query.session,
        adapter=query.ask.adapter,
        now=now,
    )

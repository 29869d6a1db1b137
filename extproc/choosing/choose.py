"""Choose an endpoint for one request: take a snapshot of the pool, find the endpoints with room, decide.

`look` and `choose` only read the pool; the caller books their result. A waiting request goes through both again until
an endpoint has room. Time is an argument, monotonic seconds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from extproc.answers.stream_promises import NO_PROMISES, StreamPromises
from extproc.choosing.candidates import candidates_of
from extproc.choosing.decision import Decision, context_limit, decide, prefillers, require_some
from extproc.choosing.endpoint_health import EndpointHealth
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
from extproc.shared.shared_load import Claims, EndpointBookings, SharedView

SURELY_TOO_LONG = 4  # estimated tokens / context length: no estimate from text is that far off
MOST_FILL = 3.0  # upper bound of the fill at which a full endpoint may still be the best for its cached prefix
LONG_TOKENS = 1000  # a longer prompt may wait where half of it is cached, however full the endpoint is,
HELD_FACTOR = 1.5  # up to this multiple of the best TTFT elsewhere: docs/decisions/0021-long-documents.md


class Endpoints(Protocol):
    """The pool's pods and their load."""

    def snapshot(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return the status of every configured endpoint at `now` (monotonic seconds)."""

    @property
    def learned_adapters(self) -> Mapping[str, str]:
        """LoRA adapter -> base model, as reported by the pods."""


class RoundRobin:
    """Requests counted per model, for round robin; above the limit the least recently used model is dropped."""

    def __init__(self, *, most_models: int = 1024) -> None:
        self._most_models = most_models
        self._counts: dict[str | None, int] = {}

    def turn(self, model: str | None) -> int:
        """Return the number of earlier requests of this model."""
        return self._counts.get(model, 0)

    def count(self, model: str | None) -> None:
        """Count a request of this model."""
        self._counts[model] = self._counts.pop(model, 0) + 1  # re-inserted: the order is least recently used first
        if len(self._counts) > self._most_models:
            del self._counts[next(iter(self._counts))]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolView:
    """The parts of a pool that a choice reads."""

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
    promises: StreamPromises = NO_PROMISES  # inter-token targets of the policy's classes, from `stream_promises`
    claims: Claims = field(default_factory=Claims)


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of a request that a choice reads; constant while the request waits."""

    ask: Ask = NOTHING_ASKED
    hits: IndexHits = NO_HITS
    prompts: Sequence[PromptKeys] = ()  # block or chunk keys of each prompt
    are_chunks: bool = False  # the keys are of text chunks, which no KV event reports
    estimated_tokens: int = 0  # of all prompts
    session: str | None = None
    degraded: Mapping[str, str] = {}  # reason -> explanation for people
    notes: tuple[str, ...] = ()
    strict: frozenset[str] = frozenset()  # lenient filters that must not give way


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The endpoints as one request sees them at one moment."""

    kept: Sequence[Candidate]  # eligible endpoints; at least one
    rejected: Mapping[str, str]  # address -> filter and reason
    ask: Ask
    prompt_tokens: int
    degraded: Mapping[str, str]
    at: float  # monotonic seconds
    prefillers: Sequence[Candidate] = ()  # prefill pods that may compute the prompt for one of them

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that even the warmest endpoint has to compute."""
        return max(self.prompt_tokens - max(candidate.matched_tokens for candidate in self.kept), 0)


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The decision for a request, and the facts to record once it is booked."""

    decision: Decision
    snapshot: Snapshot
    needed_room: bool  # only endpoints with room (or worth the wait) were considered
    warm_wait: WarmWait | None = None
    by_promise: bool = False  # an inter-token target kept it from an endpoint


class Full(msgspec.Struct, frozen=True, kw_only=True):
    """No endpoint has room for the request now."""

    opens_in_seconds: float | None  # until time alone makes room; None if only an event can
    by_promise: bool = False  # at least one endpoint is full because of an inter-token target


def look(view: PoolView, query: Query, *, now: float, others: Mapping[str, EndpointBookings] | None = None) -> Snapshot:
    """Return the endpoints at `now`; `others`: the other replicas' bookings if newer than the lookup's.

    Raise NoReadyEndpointError if no endpoint is eligible.
    """
    hits = query.hits
    if others is not None:
        hits = msgspec.structs.replace(hits, view=msgspec.structs.replace(hits.view or SharedView(), others=others))
    statuses = view.endpoints.snapshot(now=now)
    match = _match(view, query, hits, statuses, now=now)
    ask = msgspec.structs.replace(query.ask, turn=view.turns.turn(query.ask.model))
    candidates = _candidates(view, query, hits, statuses, match, now=now)
    degraded = query.degraded
    kept, rejected, skipped = require_some(candidates, ask=ask, strict=query.strict)
    unknown = [candidate.address for candidate in kept if candidate.load is None]
    if unknown:
        degraded = {**degraded, "load-unknown": f"no recent report of {', '.join(unknown)}"}
    if skipped:
        degraded = {**degraded, **skipped}
    if view.promises.seconds:
        words = unkept(kept, view.estimates, class_name=ask.class_name, promises=view.promises)
        degraded = {**degraded, **words} if words else degraded
    if _will_be_refused(kept, query):
        match = NO_MATCH
        candidates = _candidates(view, query, hits, statuses, match, now=now)
        kept, rejected, _ = require_some(candidates, ask=ask, strict=query.strict)
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
    """Decide between the endpoints with room for a class that may fill `ceiling` (0..1) of their limits.

    A ceiling of None ignores room and decides between all eligible endpoints.
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
    # other scorers may have outvoted the copy
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
    """Return the fill of each kept endpoint for a class with this ceiling."""
    return rooms_of(
        snapshot.kept,
        ceiling=ceiling,
        policy=view.policy.priorities.overload,
        estimates=view.estimates,
        full_until=view.health.full_until(now=snapshot.at),
        now=snapshot.at,
        class_name=snapshot.ask.class_name,
        answer_tokens=snapshot.ask.answer_tokens,
        promises=view.promises,
    )


def open_prefillers(view: PoolView, snapshot: Snapshot) -> Sequence[Candidate]:
    """Return the prefill pods with room for one more prompt."""
    policy, full_until = view.policy.priorities.overload, view.health.full_until(now=snapshot.at)
    return [
        pod for pod in snapshot.prefillers if takes_prompts(pod, policy=policy, full_until=full_until, now=snapshot.at)
    ]


def any_request(view: PoolView, *, now: float) -> Sequence[Candidate]:
    """Return the candidates at `now` of a request without a prompt, model or session."""
    query = Query()
    statuses = view.endpoints.snapshot(now=now)
    match = _match(view, query, NO_HITS, statuses, now=now)
    return _candidates(view, query, NO_HITS, statuses, match, now=now)


def _with_room(
    view: PoolView, snapshot: Snapshot, rooms: Sequence[Room], has_place: Sequence[bool]
) -> tuple[Sequence[Candidate], Mapping[str, str], tuple[str, ...]]:
    """Return the endpoints to choose from, the rejected ones, and the full ones as fallbacks, the emptiest first.

    A full endpoint stays a choice if its cached prefix makes the TTFT there the shortest, only prompts to compute fill
    it, and its fill is below MOST_FILL. Recomputing a long prompt elsewhere takes room from all other requests: where
    at least half of a long prompt is cached, it may wait longer, and also for a free slot.
    """
    now = snapshot.at
    free = [candidate for candidate, has in zip(snapshot.kept, has_place, strict=True) if has]
    best_seconds = min(expected_ttft(candidate, view.estimates, now=now) for candidate in free)
    rejected = dict(snapshot.rejected)
    places: list[Candidate] = []
    reserve: list[tuple[float, str]] = []
    is_long = snapshot.prompt_tokens > LONG_TOKENS
    for candidate, room, has in zip(snapshot.kept, rooms, has_place, strict=True):
        if is_long and 2 * candidate.saved_tokens >= snapshot.prompt_tokens:
            may_wait, most_seconds = room.by_queue, HELD_FACTOR * best_seconds
        else:
            may_wait, most_seconds = room.by_backlog and room.fill < MOST_FILL, best_seconds
        is_worth_the_wait = may_wait and expected_ttft(candidate, view.estimates, now=now) < most_seconds
        if has or is_worth_the_wait:
            places.append(candidate)
        else:
            rejected[candidate.address] = f"room: {room.why}"
            reserve.append((room.fill, candidate.address))
    return places, rejected, tuple(address for _, address in sorted(reserve))


def _match(
    view: PoolView, query: Query, hits: IndexHits, statuses: Sequence[EndpointStatus], *, now: float
) -> PromptMatch:
    """Merge the index's hits with recent routing."""
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
    """Tell whether every endpoint will reject the prompt at once because it exceeds the context length.

    A rejection costs the endpoint nothing, but booking such a prompt with all its tokens would make it look full.
    """
    for candidate in kept:
        limit = context_limit(candidate, query.ask)
        if limit is None or query.ask.prompt_tokens < limit:
            return False
        if query.ask.prompt_tokens < SURELY_TOO_LONG * limit and _keyed_tokens(query) < limit:
            return False
    return True


def _keyed_tokens(query: Query) -> int:
    """Return the certain token count of the longest prompt, 0 if only its text is known."""
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
        claims=view.claims,
        memory=view.memory,
        health=view.health,
        policy=view.policy,
        session=query.session,
        adapter=query.ask.adapter,
        now=now,
    )

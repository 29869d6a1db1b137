"""Every endpoint as one request sees it: reports, bookings of all replicas, expected hits, health. Pure."""

from collections.abc import Mapping, Sequence

from msgspec import structs

from extproc.choosing.health import EndpointHealth, at_most, slow_endpoints
from extproc.pods.endpoint import Candidate, EndpointStatus, Role
from extproc.pods.inflight import Bookings
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptMatch
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.replicas.shared_load import EndpointBookings, SharedView, add_counts

ALONE = SharedView()
NONE_BOOKED = EndpointBookings()
NEVER = float("-inf")


def candidates_of(
    statuses: Sequence[EndpointStatus],
    match: PromptMatch,
    hits: IndexHits,
    *,
    bookings: Bookings,
    memory: RoutingMemory,
    health: EndpointHealth,
    policy: PickPolicy,
    session: str | None,
    adapter: str | None,
    now: float,
) -> list[Candidate]:
    """Return a candidate for each endpoint at `now` (monotonic seconds)."""
    view = hits.view or ALONE
    others = view.others
    place = None
    if session is not None:
        place = view.session_endpoint or memory.session_place(session, now=now)
    rate = bookings.tokens_per_second
    unhealthy = unhealthy_endpoints(statuses, health=health, policy=policy, tokens_per_second=rate, now=now)
    prompt_tokens = match.prompt_tokens
    most = max(prompt_tokens - 1, 0)  # vLLM computes at least the last token anew
    matched_tokens, worth_tokens, states = match.matched_tokens, match.worth_tokens, hits.states
    indexed_tokens, recent_tokens = match.indexed_tokens, match.recent_tokens
    held_back = hits.prompts[0].held_back if len(hits.prompts) == 1 else {}
    least = min(policy.minimum_hit_ratio * prompt_tokens, most)
    roles, cordoned = policy.roles, policy.cordoned
    # what sets one endpoint apart from another beside its load and what it holds: mostly nothing
    are_alike = not (roles or cordoned or unhealthy) and place is None and adapter is None
    candidates = []
    for status in statuses:
        address, load = status.address, status.load
        other = others.get(address, NONE_BOOKED) if others else NONE_BOOKED
        own = bookings.totals(address, now=now, others_tokens=other.uncached_tokens)
        opened = own.requests + other.requests
        booked = bookings.booked_since(address, since=load.reported_at if load else NEVER) if own.requests else 0
        if load is not None and other.requests:
            # others do not tell when they booked: what the pod does not show yet must be new
            booked = max(booked, opened - load.unfinished_requests)
        matched, worth, indexed, recent = min(matched_tokens.get(address, 0), most), 0.0, 0, 0
        if matched:
            indexed = indexed_tokens.get(address, 0)
            if matched >= least:
                # what is expected there stays true for the books; only in comparing endpoints a short match is none
                worth, recent = min(worth_tokens.get(address, 0.0), matched), recent_tokens.get(address, 0)
        state = states.get(address, LIVE)
        # with more than 15 fields named, making one takes three times as long
        candidate = Candidate(
            address=address,
            reachability=status.reachability,
            load=load,
            booked_requests=booked,
            matched_tokens=matched,
            prompt_tokens=prompt_tokens,
            worth_tokens=worth,
            indexed_tokens=indexed,
            recent_tokens=recent,
            open_requests=opened,
            backlog_tokens=own.uncached_tokens + other.uncached_tokens,
            context_tokens=own.context_tokens + other.context_tokens,
            filled_tokens=own.filled_tokens,
            trend=status.trend,
            models=status.models,
        )
        if not (are_alike and state == LIVE and status.ready_since is None):
            candidate = structs.replace(
                candidate,
                role=roles.get(address, Role.BOTH) if roles else Role.BOTH,
                cordoned=address in cordoned,
                unhealthy=unhealthy.get(address),
                session=place == address,
                adapter_placed=adapter is not None
                and (address in view.adapter_endpoints or memory.has_adapter(adapter, address, now=now)),
                ready_since=status.ready_since,
                source_state="" if state == LIVE else state,
            )
        if own.promised or other.promised:
            candidate = structs.replace(candidate, promised=add_counts(own.promised, other.promised))
        if held_back and address in held_back:
            candidate = structs.replace(candidate, held_back=held_back[address].words)
        candidates.append(candidate)
    return candidates


def unhealthy_endpoints(
    statuses: Sequence[EndpointStatus],
    *,
    health: EndpointHealth,
    policy: PickPolicy,
    tokens_per_second: float,
    now: float,
) -> Mapping[str, str]:
    """Return the endpoints to be avoided and why: failures, or tokens far slower than the others'.

    Decoding is slow beside prompts that are computed in the same steps, and that is no fault. An endpoint that begins
    more prompts than one so slow could compute is not slow; `tokens_per_second` is what the pool's endpoints compute.
    """
    times = {}
    for status in statuses:
        if (seconds := status.trend.inter_token_seconds) is not None:
            times[status.address] = seconds
    slow = slow_endpoints(times, policy=policy.health) if len(times) > 2 else {}
    if slow:
        most = tokens_per_second / policy.health.slow_factor
        busy = {status.address for status in statuses if status.trend.prompt_tokens_per_second >= most}
        slow = {address: why for address, why in slow.items() if address not in busy}
    failed = health.avoided(now=now)
    if not slow and not failed:
        return failed
    return at_most({**slow, **failed}, endpoints=len(statuses), share=policy.health.most_avoided_share)

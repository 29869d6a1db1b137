"""Build the candidates of one request: each pod's report, all replicas' bookings, expected hits and health. Pure.

Avoided are endpoints with too many failures, or tokens much slower than the others'. Time: monotonic seconds.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median

from msgspec import structs

from extproc.choosing.endpoint_health import NONE_AVOIDED, EndpointHealth
from extproc.pods.endpoint import Candidate, EndpointStatus, Role
from extproc.pods.inflight import Bookings, EndpointTotals
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptMatch
from extproc.prefixes.routing_memory import RoutingMemory
from extproc.shared.shared_load import Claims, EndpointBookings, SharedView, add_counts

ALONE = SharedView()
NONE_BOOKED = EndpointBookings()
NEVER = float("-inf")
SLOW_FACTOR = 3.0  # an inter-token time this many times the endpoints' median is an outlier
SLOW_FLOOR_SECONDS = 0.05  # an inter-token time below this never is
GROWTH_USAGE = 0.5  # of the cache in use: below it expected answers do not count, as a pod may report absurd ones
MOST_AVOIDED_SHARE = 0.5  # of the endpoints, the first that failed


def slow_endpoints(inter_token_seconds: Mapping[str, float]) -> Mapping[str, str]:
    """Return the endpoints whose inter-token time (seconds by endpoint) is an outlier, each with a short reason."""
    if len(inter_token_seconds) < 3:  # with two there is no majority
        return NONE_AVOIDED
    usual = median(inter_token_seconds.values())
    limit = max(usual * SLOW_FACTOR, SLOW_FLOOR_SECONDS)
    return {
        endpoint: f"{seconds * 1000:.0f} ms a token, the others {usual * 1000:.0f} ms"
        for endpoint, seconds in inter_token_seconds.items()
        if seconds > limit
    }


def at_most(avoided: Mapping[str, str], *, endpoints: int) -> Mapping[str, str]:
    """Cap the avoided endpoints at MOST_AVOIDED_SHARE of all `endpoints`; the first ones stay."""
    most = int(endpoints * MOST_AVOIDED_SHARE)
    return avoided if len(avoided) <= most else dict(islice(avoided.items(), most))


def candidates_of(
    statuses: Sequence[EndpointStatus],
    match: PromptMatch,
    hits: IndexHits,
    *,
    bookings: Bookings,
    claims: Claims,
    memory: RoutingMemory,
    health: EndpointHealth,
    policy: PickPolicy,
    session: str | None,
    adapter: str | None,
    now: float,
) -> list[Candidate]:
    """Return one candidate per endpoint at `now` (monotonic seconds)."""
    view = hits.view or ALONE
    others = view.others
    place = None
    if session is not None:
        place = view.session_endpoint or memory.session_place(session, now=now)
    rate = bookings.tokens_per_second
    unhealthy = unhealthy_endpoints(statuses, health=health, tokens_per_second=rate, now=now)
    failing = health.failing() if unhealthy else frozenset()
    prompt_tokens = match.prompt_tokens
    most = max(prompt_tokens - 1, 0)  # vLLM always recomputes at least the last token
    matched_tokens, worth_tokens, states = match.matched_tokens, match.worth_tokens, hits.states
    indexed_tokens, recent_tokens = match.indexed_tokens, match.recent_tokens
    held_back = hits.prompts[0].held_back if len(hits.prompts) == 1 else {}
    roles, cordoned = policy.roles, policy.cordoned
    # endpoints usually differ only in load and cache: then the fields below keep their defaults
    are_alike = not (roles or cordoned or unhealthy) and place is None and adapter is None
    candidates = []
    for status in statuses:
        address, load = status.address, status.load
        other = others.get(address, NONE_BOOKED) if others else NONE_BOOKED
        if load is not None and other is not NONE_BOOKED:
            length = status.models.max_model_len if status.models is not None else None
            other = claims.believed(address, other, load, context_length=length)
        own = bookings.totals(address, now=now, others_tokens=other.uncached_tokens)
        opened = own.requests + other.requests
        booked = bookings.booked_since(address, since=load.reported_at if load else NEVER) if own.requests else 0
        if load is not None and other.requests:
            # other replicas do not share booking times: open requests missing from the report must be new
            booked = max(booked, opened - load.unfinished_requests)
        matched, worth, indexed, recent = min(matched_tokens.get(address, 0), most), 0.0, 0, 0
        if matched:
            indexed, recent = indexed_tokens.get(address, 0), recent_tokens.get(address, 0)
            worth = min(worth_tokens.get(address, 0.0), matched)
        state = states.get(address, LIVE)
        # naming more than 15 fields makes construction three times slower
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
                failing=address in failing,
                session=place == address,
                adapter_placed=adapter is not None
                and (address in view.adapter_endpoints or memory.has_adapter(adapter, address, now=now)),
                ready_since=status.ready_since,
                source_state="" if state == LIVE else state,
            )
        if own.promised or other.promised or own.growth_tokens:
            candidate = _with_streams(candidate, own, other)
        if held_back and address in held_back:
            candidate = structs.replace(candidate, held_back=held_back[address].words)
        candidates.append(candidate)
    return candidates


def _with_streams(candidate: Candidate, own: EndpointTotals, other: EndpointBookings) -> Candidate:
    """Add the open streams by class, and the expected growth of their answers."""
    load, growth = candidate.load, 0.0
    if own.growth_tokens and load is not None and load.kv_usage >= GROWTH_USAGE:
        growth = own.growth_tokens * (1.0 + other.requests / own.requests)  # their answers are like this picker's
    promised = add_counts(own.promised, other.promised)
    if not (promised or growth):
        return candidate
    return structs.replace(candidate, promised=promised, growth_tokens=growth)


def unhealthy_endpoints(
    statuses: Sequence[EndpointStatus],
    *,
    health: EndpointHealth,
    tokens_per_second: float,
    now: float,
) -> Mapping[str, str]:
    """Return the endpoints to avoid and why: failures, or an inter-token time far above the others'.

    Prefill in the same steps slows decoding down, and that is no fault. So an endpoint is not slow if it starts more
    prompt tokens than a slow one could compute: `tokens_per_second` (the pool's prefill rate) / the slow factor.
    """
    times = {}
    for status in statuses:
        if (seconds := status.trend.inter_token_seconds) is not None:
            times[status.address] = seconds
    slow = slow_endpoints(times) if len(times) > 2 else {}
    if slow:
        most = tokens_per_second / SLOW_FACTOR
        busy = {status.address for status in statuses if status.trend.prompt_tokens_per_second >= most}
        slow = {address: why for address, why in slow.items() if address not in busy}
    failed = health.avoided(now=now)
    if not slow and not failed:
        return failed
    # an endpoint that fails every request is no loss; of the others at most half are avoided
    whole = health.failing()
    failing = {address: why for address, why in failed.items() if address in whole}
    return {**at_most({**failing, **failed, **slow}, endpoints=len(statuses)), **failing}

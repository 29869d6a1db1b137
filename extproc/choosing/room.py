"""Which endpoints have room for one more request of a class, and what TTFT it would have there. Pure.

An endpoint without a recent report is neither idle nor full: it gets a few requests at a time.
`docs/explanation/estimates.md` has the rules in words.
"""

from collections.abc import Mapping, Sequence

import msgspec

from extproc.choosing.stream_room import broken_promise
from extproc.pods.endpoint import Candidate
from extproc.pods.endpoint_samples import EndpointPace
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import OverloadPolicy
from extproc.slo.stream_promises import NO_PROMISES, StreamPromises
from kvmesh.pods.pod_report import EndpointLoad

LEAST_SHARE = 0.1  # of the limits that an endpoint has which has just started
BLIND_REQUESTS = 32.0  # open at an endpoint while no endpoint reports, however few it ran: no server is that small
LEAST_LIMIT = 1e-3  # of limits that the policy sets to nothing
PREEMPTED_SECONDS = 2.0  # after it has pushed a stream back an endpoint has no room for less important classes


class Room(msgspec.Struct, frozen=True, gc=False):
    """How full an endpoint is for one class."""

    fill: float  # 1 and more: full
    why: str = ""  # it is full, for people; "" else
    opens_in_seconds: float | None = None  # where time alone makes room; None: there is room, or an event has to
    by_backlog: bool = False  # prompts that are to be computed there are all that makes it full
    yields: bool = False  # promises, or streams, of less important classes are all that makes it full
    by_promise: bool = False  # one more stream there would break a promised inter-token time


EMPTY = Room(0.0)


def rooms_of(
    candidates: Sequence[Candidate],
    *,
    ceiling: float,
    policy: OverloadPolicy,
    estimates: LatencyEstimates,
    full_until: Mapping[str, float],
    now: float,
    class_name: str = "",
    promises: StreamPromises = NO_PROMISES,
) -> list[Room]:
    """Return how full each is at `now` for a class that may fill `ceiling` (0..1) of the limits."""
    blind = all(candidate.load is None for candidate in candidates)
    return [
        room(
            candidate,
            ceiling=ceiling,
            policy=policy,
            estimates=estimates,
            full_until=full_until,
            now=now,
            blind=blind,
            class_name=class_name,
            promises=promises,
        )
        for candidate in candidates
    ]


def places_of(rooms: Sequence[Room]) -> Sequence[bool]:
    """Tell for each endpoint whether a request may go there: where it has room.

    Where none has, what is promised to less important classes gives way, and their streams are not waited for.
    """
    free = [room.fill < 1.0 for room in rooms]
    return free if True in free else [room.yields for room in rooms]


def room(
    candidate: Candidate,
    *,
    ceiling: float,
    policy: OverloadPolicy,
    estimates: LatencyEstimates,
    full_until: Mapping[str, float],
    now: float,
    blind: bool = False,
    class_name: str = "",
    promises: StreamPromises = NO_PROMISES,
) -> Room:
    """Return how full one endpoint is; `blind`: no endpoint of the pool reports, so that bookings decide alone."""
    if full_until and (until := full_until.get(candidate.address, 0.0)) > now:
        return Room(1.0, f"it answered 503 itself and counts as full for another {until - now:.1f} s", until - now)
    pace, load = estimates.pace(candidate.address), candidate.load
    started = 1.0
    if candidate.ready_since is not None:
        started = _started_share(candidate.ready_since, policy=policy, now=now)
        few = max(started * ceiling * estimates.most_running, 1.0)
        if started < 1.0 and estimates.most_running > 0.0 and candidate.open_requests >= few:
            return Room(candidate.open_requests / few, f"it is new, with {candidate.open_requests} requests open")
    if load is None:
        return _unknown(candidate, pace, policy=policy, share=started * ceiling, blind=blind)
    found = _known(candidate, load, pace, policy=policy, share=started * ceiling, now=now)
    if now - pace.preempted_at < PREEMPTED_SECONDS and promises.is_low(class_name):
        return _preempting(found, since=now - pace.preempted_at)
    if promises.seconds and (found.fill < 1.0 or found.by_backlog) and found is not EMPTY:
        broken = broken_promise(candidate, pace, class_name=class_name, promises=promises)
        if broken is not None:
            return Room(broken.fill, broken.why, yields=broken.yields and found.fill < 1.0, by_promise=True)
    return found


def _preempting(found: Room, *, since: float) -> Room:
    """Return how full an endpoint is that pushed a stream back so many seconds ago, and else is `found` so full."""
    if found is EMPTY or (found.fill >= 1.0 and not found.by_backlog):
        return found
    since = max(since, 0.0)
    return Room(1.0, f"it has pushed a stream back {since:.1f} s ago: its cache is full", PREEMPTED_SECONDS - since)


def takes_prompts(candidate: Candidate, *, policy: OverloadPolicy, full_until: Mapping[str, float], now: float) -> bool:
    """Tell whether a prefill pod may be given a prompt: it has not said that it is full, and its cache has room.

    Its queue is no limit: whoever compares the times to the first token counts with it.
    """
    if full_until.get(candidate.address, 0.0) > now:
        return False
    return candidate.load is None or candidate.load.kv_usage < policy.kv_usage


def _known(
    candidate: Candidate,
    load: EndpointLoad,
    pace: EndpointPace,
    *,
    policy: OverloadPolicy,
    share: float,
    now: float,
) -> Room:
    if not (load.unfinished_requests or candidate.booked_requests):
        return EMPTY  # whatever else is in the books: it has nothing to do
    most_waiting = _most_waiting(pace, policy, share)
    most_backlog = max(policy.backlog_seconds * share, LEAST_LIMIT)
    reported, sent = _waiting(candidate, load, pace, now)
    backlog_seconds = candidate.backlog_tokens * pace.backlog_seconds_a_token
    cache = load.kv_usage / max(policy.kv_usage, LEAST_LIMIT)
    fill = max(reported / most_waiting, sent / most_waiting, backlog_seconds / most_backlog, cache)
    if fill < 1.0:
        return Room(fill)
    if cache >= 1.0:
        return Room(fill, f"{load.kv_usage:.0%} of its cache is in use")
    if sent >= most_waiting:
        return Room(fill, f"about {sent:.0f} requests wait there for a place")
    # these two shrink by themselves
    opens_in = max((reported - most_waiting) / pace.starts_a_second, backlog_seconds - most_backlog, 0.0)
    if reported >= most_waiting:
        return Room(fill, f"{load.waiting_requests} requests wait there", opens_in, True)
    return Room(fill, f"prompts for {backlog_seconds:.1f} s are to be computed there", opens_in, True)


def _most_waiting(pace: EndpointPace, policy: OverloadPolicy, share: float) -> float:
    """Return how many may wait there for a place: those that it starts within the time that prompts may wait.

    By number alone a pod of many places would lose those that end in one step until their successors have come.
    """
    return max(policy.waiting_requests * share, pace.seen_starts_a_second * policy.backlog_seconds * share, 1.0)


def _waiting(candidate: Candidate, load: EndpointLoad, pace: EndpointPace, now: float) -> tuple[float, float]:
    """Return how many wait now of those that were reported, and how many by what was sent; negative: none.

    What a report said shrinks at the pod's pace. What was sent since waits only where it finds no place: beyond the
    number that the pod runs at a time where that is known; a busy pod's short requests come and go between two reports.
    """
    started = pace.starts_a_second * max(now - load.reported_at, 0.0)
    reported = load.waiting_requests - started
    if pace.running_limit is not None:
        return reported, candidate.open_requests - pace.running_limit
    if not load.waiting_requests:
        return reported, 0.0
    return reported, min(
        reported + candidate.booked_requests,
        candidate.open_requests - max(pace.most_running, load.running_requests),
    )


def expected_ttft(candidate: Candidate, estimates: LatencyEstimates, *, now: float) -> float:
    """Return the seconds to the first token of this request if it is sent there now."""
    load, pace, waiting = candidate.load, estimates.pace(candidate.address), 0.0
    if load is not None and (load.waiting_requests or pace.running_limit is not None):
        reported, sent = _waiting(candidate, load, pace, now)
        if pace.running_limit is not None:
            sent += 1.0  # its own place has to get free, too
        waiting = max(reported, sent)
    return estimates.ttft(
        candidate.address,
        backlog_tokens=candidate.backlog_tokens,
        uncached_tokens=max(candidate.prompt_tokens - candidate.saved_tokens, 0.0),
        waiting_requests=waiting,
    )


def _unknown(candidate: Candidate, pace: EndpointPace, *, policy: OverloadPolicy, share: float, blind: bool) -> Room:
    """Never idle, never simply full: few at a time; where no endpoint reports, as many as it ran when it did, or 32.

    What ran in a quiet time is no limit.
    """
    most = float(policy.unknown_requests)
    if blind:
        most = max(most, max(pace.most_running, BLIND_REQUESTS) * share)
    most = max(most, 1.0)
    fill = max(candidate.open_requests, 0.5) / most
    if fill < 1.0:
        return Room(fill)
    return Room(fill, f"its load is not known, and {candidate.open_requests} requests are open there")


def _started_share(ready_since: float, *, policy: OverloadPolicy, now: float) -> float:
    seconds = policy.slow_start_seconds
    return min(max((now - ready_since) / seconds, LEAST_SHARE), 1.0) if seconds > 0.0 else 1.0

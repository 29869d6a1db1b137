"""The fill of each endpoint for one more request of a class, and the TTFT it would have there. Pure.

An endpoint without a recent report is neither idle nor full: it gets a few requests at a time.
`docs/explanation/estimates.md` explains the rules.
"""

from collections.abc import Mapping, Sequence
from math import inf

import msgspec

from extproc.answers.stream_promises import NO_PROMISES, StreamPromises
from extproc.choosing.stream_room import broken_promise
from extproc.pods.endpoint import Candidate
from extproc.pods.endpoint_samples import EndpointPace
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import OverloadPolicy
from kvmesh.pods.pod_report import EndpointLoad

LEAST_SHARE = 0.1  # share of its limits that a new endpoint gets at least (slow start)
UNKNOWN_REQUESTS = 2.0  # open at a pod without a recent report
BLIND_REQUESTS = 32.0  # lower bound of open requests per endpoint while no endpoint reports; every server runs as many
LEAST_LIMIT = 1e-3  # replaces limits of 0, to divide by them
PREEMPTED_SECONDS = 2.0  # after a preemption an endpoint has no room for less important classes


class Room(msgspec.Struct, frozen=True, gc=False):
    """An endpoint's fill for one class."""

    fill: float  # full from 1 on
    why: str = ""  # why it is full, for people; "" if it is not
    opens_in_seconds: float | None = None  # until time alone makes room; None if it has room or only an event makes it
    by_backlog: bool = False  # full only because of prompts still to compute
    by_queue: bool = False  # full only because of those, or of requests waiting for a free slot
    yields: bool = False  # full only because of less important classes' targets or streams
    by_promise: bool = False  # one more stream there would break an inter-token target


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
    answer_tokens: float = 0.0,
    promises: StreamPromises = NO_PROMISES,
) -> list[Room]:
    """Return each endpoint's fill at `now` for a class that may fill `ceiling` (0..1) of the limits.

    `answer_tokens`: the expected length of the request's answers, 0 if unknown.
    """
    blind = candidates[0].load is None and all(candidate.load is None for candidate in candidates)
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
            answer_tokens=answer_tokens,
            promises=promises,
        )
        for candidate in candidates
    ]


def places_of(rooms: Sequence[Room]) -> Sequence[bool]:
    """Tell for each endpoint whether it has room for a request.

    If none has, the targets of less important classes give way, and the request does not wait for their streams.
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
    answer_tokens: float = 0.0,
    promises: StreamPromises = NO_PROMISES,
) -> Room:
    """Return one endpoint's fill; `blind`: no endpoint of the pool reports, so only bookings count."""
    if full_until and (until := full_until.get(candidate.address, 0.0)) > now:
        return Room(1.0, f"it has said that it is full, for another {until - now:.1f} s", until - now)
    pace, load = estimates.pace(candidate.address), candidate.load
    started = 1.0
    if candidate.ready_since is not None:
        started = _started_share(candidate.ready_since, policy=policy, now=now)
        few = max(started * ceiling * estimates.most_running, 1.0)
        if started < 1.0 and estimates.most_running > 0.0 and candidate.open_requests >= few:
            return Room(candidate.open_requests / few, f"it is new, with {candidate.open_requests} requests open")
    if load is None:
        return _unknown(candidate, pace, share=started * ceiling, blind=blind)
    share = started * ceiling
    found = _known(candidate, load, pace, policy=policy, share=share, answer_tokens=answer_tokens, now=now)
    if now - pace.preempted_at < PREEMPTED_SECONDS and promises.is_low(class_name):
        return _preempting(found, since=now - pace.preempted_at)
    if promises.seconds and (found.fill < 1.0 or found.by_queue) and found is not EMPTY:
        broken = broken_promise(candidate, pace, class_name=class_name, promises=promises)
        if broken is not None:
            return Room(broken.fill, broken.why, yields=broken.yields and found.fill < 1.0, by_promise=True)
    return found


def _preempting(found: Room, *, since: float) -> Room:
    """Return `found`, or full if the endpoint would have room: it preempted a stream `since` seconds ago."""
    if found is EMPTY or (found.fill >= 1.0 and not found.by_queue):
        return found
    since = max(since, 0.0)
    return Room(1.0, f"it has pushed a stream back {since:.1f} s ago: its cache is full", PREEMPTED_SECONDS - since)


def takes_prompts(candidate: Candidate, *, policy: OverloadPolicy, full_until: Mapping[str, float], now: float) -> bool:
    """Tell whether a prefill pod may get a prompt: it has not called itself full, and its KV cache has room.

    Its queue is no limit here: the comparison of TTFTs includes it.
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
    answer_tokens: float,
    now: float,
) -> Room:
    if not (load.unfinished_requests or candidate.booked_requests):
        return EMPTY  # idle as reported: bookings older than the report do not count
    most_waiting = _most_waiting(pace, policy, share)
    most_backlog = max(policy.backlog_seconds * share, LEAST_LIMIT)
    reported, sent = _waiting(candidate, load, pace, now)
    backlog_seconds = candidate.backlog_tokens * pace.backlog_seconds_a_token
    cache = load.kv_usage / max(policy.kv_usage, LEAST_LIMIT)
    if candidate.growth_tokens:
        cache = max(cache, _expected_usage(candidate, load, answer_tokens))
    fill = max(reported / most_waiting, sent / most_waiting, backlog_seconds / most_backlog, cache)
    if fill < 1.0:
        return Room(fill)
    if cache >= 1.0:
        expected = " and its open requests' answers will fill it" if load.kv_usage < policy.kv_usage else ""
        return Room(fill, f"{load.kv_usage:.0%} of its cache is in use{expected}")
    if sent >= most_waiting:
        return Room(fill, f"about {sent:.0f} requests wait there for a place", by_queue=True)
    # these two shrink with time alone
    opens_in = max((reported - most_waiting) / pace.starts_a_second, backlog_seconds - most_backlog, 0.0)
    if reported >= most_waiting:
        return Room(fill, f"{load.waiting_requests} requests wait there", opens_in, True, True)
    return Room(fill, f"prompts for {backlog_seconds:.1f} s are to be computed there", opens_in, True, True)


def _expected_usage(candidate: Candidate, load: EndpointLoad, answer_tokens: float) -> float:
    """Return the share of the cache in use once the prompts sent there are computed and the answers have grown."""
    own = candidate.prompt_tokens - candidate.matched_tokens + answer_tokens
    return load.kv_usage + (candidate.backlog_tokens + candidate.growth_tokens + own) / (load.kv_capacity_tokens or inf)


def _most_waiting(pace: EndpointPace, policy: OverloadPolicy, share: float) -> float:
    """Return how many requests may wait for a free slot: as many as the pod starts within the backlog limit.

    With a fixed number alone, a pod with many slots would leave some empty when many requests end in the same step.
    """
    return max(policy.waiting_requests * share, pace.seen_starts_a_second * policy.backlog_seconds * share, 1.0)


def _waiting(candidate: Candidate, load: EndpointLoad, pace: EndpointPace, now: float) -> tuple[float, float]:
    """Estimate the waiting requests twice, from the report and from the bookings; negative means none.

    The reported queue shrinks at the pod's pace. Of the requests sent there, those beyond the pod's running limit wait,
    if the limit is known. Without a limit they wait only if the report has a queue: on a busy pod short requests come
    and go between two reports.
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
    """Return this request's TTFT in seconds if it is sent there now."""
    load, pace, waiting = candidate.load, estimates.pace(candidate.address), 0.0
    if load is not None and (load.waiting_requests or pace.running_limit is not None):
        reported, sent = _waiting(candidate, load, pace, now)
        if pace.running_limit is not None:
            sent += 1.0  # it needs a free slot itself
        waiting = max(reported, sent)
    return estimates.ttft(
        candidate.address,
        backlog_tokens=candidate.backlog_tokens,
        uncached_tokens=max(candidate.prompt_tokens - candidate.saved_tokens, 0.0),
        waiting_requests=waiting,
    )


def _unknown(candidate: Candidate, pace: EndpointPace, *, share: float, blind: bool) -> Room:
    """Return the fill of an endpoint without a report: never idle, never simply full, but a few requests at a time.

    If no endpoint reports, it gets as many requests as it ran at most, and at least 32: a quiet time is no limit.
    """
    most = UNKNOWN_REQUESTS
    if blind:
        most = max(most, max(pace.most_running, BLIND_REQUESTS) * share)
    fill = max(candidate.open_requests, 0.5) / most
    if fill < 1.0:
        return Room(fill)
    return Room(fill, f"its load is not known, and {candidate.open_requests} requests are open there")


def _started_share(ready_since: float, *, policy: OverloadPolicy, now: float) -> float:
    seconds = policy.slow_start_seconds
    return min(max((now - ready_since) / seconds, LEAST_SHARE), 1.0) if seconds > 0.0 else 1.0

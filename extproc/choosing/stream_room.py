"""Tell whether one more stream on an endpoint breaks an inter-token target: its own, or a running stream's. Pure.

Used by `room`. Targets of equally or more important classes are kept. Targets of less important classes give way if no
endpoint has room, and a request does not wait for their streams. `docs/explanation/estimates.md` explains the rules.
"""

from collections.abc import Sequence

import msgspec

from extproc.answers.stream_promises import StreamPromises
from extproc.pods.endpoint import Candidate
from extproc.pods.endpoint_samples import EndpointPace
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.stream_samples import StreamPace
from kvmesh.pods.pod_report import EndpointLoad

PROMISE_SHARE = 0.9  # expected mean / target at most: some streams are slower than the mean
REASON = "inter-token-promise"
UNLEARNED, OUT_OF_REACH = "inter-token-unlearned", "inter-token-out-of-reach"


class BrokenPromise(msgspec.Struct, frozen=True, kw_only=True):
    """One more stream would break an inter-token target."""

    fill: float  # expected inter-token time / (PROMISE_SHARE x target)
    why: str
    yields: bool  # only less important classes' targets break, or only because of their streams


def seconds_with(candidate: Candidate, load: EndpointLoad, streams: StreamPace, running_limit: float | None) -> float:
    """Return the mean inter-token time at an endpoint with this report once it also runs this request."""
    running, opened = load.running_requests, candidate.open_requests
    active = running + load.waiting_requests + load.fetching_requests + candidate.booked_requests
    if opened > active:  # noqa: PLR1730  (a call costs more)
        active = opened
    context: float = candidate.prompt_tokens
    if load.kv_capacity_tokens is not None:
        context += load.kv_usage * load.kv_capacity_tokens
    if active > running and opened:
        # requests that do not run yet count with the mean context of the open ones
        more = active - running
        context += candidate.context_tokens * (more / opened if more < opened else 1.0)
    count = active + 1.0
    if running_limit is not None and count > running_limit:
        count = max(running_limit, float(running))  # the rest wait in the pod's queue
    return streams.seconds(count, context)


def broken_promise(
    candidate: Candidate,
    pace: EndpointPace,
    *,
    class_name: str,
    promises: StreamPromises,
) -> BrokenPromise | None:
    """Return the target that the request's stream would break there, or None if none is known to break."""
    streams, load = pace.streams, candidate.load
    if streams is None or load is None:
        return None
    seconds = seconds_with(candidate, load, streams, pace.running_limit)
    if seconds <= PROMISE_SHARE * promises.tightest_seconds:
        return None
    priority = promises.priorities.get(class_name, promises.highest_priority)
    broken: BrokenPromise | None = None
    for name in (class_name, *candidate.promised):
        promised = promises.seconds.get(name)
        if promised is None or seconds <= PROMISE_SHARE * promised or is_out_of_reach(streams, promised):
            continue
        theirs = promises.priorities[name]
        yields = theirs < priority or (
            theirs == priority
            and class_name in promises.seconds
            and _seconds_without_others(candidate, load, streams, promises, priority) <= PROMISE_SHARE * promised
        )
        if broken is None or (broken.yields and not yields):
            broken = BrokenPromise(
                fill=max(seconds / (PROMISE_SHARE * promised), 1.0),
                why=f"{REASON}: {1000 * seconds:.3g} ms a token with one more stream, "
                f"{1000 * promised:g} ms are promised to class {name!r}",
                yields=yields,
            )
    return broken


def _seconds_without_others(
    candidate: Candidate, load: EndpointLoad, streams: StreamPace, promises: StreamPromises, priority: int
) -> float:
    """Return the mean inter-token time with the request once all less important streams have ended.

    Only streams with a target are counted by class, so all other streams count as less important. They end whether the
    request waits or not, and no new ones are admitted while it runs there.
    """
    count = sum(number for name, number in candidate.promised.items() if promises.priorities.get(name, 0) >= priority)
    context = load.kv_usage * load.kv_capacity_tokens if load.kv_capacity_tokens is not None else 0.0
    share = min(count / max(load.running_requests, 1), 1.0)
    return streams.seconds(count + 1.0, context * share + candidate.prompt_tokens)


def is_out_of_reach(streams: StreamPace, promised_seconds: float) -> bool:
    """Tell whether even a single stream would miss the target there: then waiting gains nothing."""
    return streams.alone_seconds > PROMISE_SHARE * promised_seconds


def least_seconds(kept: Sequence[Candidate], estimates: LatencyEstimates) -> float:
    """Return the shortest expected inter-token time of all endpoints, 0 if none is known."""
    found = 0.0
    for candidate in kept:
        pace = estimates.pace(candidate.address)
        if pace.streams is not None and (load := candidate.load) is not None:
            seconds = seconds_with(candidate, load, pace.streams, pace.running_limit)
            found = seconds if not found else min(found, seconds)
    return found


def unkept(
    kept: Sequence[Candidate], estimates: LatencyEstimates, *, class_name: str, promises: StreamPromises
) -> dict[str, str]:
    """Return reason -> explanation why some busy endpoints ignore the class's inter-token target."""
    promised = promises.seconds.get(class_name)
    if promised is None:
        return {}
    unlearned, slow, reach = [], [], PROMISE_SHARE * promised
    for candidate in kept:
        streams = estimates.pace(candidate.address).streams
        if streams is not None and streams.alone_seconds <= reach:  # nearly always
            continue
        if candidate.load is None or not candidate.load.unfinished_requests:
            continue
        if streams is None:
            unlearned.append(candidate.address)
        else:
            slow.append(f"{candidate.address} ({1000 * streams.alone_seconds:.3g} ms)")
    words = {}
    if unlearned:
        words[UNLEARNED] = (
            f"what one more stream costs is not known yet at {', '.join(unlearned)}: the {1000 * promised:g} ms a "
            f"token that class {class_name!r} is promised keep no request away from there"
        )
    if slow:
        words[OUT_OF_REACH] = (
            f"even a single stream takes longer than the {1000 * promised:g} ms a token that class {class_name!r} is "
            f"promised, less a tenth, at {', '.join(slow)}: the promise keeps no request away from there"
        )
    return words

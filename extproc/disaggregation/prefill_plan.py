"""Decides whether a prefill pod computes a prompt for the chosen decode pod, and which one. Pure.

The decode pod is chosen first, as without disaggregation: by its cache and its load. The prefill pods that may serve
the request are then compared by the expected TTFT: their queue, their uncached part of the prompt, and the KV transfer.

Pod labels decide which prefill pods may pair with a decode pod, and the speed of their link.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.choosing.room import expected_ttft
from extproc.disaggregation.offload import Sides, Verdict, decide
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.disaggregation import Disaggregation

Labels = Mapping[str, Mapping[str, str]]  # endpoint -> its pod's labels that matter for pairing
NO_LABELS: Mapping[str, str] = {}


def partners(
    decode: str, prefillers: Sequence[Candidate], labels: Labels, policy: Disaggregation
) -> Sequence[Candidate]:
    """Return the prefill pods that agree with the decode pod on the policy's `sameLabels`; both may lack a label."""
    if not policy.same_labels:
        return prefillers
    own = labels.get(decode, NO_LABELS)
    wanted = [(name, own.get(name)) for name in policy.same_labels]
    return [
        prefiller
        for prefiller in prefillers
        if all(labels.get(prefiller.address, NO_LABELS).get(name) == value for name, value in wanted)
    ]


def link_bytes_per_second(
    prefill: str, decode: str, labels: Labels, *, policy: Disaggregation, links: LinkEstimates
) -> float:
    """Return the speed of a KV transfer between two pods.

    The first of the policy's `links` applies whose label has the same value on both pods. Other pairs use the speed
    measured at the decode pod's fetches, or `linkBytesPerSecond` before the first fetch.
    """
    here, there = labels.get(decode, NO_LABELS), labels.get(prefill, NO_LABELS)
    for link in policy.links:
        if (value := here.get(link.label)) is not None and there.get(link.label) == value:
            return link.bytes_per_second
    return links.bytes_per_second(decode, declared=policy.link_bytes_per_second)


class PrefillPlace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One prefill pod as a candidate for computing a prompt."""

    endpoint: str
    uncached_tokens: int  # of the prompt, which the pod would compute; at least 1
    cached_tokens: int  # of the prompt
    queue: int  # requests waiting there or on their way
    leg_seconds: float  # expected time until the pod's answer
    transfer_seconds: float  # to move the KV cache to the decode pod
    seconds: float  # expected TTFT: the leg and the transfer


class Race(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Whether the two best prefill pods compute a prompt at the same time, and the reason in words."""

    runs: bool
    why: str


class PrefillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about a request's prefill, and its basis."""

    verdict: Verdict
    sides: Sides
    policy: Disaggregation  # applied to the decision
    places: tuple[PrefillPlace, ...]  # best first; the others are fallbacks
    race: Race | None = None  # None without races in the policy, or without a remote prefill

    @property
    def is_remote(self) -> bool:
        """Whether a prefill pod computes the prompt."""
        return self.verdict.remote

    @property
    def races(self) -> bool:
        """Whether the first two places compute the prompt at the same time."""
        return self.race is not None and self.race.runs


def plan_prefill(
    decode: Candidate,
    prefillers: Sequence[Candidate],
    *,
    policy: Disaggregation,
    labels: Labels,
    estimates: LatencyEstimates,
    links: LinkEstimates,
    target_seconds: float | None,
    yields: bool,
    tie_break: Callable[[], float],
    now: float,
) -> PrefillPlan | None:
    """Return where the prompt of a request that decodes at `decode` is computed, or None without an alternative.

    `labels`: the pod labels for pairing. `target_seconds`: the TTFT target of the request's class. `yields`: its class
    gives way to others in queues.
    """
    prefillers = partners(decode.address, prefillers, labels, policy)
    if not prefillers or not decode.prompt_tokens:
        return None
    missing = max(decode.prompt_tokens - decode.matched_tokens, 1)
    moved = missing * links.bytes_per_token(declared=policy.kv_bytes_per_token)
    ranked = []
    for candidate in prefillers:
        rate = link_bytes_per_second(candidate.address, decode.address, labels, policy=policy, links=links)
        transfer = moved / rate + policy.hand_over_seconds
        leg = expected_ttft(candidate, estimates, now=now)
        place = PrefillPlace(
            endpoint=candidate.address,
            uncached_tokens=max(candidate.prompt_tokens - candidate.matched_tokens, 1),
            cached_tokens=candidate.matched_tokens,
            queue=candidate.open_requests if (queue := candidate.queue_depth) is None else queue,
            leg_seconds=leg,
            transfer_seconds=transfer,
            seconds=leg + transfer,
        )
        ranked.append((place.seconds, tie_break(), place, candidate))
    ranked.sort(key=lambda each: each[:2])
    _, _, best, prefiller = ranked[0]
    load = decode.load
    sides = Sides(
        prompt_tokens=decode.prompt_tokens,
        cached_tokens=decode.matched_tokens,
        prefill_queue=best.queue,
        decode_requests=decode.open_requests if load is None else load.running_requests,
        decode_open=decode.open_requests if (active := decode.active_requests) is None else active,
        prefill_open=prefiller.open_requests,
        local_seconds=expected_ttft(decode, estimates, now=now),
        local_compute_seconds=estimates.pace(decode.address).prefill.seconds(missing),
        remote_seconds=best.seconds,
        remote_compute_seconds=estimates.pace(best.endpoint).prefill.seconds(best.uncached_tokens),
        transfer_seconds=best.transfer_seconds,
        target_seconds=target_seconds,
        yields=yields,
    )
    return PrefillPlan(
        verdict=decide(sides, policy),
        sides=sides,
        policy=policy,
        places=tuple(place for _, _, place, _ in ranked),
    )

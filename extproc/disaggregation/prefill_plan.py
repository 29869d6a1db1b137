"""Which prefill pod computes a prompt for the decode pod that was chosen, and whether any does. Pure.

The decode pod comes first, as without disaggregation: by its cache and its load. The prefill pods that may serve the
request are then compared by what the first token would take by way of each: the queue there, what of the prompt it does
not hold, and moving the cache.
"""

from collections.abc import Callable, Sequence

import msgspec

from extproc.choosing.room import expected_ttft
from extproc.disaggregation.offload import Sides, Verdict, decide
from extproc.disaggregation.pairs import Labels, link_bytes_per_second, partners
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.disaggregation import Disaggregation


class PrefillPlace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One prefill pod as the place for a prompt."""

    endpoint: str
    uncached_tokens: int  # of the prompt, to be computed there; at least 1
    cached_tokens: int  # that it holds
    queue: int  # requests that wait there or are on their way
    leg_seconds: float  # until its answer, expected
    transfer_seconds: float  # for moving the cache to the decode pod
    seconds: float  # to the client's first token by way of it, all of these together


class Race(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Whether the two best prefill pods compute a prompt at the same time, and why in words."""

    runs: bool
    why: str


class PrefillPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What was decided of a request's prefill, and the numbers that it was decided by."""

    verdict: Verdict
    sides: Sides
    policy: Disaggregation  # by which it was decided
    places: tuple[PrefillPlace, ...]  # the best first; the others are for its failure
    race: Race | None = None  # None: the policy wants none, or no prefill pod computes the prompt
    withheld: Verdict | None = None  # in shadow: by which a prefill pod would compute it

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
    """Return where the prompt of a request that decodes at `decode` is computed; None where nobody else could.

    `labels`: those of pods by which pairs are made. `target_seconds`: the TTFT that the request's class promises;
    `yields`: its class leaves queues to the others.
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

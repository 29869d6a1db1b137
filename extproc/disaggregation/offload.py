"""Decides whether a prefill pod computes a prompt, instead of the decode pod: five factors, and rules. Pure.

The factors: the prompt's uncached and cached tokens on the decode pod, the prefill pod's queue, the decode pod's load,
and the request's class. `explain` shows the numbers of both sides.
"""

from collections.abc import Callable, Mapping

import msgspec

from extproc.policy.disaggregation import Disaggregation, OffloadRule, VoteAction, VoteMetric

# docs/decisions/0014-offload-rule.md
STALLED_STREAM_WEIGHT = 0.1  # of a second of delay for another stream, by a local prefill
QUEUED_PROMPT_WEIGHT = 0.5  # the same for each open prompt at the prefill pod
MISSED_TARGET_WEIGHT = 0.25  # as a share of the target


class Sides(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The numbers of local and remote prefill, for one request, one decode pod and one prefill pod."""

    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, on the decode pod
    prefill_queue: int = 0  # requests waiting at the prefill pod or on their way to it
    decode_requests: int = 0  # running on the decode pod
    decode_open: int = 0  # running, waiting or on their way to the decode pod: a local prefill delays them
    prefill_open: int = 0  # prompts open at the prefill pod: indicates how many later ones this prompt will delay
    local_seconds: float = 0.0  # TTFT if the decode pod computes the prompt
    local_compute_seconds: float = 0.0  # the compute time in it; the decode pod's other streams stall for as long
    remote_seconds: float = 0.0  # TTFT by way of the prefill pod, including the transfer
    remote_compute_seconds: float = 0.0  # the compute time in it
    transfer_seconds: float = 0.0  # the time in it to move the KV cache
    target_seconds: float | None = None  # TTFT target of the class, if any
    yields: bool = False  # the class gives way to other classes in a queue

    @property
    def uncached_tokens(self) -> int:
        """The tokens that the decode pod would compute; at least one, even for a fully cached prompt."""
        return max(self.prompt_tokens - self.cached_tokens, 1 if self.prompt_tokens else 0)


class Verdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where the prompt is computed, and the reason in words."""

    remote: bool
    why: str


def decide(sides: Sides, policy: Disaggregation) -> Verdict:
    """Return where the prompt is computed."""
    if sides.yields and sides.prefill_queue > 0:
        return Verdict(remote=False, why=f"its class leaves the prefill pod's queue ({sides.prefill_queue}) to others")
    return _RULES[policy.rule](sides, policy)


def by_estimate(sides: Sides, _: Disaggregation) -> Verdict:
    """Compare both TTFTs, plus the delay that each choice causes to other requests.

    A local prefill stalls the decode pod's streams; a remote one delays the prompts behind it. A choice that misses the
    class's target gets a penalty.
    """
    streams = STALLED_STREAM_WEIGHT * sides.decode_open * sides.local_compute_seconds
    prompts = QUEUED_PROMPT_WEIGHT * sides.prefill_open * sides.remote_compute_seconds
    local, local_words = _cost(sides.local_seconds, streams, sides.target_seconds)
    remote, remote_words = _cost(sides.remote_seconds, prompts, sides.target_seconds)
    return Verdict(remote=remote < local, why=f"local {local_words}, remote {remote_words}")


def by_thresholds(sides: Sides, policy: Disaggregation) -> Verdict:
    """Offload a long prompt, or a shorter one if the decode pod is busy, provided that the prefill queue has room.

    Lengths and loads must reach their thresholds (>=); the queue must be below its own (<).
    """
    tokens, queue, busy = sides.uncached_tokens, sides.prefill_queue, sides.decode_requests
    if queue >= policy.prefill_queue_requests:
        return Verdict(
            remote=False, why=f"{queue} requests wait for prefill, {policy.prefill_queue_requests} are enough"
        )
    if tokens >= policy.prompt_tokens:
        return Verdict(remote=True, why=f"{tokens} tokens are uncached, from {policy.prompt_tokens} on it pays")
    if busy >= policy.busy_decodes and tokens >= policy.busy_prompt_tokens:
        return Verdict(remote=True, why=f"{tokens} tokens are uncached, and the decode pod runs {busy} requests")
    return Verdict(remote=False, why=f"{tokens} tokens are uncached, and the decode pod runs {busy} requests")


def by_votes(sides: Sides, policy: Disaggregation) -> Verdict:
    """Add up the votes whose metric exceeds their threshold; votes for local count negative."""
    score, words = 0.0, []
    for vote in policy.votes:
        if _METRICS[vote.metric](sides) > vote.threshold:
            weight = vote.weight if vote.action is VoteAction.PREFER_REMOTE else -vote.weight
            score += weight
            words.append(f"{vote.metric.value} above {vote.threshold:g} {weight:+g}")
    return Verdict(
        remote=score > policy.minimum_score,
        why=f"{score:g} of votes ({'; '.join(words) or 'none'}), remote above {policy.minimum_score:g}",
    )


def always(_: Sides, __: Disaggregation) -> Verdict:
    """Always use the prefill pod."""
    return Verdict(remote=True, why="the policy's rule is always")


def _cost(own: float, others: float, target: float | None) -> tuple[float, str]:
    words = f"{own:.3f} s" + (f" and {others:.3f} s of others" if others else "")
    if target is None or own <= target:
        return own + others, words
    more = MISSED_TARGET_WEIGHT * target
    return own + others + more, f"{words} and {more:.3f} s for missing {target:g} s"


_METRICS: Mapping[VoteMetric, Callable[[Sides], float]] = {
    VoteMetric.PREFILL_LENGTH: lambda sides: sides.uncached_tokens,
    VoteMetric.PREFILL_QUEUE: lambda sides: sides.prefill_queue,
    VoteMetric.DECODE_LOAD: lambda sides: sides.decode_requests,
    VoteMetric.TRANSFER_MS: lambda sides: 1000.0 * sides.transfer_seconds,
}
_RULES: Mapping[OffloadRule, Callable[[Sides, Disaggregation], Verdict]] = {
    OffloadRule.ESTIMATE: by_estimate,
    OffloadRule.THRESHOLDS: by_thresholds,
    OffloadRule.VOTES: by_votes,
    OffloadRule.ALWAYS: always,
}

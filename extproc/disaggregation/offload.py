"""Whether a prompt is computed by another pod than the one that decodes: five factors, and rules over them. Pure.

The factors are the tokens that the decode pod does not hold, what it holds, the prefill pod's queue, what the decode
pod runs, and the request's class. `explain` shows the numbers of both sides.
"""

from collections.abc import Callable, Mapping

import msgspec

from extproc.policy.disaggregation import Disaggregation, OffloadRule, Vote, VoteAction, VoteMetric


class Sides(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What speaks for either side, for one request, one decode pod and one prefill pod."""

    prompt_tokens: int
    cached_tokens: int = 0  # of the prompt, on the decode pod
    prefill_queue: int = 0  # requests that wait at the prefill pod or are on their way there
    decode_requests: int = 0  # that the decode pod runs
    decode_open: int = 0  # that it runs or that wait or are on their way there: a prompt computed there holds them up
    prefill_open: int = 0  # prompts that are open at the prefill pod: a sign of how many this one will hold up
    local_seconds: float = 0.0  # to the first token where the decode pod computes the prompt
    local_compute_seconds: float = 0.0  # of these, computing it; the decode pod's other streams wait as long
    remote_seconds: float = 0.0  # to the first token by way of the prefill pod, the transfer included
    remote_compute_seconds: float = 0.0  # of these, computing the prompt there
    transfer_seconds: float = 0.0  # of these, moving the cache
    target_seconds: float | None = None  # what the class promises; None: nothing
    yields: bool = False  # a request of this class leaves a queue to those of others

    @property
    def uncached_tokens(self) -> int:
        """What the decode pod would compute; of a prompt that it holds as a whole still one token."""
        return max(self.prompt_tokens - self.cached_tokens, 1 if self.prompt_tokens else 0)


class Verdict(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where the prompt is computed, and why in words."""

    remote: bool
    why: str


def decide(sides: Sides, policy: Disaggregation) -> Verdict:
    """Return where the prompt is computed."""
    if sides.yields and sides.prefill_queue > 0:
        return Verdict(remote=False, why=f"its class leaves the prefill pod's queue ({sides.prefill_queue}) to others")
    return _RULES[policy.rule](sides, policy)


def by_estimate(sides: Sides, policy: Disaggregation) -> Verdict:
    """Compare the two times to the first token, and what either way costs others.

    A local prefill holds up the streams of the decode pod, a remote one the prompts that come behind it. A way that
    misses the promise of the class counts for more.
    """
    streams = policy.stalled_stream_weight * sides.decode_open * sides.local_compute_seconds
    prompts = policy.queued_prompt_weight * sides.prefill_open * sides.remote_compute_seconds
    local, local_words = _cost(sides.local_seconds, streams, sides.target_seconds, policy)
    remote, remote_words = _cost(sides.remote_seconds, prompts, sides.target_seconds, policy)
    return Verdict(remote=remote < local, why=f"local {local_words}, remote {remote_words}")


def by_thresholds(sides: Sides, policy: Disaggregation) -> Verdict:
    """Compare lengths and queues: a long prompt, or a shorter one where the decode pod is busy, and room to compute it.

    Lengths and loads count from their threshold on (>=), a queue has room below its own (<).
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
    """Add up the votes whose metric is above their threshold; those for local count against."""
    score, words = 0.0, []
    for vote in policy.votes:
        if _METRICS[vote.metric](sides) > vote.threshold:
            score += _signed(vote)
            words.append(f"{vote.metric.value} above {vote.threshold:g} {_signed(vote):+g}")
    return Verdict(
        remote=score > policy.minimum_score,
        why=f"{score:g} of votes ({'; '.join(words) or 'none'}), remote above {policy.minimum_score:g}",
    )


def always(_: Sides, __: Disaggregation) -> Verdict:
    """Take the prefill pod."""
    return Verdict(remote=True, why="the policy's rule is always")


def _cost(own: float, others: float, target: float | None, policy: Disaggregation) -> tuple[float, str]:
    """Return what one way costs in seconds, and its parts in words."""
    words = f"{own:.3f} s" + (f" and {others:.3f} s of others" if others else "")
    if target is None or own <= target:
        return own + others, words
    more = policy.missed_promise_weight * target
    return own + others + more, f"{words} and {more:.3f} s for missing {target:g} s"


def _signed(vote: Vote) -> float:
    return vote.weight if vote.action is VoteAction.PREFER_REMOTE else -vote.weight


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

"""Whether a prompt is computed elsewhere: every rule at its edges."""

import pytest

from extproc.disaggregation.offload import Sides, decide
from extproc.policy.disaggregation import Disaggregation, OffloadRule, Vote, VoteAction, VoteMetric

THRESHOLDS = Disaggregation(enabled=True, rule=OffloadRule.THRESHOLDS)
VOTES = Disaggregation(
    enabled=True,
    rule=OffloadRule.VOTES,
    votes=(
        Vote(metric=VoteMetric.PREFILL_LENGTH, threshold=256, action=VoteAction.PREFER_REMOTE, weight=0.7),
        Vote(metric=VoteMetric.PREFILL_QUEUE, threshold=10, action=VoteAction.PREFER_LOCAL, weight=0.3),
    ),
)
ESTIMATE = Disaggregation(enabled=True)


@pytest.mark.parametrize(
    ("prompt", "cached", "queue", "active", "remote"),
    [
        (255, 0, 0, 7, False),  # below the limit
        (256, 0, 9, 0, True),
        (256, 0, 10, 0, False),  # the prefill pods are full
        (256, 0, 10, 8, False),  # and a busy decode pod makes them no emptier
        (64, 0, 1000, 8, False),
        (64, 0, 0, 8, True),
        (63, 0, 0, 8, False),  # too short
        (5000, 4992, 0, 50, False),  # the hit leaves 8 tokens
        (5000, 4000, 0, 0, True),
        (100, 200, 0, 99, False),  # more cached than asked
        (8000, 0, 10, 7, False),
    ],
)
def test_thresholds_look_at_lengths_the_hit_the_queue_and_the_decode_pods_load(
    prompt: int, cached: int, queue: int, active: int, remote: bool
) -> None:
    sides = Sides(prompt_tokens=prompt, cached_tokens=cached, prefill_queue=queue, decode_requests=active)
    assert decide(sides, THRESHOLDS).remote is remote


@pytest.mark.parametrize(
    ("length", "queue", "remote", "words"),
    [
        (300, 5, True, "0.7 of votes (prefill-length above 256 +0.7), remote above 0.5"),
        (300, 11, False, "prefill-queue above 10 -0.3"),
        (256, 0, False, "0 of votes (none), remote above 0.5"),
        (300, 10, True, "0.7 of votes"),
        (100, 11, False, "-0.3 of votes"),
    ],
)
def test_votes_for_local_count_against(length: int, queue: int, remote: bool, words: str) -> None:
    verdict = decide(Sides(prompt_tokens=length, prefill_queue=queue), VOTES)
    assert (verdict.remote, words in verdict.why) == (remote, True), verdict


@pytest.mark.parametrize(
    ("metric", "sides"),
    [
        (VoteMetric.DECODE_LOAD, Sides(prompt_tokens=1, decode_requests=9)),
        (VoteMetric.TRANSFER_MS, Sides(prompt_tokens=1, transfer_seconds=0.009)),
        (VoteMetric.PREFILL_LENGTH, Sides(prompt_tokens=9)),
        (VoteMetric.PREFILL_QUEUE, Sides(prompt_tokens=1, prefill_queue=9)),
    ],
)
def test_each_metric_has_a_vote_above_its_threshold(metric: VoteMetric, sides: Sides) -> None:
    for threshold, remote in ((8.5, True), (9.5, False)):
        vote = Vote(metric=metric, threshold=threshold, action=VoteAction.PREFER_REMOTE, weight=1)
        policy = Disaggregation(enabled=True, rule=OffloadRule.VOTES, votes=(vote,))
        assert decide(sides, policy).remote is remote


@pytest.mark.parametrize(
    ("local", "compute", "streams", "remote_seconds", "target", "remote"),
    [
        (0.5, 0.5, 0, 0.4, None, True),
        (0.5, 0.5, 0, 0.5, None, False),  # nothing is gained
        (0.5, 0.5, 0, 0.6, None, False),
        (0.5, 0.5, 4, 0.6, None, True),  # four streams would stand still for 0.5 s each, at a tenth
        (0.5, 0.5, 4, 0.8, None, False),
        (0.5, 0.5, 12, 1.0, 1.0, True),  # both keep the promise
        (0.5, 0.5, 12, 1.05, 1.0, False),  # this one misses it, which counts as a quarter of a second
        (0.5, 0.5, 40, 1.05, 1.0, True),  # and as no more than that
        (1.05, 0.5, 0, 1.0, 1.0, True),
        (1.2, 0.1, 0, 1.1, 1.0, True),  # nowhere is it kept: the sooner one
    ],
)
def test_the_estimate_compares_both_times_the_streams_held_up_and_the_promise(
    local: float, compute: float, streams: int, remote_seconds: float, target: float | None, remote: bool
) -> None:
    sides = Sides(
        prompt_tokens=1000,
        decode_open=streams,
        local_seconds=local,
        local_compute_seconds=compute,
        remote_seconds=remote_seconds,
        target_seconds=target,
    )
    assert decide(sides, ESTIMATE).remote is remote


@pytest.mark.parametrize(
    ("streams", "prompts", "remote"),
    [
        (0, 0, True),
        (0, 1, False),  # one prompt is there, and one will come behind this one: 0.4 s later, at a half
        (4, 1, True),  # which is as much as four streams lose here, at a tenth
        (4, 2, False),
        (12, 2, True),
    ],
)
def test_a_prompt_holds_up_others_on_both_sides(streams: int, prompts: int, remote: bool) -> None:
    sides = Sides(
        prompt_tokens=1000,
        decode_requests=99,  # what runs counts for other rules: those that wait are held up, too
        decode_open=streams,
        prefill_open=prompts,
        local_seconds=0.5,
        local_compute_seconds=0.4,
        remote_seconds=0.45,
        remote_compute_seconds=0.4,
    )
    verdict = decide(sides, ESTIMATE)
    assert verdict.remote is remote
    assert (f"{0.04 * streams:.3f} s of others" in verdict.why) is bool(streams)
    assert (f"{0.2 * prompts:.3f} s of others" in verdict.why) is bool(prompts)


def test_a_class_that_yields_leaves_a_queue_to_the_others_whatever_the_rule() -> None:
    for rule in OffloadRule:
        policy = Disaggregation(enabled=True, rule=rule, votes=VOTES.votes)
        sides = Sides(prompt_tokens=9000, local_seconds=9.0, remote_seconds=0.1, prefill_queue=1, yields=True)
        assert decide(sides, policy).remote is False
    always = Disaggregation(enabled=True, rule=OffloadRule.ALWAYS)
    assert decide(Sides(prompt_tokens=1, yields=True), always).remote

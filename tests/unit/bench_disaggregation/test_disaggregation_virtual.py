"""Prefill and decode apart, in virtual time: a run can be repeated, and nothing is left booked or kept."""

from dataclasses import replace
from itertools import pairwise

import pytest

from bench.disaggregation.loads import Load, build_load
from bench.disaggregation.plan import ARMS, BOTH, MIXES, NEVER, Plan
from bench.disaggregation.play import play
from bench.disaggregation.summary import summarise
from bench.disaggregation.world import World
from extproc.policy.disaggregation import Disaggregation, OffloadRule
from podsim.core.link import LinkSettings
from podsim.core.scheduler import EngineSettings

ENGINE = EngineSettings(total_blocks=4096, max_running=32, inter_token_seconds=0.012)
PLAN = Plan(engine=ENGINE, pods=2, seconds=6.0, warm_seconds=0.0)
LOAD = build_load(MIXES["balanced"], PLAN, seed=1)


def played(arm: str = "always", *, load: Load = LOAD, plan: Plan = PLAN) -> World:
    return play(load, ARMS[arm], plan=plan, prefill_pods=0 if arm == BOTH else 1, seed=1)


def assert_nothing_is_left(world: World) -> None:
    books = world.picker.books
    assert books.bookings.by_endpoint() == {}
    assert books._legs == {}
    for pod in world.pods.values():
        assert (pod.scheduler.running, pod.scheduler.waiting) == (0, 0)
        assert pod.scheduler.pool.usage == 0.0, "blocks that nobody needs are free"
        assert pod.link.next_end() is None


@pytest.mark.parametrize("arm", ARMS)
def test_every_request_is_answered_and_nothing_is_left_booked(arm: str) -> None:
    world = played(arm)

    assert len(world.records) == LOAD.requests > 15
    assert all(record.sent < record.first <= record.ended for record in world.records)
    assert_nothing_is_left(world)


def test_a_run_can_be_repeated() -> None:
    first, again = (
        summarise(played("estimate"), PLAN, mix="balanced", prefill_pods=1, arm="estimate") for _ in range(2)
    )
    assert first == again


def test_the_rules_decide_where_prompts_are_computed() -> None:
    never, always = played(NEVER), played("always")

    assert not any(record.remote for record in never.records)
    assert all(record.remote for record in always.records)
    prefill, decode = never.pods
    assert (never.busy[prefill], never.busy[decode] > 0) == (0.0, True)


def test_a_fetched_prompt_counts_as_vllm_counts_it() -> None:
    world = played()
    prefill, decode = (pod.report(9.0).load for pod in world.pods.values())

    assert prefill is not None
    assert decode is not None
    requests = [record.request for record in world.records]
    assert (prefill.first_token_count, decode.first_token_count) == (len(requests), len(requests))
    assert (prefill.fetched_tokens, prefill.fetched_bytes) == (0, 0.0)
    assert decode.fetched_tokens > 0
    assert decode.fetched_bytes >= decode.fetched_tokens * PLAN.link.bytes_per_token
    assert decode.fetch_seconds_sum >= decode.fetched_bytes / PLAN.link.bytes_per_second
    # both count the prompts less what the prefill pod held of them
    prompts = sum(request.prompt_tokens for request in requests)
    assert decode.prefill_computed_tokens == prefill.prefill_computed_tokens == prompts - prefill.prefix_hit_tokens
    assert prefill.inter_token_count == 0
    assert decode.inter_token_count == sum(request.answer_tokens - 1 for request in requests)


def test_a_transfer_takes_as_long_as_its_link_is_slow() -> None:
    slow = replace(PLAN, link=LinkSettings(bytes_per_second=1e9))
    quick = replace(PLAN, link=LinkSettings(bytes_per_second=1e12))

    assert sum(record.ttft for record in played(plan=slow).records) > sum(
        record.ttft for record in played(plan=quick).records
    )


def test_a_leg_that_takes_too_long_is_given_up_and_its_booking_released() -> None:
    rule = Disaggregation(enabled=True, rule=OffloadRule.ALWAYS, timeout_seconds=0.1)
    world = play(LOAD, rule, plan=PLAN, prefill_pods=1, seed=1)

    fell_back = [record for record in world.records if record.fell_back]
    assert fell_back
    assert all(not record.remote and record.first for record in fell_back)
    assert_nothing_is_left(world)


def test_a_load_is_as_heavy_as_planned_and_the_same_again() -> None:
    first, again = (build_load(MIXES["decode-heavy"], PLAN, seed=3) for _ in range(2))
    assert [[turn.token_ids for turn in session] for session in first.sessions] == [
        [turn.token_ids for turn in session] for session in again.sessions
    ]
    shares = [build_load(MIXES[name], PLAN, seed=1).prefill_share for name in MIXES]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.6 > shares[1] > 0.45 > shares[2]


def test_a_chats_turns_go_on_from_what_was_said() -> None:
    plan = replace(PLAN, seconds=60.0)
    chats = [session for session in build_load(MIXES["balanced"], plan, seed=1).sessions if len(session) > 2]
    assert chats
    for session in chats:
        for before, after in pairwise(session):
            assert after.token_ids[: len(before.token_ids)] == before.token_ids
            assert len(before.token_ids) < after.prompt_tokens
            assert before.due < after.due

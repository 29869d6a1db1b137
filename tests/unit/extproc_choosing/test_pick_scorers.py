"""What each scorer says of candidates, and that none outvotes the others by having nothing to say."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.choosing.scorers import MEMORY_BYTES_PER_SECOND, SCORERS
from extproc.pods.endpoint import NOTHING_ASKED, Ask, Candidate, EndpointTrend
from extproc.policy.values import PRESETS, SCORER_NAMES, PickPolicy, Strategy
from tests.unit.extproc_choosing.pick_candidates import candidate, decided, load


def scored(name: str, *candidates: Candidate, ask: Ask = NOTHING_ASKED) -> list[float]:
    return [round(score, 4) for score in SCORERS[name](candidates, ask)]


def test_a_hit_is_worth_the_tokens_that_it_saves_and_a_queue_the_tokens_before_this_prompt() -> None:
    warm_and_busy = candidate("a", prompt=4000, matched=3000, backlog_tokens=2000.0)  # 2000 + 2 x 1000
    cold_and_idle = candidate("b", prompt=4000)  # 2 x 4000
    assert scored("prefill-work", warm_and_busy, cold_and_idle) == [1.0, round(1 - 4000 / 16384, 4)]


def test_a_warm_endpoint_is_left_once_waiting_there_costs_more_than_computing_elsewhere() -> None:
    policy = PickPolicy(weights={"prefill-work": 1.0})

    def winner(backlog: float) -> str:
        warm = candidate("warm", prompt=4000, matched=3000, backlog_tokens=backlog)
        decision = decided(
            [warm, candidate("cold", prompt=4000)],
            policy=policy,
            prompt_tokens=4000,
            degraded={},
            tie_break=lambda: 0.0,
        )
        return decision.endpoints[0]

    assert (winner(5999.0), winner(6001.0)) == ("warm", "cold")


def test_a_burst_with_a_new_prefix_waits_for_the_one_endpoint_that_computes_it() -> None:
    computing = candidate("computing", prompt=4000, matched=3900, backlog_tokens=4000.0, open_requests=1)
    scores = scored("prefill-work", computing, candidate("idle", prompt=4000))
    assert scores[0] == 1.0 > scores[1]


def test_waiting_requests_that_came_past_the_pickers_count_in_tokens() -> None:
    assert scored("prefill-work", candidate("a", reported=load(waiting_requests=4)), candidate("b")) == [
        round(1 - 4 * 512 / 16384, 4),
        1.0,
    ]


def test_an_endpoint_of_unknown_load_is_taken_for_the_one_with_the_longest_queue() -> None:
    busy = candidate("a", backlog_tokens=8192.0)
    assert scored("prefill-work", busy, candidate("b", reported=None), candidate("c")) == [0.5, 0.5, 1.0]


def test_a_rate_that_was_learned_under_little_load_does_not_keep_work_away() -> None:
    pods = [candidate("a", tokens_per_second=1000.0), candidate("b", tokens_per_second=16_000.0)]
    assert scored("prefill-work", *pods) == [1.0, 1.0]


def test_decoding_costs_sequences_and_their_context_whoever_knows_more_of_it() -> None:
    booked = candidate("a", open_requests=2, context_tokens=30_000)
    reported = candidate("b", reported=load(running_requests=2, kv_usage=0.3, kv_capacity_tokens=100_000))
    assert scored("decode-work", booked, reported, candidate("idle")) == [
        round(1 - (1024 + 30_000) / 65536, 4),
        round(1 - (1024 + 30_000) / 65536, 4),
        1.0,
    ]


def test_queues_differ_by_their_scale_or_more() -> None:
    def waiting(n: int) -> Candidate:
        return candidate(f"p{n}", reported=load(waiting_requests=n))

    assert scored("queue-depth", waiting(0), waiting(1)) == [1.0, 0.75]
    assert scored("queue-depth", waiting(0), waiting(4), waiting(8)) == [1.0, 0.5, 0.0]
    assert scored("queue-depth", candidate("u", reported=None), waiting(3)) == [0.0, 1.0]


def test_active_requests_are_those_that_anybody_knows_of() -> None:
    reported = candidate("a", reported=load(waiting_requests=1, running_requests=2), booked_requests=1)
    booked = candidate("b", open_requests=6)
    assert scored("active-requests", reported, booked) == [1.0, 0.75]


def test_kv_use_counts_what_this_prompt_would_fill() -> None:
    full = candidate("a", prompt=1000, matched=500, reported=load(kv_usage=0.2, kv_capacity_tokens=1000))
    assert scored("kv-usage", full, candidate("b", reported=None)) == [0.3, 0.0]


def test_a_new_prefix_goes_where_it_displaces_least() -> None:
    filled = candidate("a", filled_tokens=50_000.0)
    small = candidate("b", filled_tokens=5_000.0, reported=load(kv_capacity_tokens=50_000))
    assert scored("cache-room", filled, small, candidate("c")) == [0.5, 0.9, 1.0]


def test_what_is_cached_or_has_no_prompt_displaces_nothing() -> None:
    warm = candidate("warm", filled_tokens=80_000.0, matched=900)
    assert scored("cache-room", warm, candidate("c")) == [0.92, 1.0]
    assert scored("cache-room", candidate("a", filled_tokens=8e4, prompt=0), candidate("b", prompt=0)) == [1.0, 1.0]


def test_a_prefix_hit_is_scored_by_share_and_tier() -> None:
    assert scored("prefix", candidate("a", matched=500), candidate("b", matched=500, worth_tokens=250.0)) == [0.5, 0.25]
    assert scored("prefix", candidate("unknown", prompt=0)) == [0.0]


def test_recent_use_of_the_prefix_is_a_count_of_its_own() -> None:
    assert scored("recent-prefix", candidate("a", matched=500, recent_tokens=250), candidate("b")) == [0.25, 0.0]


def test_adapters_are_best_where_they_are_loaded_then_where_a_slot_is_free() -> None:
    def with_adapters(running: set[str], waiting: frozenset[str] = frozenset(), most: int | None = 1) -> Candidate:
        reported = load(running_adapters=frozenset(running), waiting_adapters=waiting, max_adapters=most)
        return candidate("p", reported=reported)

    candidates = [
        with_adapters({"mine"}),
        candidate("placed", adapter_placed=True, reported=None),
        with_adapters({"other"}, most=2),
        with_adapters(set(), most=None),
        with_adapters({"other"}, frozenset({"mine"})),
        with_adapters({"other", "mine"}),  # one of them waits, and vLLM does not tell which
        with_adapters({"other"}),
        candidate("unknown", reported=None),
    ]
    assert scored("lora", *candidates, ask=Ask(adapter="mine")) == [1.0, 1.0, 0.8, 0.8, 0.6, 0.6, 0.0, 0.0]
    assert scored("lora", *candidates) == [1.0] * 8


def test_a_session_stays_where_it_was() -> None:
    assert scored("session", candidate("a", session=True), candidate("b")) == [1.0, 0.0]


def test_memory_bandwidth_says_nothing_unless_everybody_reports_it() -> None:
    busy = candidate("a", trend=EndpointTrend(memory_bytes_per_second=1.5e12))
    assert scored("memory-bandwidth", busy, candidate("b", trend=EndpointTrend(memory_bytes_per_second=0.0))) == [
        0.25,
        1.0,
    ]
    assert scored("memory-bandwidth", busy, candidate("b")) == [1.0, 1.0]


def test_turns_go_round() -> None:
    pods = [candidate(name) for name in "abc"]
    best = []
    for turn in range(4):
        scores = scored("turn", *pods, ask=Ask(turn=turn))
        best.append(pods[scores.index(max(scores))].address)
    assert best == ["a", "b", "c", "a"]


counts = st.integers(min_value=0, max_value=10**6)


@st.composite
def candidates(draw: st.DrawFn) -> Candidate:
    prompt = draw(st.integers(min_value=0, max_value=10**6))
    reported = draw(
        st.none()
        | st.builds(
            load,
            waiting_requests=counts,
            running_requests=counts,
            kv_usage=st.floats(0, 1),
            kv_capacity_tokens=st.none() | st.integers(1, 10**7),
            max_adapters=st.none() | st.integers(0, 3),
        )
    )
    return candidate(
        "p",
        reported=reported,
        prompt=prompt,
        matched=draw(st.integers(0, max(prompt - 1, 0))),
        tokens_per_second=draw(st.none() | st.floats(0.1, 1e7)),
        backlog_tokens=draw(st.floats(0, 1e9)),
        context_tokens=draw(counts),
        open_requests=draw(counts),
    )


@pytest.mark.parametrize("name", SCORERS)
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(pods=st.lists(candidates(), min_size=1, max_size=6), turn=counts)
def test_every_scorer_stays_between_zero_and_one(name: str, pods: list[Candidate], turn: int) -> None:
    scores = SCORERS[name](pods, Ask(adapter="x", turn=turn))
    assert len(scores) == len(pods)
    assert all(0.0 <= score <= 1.0 for score in scores)


@pytest.mark.parametrize("name", [name for name in SCORERS if name != "turn"])
def test_equal_endpoints_get_equal_scores(name: str) -> None:
    assert len(set(scored(name, candidate("a", matched=10), candidate("b", matched=10)))) == 1


@pytest.mark.parametrize("strategy", Strategy)
def test_every_preset_names_scorers_that_there_are(strategy: Strategy) -> None:
    assert set(PRESETS[strategy]) <= set(SCORERS)
    assert all(weight > 0 for weight in PRESETS[strategy].values())


def test_the_latency_cost_prefers_the_warm_pod_of_the_chapter_s_example() -> None:
    def pod(address: str, kv_usage: float, active: int, **values: Any) -> Candidate:
        return candidate(
            address,
            reported=load(kv_usage=kv_usage, running_requests=active),
            trend=EndpointTrend(memory_bytes_per_second=0.3 * MEMORY_BYTES_PER_SECOND),
            **values,
        )

    a = pod("a", 0.20, 4)
    for active in (4, 14):
        b = pod("b", 0.25, active, matched=999, recent_tokens=999)
        decision = decided(
            [a, b],
            policy=PickPolicy(strategy=Strategy.LATENCY_COST, weights=PRESETS[Strategy.LATENCY_COST]),
            prompt_tokens=1000,
            degraded={},
            tie_break=lambda: 0.0,
        )
        assert decision.endpoints[0] == "b"


def test_a_policy_may_weigh_every_scorer_and_no_other() -> None:
    assert tuple(SCORERS) == SCORER_NAMES

"""What was routed a moment ago is expected to be cached there, for a while, in bounded memory."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import PromptKeys
from extproc.prefixes.routing_memory import (
    POSITIONS,
    SETTLE_SECONDS,
    LastPlaces,
    RecentRoutes,
    RoutingMemory,
)
from kvmesh.blocks.block_keys import block_keys

ROOT = b"r" * 8


def chain(*blocks: str) -> bytes:
    """Return chained keys, one for each word."""
    return block_keys(b"".join(block.encode().ljust(4, b" ")[:4] for block in blocks), block_size=1, parent=ROOT)


def numbered(count: int, *, start: int = 0) -> list[str]:
    return [str(number) for number in range(start, start + count)]


def routes(*, ttl_seconds: float = 10.0, limit: int = 100_000) -> RecentRoutes:
    return RecentRoutes(ttl_seconds=ttl_seconds, limit=limit)


@pytest.mark.parametrize("count", [1, 2, 9, 13, 100, 500, 16_128])
def test_the_same_prompt_matches_whole(count: int) -> None:
    recent = routes()
    keys = chain(*numbered(count))
    recent.note(keys, endpoint="a", now=1.0)
    assert recent.match(keys, now=1.0) == {"a": count}


def test_a_prompt_that_goes_on_matches_up_to_the_last_checkpoint_before_it_differs() -> None:
    recent = routes()
    recent.note(chain(*numbered(437)), endpoint="a", now=1.0)
    assert recent.match(chain(*numbered(500)), now=1.0) == {"a": 432}
    assert recent.match(chain(*numbered(21), "other"), now=1.0) == {"a": 20}
    assert recent.match(chain(*numbered(7), "other"), now=1.0) == {"a": 7}


def test_each_endpoint_has_its_own_depth() -> None:
    recent = routes()
    for depth, endpoint in ((16, "a"), (64, "b"), (8, "c")):
        recent.note(chain(*numbered(depth)), endpoint=endpoint, now=1.0)
    assert recent.match(chain(*numbered(200)), now=1.0) == {"a": 16, "b": 64, "c": 8}


def test_a_different_beginning_or_no_keys_match_nothing() -> None:
    recent = routes()
    recent.note(chain("x", *numbered(50)), endpoint="a", now=1.0)
    recent.note(b"", endpoint="a", now=1.0)
    assert recent.match(chain("y", *numbered(50)), now=1.0) == {}
    assert recent.match(b"", now=1.0) == {}


def test_a_route_lasts_three_quarters_of_the_ttl_and_is_gone_after_all_of_it() -> None:
    keys = chain(*numbered(20))
    for noted_at in (100.0, 101.3, 102.4, 104.999):
        recent = routes(ttl_seconds=10.0)
        recent.note(chain("first"), endpoint="z", now=100.0)
        recent.note(keys, endpoint="a", now=noted_at)
        assert recent.match(keys, now=noted_at + 7.49) == {"a": 20}
        assert recent.match(keys, now=noted_at + 10.0) == {}


def test_irregular_looks_do_not_prolong_a_route() -> None:
    recent = routes(ttl_seconds=8.0)
    keys = chain(*numbered(20))
    recent.note(keys, endpoint="a", now=0.0)
    for now in (3.9, 7.8):
        recent.match(keys, now=now)
    assert recent.match(keys, now=8.0) == {}


def test_a_route_noted_again_starts_anew() -> None:
    recent = routes(ttl_seconds=8.0)
    keys = chain(*numbered(20))
    for now in (0.0, 5.0, 10.0):
        recent.note(keys, endpoint="a", now=now)
    assert recent.match(keys, now=15.0) == {"a": 20}


def test_a_forgotten_endpoint_matches_nothing_until_it_is_sent_something_again() -> None:
    recent = routes()
    long, short = chain(*numbered(100)), chain(*numbered(10))
    for endpoint in ("a", "b"):
        recent.note(long, endpoint=endpoint, now=1.0)
    recent.forget("a")
    recent.forget("never seen")
    assert recent.match(long, now=1.0) == {"b": 100}
    recent.note(short, endpoint="a", now=2.0)
    assert recent.match(long, now=2.0) == {"a": 10, "b": 100}


def test_endpoints_that_come_and_go_are_never_taken_for_each_other() -> None:
    recent = routes(ttl_seconds=4.0)
    for number in range(200):
        keys = chain(f"p{number}", *numbered(10))
        recent.note(keys, endpoint=f"pod {number}", now=number / 10)
        recent.forget(f"pod {number - 1}")
        assert recent.match(keys, now=number / 10) == {f"pod {number}": 11}
        assert recent.match(chain(f"p{number - 1}", *numbered(10)), now=number / 10) == {}


def test_memory_is_bounded_and_the_newest_routes_stay() -> None:
    recent = routes(limit=1_000)
    for number in range(500):
        keys = chain(f"p{number}", *numbered(60))
        recent.note(keys, endpoint="a", now=1.0)
        assert len(recent) <= 1_000 + 20
        assert recent.match(keys, now=1.0) == {"a": 61}
    assert recent.match(chain("p0", *numbered(60)), now=1.0) == {}
    assert recent.match(chain("p490", *numbered(60)), now=1.0) == {"a": 61}


@pytest.mark.parametrize("ttl_seconds", [0.0, 1e-12])
def test_without_a_time_to_live_nothing_is_remembered(ttl_seconds: float) -> None:
    recent, keys = routes(ttl_seconds=ttl_seconds), chain("a", "b", "c")
    recent.note(keys, endpoint="a", now=500_000.0)
    assert recent.match(keys, now=500_000.001) == {}
    assert len(recent) == 0


@pytest.mark.thorough
def test_random_routes_match_what_a_plain_list_of_them_says() -> None:
    source = random.Random(7)
    recent = routes(ttl_seconds=1e6)
    noted: list[tuple[list[str], str]] = []
    for _ in range(400):
        words = [source.choice("ab") for _ in range(source.randint(1, 6))] + numbered(source.randint(0, 150))
        endpoint = source.choice(["e1", "e2", "e3"])
        recent.note(chain(*words), endpoint=endpoint, now=0.0)
        noted.append((words, endpoint))
        asked = [source.choice("ab") for _ in range(source.randint(1, 6))] + numbered(source.randint(0, 150))
        assert recent.match(chain(*asked), now=0.0) == expected(noted, asked)


def expected(noted: list[tuple[list[str], str]], asked: list[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for words, endpoint in noted:
        shared = next((n for n, (w, a) in enumerate(zip(words, asked, strict=False)) if w != a), None)
        length = min(len(words), len(asked)) if shared is None else shared
        depth = max((p for p in POSITIONS if p <= length), default=0)
        if words == asked:
            depth = len(asked)
        if depth:
            found[endpoint] = max(found.get(endpoint, 0), depth)
    return found


def test_what_the_index_covers_is_not_returned() -> None:
    recent, keys = routes(), chain(*numbered(100))
    recent.note(keys, endpoint="a", now=1.0)
    recent.note(keys, endpoint="b", now=1.0)
    assert recent.match(keys, now=1.0, held={"a": 99}) == {"a": 100, "b": 100}
    assert recent.match(keys, now=1.0, held={"a": 100}) == {"b": 100}
    assert recent.match(keys, now=1.0) == {"a": 100, "b": 100}


def test_an_ended_answer_leaves_its_prompt_to_the_index_soon_and_a_refusal_at_once() -> None:
    memory = RoutingMemory(PickPolicy())
    prompts = [PromptKeys(keys=chain(*numbered(100)), tokens_each=16)]
    for endpoint in ("computed", "refused", "open"):
        memory.began(endpoint, prompts, now=1.0)
        memory.note(endpoint, prompts=prompts, session=None, adapter=None, now=1.0)
    memory.ended("computed", prompts, computed=True, now=1.0)
    memory.ended("refused", prompts, computed=False, now=1.0)

    def expected(now: float, *live: str) -> set[str]:
        ((hits, _),) = memory.matches(
            prompts, states=dict.fromkeys(live, "live"), endpoints=("computed", "refused", "open"), now=now
        )
        return set(hits)

    everywhere = ("computed", "refused", "open")
    assert expected(1.0, *everywhere) == {"computed", "open"}
    assert expected(1.0 + SETTLE_SECONDS, *everywhere) == {"open"}
    assert expected(1.0 + SETTLE_SECONDS) == set(everywhere)  # without events nothing else is known


def test_a_request_under_way_is_expected_for_the_policys_seconds() -> None:
    memory = RoutingMemory(PickPolicy(recent_prefix_seconds=5.0))
    prompts = [PromptKeys(keys=chain(*numbered(100)), tokens_each=16)]
    memory.began("a", prompts, now=1.0)
    memory.note("a", prompts=prompts, session=None, adapter=None, now=1.0)
    found = [memory.matches(prompts, states={"a": "live"}, endpoints=("a",), now=now) for now in (5.9, 6.0)]
    assert found == [[({"a": 100}, 16)], [({}, 16)]]


WORDS = st.lists(st.sampled_from("ab"), min_size=1, max_size=12)
STEPS = st.lists(st.tuples(st.sampled_from(("note", "match")), WORDS, st.sampled_from(("e1", "e2"))), max_size=60)


@given(STEPS)
def test_expectations_match_what_a_plain_set_says(steps: list[tuple[str, list[str], str]]) -> None:
    recent = routes(ttl_seconds=1e6)
    noted: set[tuple[str, tuple[str, ...]]] = set()  # endpoint, beginning
    for step, words, endpoint in steps:
        beginnings = [tuple(words[:depth]) for depth in range(1, len(words) + 1)]
        remembered = [each for each in beginnings if len(each) in POSITIONS or len(each) == len(words)]
        if step == "note":
            recent.note(chain(*words), endpoint=endpoint, now=0.0)
            noted.update((endpoint, each) for each in remembered)
            continue
        wanted: dict[str, int] = {}
        for candidate in ("e1", "e2"):
            deepest = max((each for each in remembered if (candidate, each) in noted), key=len, default=())
            if deepest:
                wanted[candidate] = len(deepest)
        assert recent.match(chain(*words), now=0.0) == wanted


def test_the_last_place_counts_and_the_oldest_names_make_room() -> None:
    places = LastPlaces(ttl_seconds=10.0, limit=2)
    for name, endpoint in [("a", "1"), ("b", "1"), ("a", "2"), ("c", "3")]:
        places.note(name, endpoint=endpoint, now=0.0)
    assert [places.get(name, now=1.0) for name in "abc"] == ["2", None, "3"]

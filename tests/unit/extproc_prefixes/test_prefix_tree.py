"""The tree of what was routed lately: what it counts, what it forgets, and that it stays small."""

import struct
from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from extproc.prefixes.prefix_tree import (
    FORGOTTEN_AT_ONCE,
    MOST_KEYS,
    NODE_BYTES,
    Origin,
    PrefixTree,
    TreeEdge,
    TreeView,
)

TINY = Origin(model="tiny", tokens_each=16)
HALF_LIFE = 100.0


def keys(*path: int) -> bytes:
    """Packed keys; real ones are chained, so that one number stands for all before it."""
    return struct.pack(f"<{len(path)}Q", *path)


def tree(**settings: int) -> PrefixTree:
    return PrefixTree(half_life_seconds=HALF_LIFE, **settings)


def note(into: PrefixTree, *path: int, matched_tokens: int = 0, now: float = 0.0, weight: float = 1.0) -> None:
    into.note(keys(*path), origin=TINY, matched_tokens=matched_tokens, now=now, weight=weight)


def shapes(view: TreeView) -> list[tuple[int, bytes, float, float]]:
    """Depth, own keys, requests and hit tokens of each edge."""
    return [(edge.depth, edge.keys, round(edge.requests, 6), round(edge.hit_tokens, 6)) for edge in view.edges]


def test_a_prompt_alone_is_one_edge() -> None:
    one = tree()

    note(one, 1, 2, 3, matched_tokens=32, now=7.0)

    assert one.view(limit=10, now=7.0) == TreeView(
        edges=(
            TreeEdge(
                key=keys(3),
                parent=None,
                origin=TINY,
                depth=0,
                first=0,
                keys=keys(1, 2, 3),
                requests=1.0,
                hit_tokens=32.0,
                seen_at=7.0,
                head=b"",
            ),
        ),
        requests=1.0,
        hit_tokens=32.0,
        left_out=0,
    )


def test_what_is_shown_as_one_edge_with_another_is_not_left_out() -> None:
    one = tree()
    for _ in range(2000):
        note(one, 1, 2, 3, 4)
    note(one, 1, 2)  # cuts the edge, and is too rare to be told apart

    assert [len(one), len(one.view(limit=10, now=0.0).edges), one.view(limit=10, now=0.0).left_out] == [2, 1, 0]
    note(one, 9)
    assert one.view(limit=1, now=0.0).left_out == 1


def test_prompts_part_where_they_differ_and_hits_are_credited_to_the_edges_that_gave_them() -> None:
    one = tree()

    note(one, 1, 2, 3, 4)
    note(one, 1, 2, 5, 6, matched_tokens=32)
    note(one, 1, 2, 3, 4, matched_tokens=64)

    view = one.view(limit=10, now=0.0)
    assert shapes(view) == [
        (0, keys(1, 2), 3.0, 64.0),
        (1, keys(3, 4), 2.0, 32.0),
        (1, keys(5, 6), 1.0, 0.0),
    ]
    assert [edge.parent for edge in view.edges] == [None, keys(2), keys(2)]
    assert [edge.first for edge in view.edges] == [0, 2, 2]
    assert view.hit_tokens == 96.0


def test_what_is_found_is_found_from_the_front_when_an_edge_is_cut() -> None:
    one = tree()

    note(one, 1, 2, 3, 4, matched_tokens=48)
    note(one, 1, 9)

    assert shapes(one.view(limit=10, now=0.0)) == [
        (0, keys(1), 2.0, 16.0),
        (1, keys(2, 3, 4), 1.0, 32.0),
        (1, keys(9), 1.0, 0.0),
    ]


def test_a_conversation_that_only_grows_is_shown_as_far_as_it_is_asked_for_alike() -> None:
    one = tree()

    note(one, 1, 2)
    note(one, 1, 2, 3)
    note(one, 1, 2, 3, 4, now=0.0)
    before = one.view(limit=10, now=0.0)
    for _ in range(5000):
        note(one, 1, 2, 3, 4)

    assert [edge.keys for edge in before.edges] == [keys(1, 2), keys(3), keys(4)]
    assert [edge.keys for edge in one.view(limit=10, now=0.0).edges] == [keys(1, 2, 3, 4)]


def test_a_request_counts_half_after_the_half_life() -> None:
    one = tree()

    note(one, 1, matched_tokens=16, now=0.0)
    note(one, 2, matched_tokens=16, now=HALF_LIFE)

    view = one.view(limit=10, now=2 * HALF_LIFE)
    assert shapes(view) == [(0, keys(2), 0.5, 8.0), (0, keys(1), 0.25, 4.0)]
    assert (view.requests, view.hit_tokens) == (0.75, 12.0)


def test_counts_survive_years() -> None:
    one = tree()

    for year in range(20):
        note(one, 1, now=year * 31_536_000.0)
        note(one, 1, 2, now=year * 31_536_000.0 + 1)

    view = one.view(limit=10, now=19 * 31_536_000.0 + 1)
    assert view.requests == pytest.approx(2.0, abs=0.01)


def test_a_weight_stands_for_so_many_requests() -> None:
    one = tree()

    note(one, 1, matched_tokens=16, weight=10)

    assert shapes(one.view(limit=10, now=0.0)) == [(0, keys(1), 10.0, 160.0)]


def test_of_a_very_long_prompt_the_beginning_is_told_apart() -> None:
    one = tree()

    note(one, *range(MOST_KEYS + 500))

    assert [edge.blocks for edge in one.view(limit=1, now=0.0).edges] == [MOST_KEYS]


def test_only_the_most_asked_for_are_shown_and_no_child_without_its_parent() -> None:
    one = tree()
    for hot in range(10):
        for turn in range(hot):
            note(one, hot, 100 * hot + turn)

    view = one.view(limit=7, now=0.0)

    assert [edge.keys for edge in view.edges if edge.depth == 0] == [keys(n) for n in range(9, 2, -1)]
    seen: set[bytes] = set()
    for edge in one.view(limit=30, now=0.0).edges:
        assert edge.parent is None or edge.parent in seen
        seen.add(edge.key)


def test_the_least_asked_for_is_forgotten_first_and_the_memory_is_bounded() -> None:
    most = 100 * (NODE_BYTES + 16)
    one = tree(most_bytes=most)
    random = Random(7)

    for at in range(5000):
        note(one, 1, 2, now=at / 100)
        note(one, random.getrandbits(63), random.getrandbits(63), now=at / 100)
        assert one._bytes <= most + NODE_BYTES + 16

    view = one.view(limit=1, now=50.0)
    assert view.edges[0].keys == keys(1, 2)
    assert len(one) <= 101


def test_the_beginning_of_an_edge_is_kept_where_tokens_are_given_and_forgotten_when_told() -> None:
    one = tree()
    tokens = struct.pack("<64I", *range(64))

    one.note(keys(1, 2, 3, 4), origin=TINY, matched_tokens=0, now=0.0, tokens=tokens)
    one.note(keys(1, 2, 9), origin=TINY, matched_tokens=0, now=0.0, tokens=tokens)
    one.note(keys(1, 2, 3, 4), origin=TINY, matched_tokens=0, now=0.0, tokens=tokens)

    heads = {edge.keys: edge.head for edge in one.view(limit=10, now=0.0).edges}
    assert heads == {
        keys(1, 2): tokens[: 32 * 4],
        keys(3, 4): tokens[32 * 4 :],
        keys(9): tokens[32 * 4 :],
    }
    one.forget_text()
    assert {edge.head for edge in one.view(limit=10, now=0.0).edges} == {b""}


@pytest.mark.parametrize("seed", range(20))
def test_it_counts_as_a_plain_count_of_all_prefixes_does(seed: int) -> None:
    random, one = Random(seed), tree()
    counted: Counter[tuple[int, ...]] = Counter()
    matched: Counter[tuple[int, ...]] = Counter()
    for _ in range(300):
        # chained: what comes after depends on all before it
        path: tuple[int, ...] = ()
        while len(path) < random.randint(1, 6):
            path += (hash((path, random.randint(0, 2))) & (1 << 60) - 1,)
        found = random.randint(0, len(path))
        note(one, *path, matched_tokens=16 * found)
        for depth in range(1, len(path) + 1):
            counted[path[:depth]] += 1
            matched[path[:depth]] += found >= depth

    by_last = {path[-1]: path for path in counted}
    for edge in one.view(limit=10_000, now=0.0).edges:
        own = [int.from_bytes(edge.keys[at : at + 8], "little") for at in range(0, len(edge.keys), 8)]
        # an edge is cut where prompts end, and put together only where nearly no prompt ends
        assert edge.requests == pytest.approx(counted[by_last[own[0]]], rel=0.002)
        assert all(len(by_last[after]) == len(by_last[before]) + 1 for before, after in pairwise(own))
    assert one.view(limit=1, now=0.0).hit_tokens == pytest.approx(16 * sum(matched.values()))


def test_a_large_tree_that_is_to_be_small_shrinks_in_steps_that_hold_up_nobody() -> None:
    one = PrefixTree(most_bytes=4 << 20)
    for number in range(3000):
        note(one, number)
    before = len(one)

    one.reconfigure(most_bytes=1 << 20)
    assert before - len(one) == FORGOTTEN_AT_ONCE
    for number in range(20):
        note(one, number + before)
    assert one._bytes <= 1 << 20

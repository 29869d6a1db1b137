"""Which requests are looked at for the prefix tree, what of them is kept, and what is shown of the tree."""

import struct
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from extproc.admission.prepared_request import Picked
from extproc.choosing.choose import Query
from extproc.pages.picker_state import HolderState, PrefixNode
from extproc.pages.prefix_pages import (
    MOST_HOLDERS,
    NOTES_PER_SECOND,
    PrefixWatch,
    index_state,
    prefix_nodes,
    sampled_keys,
)
from extproc.prefixes.prefix_tree import Origin, TreeEdge, TreeView
from extproc.prefixes.prompt_match import PromptKeys
from extproc.prompts.tokenized_prompt import PromptTokens, TokenizedPrompt


@dataclass
class Base:
    name: str = "tiny"


@dataclass
class Resolved:
    model: str | None = "tiny"
    base: Base | None = field(default_factory=Base)
    adapter: str | None = None


@dataclass
class Request:
    cache_salt: str | None = None


@dataclass
class Asked:
    resolved: Resolved = field(default_factory=Resolved)
    request: Request = field(default_factory=Request)


@dataclass
class Prepared:
    query: Query
    tokens: PromptTokens
    asked: Asked


@dataclass
class Decision:
    matched_tokens: int = 0


@dataclass
class Pick:
    """As much of `Picked` as is looked at."""

    prepared: Prepared
    decision: Decision = field(default_factory=Decision)


TOKENS = struct.pack("<32I", *range(32))


def pick(*path: int, matched: int = 0, chunks: bool = False, **asked: Any) -> Picked:
    keys = struct.pack(f"<{len(path)}Q", *path)
    tokens = (
        PromptTokens(chunks=keys, chunk_tokens=64)
        if chunks
        else PromptTokens(prompts=(TokenizedPrompt(tokens=TOKENS),))
    )
    prompts = (PromptKeys(keys=keys, tokens_each=64 if chunks else 16),) if path else ()
    found = Pick(Prepared(query=Query(prompts=prompts), tokens=tokens, asked=Asked(**asked)), Decision(matched))
    return cast("Picked", found)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watch(*, shows_text: bool = False, clock: Clock | None = None) -> PrefixWatch:
    return PrefixWatch(shows_text=lambda: shows_text, clock=clock or Clock(), random=Random(7).random)


def test_a_request_is_counted_with_its_model_adapter_and_what_was_expected_to_be_found() -> None:
    one = watch()

    one.routed(pick(1, 2, matched=16, resolved=Resolved(adapter="lora")))

    (edge,) = one.view(limit=9).edges
    assert edge.origin == Origin(model="tiny", adapter="lora", tokens_each=16)
    assert (edge.blocks, edge.requests, edge.hit_tokens, edge.head) == (2, 1.0, 16.0, b"")


def test_text_chunks_and_models_that_nobody_configured_are_told_apart() -> None:
    one = watch(shows_text=True)

    one.routed(pick(1, chunks=True, resolved=Resolved(model="m" * 500, base=None)))

    (edge,) = one.view(limit=9).edges
    assert edge.origin == Origin(model="m" * 200, tokens_each=64, indexed=False)
    assert edge.head == b""


def test_requests_without_prompts_are_passed_over() -> None:
    one = watch()

    one.routed(pick())

    assert one.view(limit=9).edges == ()


def test_the_beginning_is_kept_where_text_is_shown_but_never_of_salted_prompts() -> None:
    one = watch(shows_text=True)

    one.routed(pick(1))
    one.routed(pick(2, request=Request(cache_salt="private")))

    assert {edge.origin.private: edge.head for edge in one.view(limit=9).edges} == {False: TOKENS, True: b""}


def test_text_is_forgotten_as_soon_as_it_is_not_to_be_shown() -> None:
    answers = [True, False]
    one = PrefixWatch(shows_text=lambda: answers[0], clock=Clock(), random=Random(7).random)
    one.routed(pick(1))
    assert [edge.head for edge in one._tree.view(limit=9, now=100.0).edges] == [TOKENS]

    del answers[0]
    one.shows_text()

    assert [edge.head for edge in one._tree.view(limit=9, now=100.0).edges] == [b""]
    one.routed(pick(1))
    assert [edge.head for edge in one.view(limit=9).edges] == [b""]


@pytest.mark.parametrize("per_second", [1, 3, 40, 400])
def test_few_are_all_looked_at_and_of_many_a_few_but_all_are_counted(per_second: int) -> None:
    clock = Clock()
    one, looked_at, seconds = watch(clock=clock), 0, 30
    note = one._tree.note

    def counting(*arguments: Any, **named: Any) -> None:
        nonlocal looked_at
        looked_at += 1
        note(*arguments, **named)

    one._tree.note = counting  # type: ignore[method-assign]
    for number in range(per_second * seconds):
        clock.now = 100.0 + number / per_second
        one.routed(pick(1))

    all_requests = per_second * seconds
    if per_second <= NOTES_PER_SECOND:
        assert looked_at == all_requests
    else:
        assert looked_at <= 2 * NOTES_PER_SECOND * seconds
        assert one.sampled_share == pytest.approx(NOTES_PER_SECOND / per_second, rel=0.2)
    # half a minute of a half-life of five lets a thirtieth go
    assert one.view(limit=1).requests == pytest.approx(all_requests, rel=0.1)


def test_a_burst_out_of_nothing_is_thinned_out_at_once() -> None:
    one, clock_stands_still = watch(), 2000

    for number in range(clock_stands_still):
        one.routed(pick(number + 1))

    assert one.view(limit=1).left_out < 60
    assert one.view(limit=1).requests == pytest.approx(2000, rel=0.5)


def test_traffic_that_takes_turns_is_not_met_at_the_same_one_each_time() -> None:
    clock = Clock()
    one = watch(clock=clock)

    for number in range(20_000):
        clock.now = 100.0 + number / 100
        one.routed(pick(1 + number % 2))

    first, second = one.view(limit=2).edges
    assert first.requests / second.requests == pytest.approx(1.0, abs=0.25)


def edge(first: int, count: int, *, parent: bytes | None = None, indexed: bool = True, **more: Any) -> TreeEdge:
    keys = b"".join(number.to_bytes(8, "little") for number in range(first, first + count))
    fields: dict[str, Any] = {
        "key": keys[-8:], "parent": parent, "origin": Origin(model="tiny", tokens_each=16, indexed=indexed),
        "depth": 0, "first": first, "keys": keys, "requests": 2.0, "hit_tokens": 8.0, "seen_at": 5.0, "head": b"",
    }  # fmt: skip
    return TreeEdge(**fields | more)


def nodes_of(view: TreeView, *, holders: Any = (), cached_blocks: int | None = 200) -> list[PrefixNode]:
    return list(
        prefix_nodes(
            view,
            holders=holders,
            cached_blocks=cached_blocks,
            unix_at=lambda seconds: 93.0 + seconds,
            name_of=lambda key: f"<{key[0]}>",
            text_of=lambda edge: edge.head.decode(),
        )
    )


def test_of_a_long_edge_blocks_all_over_it_are_looked_up_and_the_last() -> None:
    found = sampled_keys(edge(0, 160))

    assert [int.from_bytes(found[at : at + 8], "little") for at in range(0, len(found), 8)] == list(range(9, 160, 10))
    assert sampled_keys(edge(0, 2)) == edge(0, 2).keys
    assert sampled_keys(edge(0, 2, indexed=False)) == b""


def test_a_prefix_has_its_shares_and_its_holders_by_what_was_looked_up() -> None:
    upper = edge(0, 32)
    lower = edge(32, 2, parent=upper.key, depth=1, requests=1.0, hit_tokens=2.0)
    view = TreeView(edges=(upper, lower), requests=4.0, hit_tokens=10.0, left_out=3)
    holders = [{"a:1": "GPU", "b:1": "GPU"}] * 8 + [{"a:1": "CPU"}] * 8 + [{"a:1": "GPU"}, {}]

    first, second = nodes_of(view, holders=holders)

    assert (first.id, first.parent, second.id, second.parent) == ("<31>", None, "<33>", "<31>")
    assert first.holders == [
        HolderState(endpoint="a:1", blocks=32, tiers={"GPU": 16, "CPU": 16}),
        HolderState(endpoint="b:1", blocks=16, tiers={"GPU": 16}),
    ]
    assert second.holders == [HolderState(endpoint="a:1", blocks=1, tiers={"GPU": 1})]
    assert (first.share_of_requests, first.share_of_hits, first.share_of_memory) == (0.5, 0.8, 0.24)
    assert (first.from_tokens, first.tokens, second.from_tokens, second.tokens) == (0, 512, 512, 32)
    assert (first.last_at, first.text) == (98.0, None)


def test_without_an_index_no_pod_is_said_to_hold_anything() -> None:
    view = TreeView(edges=(edge(0, 2),), requests=2.0, hit_tokens=8.0, left_out=0)

    (node,) = nodes_of(view, holders=None, cached_blocks=None)

    assert index_state(view, None) == "unavailable"
    assert (node.holders, node.held_blocks, node.share_of_memory) == (None, None, None)


def test_text_chunks_have_no_holders() -> None:
    view = TreeView(edges=(edge(0, 2, indexed=False),), requests=2.0, hit_tokens=8.0, left_out=0)

    (node,) = nodes_of(view)

    assert (index_state(view, ()), node.holders) == ("no-tokens", None)


def test_only_an_edge_whose_beginning_is_kept_has_text() -> None:
    view = TreeView(edges=(edge(0, 2, head=b"hello"), edge(2, 2)), requests=2.0, hit_tokens=8.0, left_out=0)

    assert [node.text for node in nodes_of(view)] == ["hello", None]


def test_of_a_prefix_that_hundreds_hold_those_with_the_most_of_it_are_told_and_all_are_counted() -> None:
    view = TreeView(edges=(edge(0, 2),), requests=2.0, hit_tokens=8.0, left_out=0)
    everybody = {f"10.0.1.{i}:8000": "GPU" for i in range(MOST_HOLDERS + 9)}
    best = {"10.0.2.1:8000": "GPU"}

    (node,) = nodes_of(view, holders=[everybody | best, best])

    assert node.holders is not None
    assert (len(node.holders), node.holders_left_out) == (MOST_HOLDERS, 10)
    assert node.holders[0] == HolderState(endpoint="10.0.2.1:8000", blocks=2, tiers={"GPU": 2})
    assert node.held_blocks == MOST_HOLDERS + 9 + 2

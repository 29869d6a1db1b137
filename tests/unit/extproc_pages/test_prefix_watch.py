"""Which requests are looked at for the prefix tree, and what of them is kept."""

import struct
from dataclasses import dataclass, field
from random import Random
from typing import Any, cast

import pytest

from extproc.admission.prepared_request import Picked
from extproc.choosing.choose import Query
from extproc.pages.prefix_watch import NOTES_PER_SECOND, PrefixWatch
from extproc.prefixes.prefix_tree import Origin
from extproc.prefixes.prompt_match import PromptKeys
from extproc.prompts.token_ids import PromptTokens, TokenizedPrompt


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
    return PrefixWatch(shows_text=shows_text, clock=clock or Clock(), random=Random(7).random)


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
    one = watch(shows_text=True)
    one.routed(pick(1))

    one.reconfigure(shows_text=False)
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

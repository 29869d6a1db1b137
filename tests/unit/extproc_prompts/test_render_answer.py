"""A pod's rendered prompts are read whole, or refused with what is wrong."""

import json
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from extproc.prompts.pod_tokenize import RenderAnswerError, read_refusal, read_render_answer
from extproc.prompts.tokenized_prompt import Feature, TokenizedPrompt
from kvmesh.pods.page_steps import Steps, T, at_once


def read(answer: Any) -> tuple[TokenizedPrompt, ...]:
    return at_once(read_render_answer(json.dumps(answer).encode()))


def tokens(*ids: int) -> bytes:
    return array("I", ids).tobytes()


def test_a_chat_has_one_prompt_and_completions_have_a_list() -> None:
    chat = {"request_id": "x", "token_ids": [1, 2, 4_294_967_295], "features": None, "sampling_params": {"n": 1}}
    assert read(chat) == (TokenizedPrompt(tokens=tokens(1, 2, 4_294_967_295)),)
    assert read([{"token_ids": [1]}, {"token_ids": [2, 3]}]) == (
        TokenizedPrompt(tokens=tokens(1)),
        TokenizedPrompt(tokens=tokens(2, 3)),
    )


def test_media_of_all_kinds_are_listed_in_the_order_of_their_places() -> None:
    features = {
        "mm_hashes": {"image": ["b", "c"], "audio": ["a"]},
        "mm_placeholders": {
            "image": [{"offset": 5, "length": 3, "is_embed": None}, {"offset": 30, "length": 2}],
            "audio": [{"offset": 1, "length": 4}],
        },
        "kwargs_data": {"image": ["AAAA", None], "audio": [None]},
    }
    assert read({"token_ids": [7] * 40, "features": features}) == (
        TokenizedPrompt(
            tokens=tokens(*[7] * 40),
            features=(
                Feature(identifier="a", first_token=1, length=4),
                Feature(identifier="b", first_token=5, length=3),
                Feature(identifier="c", first_token=30, length=2),
            ),
        ),
    )


def test_a_long_prompt_is_read_piece_by_piece_and_whole() -> None:
    ids = list(range(100_000))
    steps = read_render_answer(json.dumps({"token_ids": ids}).encode())
    into: list[tuple[TokenizedPrompt, ...]] = []
    assert len([*collected(steps, into)]) > 5
    assert into == [(TokenizedPrompt(tokens=tokens(*ids)),)]


def collected(steps: Steps[T], into: list[T]) -> Iterator[None]:
    into.append((yield from steps))


@pytest.mark.parametrize(
    ("count", "features", "why"),
    [
        (100, {"image": ("a", 90, 11)}, "stands beyond the prompt's 100 tokens"),
        (100, {"image": ("a" * 300, 0, 1)}, "a name of more than 256 characters"),
        (100, {f"image{number}": ("a", 0, 100) for number in range(5)}, "cover the prompt again and again"),
        (100, {f"image{number}": ("a", 0, 0) for number in range(20_000)}, "more than 16384 parts"),
    ],
    ids=["beyond-the-prompt", "long-name", "overlapping", "many"],
)
def test_media_that_would_cost_more_than_their_prompt_are_refused(
    count: int, features: dict[str, tuple[str, int, int]], why: str
) -> None:
    hashes = {kind: [name] for kind, (name, _, _) in features.items()}
    places = {kind: [{"offset": offset, "length": length}] for kind, (_, offset, length) in features.items()}
    with pytest.raises(RenderAnswerError, match=why):
        read({"token_ids": [7] * count, "features": {"mm_hashes": hashes, "mm_placeholders": places}})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff",
        b"7",
        b"{}",
        b'{"token_ids": null}',
        b'{"token_ids": [1.5]}',
        b'{"token_ids": [-1]}',
        b'{"token_ids": [4294967296]}',
        b'[{"token_ids": [1]}, 5]',
        b'{"token_ids": {"1": 2}}',
        b'{"token_ids": [' + b"[1,2]," * 20_000 + b"1]}",
        b'{"token_ids": [' + b'"1,2",' * 20_000 + b"1]}",
        b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}}',
        b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]},'
        b' "mm_placeholders": {"image": [{"offset": -1, "length": 1}]}}}',
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(RenderAnswerError):
        at_once(read_render_answer(body))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"error": {"message": "no such model", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "old style"}', "old style"),
        (b'{"detail": "Not Found"}', ""),
        (b"<html>", ""),
        (b'{"error": {"message": "' + b"x" * 500 + b'"}}', "x" * 200),
    ],
)
def test_a_refusals_message_is_found_in_old_and_new_forms(body: bytes, expected: str) -> None:
    assert read_refusal(body) == expected

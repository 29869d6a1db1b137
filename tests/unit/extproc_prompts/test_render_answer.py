"""A pod's rendered prompts are read whole, or refused with what is wrong."""

import json
from array import array
from typing import Any

import pytest

from extproc.prompts.pod_render import RenderAnswerError, read_refusal, read_render_answer
from extproc.prompts.token_ids import Feature, TokenizedPrompt


def read(answer: Any) -> tuple[TokenizedPrompt, ...]:
    return read_render_answer(json.dumps(answer).encode())


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
    assert read({"token_ids": [7], "features": features}) == (
        TokenizedPrompt(
            tokens=tokens(7),
            features=(
                Feature(identifier="a", first_token=1, length=4),
                Feature(identifier="b", first_token=5, length=3),
                Feature(identifier="c", first_token=30, length=2),
            ),
        ),
    )


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
        b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {}}}',
        b'{"token_ids": [1], "features": {"mm_hashes": {"image": ["a"]},'
        b' "mm_placeholders": {"image": [{"offset": -1, "length": 1}]}}}',
    ],
)
def test_anything_else_is_refused(body: bytes) -> None:
    with pytest.raises(RenderAnswerError):
        read_render_answer(body)


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

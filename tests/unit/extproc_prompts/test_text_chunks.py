"""Where tokens are unknown, prompts share keys as far as their text is the same."""

from typing import Any

import pytest

from extproc.prompts.text_chunks import (
    CHUNK_BYTES,
    MAX_PIECES,
    MAX_TEXT_BYTES,
    MEDIA_TOKENS,
    canonical_text,
    chunk_text,
    estimated_tokens,
)
from extproc.requests.request import ChatPrompt, Prompt, TextPrompt

ROOT = b"r" * 8
SYSTEM = {"role": "system", "content": "You are a careful assistant. " * 30}
QUESTION = {"role": "user", "content": "What is a block pool? " * 30}
ANSWER = {"role": "assistant", "content": "It is where blocks live. " * 30}


def chat(*messages: Any, **more: Any) -> ChatPrompt:
    return ChatPrompt(messages=messages, **more)


def shared(one: Prompt, other: Prompt) -> int:
    """Return how many leading keys are the same."""
    keys = [chunk_text(prompt, root=ROOT)[0] for prompt in (one, other)]
    pairs = zip(*([k[i : i + 8] for i in range(0, len(k), 8)] for k in keys), strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(map(len, keys)) // 8)


def test_a_later_turn_has_all_the_keys_of_the_one_before() -> None:
    first = chat(SYSTEM, QUESTION)
    later = chat(SYSTEM, QUESTION, ANSWER, {"role": "user", "content": "More."})
    assert shared(first, later) == len(canonical_text(first)[0]) // CHUNK_BYTES == 6


def test_chats_that_share_the_system_prompt_share_the_keys_up_to_its_end() -> None:
    one, other = chat(SYSTEM, QUESTION), chat(SYSTEM, {"role": "user", "content": "Something else. " * 40})
    assert shared(one, other) == len(SYSTEM["content"]) // CHUNK_BYTES == 3


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(chat({**SYSTEM, "role": "user"}, QUESTION), id="role"),
        pytest.param(chat(SYSTEM, QUESTION, tools=({"type": "function"},)), id="tools"),
        pytest.param(chat(SYSTEM, QUESTION, documents=({"text": "d"},)), id="documents"),
        pytest.param(TextPrompt(text=SYSTEM["content"] + QUESTION["content"]), id="no chat"),
    ],
)
def test_what_differs_at_the_beginning_shares_nothing(other: Prompt) -> None:
    assert shared(chat(SYSTEM, QUESTION), other) == 0


def test_roots_keep_models_adapters_and_salts_apart() -> None:
    one, other = (chunk_text(chat(SYSTEM), root=root)[0] for root in (b"r" * 8, b"s" * 8))
    assert not {one[i : i + 8] for i in range(0, len(one), 8)} & {other[i : i + 8] for i in range(0, len(other), 8)}


def test_parts_count_as_the_text_in_them_and_media_as_what_was_sent() -> None:
    def picture(url: str) -> dict[str, Any]:
        content = [{"type": "text", "text": SYSTEM["content"]}, {"type": "image_url", "image_url": {"url": url}}]
        return {"role": "user", "content": [*content, "x" * 600]}

    assert shared(chat(picture("a")), chat(picture("a"))) == 5
    assert shared(chat(picture("a")), chat(picture("b"))) == 3
    assert canonical_text(chat(picture("a")))[1] == pytest.approx(MEDIA_TOKENS + (870 + 600) / 4, abs=10)


def test_a_long_prompt_is_chunked_only_at_its_beginning_but_estimated_whole() -> None:
    keys, tokens = chunk_text(TextPrompt(text="word " * 1_000_000), root=ROOT)
    assert (len(keys) // 8, tokens) == (MAX_TEXT_BYTES // CHUNK_BYTES, 1_250_000)
    long_chat = chat(*[QUESTION] * 3_000)
    assert len(chunk_text(long_chat, root=ROOT)[0]) // 8 == MAX_TEXT_BYTES // CHUNK_BYTES
    assert estimated_tokens([long_chat]) == pytest.approx(3_000 * len(QUESTION["content"]) / 4, rel=0.02)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "\ud800 half"},
        {"role": "user", "content": [{"type": "text", "text": None}, {"other": "\udfff"}]},
        {"role": 5, "content": 7},
        "no object",
        {},
    ],
    ids=repr,
)
def test_odd_messages_have_keys_too(message: Any) -> None:
    prompt = chat(message, SYSTEM)
    assert shared(prompt, chat(message, SYSTEM, QUESTION)) >= 3


def test_a_conversation_of_endless_pieces_is_read_only_so_far() -> None:
    text, tokens = canonical_text(chat(*([""] * 10 * MAX_PIECES)))
    assert (len(text), tokens) == (MAX_PIECES * 3, -(-MAX_PIECES * 3 // 4))  # a mark and two quotes each

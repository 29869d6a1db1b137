"""Generates text from words of the tokenizer's vocabulary, always the same for one prompt and seed.

Each answer first says that it is simulated. The pod calls this once per generation, before scheduling it. Each word
encodes to one token that decodes to the same word, so that when the client sends the text back as the assistant's turn,
it has the same tokens as those in the cache.
"""

import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

SHORTEST_ANSWER_TOKENS, LONGEST_ANSWER_TOKENS = 24, 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """The tokens that can be generated."""

    words: Sequence[int]  # token ids whose text starts with a space
    punctuation: Sequence[int]
    texts: Mapping[int, str]  # of all ids above, and "" for `end_of_turn`
    end_of_turn: int | None  # the token that ends a generation
    opening: Sequence[int] = ()  # the start of each answer, as far as its length allows
    opening_texts: Sequence[str] = ()  # what each of these tokens adds to the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The length limits of one request."""

    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole generation: `pieces[i]` is the text that token `i` adds."""

    token_ids: list[int]
    pieces: list[str]
    finish_reason: str  # "stop" or "length"
    stop_reason: str | None = None  # the stop string that ended it


def prompt_seed(token_ids: Sequence[int], *, seed: int) -> int:
    """Return a number that depends only on the prompt and on the pod's seed."""
    return crc32(array("I", token_ids), seed & 0xFFFFFFFF)


def generate_answer(rng: random.Random, vocabulary: Vocabulary, limits: Limits) -> Answer:
    """Generate a random answer within `limits`; unless `ignore_eos` is set, it may end before the limit."""
    natural_tokens = max(rng.randint(SHORTEST_ANSWER_TOKENS, LONGEST_ANSWER_TOKENS), limits.min_tokens + 1)
    ends_itself = not (limits.ignore_eos or vocabulary.end_of_turn is None)
    length = min(natural_tokens, limits.max_tokens) if ends_itself else limits.max_tokens
    opening = vocabulary.opening[:length]
    token_ids = [*opening, *_draw_tokens(rng, vocabulary, length - len(opening))]
    complete = ends_itself and natural_tokens <= limits.max_tokens
    if complete and vocabulary.end_of_turn is not None:
        token_ids[-1] = vocabulary.end_of_turn
    answer = Answer(
        token_ids=token_ids,
        pieces=[*vocabulary.opening_texts[:length], *(vocabulary.texts[token] for token in token_ids[len(opening) :])],
        finish_reason="stop" if complete else "length",
    )
    return cut_at_stop(answer, limits.stop) if limits.stop else answer


def cut_at_stop(answer: Answer, stop: Sequence[str]) -> Answer:
    """End the answer before the first stop string; the token that completes this string is the last one."""
    text = ""
    for count, piece in enumerate(answer.pieces, start=1):
        text += piece
        found = [(text.find(one), one) for one in stop if one and one in text]
        if not found:
            continue
        position, one = min(found)
        pieces: list[str] = []
        left = position
        for kept in answer.pieces[:count]:
            pieces.append(kept[:left])
            left = max(0, left - len(kept))
        return Answer(token_ids=answer.token_ids[:count], pieces=pieces, finish_reason="stop", stop_reason=one)
    return answer


def _draw_tokens(rng: random.Random, vocabulary: Vocabulary, count: int) -> list[int]:
    token_ids = rng.choices(vocabulary.words, k=count)
    if vocabulary.punctuation:
        position = rng.randint(4, 9)
        while position < count:  # never two punctuation tokens in a row, since they would merge into another token
            token_ids[position] = rng.choice(vocabulary.punctuation)
            position += rng.randint(4, 12)
    return token_ids

"""Chat prompts of known token counts: nine tenths a prefix that was seen before, one tenth that was not.

The words are entries of the tokenizer's vocabulary, so that a word is one token; what comes out is counted by a pod's
`/tokenize` and recorded, not assumed.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

import aiohttp

KNOWN_SHARE = 0.9
WORD_MARK = "Ġ"  # byte-level BPE writes a leading space like this
SHORTEST_WORD = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSet:
    """Request bodies of one size; `prefixes` are bodies with the known part alone, to warm the caches with."""

    size_tokens: int
    model: str
    prefixes: tuple[str, ...]

    def body(self, number: int, *, words: tuple[str, ...], seed: int) -> bytes:
        """Body `number`: one of the prefixes in turn, and a tail that no other number has."""
        rng = random.Random(seed * 1_000_003 + number)
        tail_words = max(1, round(self.size_tokens * (1 - KNOWN_SHARE)))
        tail = " ".join(rng.choices(words, k=tail_words))
        return chat_body(self.model, self.prefixes[number % len(self.prefixes)], tail)


def chat_body(model: str, system: str, user: str) -> bytes:
    """A chat request for one token, as one line of JSON."""
    request = {
        "model": model,
        "max_tokens": 1,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": user}],
    }
    return json.dumps(request).encode()


def vocabulary_words(tokenizer_folder: Path) -> tuple[str, ...]:
    """Whole words that are one token when a space stands before them."""
    vocabulary = json.loads((tokenizer_folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    words = {entry[1:] for entry in vocabulary if entry.startswith(WORD_MARK)}
    return tuple(sorted(word for word in words if len(word) >= SHORTEST_WORD and word.isascii() and word.isalpha()))


def make_prompt_set(size_tokens: int, *, model: str, words: tuple[str, ...], prefix_count: int, seed: int) -> PromptSet:
    """`prefix_count` prefixes of nine tenths of the size."""
    rng = random.Random(f"{seed} prefixes {size_tokens}")
    prefixes = tuple(" ".join(rng.choices(words, k=round(size_tokens * KNOWN_SHARE))) for _ in range(prefix_count))
    return PromptSet(size_tokens=size_tokens, model=model, prefixes=prefixes)


async def count_tokens(session: aiohttp.ClientSession, pod: str, body: bytes) -> int:
    """What a pod makes of the body's messages."""
    request = {key: value for key, value in json.loads(body).items() if key in ("model", "messages")}
    async with session.post(f"http://{pod}/tokenize", json=request) as response:
        response.raise_for_status()
        return int((await response.json())["count"])

"""Prompts that tokens are compared on, here and at a pod: what templates and tokenizers most often get differently.

The running picker compares each pod once (`prompts.token_checks`), `kvmesh doctor` and its checks at start-up all of
them. Pure.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Tokens = tuple[int, ...] | str  # a text says why there are none

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place: °C, wind & rain",
            "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        },
    }
]
UNICODE = "Straße, İstanbul, e\u0301 vs é, 日本語, 한국어, العربية, 👩‍👩‍👧 🏳️‍🌈\u00a0\u2003end"
WHITESPACE = "  two  spaces\n\n\n\ttab\r\nline   \n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One prompt, as a client sends it; /tokenize of the pod takes the same fields."""

    name: str
    path: str
    fields: Mapping[str, Any]

    @property
    def is_chat(self) -> bool:
        """Whether a chat template takes part."""
        return "messages" in self.fields

    def body(self, model: str) -> bytes:
        """Return the request body for a model."""
        return msgspec.json.encode({"model": model, **self.fields})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenComparison:
    """One probe of one model, tokenized here and by a pod."""

    model: str  # base name
    probe: str
    is_chat: bool
    ours: tuple[int, ...] | None  # None: see `our_problem`
    theirs: tuple[int, ...] | None  # None: see `their_problem`
    our_problem: str = ""
    their_problem: str = ""
    refused: bool = False  # the pod takes no such prompt (400), as a template without a system role

    @property
    def agree(self) -> bool:
        """Whether the tokens are the same, or both sides refuse such a prompt."""
        return self.ours == self.theirs if self.ours is not None else self.refused

    @property
    def difference(self) -> str:
        """Where two that do not agree part."""
        if self.ours is None or self.theirs is None:
            return self.our_problem or self.their_problem
        pairs = enumerate(zip(self.ours, self.theirs, strict=False))
        at = next((i for i, pair in pairs if pair[0] != pair[1]), None)
        where = f"token {at} differs" if at is not None else "one begins like the other"
        return f"{len(self.ours)} here, {len(self.theirs)} there, {where}"


def _chat(name: str, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Probe:
    return Probe(name=name, path="/v1/chat/completions", fields={"messages": messages, **fields})


def _completion(name: str, prompt: str) -> Probe:
    return Probe(name=name, path="/v1/completions", fields={"prompt": prompt})


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


PROBES = (
    _completion("completion", "The quick brown fox jumps over the lazy dog. 1234567890 x²+y²≠z²"),
    _completion("completion with Unicode", UNICODE),
    _completion("completion with whitespace", WHITESPACE),
    _chat("chat", [_says("user", "What is a block pool?")]),
    _chat(
        "chat with system prompt and history",
        [
            _says("system", "You are a terse assistant. " * 8),
            _says("user", "Name a colour."),
            _says("assistant", "Blue."),
            _says("user", "Another one, please."),
        ],
    ),
    _chat("chat with Unicode", [_says("user", UNICODE + WHITESPACE)]),
    _chat("chat with tools", [_says("user", "Will it rain in Paris?")], tools=TOOLS),
)


def token_ids(buffer: bytes) -> tuple[int, ...]:
    """Return the numbers in a buffer of little-endian uint32."""
    return struct.unpack(f"<{len(buffer) // 4}I", buffer)

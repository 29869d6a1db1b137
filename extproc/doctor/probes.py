"""The prompts that tokens are compared on: what templates and tokenizers most often get differently. No I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

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

"""Find the text in a body whose tokens cannot be known: media, unknown fields, an API that only vLLM understands.

Called by `prompts.prompt_tokens` before it chunks the text. Lenient on purpose: what comes out is only ever compared
with what came out of an earlier body, so nothing here judges or refuses.
"""

from typing import Any

import msgspec

from extproc.requests.json_body import has_too_many_parts
from extproc.requests.request import ChatPrompt, Prompt, TextPrompt


class _Texts(msgspec.Struct):
    """The fields that hold prompts in vLLM's APIs."""

    messages: Any = None
    system: Any = None  # Anthropic's messages
    instructions: Any = None  # responses
    input: Any = None  # responses, embeddings
    tools: Any = None
    prompt: Any = None
    suffix: Any = None


_DECODER = msgspec.json.Decoder(_Texts)


def prompt_in_body(body: bytes) -> Prompt | None:
    """Return the prompt as far as it is text and JSON, None where there is none or reading would take too long."""
    if has_too_many_parts(body):
        return None
    try:
        texts = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    messages = _messages(texts)
    if messages:
        tools = tuple(texts.tools) if isinstance(texts.tools, list) else None
        return ChatPrompt(messages=messages, tools=tools)
    for given in (texts.prompt, texts.input):
        first = given[0] if isinstance(given, list) and given else given
        if isinstance(first, str):
            return TextPrompt(text=first)
    return None


def _messages(texts: _Texts) -> tuple[Any, ...]:
    """Return a conversation, system prompt first, as chat completions would have it."""
    system = texts.system if texts.system is not None else texts.instructions
    first = [{"role": "system", "content": system}] if isinstance(system, str | list) and system else []
    for turns in (texts.messages, texts.input):
        if isinstance(turns, list) and any(isinstance(turn, dict) for turn in turns):
            return (*first, *turns)
    if first and isinstance(texts.input, str):
        return (*first, {"role": "user", "content": texts.input})
    return ()

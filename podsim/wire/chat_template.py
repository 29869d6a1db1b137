"""Chat messages to prompt text, as vLLM 0.32 renders them: messages normalised, then the folder's Jinja template.

The model folder owns one `ChatTemplate`. Sandbox, block trimming and filters are those that the transformers
library gives to chat templates.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from podsim.errors import RequestRefusedError
from podsim.wire.chat_messages import Message, developer_as_system
from podsim.wire.content_format import wants_parts

_CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; rendering only needs its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # unlike Jinja's own filter: no HTML escapes, no ASCII escapes, keys in their order
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self.wants_parts = wants_parts(environment.parse(source))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text.

        `messages` are normalised ones. Raises RequestRefusedError with the template's own words if it refuses.
        """
        if not messages:
            raise RequestRefusedError(
                "Cannot apply chat template to an empty conversation. Provide at least one message."
            )
        if not self._knows_developer:
            messages = developer_as_system(messages)
        if continue_final_message:
            messages = _mark_final_message(messages)
        values = {**self._special_tokens, "documents": None, **(kwargs or {})}
        values |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(values)
        except jinja2.TemplateError as error:
            raise RequestRefusedError(str(error)) from error
        except (TypeError, ValueError, LookupError) as error:  # a template that trips over the messages
            raise RequestRefusedError(f"{type(error).__name__}: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text


def _mark_final_message(messages: Sequence[Message]) -> list[Message]:
    final = dict(messages[-1])
    content = final.get("content")
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        texts = [part for part in parts if "text" in part]
        if texts:
            texts[-1]["text"] += _CONTINUATION_MARK
        final["content"] = parts
    else:
        final["content"] = f"{content or ''}{_CONTINUATION_MARK}"
    return [*messages[:-1], final]


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUATION_MARK.strip())
    if position < 0:
        raise RequestRefusedError(
            "continue_final_message is set but the final message does not appear in the chat after "
            "applying the chat template! This can happen if the chat template deletes portions of "
            "the final message. Please verify the chat template and final message in your chat to "
            "ensure they are compatible."
        )
    if text.startswith(_CONTINUATION_MARK, position):
        return text[:position]
    return text[:position].rstrip()  # the template trims the message

"""Chat messages to prompt text, as vLLM 0.32 renders them: messages normalised, then the folder's Jinja template.

The model folder owns one `ChatTemplate`. Sandbox, block trimming and filters are those that the transformers
library gives to chat templates.

vLLM 0.32 looks in the template's syntax tree for a loop over a message's content: contents are lists of
parts, or text. This module looks for the same loops, once. If vLLM's search would give up, contents are text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from podsim.errors import RequestRefusedError
from podsim.wire.chat_messages import Message, developer_as_system

_CONTINUATION_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def wants_parts(template: nodes.Template) -> bool:
    """True if the template iterates over a message's content: in a message loop, or in a macro that gets it."""
    message_lists = _message_lists(template)
    if message_lists is None:
        return False
    messages: set[str] = set()
    for loop in template.find_all(nodes.For):
        if _reads(loop.iter, message_lists):
            if not isinstance(loop.target, nodes.Name):
                return False
            messages.add(loop.target.name)
    in_macros: set[int] = set()
    for macro in template.find_all(nodes.Macro):
        loops = list(macro.find_all(nodes.For))
        in_macros.update(map(id, loops))
        parameters = set(_content_parameters(template, macro, messages))
        if any(isinstance(loop.iter, nodes.Name) and loop.iter.name in parameters for loop in loops):
            return True
    return any(
        isinstance(loop.target, nodes.Name)
        and (
            _reads_content(loop.iter, messages)
            or (id(loop) not in in_macros and isinstance(loop.iter, nodes.Name) and loop.iter.name == "content")
        )
        for loop in template.find_all(nodes.For)
    )


def _message_lists(template: nodes.Template) -> set[str] | None:
    """Return the names that stand for messages; None if one is assigned to something other than a name."""
    names, assignments = {"messages"}, list(template.find_all(nodes.Assign))
    while True:
        found = [assignment.target for assignment in assignments if _reads(assignment.node, names)]
        if not all(isinstance(target, nodes.Name) for target in found):
            return None
        grown = names | {target.name for target in found if isinstance(target, nodes.Name)}
        if grown == names:
            return names
        names = grown


def _content_parameters(template: nodes.Template, macro: nodes.Macro, messages: set[str]) -> Iterator[str]:
    """Return the parameters of a macro that are given a message's content in some call."""
    names = [argument.name for argument in macro.args]
    for call in template.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        for name, argument in zip(names, call.args, strict=False):
            if _reads_content(argument, messages):
                yield name
        for keyword in call.kwargs:
            if isinstance(keyword, nodes.Keyword) and keyword.key in names and _reads_content(keyword.value, messages):
                yield keyword.key


def _reads(node: nodes.Node, names: set[str]) -> bool:
    """Tell whether an expression is one of `names`, possibly filtered or sliced."""
    node = _unwrapped(node)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name in names


def _reads_content(node: nodes.Node, messages: set[str]) -> bool:
    """Tell whether an expression is the content of one of `messages`, possibly filtered or sliced."""
    node = _unwrapped(node)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content" and _reads(node.node, messages)
    return (
        isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == "content"
        and _reads(node.node, messages)
    )


def _unwrapped(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter | nodes.Test | nodes.Getitem):
        sliced = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        if node.node is None or (isinstance(node, nodes.Getitem) and not sliced):
            break
        node = node.node
    return node


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
    # unlike Jinja's own filter, escape no HTML or non-ASCII characters and keep the order of the keys
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().astimezone().strftime(pattern)
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
        except (TypeError, ValueError, LookupError) as error:  # the template fails on these messages
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
    return text[:position].rstrip()  # the template strips the message

"""Render a conversation with the model's chat template, as transformers 5 and vLLM 0.32 do it.

Called by the tokenizer adapter for each chat. Templates come from the model's folder, never from a request, and
still run in Jinja's immutable sandbox. No I/O: the clock that `strftime_now` reads is an argument.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from extproc.core.request import ChatPrompt
from extproc.errors import ChatTemplateError
from extproc.wire.chat_content_format import content_format
from extproc.wire.chat_messages import (
    Message,
    conversation,
    developer_as_system,
    function_tools,
)

# Arguments of transformers' own method: a request that sends them does not create template variables.
NOT_VARIABLES = frozenset(
    (
        *("conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
DICT_ATTRIBUTES = frozenset(dir(dict))
CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "  # with the space: shows whether the template trims


class ChatTemplate:
    """One compiled template; create it once per model, it may be used from several threads.

    `special_tokens` are the variables bos_token, eos_token and so on. `defaults` are the server's
    (--default-chat-template-kwargs): a request's own variables win. `now` is the local time that `strftime_now`
    formats: pods in another time zone render another date.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        defaults: Mapping[str, Any] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = _environment(now)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
            # a plain dict instead of a chain of them, which every render walks: a third of its fixed cost
            self._template.globals = dict(self._template.globals)
        except (TemplateError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self.content_format = content_format(tree)
        self._variables = meta.find_undeclared_variables(tree) - NOT_VARIABLES
        self._special_tokens = dict(special_tokens)
        self._defaults = dict(defaults or {})
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._source = source
        self._mentions_content = "content" in source

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt's text; raise ChatTemplateError if the template refuses it or vLLM would."""
        if not prompt.messages:
            raise ChatTemplateError("there are no messages")
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise ChatTemplateError("continue_final_message needs add_generation_prompt to be false")
        messages = conversation(prompt.messages, content_format=self.content_format)
        if not self._knows_developer and any(message["role"] == "developer" for message in messages):
            messages = developer_as_system(messages)
        if not prompt.continue_final_message:
            return self._apply(messages, prompt)
        return self._continued(messages, prompt)

    def _apply(self, messages: Sequence[Message], prompt: ChatPrompt) -> str:
        kwargs = {**self._defaults, **prompt.chat_template_kwargs} if self._defaults else prompt.chat_template_kwargs
        variables = self._special_tokens | {key: kwargs[key] for key in kwargs.keys() & self._variables}
        # vLLM lets these two names in a request's kwargs win over, or stand in for, the request's own fields
        tools = prompt.chat_template_kwargs.get("tools", function_tools(prompt.tools))
        if tools is None:
            tools = self._defaults.get("tools")
        documents = kwargs.get("documents") if prompt.documents is None else list(prompt.documents)
        try:
            return self._template.render(
                **variables,
                messages=messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=prompt.add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it may raise anything
            raise ChatTemplateError(f"the chat template refused the conversation: {self._words(error)}") from error

    def _words(self, error: Exception) -> str:
        """Return what an error says if the template itself says it so: other words may be the conversation's."""
        said = str(error)
        return said if said and said in self._source else type(error).__name__

    def _continued(self, messages: list[Message], prompt: ChatPrompt) -> str:
        """Render with a tag at the end of the last message, then cut there: the model goes on writing it."""
        if not self._mentions_content:
            raise ChatTemplateError("the chat template does not use message content")
        text, tagged = _with_tag(messages[-1])
        rendered = self._apply([*messages[:-1], tagged], prompt)
        at = rendered.rfind(CONTINUE_TAG.strip())
        if at < 0 or text.strip() not in rendered:
            raise ChatTemplateError("the chat template drops the final message, so it cannot be continued")
        if rendered.startswith(CONTINUE_TAG, at):
            return rendered[:at]
        return rendered[:at].rstrip()  # the template trims messages, so it would trim this one too


def _with_tag(message: Message) -> tuple[str, Message]:
    """Return the text to be continued, and a copy of the message with the tag after it."""
    content = message["content"]
    if isinstance(content, str):
        return content, message | {"content": content + CONTINUE_TAG}
    for index in range(len(content) - 1, -1, -1):
        if "text" in content[index]:
            text = content[index]["text"]
            tagged = content[index] | {"text": text + CONTINUE_TAG}
            return text, message | {"content": [*content[:index], tagged, *content[index + 1 :]]}
    raise ChatTemplateError("the final message has no text to continue")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a short cut: `message.role` is found without raising AttributeError first."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote, for training; here only its body."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a call block, because its body has a scope of its own: variables set inside do not leak
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())

"""Render a conversation with the model's chat template, as transformers 5 and vLLM 0.32 do it.

Templates come from the model's folder, never from a request, and still run in Jinja's immutable sandbox. This module
probes a template as vLLM does at start-up: the content format it expects, its treatment of later system messages, and
its treatment of disabled thinking. No I/O: the clock that `strftime_now` reads is an argument.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro

from extproc.errors import ChatTemplateError, PromptTokensError, TemplateLimitError
from extproc.prompts.template_limits import LimitedEnvironment
from extproc.prompts.template_units import LimitedContext
from extproc.requests.chat_messages import ContentFormat, Message, conversation, developer_as_system, function_tools
from extproc.requests.request import ChatPrompt
from extproc.requests.request_fields import template_variables

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
MOST_BREACHES = 3  # of a template's limits
MOST_COMPARED = 5_000_000  # pairs of nodes; published templates have some 10,000
MOST_LAYOUT = 1000  # characters
EFFORTS = ("low", "medium", "high", "xhigh", "max")


class ChatTemplate:
    """One compiled template. Create it once per model; it is thread-safe.

    `special_tokens` are the variables bos_token, eos_token and so on. `defaults` are the server's
    (--default-chat-template-kwargs); the request's variables override them. `now` is the local time that
    `strftime_now` formats: pods in another time zone render another date.
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
            self.content_format = content_format(tree)
            self._variables = meta.find_undeclared_variables(tree) - NOT_VARIABLES
            self._template = environment.from_string(environment.limited(tree))
            self._template.globals = dict(self._template.globals)  # a plain dict: 5 µs faster to copy per render
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._defaults = dict(defaults or {})
        self._knows_developer = '"developer"' in source or "'developer'" in source
        self._source = source
        self._breaches = 0
        self.breach = ""  # of the limits, if the template is no longer used

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt's text; raise ChatTemplateError if the template refuses it or vLLM would."""
        if self.breach:
            raise TemplateLimitError(self.breach)
        if not prompt.messages:
            raise ChatTemplateError("there are no messages")
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise ChatTemplateError("continue_final_message needs add_generation_prompt to be false")
        messages = conversation(prompt.messages, content_format=self.content_format)
        if not self._knows_developer and "developer" in [message["role"] for message in messages]:
            messages = developer_as_system(messages)
        return self._continued(messages, prompt) if prompt.continue_final_message else self._apply(messages, prompt)

    def tools(self, prompt: ChatPrompt) -> Any:
        """Return the template's `tools` variable, or None without tools; raise ChatTemplateError.

        Precedence as in vLLM: the request's template variables, the request's `tools`, the server's defaults.
        """
        tools = prompt.chat_template_kwargs.get("tools", function_tools(prompt.tools))
        return self._defaults.get("tools") if tools is None else tools

    def _apply(self, messages: Sequence[Message], prompt: ChatPrompt) -> str:
        kwargs = {**self._defaults, **prompt.chat_template_kwargs}
        tools = self.tools(prompt)
        try:
            context = self._template.new_context(
                self._special_tokens
                | self._given(kwargs)
                | {
                    "messages": messages,
                    "tools": tools,
                    # as in vLLM, `documents` may come from the template variables if the request has no such field
                    "documents": kwargs.get("documents") if prompt.documents is None else list(prompt.documents),
                    "add_generation_prompt": prompt.add_generation_prompt,
                }
            )
            assert isinstance(context, LimitedContext)
            return context.concatenated(self._template.root_render_func(context))
        except TemplateLimitError as error:
            self._breaches += 1
            if self._breaches == MOST_BREACHES:
                self.breach = str(error)
            raise
        except Exception as error:  # a template is a program: it may raise anything
            raise ChatTemplateError(f"the chat template refused the conversation: {self._reason(error)}") from error

    def _given(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        given = {key: kwargs[key] for key in kwargs.keys() & self._variables}
        if "messages" in given:  # the template gets the conversation under this name
            raise TypeError  # no message: `_reason` shows a message that occurs in the template
        return given

    def _reason(self, error: Exception) -> str:
        """Return the error's text if it occurs literally in the template, else its type: it may quote the chat."""
        text = error.args[0] if error.args and type(error.args[0]) is str else ""  # str() may take long
        return text if text and text in self._source else type(error).__name__

    def _continued(self, messages: list[Message], prompt: ChatPrompt) -> str:
        """Render with a tag at the end of the last message and cut there, so that the model continues the message."""
        if "content" not in self._source:
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
    content = message["content"]
    if isinstance(content, str):
        return content, message | {"content": content + CONTINUE_TAG}
    for index in range(len(content) - 1, -1, -1):
        if "text" in content[index]:
            text = content[index]["text"]
            tagged = content[index] | {"text": text + CONTINUE_TAG}
            return text, message | {"content": [*content[:index], tagged, *content[index + 1 :]]}
    raise ChatTemplateError("the final message has no text to continue")


# --- Jinja's environment ----------------------------------------------------------------------------------------------


class _Sandbox(LimitedEnvironment):
    """The sandbox, faster but otherwise equivalent: docs/decisions/0005-hot-path.md has the numbers.

    It looks up a message's field without raising AttributeError first. It caches by type and name whether an attribute
    is safe: Jinja's answer depends on nothing else.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._safe: dict[tuple[type, str], bool] = {}

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        key = type(obj), attr
        safe = self._safe.get(key)
        if safe is None:
            safe = self._safe[key] = super().is_safe_attribute(obj, attr, value)
        return safe


def _environment(now: Callable[[], datetime]) -> LimitedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.set_filter("tojson", _tojson)
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout[:MOST_LAYOUT])
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
    """Write plain JSON; Jinja's own filter escapes HTML and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """Render only the body of `{% generation %}…{% endgeneration %}`, which marks model output for training."""

    tags = {"generation"}  # noqa: RUF012 - the name and type that Jinja reads

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a call block has its own scope: variables set inside do not leak
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return str(caller())


# --- does a template support two features of Anthropic's API? Probed by rendering, as in vLLM -------------------------


def refuses_later_system(source: str) -> bool:
    """Tell whether a template is empty, or raises for a second system message.

    vLLM then moves the texts of later system messages into the first: render `ChatPrompt.messages_system_first`.
    """
    if not source:
        return True
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        template = environment.from_string(environment.limited(environment.parse(source)))
        template.render(messages=messages, add_generation_prompt=False)
    except Exception:  # a template may raise anything; in vLLM, an error other than TemplateError aborts the start
        return True
    return False


def cannot_disable_thinking(render: Callable[[ChatPrompt], str | bytes]) -> bool:
    """Tell whether the template refuses the effort "none", or renders it like a real effort.

    vLLM then asks for a low effort instead: render with `ChatPrompt.kwargs_low_effort`.
    """
    off = _with_effort(render, "none")
    return off is None or any(_with_effort(render, effort) == off for effort in EFFORTS)


def _with_effort(render: Callable[[ChatPrompt], str | bytes], effort: str) -> str | bytes | None:
    hi = {"role": "user", "content": "Hi"}
    variables = template_variables(None, effort)
    try:
        return render(ChatPrompt(messages=(hi,), chat_template_kwargs=variables, reasoning_effort=effort))
    except PromptTokensError:
        return None


# --- the content format of a template: a string, or OpenAI's list of parts (vLLM's `auto` mode) -----------------------


class _NotUnderstoodError(Exception):
    """vLLM's detection gives up on this tree and falls back to strings."""


def content_format(tree: nodes.Template) -> ContentFormat:
    """Return "openai" for a template that loops over the parts of a message's content, else "string".

    The loop may be direct, through a variable, or in a macro that receives the content. Nothing is rendered.
    """
    loops, calls = (sum(1 for _ in tree.find_all(kind)) for kind in (nodes.For, nodes.Call))
    assignments, macros = (sum(1 for _ in tree.find_all(kind)) for kind in (nodes.Assign, nodes.Macro))
    try:
        if (loops + assignments + macros * calls) * (loops + assignments) > MOST_COMPARED:
            raise _NotUnderstoodError
        return "openai" if any(_content_loops(tree)) else "string"
    except _NotUnderstoodError:
        return "string"


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = list(_message_names(tree))
    parameters = _macro_parameters(tree, messages)
    for loop in tree.find_all(nodes.For):
        in_macro = id(loop) in parameters
        names = parameters.get(id(loop), set()) if in_macro else {"content"}
        is_parameter = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
        if is_parameter or any(_is_derived(loop.iter, name, "content") for name in messages):
            _target_name(loop.target)
            yield loop


def _message_names(tree: nodes.Template) -> Iterator[str]:
    """Yield the names that stand for one message: the targets of loops over `messages` or a copy of it."""
    lists = list(_aliases(tree, "messages"))
    for loop in tree.find_all(nodes.For):
        if any(_is_derived(loop.iter, name) for name in lists):
            yield _target_name(loop.target)


def _aliases(tree: nodes.Template, name: str) -> Iterator[str]:
    """Yield `name` and every variable assigned from it, possibly sliced or filtered."""
    seen, queue = {name}, [name]
    while queue:
        current = queue.pop(0)
        yield current
        for assignment in tree.find_all(nodes.Assign):
            if _is_derived(assignment.node, current) and (target := _target_name(assignment.target)) not in seen:
                seen.add(target)
                queue.append(target)


def _macro_parameters(tree: nodes.Template, messages: list[str]) -> dict[int, set[str]]:
    """Return, for each loop inside a macro (by identity), the macro's parameters that receive a content."""
    by_loop: dict[int, set[str]] = {}
    calls = [call for call in tree.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in tree.find_all(nodes.Macro):
        declared = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                named = [(keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in declared]
                for parameter, value in [*zip(declared, call.args, strict=False), *named]:
                    if any(_is_derived(value, message, "content") for message in messages):
                        given.add(parameter)
        for loop in macro.find_all(nodes.For):
            by_loop[id(loop)] = given
    return by_loop


def _is_derived(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Tell whether `node` is the variable (or its member `key`), possibly behind filters, tests and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getattr):
        return node.attr == key and _is_derived_name(node.node, name)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        return bool(node.arg.value == key) and _is_derived_name(node.node, name)
    return False


def _is_derived_name(node: nodes.Node, name: str) -> bool:
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotUnderstoodError
    return target.name

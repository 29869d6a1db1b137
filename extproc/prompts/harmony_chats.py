"""Chats of gpt-oss in the harmony format, rendered by the library that vLLM 0.32 itself uses.

vLLM renders them from the request's own messages, without the folder's template
(vllm/entrypoints/openai/parser/harmony_utils.py); this is the same, for chat completions. The library is an extra,
`kvmesh[harmony]`: oss-harmony, which has the vocabulary in it. OpenAI's own openai-harmony is imported by the same name
and asks a server for its vocabulary, unless TIKTOKEN_ENCODINGS_BASE names a folder with o200k_base.tiktoken.
"""

import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from extproc.errors import ChatTemplateError
from extproc.prompts.harmony_tokens import HarmonyTokens
from extproc.requests.chat_messages import function_tools
from extproc.requests.request import ChatPrompt

PACKAGE = "openai_harmony"
EFFORTS = ("low", "medium", "high")


def is_installed() -> bool:
    """Tell whether there is a harmony library, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


class HarmonyChats:
    """Renders conversations of one model.

    `texts` is the folder's tokenizer, without special tokens around, `added` are the tokens that it finds in texts.
    `now` is the local time whose date the system message has, as the pods' has theirs.
    """

    def __init__(
        self,
        texts: Callable[[str], bytes] | None = None,
        added: Iterable[str] = (),
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Load the library's vocabulary; raise TokenizerError where that is impossible. Takes 0.2 s."""
        import openai_harmony  # noqa: PLC0415  an extra

        self._library: Any = openai_harmony
        self._rendered = HarmonyTokens(openai_harmony, texts, added)
        self._now = now

    def tokens(self, prompt: ChatPrompt) -> bytes:
        """Return the ids (little-endian uint32); raise ChatTemplateError for what the library or vLLM refuses."""
        _require_text(prompt.messages)
        try:
            messages = [*self._preamble(prompt), *self._conversation(_without_instructions(prompt.messages))]
            return self._rendered.of(_without_old_reasoning(messages), has_tools=bool(prompt.tools))
        except ChatTemplateError:
            raise
        except Exception as error:  # it raises anything; its texts may quote the chat
            raise ChatTemplateError(f"the harmony library refuses the conversation: {type(error).__name__}") from None

    # --- what stands before the conversation --------------------------------------------------------------------------

    def _preamble(self, prompt: ChatPrompt) -> Iterator[Any]:
        library = self._library
        system = library.SystemContent.new()
        effort = prompt.reasoning_effort
        if effort is not None:
            if effort not in EFFORTS:
                raise ChatTemplateError("the harmony format has no such reasoning_effort")
            system = system.with_reasoning_effort(library.ReasoningEffort[effort.upper()])
        system = system.with_conversation_start_date(self._now().strftime("%Y-%m-%d"))
        yield library.Message.from_role_and_content(library.Role.SYSTEM, system)
        instructions = _instructions(prompt.messages)
        if instructions or prompt.tools:
            yield self._developer(instructions, prompt.tools or ())

    def _developer(self, instructions: str | None, tools: Sequence[Any] = ()) -> Any:
        library = self._library
        content = library.DeveloperContent.new()
        if instructions is not None:
            content = content.with_instructions(instructions)
        if described := [library.ToolDescription.new(**tool) for tool in _tools(tools)]:
            content = content.with_function_tools(described)
        return library.Message.from_role_and_content(library.Role.DEVELOPER, content)

    # --- the conversation ---------------------------------------------------------------------------------------------

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
        names = {
            call.get("id"): call.get("function", {}).get("name")
            for message in messages
            for call in message.get("tool_calls") or ()
        }
        for message in messages:
            role = message.get("role")
            if role == "assistant":
                yield from self._assistant(message)
            elif role == "tool":
                name = names.get(message.get("tool_call_id", ""), "")
                author = self._library.Author.new(self._library.Role.TOOL, f"functions.{name}")
                said = self._library.Message.from_author_and_content(author, _text(message.get("content")) or "")
                yield said.with_channel("commentary").with_recipient("assistant")
            elif role in ("system", "developer"):
                text = _text(message.get("content"))
                if text is not None:
                    yield self._developer(text)
            else:
                yield self._library.Message.from_role_and_contents(role, self._parts(message))

    def _assistant(self, message: Mapping[str, Any]) -> Iterator[Any]:
        calls, reasoning = message.get("tool_calls"), message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")  # the old name of the same field
        if calls:
            if text := _text(message.get("content")):
                yield self._said(text, "commentary")
            if reasoning:
                yield self._said(reasoning, "analysis")
            for call in calls:
                function = call.get("function", {})
                arguments = function.get("arguments")
                if isinstance(arguments, dict):  # made by the reader of another API; vLLM's makes a text of them
                    arguments = json.dumps(arguments)
                said = self._said(arguments or "", "commentary")
                yield said.with_recipient(f"functions.{function.get('name', '')}").with_content_type("json")
            return
        if reasoning:
            yield self._said(reasoning, "analysis")
        parts = self._parts(message)
        if parts and parts[0].text:
            yield self._library.Message.from_role_and_contents("assistant", parts).with_channel("final")

    def _said(self, text: str, channel: str) -> Any:
        return self._library.Message.from_role_and_content(self._library.Role.ASSISTANT, text).with_channel(channel)

    def _parts(self, message: Mapping[str, Any]) -> list[Any]:
        content = message.get("content") or ""
        texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
        return [self._library.TextContent(text=text) for text in texts]


def _require_text(messages: Sequence[Any]) -> None:
    """Raise ChatTemplateError for parts that are no text: which of them vLLM drops depends on how it read the body."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ChatTemplateError("content parts must be of type text")


def _instructions(messages: Sequence[Any]) -> str | None:
    """Return the text of a system or developer message at the front."""
    first = messages[0] if messages else {}
    return _text(first.get("content")) if first.get("role") in ("system", "developer") else None


def _without_instructions(messages: Sequence[Any]) -> Sequence[Any]:
    return messages[1:] if messages and messages[0].get("role") in ("system", "developer") else messages


def _tools(tools: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield name, description and parameters of the functions."""
    for tool in function_tools(tools) or ():
        function = tool["function"]
        yield {
            "name": function["name"],
            "description": function["description"] or "",
            "parameters": function["parameters"],
        }


def _text(content: Any) -> str | None:
    """Return a message's text parts in one, None where it has none."""
    if content is None or isinstance(content, str):
        return content
    known = [text for part in content if (text := part.get("text")) is not None]
    return "".join(known) if known else None


def _without_old_reasoning(messages: Sequence[Any]) -> list[Any]:
    """Return the messages without the reasoning that led to earlier answers."""
    final = [at for at, said in enumerate(messages) if said.author.role == "assistant" and said.channel == "final"]
    last = final[-1] if final else -1
    return [said for at, said in enumerate(messages) if at >= last or said.channel != "analysis"]

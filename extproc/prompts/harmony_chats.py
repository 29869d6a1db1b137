"""Chats of gpt-oss in the harmony format, rendered by the library that vLLM 0.32 itself uses.

vLLM renders them from the request's messages, without the folder's template
(vllm/entrypoints/openai/parser/harmony_utils.py). This module does the same for chat completions. The library is an
extra, `kvmesh[harmony]`: oss-harmony, which includes the vocabulary. OpenAI's openai-harmony has the same import name
but downloads its vocabulary, unless TIKTOKEN_ENCODINGS_BASE names a folder with o200k_base.tiktoken.

The library holds the GIL while it renders, 0.4 µs a token. So the tokenizer of the model's folder tokenizes the texts,
if it agrees with the library on texts. The library then renders only the frame around each text. Each message's tokens
are cached.
"""

import importlib.util
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.engines import probe_texts
from extproc.prompts.token_cache import TokenMemory, key_of
from extproc.prompts.tokenized_prompt import TOKEN_BYTES
from extproc.requests.chat_messages import function_tools
from extproc.requests.request import ChatPrompt, TokenPrompt

PACKAGE = "openai_harmony"
EFFORTS = ("low", "medium", "high")
logger = logging.getLogger(__name__)

MOST_LIBRARY_CHARACTERS = 100_000  # per request, uncached: blocks the event loop for some 10 ms
# The library's time for an unsplit piece grows with its length squared: 1 ms for 1,000 letters, 200 ms for 16,000.
# A long piece of the library's pattern contains one of these runs: letters and marks, signs, white space, line ends.
LONG_PIECE = re.compile(
    r"[^\s_.,;:!?'\"()\[\]{}<>/\\|=+*&^%$#@~`。，、；：！？-]{1000}|(?:[^\w\s]|_){1000}|\s{1000}|[\r\n/]{1000}"
)
SPECIAL = "<|"  # begins every special token; only the library treats one in a text as plain text


class _Marks(NamedTuple):
    """Ids of special tokens; they never come from a text."""

    start: int
    channel: int
    constrain: int
    message: int


class HarmonyTokens:
    """Renders messages of one model.

    `texts` is the folder's tokenizer without special tokens; `added` are its added tokens.
    """

    def __init__(self, library: Any, texts: Callable[[str], bytes] | None = None, added: Iterable[str] = ()) -> None:
        """`library` is the module openai_harmony. Raise TokenizerError if its vocabulary does not load. Takes 0.2 s."""
        try:
            self._encoding: Any = library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)
        except Exception as error:  # the library raises anything
            raise TokenizerError(
                f"the harmony format of gpt-oss cannot be loaded: {type(error).__name__}: {str(error)[:200]}; "
                "pip install 'kvmesh[harmony]', or let the pods be asked (`tokens: render`)"
            ) from error
        self._library = library
        self._marks = _Marks(*(self._encode(f"<|{name}|>", special=True)[0] for name in _Marks._fields))
        self._end = _packed([self._marks.start, *self._encode("assistant")])
        self._texts = texts if texts is not None and self._is_same(texts, added) else None
        self._memory = TokenMemory()

    def of(self, messages: Sequence[Any], *, has_tools: bool) -> bytes:
        """Return the ids (little-endian uint32) of a conversation, up to the beginning of the assistant's next message.

        `has_tools` says that the instructions declare functions. Raise ChatTemplateError for too much text, and
        whatever the library raises.
        """
        left = MOST_LIBRARY_CHARACTERS
        buffers: list[bytes] = []
        for message in messages:
            tokens, characters = self._message(message, has_tools=has_tools, most_characters=left)
            buffers.append(tokens)
            left -= characters
        return b"".join((*buffers, self._end))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of ids, with special tokens spelled out."""
        return str(self._encoding.decode(tokens))

    def _message(self, message: Any, *, has_tools: bool, most_characters: int) -> tuple[bytes, int]:
        """Return a message's tokens, and the number of characters that the library read for them."""
        text = _only_text(message)
        if self._texts is not None and text and SPECIAL not in text:
            frame = message.model_copy(update={"content": [self._library.TextContent(text="")]})
            around, characters = self._message(frame, has_tools=has_tools, most_characters=most_characters)
            return around[:-TOKEN_BYTES] + self._texts(text) + around[-TOKEN_BYTES:], characters
        written = message.to_json()
        key = key_of(written, kind=b"tools" if has_tools else b"")
        found = self._memory.get(key)
        if found is not None:
            return found, 0
        if len(written) > most_characters:
            raise ChatTemplateError("there is too much text in the conversation for the harmony library")
        if any(LONG_PIECE.search(each) for each in _texts_in(message.to_dict())):
            raise ChatTemplateError("a text in the conversation is not divided into words")
        options = self._library.RenderOptions(conversation_has_function_tools=has_tools)
        tokens = _packed(self._with_recipient_first(self._encoding.render(message, options)))
        self._memory.put(key, tokens)
        return tokens, len(written)

    def _with_recipient_first(self, ids: list[int]) -> list[int]:
        """Return a call's ids with the header that gpt-oss was trained on: the recipient before the channel.

        oss-harmony 0.0.10 and later write `assistant<|channel|>commentary to=f <|constrain|>json`; vLLM rewrites it to
        `assistant to=f<|channel|>commentary json`.
        """
        marks = self._marks
        try:
            end = ids.index(marks.message)
            channel_at = ids.index(marks.channel, 1, end)
            constrain_at = ids.index(marks.constrain, channel_at + 1, end)
        except ValueError:
            return ids
        author, told, kind = (
            self.text(ids[first:last])
            for first, last in ((1, channel_at), (channel_at + 1, constrain_at), (constrain_at + 1, end))
        )
        channel, separator, recipient = told[:-1].partition(" to=")
        if author != "assistant" or not told.endswith(" ") or not (channel and separator and recipient and kind):
            return ids
        header = [marks.start, *self._encode(f"assistant to={recipient}"), marks.channel]
        return [*header, *self._encode(f"{channel} {kind}"), *ids[end:]]

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        ids: list[int] = self._encoding.encode(text, allowed_special="all" if special else set(), disallowed_special=())
        return ids

    def _is_same(self, texts: Callable[[str], bytes], added: Iterable[str]) -> bool:
        """Tell whether the folder's tokenizer agrees with the library on texts without special tokens."""
        for text in (*probe_texts(()), *(token for token in added if not token.startswith(SPECIAL))):
            if texts(text) != _packed(self._encode(text)):
                logger.warning(
                    "a folder's tokenizer is not that of the harmony format: every token of its chats costs 20 times "
                    "as much CPU",
                    extra={"probe": text[:40]},
                )
                return False
        return True


def _only_text(message: Any) -> str | None:
    text = getattr(message.content[0], "text", None) if len(message.content) == 1 else None
    return text if isinstance(text, str) else None


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, field in value.items():
            yield name
            yield from _texts_in(field)
    elif isinstance(value, list):
        for item in value:
            yield from _texts_in(item)


def _packed(ids: list[int]) -> bytes:
    return TokenPrompt.of(ids).token_bytes


def is_installed() -> bool:
    """Tell whether a harmony library is installed, without importing it."""
    return importlib.util.find_spec(PACKAGE) is not None


class HarmonyChats:
    """Renders conversations of one model.

    `texts` is the folder's tokenizer without special tokens; `added` are its added tokens. `now` is the local time: the
    system message contains its date, as the pods' system message contains theirs.
    """

    def __init__(
        self,
        texts: Callable[[str], bytes] | None = None,
        added: Iterable[str] = (),
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Load the library's vocabulary; raise TokenizerError if that fails. Takes 0.2 s."""
        import openai_harmony  # noqa: PLC0415  an extra

        self._library: Any = openai_harmony
        self._rendered = HarmonyTokens(openai_harmony, texts, added)
        self._now = now

    def tokens(self, prompt: ChatPrompt) -> bytes:
        """Return the ids (little-endian uint32); raise ChatTemplateError if the library or vLLM refuses the chat."""
        _require_text(prompt.messages)
        try:
            messages = [*self._preamble(prompt), *self._conversation(_without_instructions(prompt.messages))]
            return self._rendered.of(_without_old_reasoning(messages), has_tools=bool(prompt.tools))
        except ChatTemplateError:
            raise
        except Exception as error:  # the library raises anything; its messages may quote the chat
            raise ChatTemplateError(f"the harmony library refuses the conversation: {type(error).__name__}") from None

    # --- the system and developer messages before the conversation ----------------------------------------------------

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
                if isinstance(arguments, dict):  # from our parser of another API; vLLM's parser serializes them
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
    """Raise ChatTemplateError for non-text parts: whether vLLM drops them depends on how it parsed the body."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or part.get("type") != "text":
                raise ChatTemplateError("content parts must be of type text")


def _instructions(messages: Sequence[Any]) -> str | None:
    first = messages[0] if messages else {}
    return _text(first.get("content")) if first.get("role") in ("system", "developer") else None


def _without_instructions(messages: Sequence[Any]) -> Sequence[Any]:
    return messages[1:] if messages and messages[0].get("role") in ("system", "developer") else messages


def _tools(tools: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for tool in function_tools(tools) or ():
        function = tool["function"]
        yield {
            "name": function["name"],
            "description": function["description"] or "",
            "parameters": function["parameters"],
        }


def _text(content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    known = [text for part in content if (text := part.get("text")) is not None]
    return "".join(known) if known else None


def _without_old_reasoning(messages: Sequence[Any]) -> list[Any]:
    final = [at for at, said in enumerate(messages) if said.author.role == "assistant" and said.channel == "final"]
    last = final[-1] if final else -1
    return [said for at, said in enumerate(messages) if at >= last or said.channel != "analysis"]

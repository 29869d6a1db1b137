"""Messages of a harmony conversation to tokens, one message at a time: what was rendered before is remembered.

The library holds the GIL while it renders, 0.4 µs a token. So texts go to the tokenizer of the model's folder, if that
makes the same tokens of texts, and the library renders only what stands around them.
"""

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.engines import probe_texts
from extproc.prompts.token_ids import TOKEN_BYTES
from extproc.prompts.token_memory import TokenMemory, key_of
from extproc.requests.request import TokenPrompt

logger = logging.getLogger(__name__)

MOST_LIBRARY_CHARACTERS = 100_000  # of one request, not remembered: some 10 ms in which nothing else runs
# What the library does not split takes it time by the square of its length: 16,000 letters take 200 ms, 1,000 one. Each
# piece of its pattern that is as long has such a run in it: letters and marks, signs, white space, ends of lines.
LONG_PIECE = re.compile(
    r"[^\s_.,;:!?'\"()\[\]{}<>/\\|=+*&^%$#@~`。，、；：！？-]{1000}|(?:[^\w\s]|_){1000}|\s{1000}|[\r\n/]{1000}"
)
SPECIAL = "<|"  # how all special tokens begin; in a text they are text, which a folder's tokenizer does not know


class _Marks(NamedTuple):
    """Special tokens, which no text has."""

    start: int
    channel: int
    constrain: int
    message: int


class HarmonyTokens:
    """Renders messages of one model.

    `texts` is the folder's tokenizer, without special tokens around; `added` are the tokens that it finds in texts.
    """

    def __init__(self, library: Any, texts: Callable[[str], bytes] | None = None, added: Iterable[str] = ()) -> None:
        """`library` is the module openai_harmony. Raise TokenizerError where it has no vocabulary. Takes 0.2 s."""
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
        """Return the ids (little-endian uint32) of a conversation that the assistant is to go on with.

        `has_tools` says that functions are among the instructions. Raise ChatTemplateError for too much text, and
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
        """Return the text of ids, special ones as they are written."""
        return str(self._encoding.decode(tokens))

    def _message(self, message: Any, *, has_tools: bool, most_characters: int) -> tuple[bytes, int]:
        """Return a message's tokens, and how many characters the library had to read for them."""
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
        """Return a call's ids with the header as gpt-oss was trained: the recipient before the channel.

        oss-harmony 0.0.10 and later write `assistant<|channel|>commentary to=f <|constrain|>json`; vLLM makes
        `assistant to=f<|channel|>commentary json` of that.
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
        """Tell whether the folder's tokenizer makes the same of texts without special tokens as the library."""
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
    """Return the text of a message that has one text and nothing else."""
    text = getattr(message.content[0], "text", None) if len(message.content) == 1 else None
    return text if isinstance(text, str) else None


def _texts_in(value: Any) -> Iterator[str]:
    """Yield the texts of a JSON value, names of fields among them."""
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

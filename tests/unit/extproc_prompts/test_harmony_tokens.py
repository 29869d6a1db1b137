"""Messages of harmony conversations: rendered once each, texts by the folder's tokenizer, and always in bounds."""

from array import array
from collections.abc import Sequence
from typing import Any

import openai_harmony
import pytest

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.harmony_chats import MOST_LIBRARY_CHARACTERS, HarmonyTokens
from extproc.prompts.tokenized_prompt import TOKEN_BYTES
from extproc.requests.request import TokenPrompt

LONG = "What is it? " * 1_000


class Counting:
    """The library's encoding; remembers what it was asked to render."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.rendered: list[str] = []

    def render(self, message: Any, options: Any) -> list[int]:
        self.rendered.append(message.content[0].text)
        ids: list[int] = self._encoding.render(message, options)
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoding, name)


class Texts:
    """A folder's tokenizer of the same vocabulary; remembers what it was asked for."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.encoded: list[str] = []

    def __call__(self, text: str) -> bytes:
        self.encoded.append(text)
        return TokenPrompt.of(self._encoding.encode(text, disallowed_special=())).token_bytes


@pytest.fixture
def counting() -> Counting:
    return Counting(openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS))


@pytest.fixture
def tokens(counting: Counting) -> HarmonyTokens:
    made = HarmonyTokens(openai_harmony)
    made._encoding = counting
    return made


def said(*texts: str) -> Sequence[Any]:
    return [openai_harmony.Message.from_role_and_content(openai_harmony.Role.USER, text) for text in texts]


def test_each_message_is_rendered_once(tokens: HarmonyTokens, counting: Counting) -> None:
    first = tokens.of(said("a", "b"), has_tools=False)
    assert tokens.of(said("a", "b", "c"), has_tools=False).startswith(first[: -2 * TOKEN_BYTES])
    assert counting.rendered == ["a", "b", "c"]
    tokens.of(said("a"), has_tools=True)  # a system message then says something else
    assert counting.rendered == ["a", "b", "c", "a"]


def test_texts_are_the_folders_and_what_stands_around_them_the_librarys(counting: Counting) -> None:
    texts = Texts(counting)
    fast = HarmonyTokens(openai_harmony, texts)
    fast._encoding = counting
    texts.encoded.clear()
    expected = HarmonyTokens(openai_harmony).of(said("short", LONG), has_tools=False)
    assert fast.of(said("short", LONG), has_tools=False) == expected
    assert (texts.encoded, counting.rendered) == (["short", LONG], [""])


def test_texts_that_hold_special_tokens_are_the_librarys(counting: Counting) -> None:
    marked = LONG + "<|end|>"
    texts = Texts(counting)
    fast = HarmonyTokens(openai_harmony, texts)
    texts.encoded.clear()
    made = array("I", fast.of(said(marked), has_tools=False)).tolist()
    assert texts.encoded == []
    (end,) = counting.encode("<|end|>", allowed_special="all")
    assert made.count(end) == 1  # that of the message


def test_a_folder_of_another_vocabulary_is_not_asked(counting: Counting, caplog: pytest.LogCaptureFixture) -> None:
    other = HarmonyTokens(openai_harmony, lambda text: text.encode("utf-32-le"))
    assert other.of(said(LONG), has_tools=False) == HarmonyTokens(openai_harmony).of(said(LONG), has_tools=False)
    assert "tokenizer is not that of the harmony format" in caplog.text


def test_a_folder_that_finds_more_tokens_in_texts_is_not_asked(counting: Counting) -> None:
    def with_a_token_more(text: str) -> bytes:
        return b"more" if text == "[MORE]" else Texts(counting)(text)

    folder = HarmonyTokens(openai_harmony, with_a_token_more, ["<|end|>", "[MORE]"])
    assert folder.of(said("[MORE]"), has_tools=False) == HarmonyTokens(openai_harmony).of(
        said("[MORE]"), has_tools=False
    )


def test_the_library_reads_no_more_text_of_one_request_than_it_may(tokens: HarmonyTokens, counting: Counting) -> None:
    text = "a b " * (MOST_LIBRARY_CHARACTERS // 12)
    messages = said(text, "b" + text, "c" + text)
    with pytest.raises(ChatTemplateError, match="too much text"):
        tokens.of(messages, has_tools=False)
    assert tokens.of(messages, has_tools=False)  # two of the three are remembered by now
    assert len(counting.rendered) == 3


@pytest.mark.parametrize("unit", ["a", "é", "a\u0301", "\u0301", " ", "\n", "!", "_", "/\n", "漢", "1a", "'", "\\"])
def test_a_text_that_the_library_cannot_divide_is_refused_before_it_takes_long(
    tokens: HarmonyTokens, counting: Counting, unit: str
) -> None:
    with pytest.raises(ChatTemplateError, match="not divided into words"):
        tokens.of(said("a " + unit * 2_000), has_tools=False)
    assert counting.rendered == []
    assert tokens.of(said("a " + (unit * 400 + " ,\n") * 4), has_tools=False)


def test_a_library_without_its_vocabulary_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: object) -> None:
        raise openai_harmony.HarmonyError("error downloading or loading vocab file")

    monkeypatch.setattr(openai_harmony, "load_harmony_encoding", refuse)
    with pytest.raises(TokenizerError, match=r"vocab file; pip install 'kvmesh\[harmony\]', or let the pods be asked"):
        HarmonyTokens(openai_harmony)

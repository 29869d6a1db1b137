"""Turn requests into token ids exactly as the model's vLLM pods do.

`service` loads one ModelTokenizer per model at start-up, the use case asks it for each request. It reads the model's
folder once and never again, and it reaches no network: an unusable folder is an error that names the file.
"""

import json
import logging
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import fastokens  # type: ignore[import-untyped]
import tokenizers
from msgspec.structs import replace

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.chat_template import ChatTemplate, cannot_disable_thinking, refuses_later_system
from extproc.prompts.text_chunks import BYTES_PER_TOKEN, estimated_tokens
from extproc.prompts.token_cut import NO_FRAME, Frame, cut_tokens, kept_tokens
from extproc.prompts.tokenizer_config import (
    ARCHITECTURES_WITHOUT_TEMPLATE,
    added_tokens,
    chat_templates,
    special_tokens,
)
from extproc.requests.request import ChatPrompt, InferenceRequest, Prompt, TextPrompt, TokenPrompt, Truncation

logger = logging.getLogger(__name__)

SEGMENT_CACHE_BYTES = 64 * 1024 * 1024  # remembers what stands between special tokens, so old turns cost nothing
MOST_TEMPLATE_CHARACTERS = 1 << 20  # far above any real one


class Engine(Protocol):
    """A tokenizer library with the model's tokenizer.json in it."""

    name: str
    thread_above_bytes: int  # larger bodies are worth a thread: both libraries let go of the GIL

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the token ids as little-endian uint32."""

    def decode(self, tokens: bytes) -> str:
        """Return the text of token ids (little-endian uint32), special ones as they are written."""


class _Fastokens:
    """The fast one: about 0.03 µs a token, nearly nothing for segments seen before."""

    name = "fastokens"
    thread_above_bytes = 200_000

    def __init__(self, tokenizer_json: str, *, segment_cache_bytes: int) -> None:
        self._tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
        self._tokenizer.enable_segment_cache(segment_cache_bytes)

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        ids: bytes = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)[0]
        return ids

    def decode(self, tokens: bytes) -> str:
        return str(self._tokenizer.decode(_token_ids(tokens), skip_special_tokens=False))


class _Reference:
    """The library that vLLM itself uses: about 1.4 µs a token."""

    name = "tokenizers"
    thread_above_bytes = 4_000

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        ids = array("I", self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        if sys.byteorder == "big":
            ids.byteswap()
        return ids.tobytes()

    def decode(self, tokens: bytes) -> str:
        return str(self._tokenizer.decode(_token_ids(tokens), skip_special_tokens=False))


class ModelTokenizer:
    """The tokenizer and the chat template of one model. `engine` is "fastokens" or "tokenizers"."""

    def __init__(
        self, *, engine: Engine, templates: Mapping[str, ChatTemplate], no_template: str, system_first: bool = False
    ) -> None:
        self._engine = engine
        self._templates = templates
        self._no_template = no_template  # what to say to a chat when there is no template for it
        self._frame = _frame(engine)
        self._system_first = system_first  # the template refuses later system messages: vLLM moves them to the front
        self._low_effort = cannot_disable_thinking(self._rendered)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        chat_template: Path | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        segment_cache_bytes: int = SEGMENT_CACHE_BYTES,
    ) -> "ModelTokenizer":
        """Read a model's folder; raise TokenizerError or ChatTemplateError naming the file that is unusable.

        `chat_template` is a Jinja file in place of the folder's own, `chat_template_kwargs` are defaults beneath each
        request's: what the pods have as --chat-template and --default-chat-template-kwargs.
        """
        reference = _read_tokenizer(folder)
        config = _read_json(folder / "tokenizer_config.json")
        try:
            named = special_tokens(config, _read_json(folder / "special_tokens_map.json"))
            _add_tokens(reference, config, named)
            sources = chat_templates(config, _template_files(folder))
            if chat_template is not None:
                sources = {"default": _read_template(chat_template)}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(
                f"{folder / 'tokenizer_config.json'} is not what transformers writes ({type(error).__name__}: "
                f"{error}); "
                "copy it again from the model's folder"
            ) from error
        no_template = f"{folder} has neither chat_template.jinja nor a chat_template in tokenizer_config.json"
        if own := ARCHITECTURES_WITHOUT_TEMPLATE.intersection(
            _read_json(folder / "config.json").get("architectures") or ()
        ):
            sources, no_template = {}, f"vLLM renders chats for {', '.join(own)} without a template"
        return cls(
            engine=_choose_engine(reference, tuple(named.values()), folder, segment_cache_bytes),
            templates={
                name: ChatTemplate(text, special_tokens=named, defaults=chat_template_kwargs)
                for name, text in sorted(sources.items())
            },
            no_template=no_template,
            system_first=any(refuses_later_system(source) for source in sources.values()) or not sources,
        )

    @property
    def engine(self) -> str:
        """The library on the hot path."""
        return self._engine.name

    @property
    def renders_chats(self) -> bool:
        """Whether there is a chat template: without one only a pod can tell a conversation's tokens."""
        return bool(self._templates)

    def token_buffers(
        self, request: InferenceRequest, *, limit: int | None = None, max_model_len: int | None = None
    ) -> tuple[bytes, ...]:
        """Return one buffer of little-endian uint32 token ids for each of the first `limit` prompts.

        `max_model_len` (tokens) is what `truncate_prompt_tokens: -1` cuts to; None leaves such prompts whole.
        Raise ChatTemplateError or TokenizerError for a prompt whose tokens cannot be known.
        """
        truncation = request.truncation
        if truncation is None:
            return tuple([self._tokens(prompt) for prompt in request.prompts[:limit]])
        keep = kept_tokens(truncation, max_model_len=max_model_len)
        return tuple([self._cut(self._text(prompt), truncation, keep) for prompt in request.prompts[:limit]])

    def leading_tokens(
        self, request: InferenceRequest, *, limit: int | None = None, budget_tokens: int
    ) -> tuple[tuple[bytes, ...], int]:
        """Return the buffers up to `budget_tokens` in all, and about how many tokens were left out.

        The text is cut before it is tokenized, so the last word may be another than in the whole prompt: that is the
        last block at most, and a block that differs is found nowhere. Raise as `token_buffers`, also for a truncation.
        """
        if request.truncation is not None:
            raise TokenizerError("a prompt over the token budget that is to be truncated has no known beginning")
        buffers: list[bytes] = []
        left, left_out = budget_tokens, 0
        for prompt in request.prompts[:limit]:
            text = self._text(prompt)
            if left <= 0:
                left_out += estimated_tokens((text,))
                continue
            share = 1.0  # of the prompt that is tokenized
            if isinstance(text, TextPrompt) and len(text.text) > left * BYTES_PER_TOKEN:
                share = left * BYTES_PER_TOKEN / len(text.text)
                text = TextPrompt(text=text.text[: left * BYTES_PER_TOKEN], add_special_tokens=text.add_special_tokens)
            tokens = self._encode(text)
            buffers.append(tokens[: left * 4])
            count = len(buffers[-1]) // 4
            left_out += int(len(tokens) // 4 / share) - count  # the rest is taken to be like the beginning
            left -= count
        return tuple(buffers), left_out

    @property
    def thread_above_bytes(self) -> int:
        """The body size from which tokenizing would hold up other requests: a few milliseconds."""
        return self._engine.thread_above_bytes

    def render(self, prompt: ChatPrompt) -> str:
        """Return the text that the chat template makes of a conversation; raise ChatTemplateError."""
        if self._system_first and prompt.messages_system_first is not None:
            prompt = replace(prompt, messages=prompt.messages_system_first)
        if self._low_effort and prompt.kwargs_low_effort is not None:
            prompt = replace(prompt, chat_template_kwargs=prompt.kwargs_low_effort)
        return self._rendered(prompt)

    def text(self, tokens: bytes) -> str:
        """Return the text of token ids (little-endian uint32); raise TokenizerError for ids that are no token's.

        For the beginning of hot prompts on the admin page, where the policy lets it show them.
        """
        try:
            return self._engine.decode(tokens)
        except Exception as error:  # the libraries raise plain exceptions, and clients may send any ids
            raise TokenizerError(f"these token ids have no text: {type(error).__name__}") from None

    def _rendered(self, prompt: ChatPrompt) -> str:
        name = "tool_use" if prompt.tools is not None and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None:
            raise ChatTemplateError(self._no_template)
        return template.render(prompt)

    def _tokens(self, prompt: Prompt) -> bytes:
        """Return a whole prompt's tokens; no more is made of a conversation than its text."""
        if isinstance(prompt, ChatPrompt):
            return self._encoded(self.render(prompt), prompt.add_special_tokens)
        return self._encode(prompt)

    def _text(self, prompt: Prompt) -> TextPrompt | TokenPrompt:
        if isinstance(prompt, ChatPrompt):
            return TextPrompt(text=self.render(prompt), add_special_tokens=prompt.add_special_tokens)
        return prompt

    def _encode(self, prompt: TextPrompt | TokenPrompt) -> bytes:
        if isinstance(prompt, TokenPrompt):
            return prompt.token_bytes
        return self._encoded(prompt.text, prompt.add_special_tokens)

    def _encoded(self, text: str, add_special_tokens: bool) -> bytes:
        try:
            return self._engine.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair, from tool call arguments
            raise TokenizerError(f"the prompt is not valid Unicode text: {error}") from error

    def _cut(self, prompt: TextPrompt | TokenPrompt, truncation: Truncation, keep: int | None) -> bytes:
        tokens = self._encode(prompt)
        if keep is None:
            return tokens
        framed = isinstance(prompt, TextPrompt) and prompt.add_special_tokens and truncation.keeps_special_tokens
        try:
            return cut_tokens(tokens, keep=keep, side=truncation.side, frame=self._frame if framed else NO_FRAME)
        except ValueError as error:
            raise TokenizerError(f"truncate_prompt_tokens: {error}") from error


def _token_ids(tokens: bytes) -> list[int]:
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _frame(engine: Engine) -> Frame:
    """Count the special tokens that stand before and after a text."""
    bare = engine.encode("a", add_special_tokens=False)
    framed = engine.encode("a", add_special_tokens=True)
    for before in range((len(framed) - len(bare)) // 4 + 1):
        if framed[before * 4 :].startswith(bare):
            return Frame(before, (len(framed) - len(bare)) // 4 - before)
    return NO_FRAME


def _read_template(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no file")  # policies may name any path, and a device is read for ever
        with path.open(encoding="utf-8") as file:
            text = file.read(MOST_TEMPLATE_CHARACTERS + 1)
        if len(text) > MOST_TEMPLATE_CHARACTERS:
            raise ValueError(f"it is longer than {MOST_TEMPLATE_CHARACTERS} characters")
        return text
    except (OSError, ValueError) as error:
        raise TokenizerError(
            f"the chat template {path} cannot be read: {error}; give the file that the pods have as --chat-template"
        ) from error


def _read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Load tokenizer.json. Its own truncation and padding do not count: vLLM sets both per request."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{path} does not exist: point --tokenizer at the folder of the model that vLLM serves. A model with only "
            "tokenizer.model or tekken.json needs a tokenizer.json made by transformers' save_pretrained first"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} cannot be read: {error}; copy it again from the model's folder") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file, or nothing when there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; copy it again from the model's folder") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object; copy it again from the model's folder")
    return content


def _template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    files |= {"default": folder / "chat_template.jinja"} if (folder / "chat_template.jinja").is_file() else {}
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"a chat template in {folder} cannot be read: {error}") from error


def _add_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add what tokenizer_config.json knows beyond tokenizer.json, as transformers does when it loads the folder."""
    tokens = [tokenizers.AddedToken(token.content, **token.flags) for token in added_tokens(config)]
    known = {token.content for token in tokens}
    known.update(token.content for token in tokenizer.get_added_tokens_decoder().values())
    missing = dict.fromkeys(text for text in named.values() if text not in known)
    tokenizer.add_tokens([*tokens, *(tokenizers.AddedToken(text, special=True) for text in missing)])


def _choose_engine(
    tokenizer: tokenizers.Tokenizer, specials: Sequence[str], folder: Path, segment_cache_bytes: int
) -> Engine:
    """Return fastokens if it loads the file and agrees with the reference on the probe, else the reference."""
    reference = _Reference(tokenizer)
    try:
        fast = _Fastokens(tokenizer.to_str(), segment_cache_bytes=segment_cache_bytes)
        different = first_difference(reference, fast, probe_texts(specials))
    except Exception as error:  # the library raises plain exceptions, and a fallback exists
        logger.warning(
            "fastokens cannot load this tokenizer: every token now costs fifty times as much CPU",
            extra={"tokenizer": str(folder), "engine": "tokenizers", "cause": str(error)},
        )
        return reference
    if different is not None:
        logger.warning(
            "fastokens and tokenizers disagree about this tokenizer: every token now costs fifty times as much CPU",
            extra={"tokenizer": str(folder), "engine": "tokenizers", "probe": different},
        )
        return reference
    return fast


def first_difference(reference: Engine, other: Engine, texts: Sequence[str]) -> str | None:
    """Return the beginning of the first text on which the engines differ, None if they agree on all of them."""
    for text in texts:
        for special in (False, True):
            expected = reference.encode(text, add_special_tokens=special)
            # twice: the second time from the segment cache
            if any(other.encode(text, add_special_tokens=special) != expected for _ in range(2)):
                return text[:40]
    return None


def probe_texts(specials: Sequence[str]) -> list[str]:
    """Return short texts that tokenizers disagree about first, with the model's own special tokens among them."""
    texts = [
        "",
        " ",
        "The quick brown fox doesn't jump; it's 12,345.678 or 1e-9?",
        "def f(x):\n\treturn {'a': [x, 0x1F]}  # tab\r\n\r\n    \n\n  if x:\n        pass\n",
        "naïve café — “quotes” … Straße, İstanbul, ŀ, ﬁ, e\u0301 vs é, \u00a0nbsp\u2003wide\u200bzero\ufeff",
        "日本語のテキスト。中文，한국어 ไทย हिन्दी العربية עברית Ελληνικά Кириллица",
        "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 \U0001f600 \U000e0067 \x00\x01\x7f\x85\u2028\u2029",
        "a" * 300 + " " * 70 + "\n" * 40 + "\t" * 9 + "=" * 120,
        "'S 'LL 'Ve ABC'd 1234567890 ١٢٣ ½ ² x²+y²≠z² ~/.config/<tag attr=\"v\">&amp;</tag>",
    ]
    marked = "".join(f"{token} text {token}\n{token}" for token in specials)
    return [*texts, marked, marked.upper(), " ".join(texts) * 8 + marked]

"""Turn requests into token ids exactly as the model's vLLM pods do.

A model's folder is read once and never again, and no network is reached: an unusable folder is an error that names the
file. What it says beside tokenizer.json is read as transformers 5 reads it.
"""

import json
import logging
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import fastokens  # type: ignore[import-untyped]
import tokenizers
from msgspec.structs import replace

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.chat_template import ChatTemplate, cannot_disable_thinking, refuses_later_system
from extproc.prompts.prompt_forms import PromptForms
from extproc.prompts.text_chunks import BYTES_PER_TOKEN, estimated_tokens
from extproc.prompts.token_ids import NO_FRAME, TOKEN_BYTES, Frame, cut_tokens, kept_tokens
from extproc.requests.request import (
    ChatPrompt,
    InferenceRequest,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Truncation,
)

logger = logging.getLogger(__name__)
_Encodable: TypeAlias = TextPrompt | TokenPrompt | PairPrompt

SEGMENT_CACHE_BYTES = 64 * 1024 * 1024  # remembers what stands between special tokens, so old turns cost nothing
MOST_TEMPLATE_CHARACTERS = 1 << 20  # far above any real one
# The token names that every tokenizer class has; templates see those that are set as variables.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# vLLM 0.32 renders these models' chats in code of its own (some with today's date), whatever template they carry.
ARCHITECTURES_WITHOUT_TEMPLATE = frozenset(
    (
        *("GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV41ForCausalLM", "DeepseekV4ForCausalLM"),
        *("DeepseekV4ForConditionalGeneration", "KimiK3ForConditionalGeneration", "MoonshotKimiaForCausalLM"),
        *("InklingForCausalLM", "InklingForConditionalGeneration"),
    )
)


class Engine:
    """The library that vLLM itself uses, with the model's tokenizer.json in it: about 1.4 µs a token."""

    name = "tokenizers"
    thread_above_bytes = 4_000  # larger bodies are worth a thread: both libraries let go of the GIL

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the token ids as little-endian uint32."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return TokenPrompt.of(ids).token_bytes

    def decode(self, tokens: bytes) -> str:
        """Return the text of token ids (little-endian uint32), special ones as they are written."""
        ids = array("I", tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


class FastEngine(Engine):
    """The fast one: about 0.03 µs a token, nearly nothing for segments seen before."""

    name = "fastokens"
    thread_above_bytes = 200_000

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Return the token ids as little-endian uint32."""
        ids: bytes = self._tokenizer.encode_batch_flat([text], add_special_tokens=add_special_tokens)[0]
        return ids


class ModelTokenizer:
    """The tokenizer and the chat template of one model. `engine` is "fastokens" or "tokenizers"."""

    def __init__(
        self,
        *,
        engine: Engine,
        templates: Mapping[str, ChatTemplate],
        no_template: str,
        forms: PromptForms,
        system_first: bool = False,
    ) -> None:
        self._engine = engine
        self._forms = forms
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
            forms=PromptForms.of(
                _read_json(folder / "config.json"), tokenizer=reference, has_template=chat_template is not None
            ),
            system_first=any(refuses_later_system(source) for source in sources.values()) or not sources,
        )

    @property
    def engine(self) -> str:
        """The library on the hot path."""
        return self._engine.name

    def token_buffers(
        self, request: InferenceRequest, *, limit: int | None = None, max_model_len: int | None = None
    ) -> tuple[bytes, ...]:
        """Return one buffer of little-endian uint32 token ids for each of the first `limit` prompts.

        `max_model_len` (tokens) is what `truncate_prompt_tokens: -1` cuts to; None leaves such prompts whole.
        Raise ChatTemplateError or TokenizerError for a prompt whose tokens cannot be known.
        """
        truncation, prompts = request.truncation, self._texts(request.prompts[:limit])
        if truncation is None:
            return tuple([self._encode(text) for text in prompts])
        keep = kept_tokens(truncation, max_model_len=max_model_len)
        return tuple([self._cut(text, truncation, keep) for text in prompts])

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
        for text in self._texts(request.prompts[:limit]):
            if left <= 0:
                left_out += estimated_tokens((text,))
                continue
            share = 1.0  # of the prompt that is tokenized
            if isinstance(text, TextPrompt) and len(text.text) > left * BYTES_PER_TOKEN:
                share = left * BYTES_PER_TOKEN / len(text.text)
            tokens = self._encode(_beginning(text, left * BYTES_PER_TOKEN))
            buffers.append(tokens[: left * TOKEN_BYTES])
            count = len(buffers[-1]) // TOKEN_BYTES
            left_out += int(len(tokens) // TOKEN_BYTES / share) - count  # the rest is taken to be like the beginning
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

    def _texts(self, prompts: Sequence[Prompt]) -> Iterator[_Encodable]:
        for prompt in self._forms.single(prompts):
            if isinstance(prompt, ChatPrompt):
                yield TextPrompt(text=self.render(prompt), add_special_tokens=prompt.add_special_tokens)
            else:
                yield prompt

    def _encode(self, prompt: _Encodable) -> bytes:
        if isinstance(prompt, TokenPrompt):
            return prompt.token_bytes
        try:
            if isinstance(prompt, PairPrompt):
                return self._forms.encode_pair(prompt, partial(self._engine.encode, add_special_tokens=False))
            return self._engine.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # half of a surrogate pair, from tool call arguments
            raise TokenizerError(f"the prompt is not valid Unicode text: {error}") from error

    def _cut(self, prompt: _Encodable, truncation: Truncation, keep: int | None) -> bytes:
        if isinstance(prompt, PairPrompt):
            raise TokenizerError("truncate_prompt_tokens cuts the longer text of a pair, token by token")
        tokens = self._encode(prompt)
        if keep is None:
            return tokens
        framed = isinstance(prompt, TextPrompt) and prompt.add_special_tokens and truncation.keeps_special_tokens
        try:
            return cut_tokens(tokens, keep=keep, side=truncation.side, frame=self._frame if framed else NO_FRAME)
        except ValueError as error:
            raise TokenizerError(f"truncate_prompt_tokens: {error}") from error


def _beginning(prompt: _Encodable, characters: int) -> _Encodable:
    if not isinstance(prompt, TextPrompt) or len(prompt.text) <= characters:
        return prompt
    return TextPrompt(text=prompt.text[:characters], add_special_tokens=prompt.add_special_tokens)


def _frame(engine: Engine) -> Frame:
    """Count the special tokens that stand before and after a text."""
    bare = engine.encode("a", add_special_tokens=False)
    framed = engine.encode("a", add_special_tokens=True)
    added = (len(framed) - len(bare)) // TOKEN_BYTES
    for before in range(added + 1):
        if framed[before * TOKEN_BYTES :].startswith(bare):
            return Frame(before, added - before)
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
    tokens = list(added_tokens(config))
    known = {token.content for token in (*tokens, *tokenizer.get_added_tokens_decoder().values())}
    missing = dict.fromkeys(text for text in named.values() if text not in known)
    tokenizer.add_tokens([*tokens, *(tokenizers.AddedToken(text, special=True) for text in missing)])


def special_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that a chat template sees, by variable name (`bos_token`, …).

    `config` is tokenizer_config.json, `legacy` special_tokens_map.json, which counts only for folders that do not list
    their added tokens in the configuration.
    """
    source = dict(config) if "added_tokens_decoder" in config else {**config, **legacy}
    extra = source.get("extra_special_tokens")
    own = extra if isinstance(extra, dict) else {}
    found: dict[str, str] = {}
    for name, value in (source | own).items():
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and (name.endswith("_token") or name in own):
            found[name] = text
    return {name: found[name] for name in NAMED_TOKENS if name in found} | found


def added_tokens(config: Mapping[str, Any]) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens that the configuration adds to tokenizer.json's, in the order of their ids."""
    listed = config.get("added_tokens_decoder") or {}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        flags = {name: bool(token[name]) for name in TOKEN_FLAGS if name in token}
        yield tokenizers.AddedToken(token["content"], **flags)


def chat_templates(config: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Return template sources by name; `files` (from *.jinja, "default" being chat_template.jinja) win altogether."""
    if files:
        return dict(files)
    template = config.get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return dict(template) if isinstance(template, dict) else {}


def _choose_engine(
    tokenizer: tokenizers.Tokenizer, specials: Sequence[str], folder: Path, segment_cache_bytes: int
) -> Engine:
    """Return fastokens if it loads the file and agrees with the reference on the probe, else the reference."""
    reference = Engine(tokenizer)
    try:
        loaded = fastokens.Tokenizer.from_json_str(tokenizer.to_str())
        loaded.enable_segment_cache(segment_cache_bytes)
        fast = FastEngine(loaded)
        different = first_difference(reference, fast, probe_texts(specials))
    except Exception as error:  # the library raises plain exceptions, and a fallback exists
        why, found = "fastokens cannot load this tokenizer", {"cause": str(error)}
    else:
        if different is None:
            return fast
        why, found = "fastokens and tokenizers disagree about this tokenizer", {"probe": different}
    logger.warning(
        "%s: every token now costs fifty times as much CPU",
        why,
        extra={"tokenizer": str(folder), "engine": reference.name, **found},
    )
    return reference


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

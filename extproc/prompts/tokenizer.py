"""Turn requests into token ids exactly as the model's vLLM pods do.

A model's folder is read once and never again, and no network is reached: an unusable folder is an error that names the
file.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from msgspec.structs import replace

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.chat_template import ChatTemplate, cannot_disable_thinking, refuses_later_system
from extproc.prompts.engines import Engine, choose_engine
from extproc.prompts.prompt_forms import PromptForms
from extproc.prompts.text_chunks import BYTES_PER_TOKEN, estimated_tokens
from extproc.prompts.token_ids import NO_FRAME, TOKEN_BYTES, Frame, cut_tokens, kept_tokens
from extproc.prompts.tokenizer_folder import TokenizerFolder, read_folder
from extproc.requests.request import (
    ChatPrompt,
    InferenceRequest,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Truncation,
)

_Encodable: TypeAlias = TextPrompt | TokenPrompt | PairPrompt

SEGMENT_CACHE_BYTES = 64 * 1024 * 1024  # remembers what stands between special tokens, so old turns cost nothing


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
        as_written: bool = False,
    ) -> "ModelTokenizer":
        """Read a model's folder; raise TokenizerError or ChatTemplateError naming the file that is unusable.

        `chat_template` is a Jinja file in place of the folder's own, `chat_template_kwargs` are defaults beneath each
        request's: what the pods have as --chat-template and --default-chat-template-kwargs. `as_written` takes
        tokenizer.json as it is, which only pods with transformers 4 do for every folder.
        """
        return cls.of_folder(
            read_folder(folder, chat_template=chat_template, as_written=as_written),
            chat_template_kwargs=chat_template_kwargs,
            segment_cache_bytes=segment_cache_bytes,
        )

    @classmethod
    def of_folder(
        cls,
        read: TokenizerFolder,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        segment_cache_bytes: int = SEGMENT_CACHE_BYTES,
    ) -> "ModelTokenizer":
        """Make the tokenizer of a folder that was read; raise ChatTemplateError where a template does not compile."""
        return cls(
            engine=choose_engine(read.backend, tuple(read.special_tokens.values()), read.path, segment_cache_bytes),
            templates={
                name: ChatTemplate(text, special_tokens=read.special_tokens, defaults=chat_template_kwargs)
                for name, text in sorted(read.templates.items())
            },
            no_template=read.no_template,
            forms=PromptForms.of(read.model, tokenizer=read.backend, has_template=read.has_given_template),
            system_first=any(refuses_later_system(source) for source in read.templates.values()) or not read.templates,
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
        template = self._templates.get("tool_use")
        if template is None or template.tools(prompt) is None:
            template = self._templates.get("default")
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

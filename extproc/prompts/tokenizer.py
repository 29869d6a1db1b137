"""Turn requests into token ids exactly as the model's vLLM pods do.

A model's folder is read once, without network access. An unusable folder raises an error that names the file.

Pairs for scoring and fill-in-the-middle depend on the model's config.json, as in vLLM 0.32
(vllm/entrypoints/pooling/scoring/io_processor.py, vllm/renderers/deepseek_v4.py). The folder does not show vLLM's
flags: for pods with --hf-overrides, write the same overrides into the folder's config.json.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from msgspec.structs import replace

from extproc.errors import ChatTemplateError, TokenizerError
from extproc.prompts.chat_template import ChatTemplate, cannot_disable_thinking, refuses_later_system
from extproc.prompts.chats_in_code import ChatCode
from extproc.prompts.engines import Engine, choose_engine
from extproc.prompts.harmony_chats import HarmonyChats
from extproc.prompts.mistral_tokenizer import has_mistral_file, load_mistral
from extproc.prompts.text_chunks import BYTES_PER_TOKEN, estimated_tokens
from extproc.prompts.tokenized_prompt import NO_FRAME, TOKEN_BYTES, Frame, cut_tokens, kept_tokens
from extproc.prompts.tokenizer_folder import TokenizerFolder, model_config, read_folder
from extproc.requests.request import (
    ApiKind,
    ChatPrompt,
    InferenceRequest,
    PairPrompt,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Truncation,
)

_Encodable: TypeAlias = TextPrompt | TokenPrompt | PairPrompt

APIS_IN_CODE = frozenset((ApiKind.CHAT_COMPLETIONS, ApiKind.MESSAGES))  # vLLM converts messages to chat completions
SEGMENT_CACHE_BYTES = 64 * 1024 * 1024  # caches the text between special tokens, so old turns cost nothing
FIM_ARCHITECTURES = frozenset(("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"))
FIM = "<｜fim▁begin｜>{prompt}<｜fim▁hole｜>{suffix}<｜fim▁end｜>"
# their own code puts the query and all documents into one prompt
RANKING_ARCHITECTURES = frozenset(("JinaForRanking", "JinaVLForRanking"))
CLASSIFIER = "ForSequenceClassification"


class Scoring(Enum):
    """How pods turn a query and a document into prompts."""

    TEXTS = "texts"  # two prompts whose vectors are compared: embedding models
    JOINED = "joined"  # one prompt: query and document concatenated
    PAIRS = "pairs"  # one prompt: the tokenizer's pair encoding
    OWN = "own"  # a form defined by the model's code


class PairFrame(NamedTuple):
    """The special tokens of a tokenizer's pair encoding (little-endian uint32)."""

    before: bytes
    between: bytes
    after: bytes


class PromptForms:
    """The forms of one model's prompts."""

    def __init__(self, *, scoring: Scoring, has_template: bool, fills_in_middle: bool, pair: PairFrame | None) -> None:
        """`has_template`: pods run with --chat-template. `pair` is None if the pair encoding is not understood."""
        self._scoring = scoring
        self._has_template = has_template and scoring in (Scoring.JOINED, Scoring.PAIRS)
        self._fills_in_middle = fills_in_middle
        self._pair = pair

    @classmethod
    def of(cls, config: Mapping[str, Any], *, tokenizer: Any, has_template: bool) -> "PromptForms":
        """Read a model's config.json; `tokenizer` is a `tokenizers.Tokenizer`, or None for another library."""
        architectures = frozenset(name for name in config.get("architectures") or () if isinstance(name, str))
        return cls(
            scoring=scoring_of(config, architectures),
            has_template=has_template,
            fills_in_middle=not architectures.isdisjoint(FIM_ARCHITECTURES),
            pair=None if tokenizer is None else pair_frame(tokenizer),
        )

    def single(self, prompts: Sequence[Prompt]) -> Iterator[Prompt]:
        """Yield the prompts that the pod computes. Separately embedded pairs yield each query once, then its documents.

        Raise TokenizerError if vLLM refuses a prompt or builds it in the model's own code.
        """
        queried: set[str] = set()
        for prompt in prompts:
            if isinstance(prompt, TextPrompt) and prompt.suffix is not None:
                yield self._in_the_middle(prompt)
            elif not isinstance(prompt, PairPrompt):
                yield prompt
            elif self._scoring is Scoring.OWN:
                raise TokenizerError("the model's own code puts queries and documents into prompts")
            elif self._scoring is Scoring.TEXTS:
                if prompt.query not in queried:
                    queried.add(prompt.query)
                    yield TextPrompt(text=prompt.query)
                yield TextPrompt(text=prompt.document)
            elif self._has_template:
                yield _templated(prompt)
            elif self._scoring is Scoring.JOINED or not prompt.document:  # vLLM makes no pair with an empty document
                yield TextPrompt(text=prompt.query + prompt.document)
            else:
                yield prompt

    def encode_pair(self, pair: PairPrompt, encode: Callable[[str], bytes]) -> bytes:
        """Return a pair's tokens; `encode` tokenizes a text without special tokens. Raise TokenizerError."""
        if self._pair is None:
            raise TokenizerError("the tokenizer's form of a pair is not understood here")
        before, between, after = self._pair
        return b"".join((before, encode(pair.query), between, encode(pair.document), after))

    def _in_the_middle(self, prompt: TextPrompt) -> TextPrompt:
        if not self._fills_in_middle:
            raise TokenizerError("pods refuse `suffix`: the model does not fill in the middle")
        text = FIM.format(prompt=prompt.text, suffix=prompt.suffix)
        return TextPrompt(text=text, add_special_tokens=prompt.add_special_tokens)


def scoring_of(config: Mapping[str, Any], architectures: frozenset[str]) -> Scoring:
    """Return how pods turn a query and a document into prompts."""
    if not architectures.isdisjoint(RANKING_ARCHITECTURES):
        return Scoring.OWN
    if not any(name.endswith(CLASSIFIER) for name in architectures):
        return Scoring.TEXTS
    separates = config.get("use_pad_token")  # the older name takes precedence
    if separates is None:
        was_language_model = config.get("classifier_from_token") is not None or config.get("method") is not None
        # for a model of texts and images, vLLM sets the flag in the inner configuration but reads it from the outer one
        joins = was_language_model and "text_config" not in config
        separates = config.get("use_sep_token", not joins)
    return Scoring.PAIRS if separates else Scoring.JOINED


def pair_frame(tokenizer: Any) -> PairFrame | None:
    """Return the special tokens around and between two texts, or None if they depend on the texts."""
    first, second = (_packed(tokenizer.encode(text, add_special_tokens=False).ids) for text in ("a", "b"))
    pair = _packed(tokenizer.encode("a", "b", add_special_tokens=True).ids)
    if not first or not second:
        return None
    for begin in range(0, len(pair), TOKEN_BYTES):
        middle = begin + len(first)
        if pair[begin:middle] != first:
            continue
        for at in range(middle, len(pair), TOKEN_BYTES):
            if pair[at : at + len(second)] == second:
                return PairFrame(pair[:begin], pair[middle:at], pair[at + len(second) :])
    return None


def _templated(pair: PairPrompt) -> ChatPrompt:
    return ChatPrompt(
        messages=({"role": "query", "content": pair.query}, {"role": "document", "content": pair.document}),
        add_generation_prompt=False,
        add_special_tokens=True,
        chat_template_kwargs=pair.chat_template_kwargs,
    )


def _packed(ids: Sequence[int]) -> bytes:
    return TokenPrompt.of(ids).token_bytes


class ModelTokenizer:
    """The tokenizer of one model, with its chat templates or its chat renderer in code."""

    def __init__(
        self,
        *,
        engine: Engine,
        templates: Mapping[str, ChatTemplate],
        no_template: str,
        forms: PromptForms,
        system_first: bool = False,
        chats: ChatCode | None = None,
    ) -> None:
        """`chats` renders conversations instead of the templates."""
        self._engine = engine
        self._chats = chats
        self._forms = forms
        self._templates = templates
        self._no_template = no_template  # the error text for a chat without a template
        self._frame = _frame(engine)
        self._system_first = system_first  # the template refuses later system messages: vLLM moves them to the front
        self._low_effort = cannot_disable_thinking(self._rendered if chats is None else chats.tokens)

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
        """Read a model's folder; raise TokenizerError or ChatTemplateError naming the unusable file.

        `chat_template` is a Jinja file that replaces the folder's template, and `chat_template_kwargs` are defaults for
        each request's variables: the pods' --chat-template and --default-chat-template-kwargs. `as_written` uses
        tokenizer.json unchanged, as only pods with transformers 4 do for every folder. Folders that mistral-common
        reads ignore templates.
        """
        if not as_written and has_mistral_file(folder):
            engine, chats = load_mistral(folder, defaults=chat_template_kwargs)
            forms = PromptForms.of(model_config(folder), tokenizer=None, has_template=False)
            why = "mistral-common renders the model's chats without a template"
            return cls(engine=engine, templates={}, no_template=why, forms=forms, system_first=True, chats=chats)
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
        """Build the tokenizer of a folder; raise ChatTemplateError if a template does not compile."""
        engine = choose_engine(read.backend, tuple(read.special_tokens.values()), read.path, segment_cache_bytes)
        harmony = _harmony(read, engine) if read.has_harmony_chats else None
        return cls(
            engine=engine,
            templates={
                name: ChatTemplate(text, special_tokens=read.special_tokens, defaults=chat_template_kwargs)
                for name, text in sorted(read.templates.items())
                if harmony is None
            },
            no_template=read.no_template,
            forms=PromptForms.of(read.model, tokenizer=read.backend, has_template=read.has_given_template),
            system_first=any(refuses_later_system(source) for source in read.templates.values()) or not read.templates,
            chats=harmony,
        )

    @property
    def engine(self) -> str:
        """The name of the tokenizer library on the hot path."""
        return self._engine.name

    @property
    def breach(self) -> str:
        """The limit that a chat template has broken too often to be used, or ""."""
        return next((template.breach for template in self._templates.values() if template.breach), "")

    def token_buffers(
        self, request: InferenceRequest, *, limit: int | None = None, max_model_len: int | None = None
    ) -> tuple[bytes, ...]:
        """Return one buffer of little-endian uint32 token ids for each of the first `limit` prompts.

        `truncate_prompt_tokens: -1` cuts to `max_model_len` (tokens); None leaves such prompts whole.
        Raise ChatTemplateError or TokenizerError for a prompt whose tokens cannot be determined.
        """
        truncation, prompts = request.truncation, self._texts(request, limit)
        if truncation is None:
            return tuple([self._encode(text) for text in prompts])
        keep = kept_tokens(truncation, max_model_len=max_model_len)
        return tuple([self._cut(text, truncation, keep) for text in prompts])

    def leading_tokens(
        self, request: InferenceRequest, *, limit: int | None = None, budget_tokens: int
    ) -> tuple[tuple[bytes, ...], int]:
        """Return the buffers, up to `budget_tokens` in total, and an estimate of the tokens left out.

        The text is cut before it is tokenized, so the last word's tokens may differ from the whole prompt's.
        This affects the last block at most, and a wrong block has no hits. Raise as `token_buffers` does, and
        TokenizerError for a truncation.
        """
        if request.truncation is not None:
            raise TokenizerError("a prompt over the token budget that is to be truncated has no known beginning")
        buffers: list[bytes] = []
        left, left_out = budget_tokens, 0
        for text in self._texts(request, limit):
            if left <= 0:
                left_out += estimated_tokens((text,))
                continue
            share = 1.0  # of the prompt that is tokenized
            if isinstance(text, TextPrompt) and len(text.text) > left * BYTES_PER_TOKEN:
                share = left * BYTES_PER_TOKEN / len(text.text)
            tokens = self._encode(_beginning(text, left * BYTES_PER_TOKEN))
            buffers.append(tokens[: left * TOKEN_BYTES])
            count = len(buffers[-1]) // TOKEN_BYTES
            left_out += int(len(tokens) // TOKEN_BYTES / share) - count  # assumes a uniform token density
            left -= count
        return tuple(buffers), left_out

    @property
    def thread_above_bytes(self) -> int:
        """The body size (bytes) above which tokenizing blocks the event loop too long: a few milliseconds."""
        return self._engine.thread_above_bytes

    def render(self, prompt: ChatPrompt) -> str:
        """Return a conversation rendered with the chat template; raise ChatTemplateError."""
        return self._rendered(self._settled(prompt))

    def _settled(self, prompt: ChatPrompt) -> ChatPrompt:
        """Return the chat with vLLM's fallbacks for features of Anthropic's API that the model's template lacks."""
        if self._system_first and prompt.messages_system_first is not None:
            prompt = replace(prompt, messages=prompt.messages_system_first)
        if self._low_effort and prompt.kwargs_low_effort is not None:
            low = prompt.kwargs_low_effort
            prompt = replace(prompt, chat_template_kwargs=low, reasoning_effort=low.get("reasoning_effort"))
        return prompt

    def text(self, tokens: bytes) -> str:
        """Return the text of token ids (little-endian uint32); raise TokenizerError for unknown ids.

        The admin page shows the beginning of hot prompts with it, if the policy allows that.
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

    def _texts(self, request: InferenceRequest, limit: int | None) -> Iterator[_Encodable]:
        for prompt in self._forms.single(request.prompts[:limit]):
            if not isinstance(prompt, ChatPrompt):
                yield prompt
            elif self._chats is None:
                yield TextPrompt(text=self.render(prompt), add_special_tokens=prompt.add_special_tokens)
            elif request.api in APIS_IN_CODE:
                yield TokenPrompt(token_bytes=self._chats.tokens(self._settled(prompt)))
            else:  # vLLM's code starts from this API's own input, but our parser has already turned it into a chat
                raise ChatTemplateError(f"vLLM renders {request.api.value} of this model in code of its own")

    def _encode(self, prompt: _Encodable) -> bytes:
        if isinstance(prompt, TokenPrompt):
            return prompt.token_bytes
        try:
            if isinstance(prompt, PairPrompt):
                return self._forms.encode_pair(prompt, partial(self._engine.encode, add_special_tokens=False))
            return self._engine.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate, from tool call arguments
            raise TokenizerError(f"the prompt is not valid Unicode text: {error}") from error

    def _cut(self, prompt: _Encodable, truncation: Truncation, keep: int | None) -> bytes:
        if isinstance(prompt, PairPrompt):
            raise TokenizerError("truncate_prompt_tokens cuts the longer text of a pair, token by token")
        tokens = self._encode(prompt)
        if keep is None:
            return tokens
        if isinstance(prompt, TextPrompt) and truncation.keeps_special_tokens and self._engine.cuts_texts_at_end:
            return tokens[: keep * TOKEN_BYTES]
        framed = isinstance(prompt, TextPrompt) and prompt.add_special_tokens and truncation.keeps_special_tokens
        try:
            return cut_tokens(tokens, keep=keep, side=truncation.side, frame=self._frame if framed else NO_FRAME)
        except ValueError as error:
            raise TokenizerError(f"truncate_prompt_tokens: {error}") from error


def _beginning(prompt: _Encodable, characters: int) -> _Encodable:
    if not isinstance(prompt, TextPrompt) or len(prompt.text) <= characters:
        return prompt
    return TextPrompt(text=prompt.text[:characters], add_special_tokens=prompt.add_special_tokens)


def _harmony(read: TokenizerFolder, engine: Engine) -> HarmonyChats:
    added = [token.content for token in read.backend.get_added_tokens_decoder().values()]
    return HarmonyChats(partial(engine.encode, add_special_tokens=False), added)


def _frame(engine: Engine) -> Frame:
    bare = engine.encode("a", add_special_tokens=False)
    framed = engine.encode("a", add_special_tokens=True)
    added = (len(framed) - len(bare)) // TOKEN_BYTES
    for before in range(added + 1):
        if framed[before * TOKEN_BYTES :].startswith(bare):
            return Frame(before, added - before)
    return NO_FRAME

"""The tokens of a request's prompts, from a tokenizer or a pod; else keys of text chunks for a prediction.

Small prompts are tokenized at once, large ones one after another in one thread. Nothing here fails a request: the
result says why tokens are missing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeVar

from msgspec.structs import replace

from extproc.errors import ChatTemplateError, PromptTokensError, PromptTooLargeError, TokenizerError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.pod_render import PodRender
from extproc.prompts.text_chunks import BYTES_PER_TOKEN, CHUNK_TOKENS, chunk_text, estimated_tokens, prompt_in_body
from extproc.prompts.tokenized_prompt import (
    NO_PROMPT,
    TOKEN_BYTES,
    PromptTokens,
    TokenizedPrompt,
    cut_tokens,
    kept_tokens,
)
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.long_work import LongWork, LongWorkError
from extproc.requests.request import InferenceRequest, TokenPrompt
from kvmesh.blocks.block_keys import root_key

_T = TypeVar("_T")

TEXT_SEED = "kvmesh-text-chunks"  # keeps the roots of text chunks apart from the roots of blocks
TRUNCATION_UNKNOWN = "truncation-unknown"
NO_TOKENIZER = "no-tokenizer"
UNSUPPORTED = "prompt-unsupported"
TOKENS_DIFFER = "tokens-differ"
POD_MAY_KNOW = frozenset((NO_TOKENIZER, UNSUPPORTED, TOKENS_DIFFER, ChatTemplateError.reason))
MAX_READ_AGAIN_BYTES = 4 << 20  # of a body parsed again for its text only: some milliseconds
UNKNOWN_MODEL = "(unknown)"  # stands for any model that is neither configured nor learned
LEAST_PROMPTS = 5  # needed to determine a model's source; one odd request is not enough
WINDOW_SECONDS = 60.0


class TokenSource(StrEnum):
    """The source of a request's tokens."""

    FOLDER = "folder"  # the model's tokenizer, in this process
    PODS = "pods"  # a pod's answer, possibly cached
    CLIENT = "client"  # the client sent token ids
    TEXT = "text"  # no tokens: text chunks, which only predict


# most exact first, which breaks ties; a client's ids say nothing about the model
_OF_MODELS = (TokenSource.FOLDER, TokenSource.PODS, TokenSource.TEXT)


@dataclass(slots=True)
class _Model:
    counts: dict[TokenSource, int] = field(default_factory=lambda: dict.fromkeys(TokenSource, 0))  # since the start
    before: dict[TokenSource, int] = field(default_factory=lambda: dict.fromkeys(TokenSource, 0))  # the window's start
    since: float | None = None  # of the window, monotonic seconds
    source: TokenSource | None = None
    is_certain: bool = False
    why: str = ""  # of the last prompt without tokens

    def judge(self, now: float) -> None:
        found = {source: self.counts[source] - self.before[source] for source in _OF_MODELS}
        total = sum(found.values())
        self.since = now if self.since is None else self.since
        if total and (total >= LEAST_PROMPTS or not self.is_certain):
            self.source = max(_OF_MODELS, key=found.__getitem__)
            self.is_certain = total >= LEAST_PROMPTS
        if total >= LEAST_PROMPTS and now - self.since >= WINDOW_SECONDS:
            self.before, self.since = self.counts.copy(), now


class TokenWatch:
    """Counts prompts by model and source, and determines each model's most frequent recent source.

    A prompt costs one addition. Models are configured names, hence few.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def took(self, model: str, source: TokenSource, *, why: str = "") -> None:
        """Count one request; `model` is "" for an unconfigured one, `why` says why there are no tokens."""
        seen = self._models.get(model)
        if seen is None:
            seen = self._models[model] = _Model()
        seen.counts[source] += 1
        if why:
            seen.why = why

    def judge(self, *, now: float) -> None:
        """Evaluate the prompts since the window began; call it every few seconds."""
        for seen in self._models.values():
            seen.judge(now)

    def keep(self, models: Collection[str]) -> None:
        """Drop all other models: they are no longer configured."""
        self._models = {name: seen for name, seen in self._models.items() if name in models or not name}

    def counts(self) -> Mapping[tuple[str, str], int]:
        """Return the requests by model and source since the start."""
        return {
            (name or UNKNOWN_MODEL, source.value): count
            for name, seen in self._models.items()
            for source, count in seen.counts.items()
            if count
        }

    @property
    def sources(self) -> Mapping[str, TokenSource]:
        """The most frequent recent source of each model that has had prompts."""
        return {name: seen.source for name, seen in self._models.items() if name and seen.source is not None}

    @property
    def has_unknown(self) -> bool:
        """Whether recent prompts of unconfigured models had no tokens."""
        seen = self._models.get("")
        return seen is not None and seen.is_certain and seen.source is TokenSource.TEXT

    @property
    def text_only(self) -> Mapping[str, str]:
        """The reason for each model whose recent prompts had no tokens."""
        return {
            name: seen.why
            for name, seen in self._models.items()
            if name and seen.is_certain and seen.source is TokenSource.TEXT
        }


class NoTokenizerError(PromptTokensError):
    """Nothing in this process knows the model's tokens."""

    reason: ClassVar[str] = NO_TOKENIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Limits of tokenizing in this process."""

    budget_tokens: int = 500_000  # per request; tokens beyond it are not looked up
    # a million tokens take fastokens some 50 ms; only a malicious body takes longer than this
    timeout_seconds: float = 2.0
    max_waiting: int = 8  # large prompts per tenant


class PromptTokenSource:
    """The prompt tokens of every served model."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        render: PodRender | None = None,
        settings: TokenSettings | None = None,
        load: Callable[[ServedModel], ModelTokenizer] | None = None,
        long_work: LongWork | None = None,
        watch: TokenWatch | None = None,
        doubts: Mapping[str, str] | None = None,
    ) -> None:
        """Load the tokenizers; raise TokenizerError or ChatTemplateError naming the unusable file.

        `load` may return cached ones. `long_work` is a shared thread; its creator closes it. `watch` counts the sources
        of tokens; `doubts` says why each distrusted folder is.
        """
        self._settings = settings or TokenSettings()
        self._render = render
        self._watch = watch or TokenWatch()
        self._doubts = {} if doubts is None else doubts
        load = load or load_tokenizer
        self.tokenizers = {model.name: load(model) for model in models if model.tokens_from is TokensFrom.TOKENIZER}
        self._owns_long_work = long_work is None
        self._long_work = long_work or LongWork()

    async def prompts(
        self,
        request: InferenceRequest,
        body: bytes | None,
        *,
        model: ServedModel,
        limit: int,
        adapter: str | None = None,
        tenant: str = "",
    ) -> PromptTokens:
        """Return the tokens or text chunks of the first `limit` prompts.

        `body` is the pod's body without content encoding, for a render endpoint. `adapter` (a LoRA name) keeps text
        chunks apart; block keys get it from their root. `tenant` is whose queue for the thread a large prompt joins.
        Raise only TokenizerError, for a model whose tokenizer was not loaded by the constructor.
        """
        if not request.prompts and request.unsupported_reason is None:
            return NO_PROMPT
        tokenizer = self._tokenizer(model)
        doubt = self._doubt(request, tokenizer, model)
        reason, why = (UNSUPPORTED, request.unsupported_reason or "") if doubt is None else (TOKENS_DIFFER, doubt)
        if request.prompts and doubt is None:
            try:
                tokens = await self._tokenized(request, tokenizer, model, limit=limit, tenant=tenant)
                self._watch.took(model.name, TokenSource.CLIENT if tokenizer is None else TokenSource.FOLDER)
                return tokens
            except PromptTokensError as error:
                reason, why = error.reason, str(error)
        may_ask = reason in POD_MAY_KNOW and model.tokens_from is not TokensFrom.TEXT
        # a pod does not render a response that it stores
        if body is not None and self._render and may_ask and request.kept_response is None:
            try:
                rendered = await self._render.prompts(request, body, model=model, limit=limit)
                self._watch.took(model.name, TokenSource.PODS)
                total = _count([prompt.tokens for prompt in rendered]) + estimated_tokens(request.prompts[limit:])
                return PromptTokens(prompts=rendered, estimated_tokens=total)
            except PromptTokensError as error:
                reason, why = (error.reason, str(error)) if reason == NO_TOKENIZER else (reason, f"{why}; {error}")
        if doubt is not None:  # a distrusted folder's tokens predict as well as the text
            with suppress(PromptTokensError):
                tokens = await self._tokenized(request, tokenizer, model, limit=limit, tenant=tenant)
                self._watch.took(model.name, TokenSource.FOLDER)
                return replace(tokens, degraded=reason, degraded_why=why)
        predicted = _predicted(request, body, model=model, adapter=adapter, reason=reason, why=why)
        if predicted.chunks:
            self._watch.took(model.name, TokenSource.TEXT, why=why)
        return predicted

    def close(self) -> None:
        """Accept no new work; work under way completes."""
        if self._owns_long_work:
            self._long_work.close()

    def engines(self) -> dict[str, str]:
        """Return the name of the tokenizer library by model, for pages and logs."""
        return {name: tokenizer.engine for name, tokenizer in self.tokenizers.items()}

    def _doubt(self, request: InferenceRequest, tokenizer: ModelTokenizer | None, model: ServedModel) -> str | None:
        if tokenizer is None or not request.prompts or isinstance(request.prompts[0], TokenPrompt):
            return None
        return self._doubts.get(model.name)

    async def _away(self, request: InferenceRequest, tokenize: Callable[[], _T], tenant: str) -> _T:
        """Tokenize in the thread; raise PromptTooLargeError if it takes too long or too many prompts wait."""
        settings = self._settings
        try:
            return await self._long_work.run(
                tokenize,
                size=request.body_bytes,
                tenant=tenant,
                most_waiting=settings.max_waiting,
                timeout_seconds=settings.timeout_seconds,
            )
        except LongWorkError as error:
            raise PromptTooLargeError(f"the prompt is too long to be tokenized now: {error}") from None

    def _tokenizer(self, model: ServedModel) -> ModelTokenizer | None:
        if model.tokens_from is not TokensFrom.TOKENIZER:
            return None
        try:
            return self.tokenizers[model.name]
        except KeyError:
            raise TokenizerError(f"the tokenizer of {model.name!r} was not loaded at start-up") from None

    async def _tokenized(
        self,
        request: InferenceRequest,
        tokenizer: ModelTokenizer | None,
        model: ServedModel,
        *,
        limit: int,
        tenant: str,
    ) -> PromptTokens:
        """Return this process's own tokens, within the budget. Raise PromptTokensError."""
        budget, left_out, max_len = self._settings.budget_tokens, 0, model.max_model_len
        rest = request.prompts[limit:]
        if tokenizer is None:
            buffers = _sent_by_client(request, model, limit)
        elif request.body_bytes <= tokenizer.thread_above_bytes:  # nearly all: nothing to wait for
            buffers = tokenizer.token_buffers(request, limit=limit, max_model_len=max_len)
        elif request.body_bytes <= budget * BYTES_PER_TOKEN or request.truncation is not None:
            buffers = await self._away(
                request, lambda: tokenizer.token_buffers(request, limit=limit, max_model_len=max_len), tenant
            )
        else:
            buffers, left_out = await self._away(
                request, lambda: tokenizer.leading_tokens(request, limit=limit, budget_tokens=budget), tenant
            )
        known = _count(buffers)
        if known > budget:
            left_out += known - budget
            known = budget
            buffers = _beginning(buffers, budget)
        degraded, why = None, ""
        if left_out:
            degraded = PromptTooLargeError.reason
            why = f"only the first {known} of about {known + left_out} tokens are looked up"
        elif request.truncation is not None and kept_tokens(request.truncation, max_model_len=max_len) is None:
            degraded = TRUNCATION_UNKNOWN
            why = "the prompt is to be cut to the model's context length, which is not known here"
        return PromptTokens(
            prompts=tuple([TokenizedPrompt(tokens=tokens) for tokens in buffers]),
            estimated_tokens=known + left_out + (estimated_tokens(rest) if rest else 0),
            degraded=degraded,
            degraded_why=why,
        )


def load_tokenizer(model: ServedModel) -> ModelTokenizer:
    """Load one model's tokenizer as its pods do; raise TokenizerError or ChatTemplateError."""
    if model.tokenizer_folder is None:
        raise TokenizerError(f"the model {model.name!r} has no tokenizer folder: give `tokenizer` in its settings")
    return ModelTokenizer.load(
        model.tokenizer_folder,
        chat_template=model.chat_template,
        chat_template_kwargs=model.chat_template_kwargs,
    )


def _count(buffers: Sequence[bytes]) -> int:
    return sum(map(len, buffers)) // TOKEN_BYTES


def _beginning(buffers: tuple[bytes, ...], budget_tokens: int) -> tuple[bytes, ...]:
    kept: list[bytes] = []
    for tokens in buffers:
        left = budget_tokens - _count(kept)
        if left > 0:
            kept.append(tokens[: left * TOKEN_BYTES])
    return tuple(kept)


def _sent_by_client(request: InferenceRequest, model: ServedModel, limit: int) -> tuple[bytes, ...]:
    """Return the token ids that the client sent. Raise NoTokenizerError for other prompts: they need a tokenizer."""
    buffers = tuple([prompt.token_bytes for prompt in request.prompts[:limit] if isinstance(prompt, TokenPrompt)])
    if not isinstance(request.prompts[0], TokenPrompt):  # all are of one kind
        raise NoTokenizerError(f"there is no tokenizer for the model {model.name!r} here")
    if request.truncation is None:
        return buffers
    keep, side = kept_tokens(request.truncation, max_model_len=model.max_model_len), request.truncation.side
    return buffers if keep is None else tuple([cut_tokens(tokens, keep=keep, side=side) for tokens in buffers])


def _predicted(
    request: InferenceRequest, body: bytes | None, *, model: ServedModel, adapter: str | None, reason: str, why: str
) -> PromptTokens:
    """Predict from the first prompt's text only: a batch's other prompts rarely share a prefix with later requests."""
    prompts = request.prompts
    if not prompts and body is not None and len(body) <= MAX_READ_AGAIN_BYTES:
        found = prompt_in_body(body)
        prompts = () if found is None else (found,)
    if not prompts:
        return PromptTokens(degraded=reason, degraded_why=why, estimated_tokens=request.body_bytes // BYTES_PER_TOKEN)
    salt = request.cache_salt
    if salt is not None:
        salt = salt.encode("utf-8", "replace").decode()  # for vLLM, a lone surrogate is no valid salt
    root = root_key(hash_seed=TEXT_SEED, model=model.name, lora=adapter, cache_salt=salt)
    chunks, tokens = chunk_text(prompts[0], root=root)
    return PromptTokens(
        chunks=chunks,
        chunk_tokens=CHUNK_TOKENS,
        estimated_tokens=tokens + estimated_tokens(prompts[1:]),
        degraded=reason,
        degraded_why=why,
    )

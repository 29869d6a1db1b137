"""What the picker can know of a request's prompts: tokens from a tokenizer or a pod, else chunks of text that predict.

Small prompts are tokenized at once, large ones one after another in one thread. Nothing here fails a request: what
cannot be known is named in the answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from extproc.errors import ChatTemplateError, PromptTokensError, PromptTooLargeError, TokenizerError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts.pod_render import PodRender
from extproc.prompts.text_chunks import BYTES_PER_TOKEN, CHUNK_TOKENS, chunk_text, estimated_tokens, prompt_in_body
from extproc.prompts.token_ids import (
    NO_PROMPT,
    TOKEN_BYTES,
    PromptTokens,
    TokenizedPrompt,
    cut_tokens,
    kept_tokens,
)
from extproc.prompts.token_watch import TokenSource, TokenWatch
from extproc.prompts.tokenizer import ModelTokenizer
from extproc.requests.long_work import LongWork, LongWorkError
from extproc.requests.request import InferenceRequest, TokenPrompt
from kvmesh.blocks.block_keys import root_key

_T = TypeVar("_T")

TEXT_SEED = "kvmesh-text-chunks"  # of the roots of text chunks: never those of blocks
TRUNCATION_UNKNOWN = "truncation-unknown"
NO_TOKENIZER = "no-tokenizer"
UNSUPPORTED = "prompt-unsupported"
POD_MAY_KNOW = frozenset((NO_TOKENIZER, UNSUPPORTED, ChatTemplateError.reason))
MAX_READ_AGAIN_BYTES = 4 << 20  # of a body that is only read for its text: some milliseconds


class NoTokenizerError(PromptTokensError):
    """Nothing in this process knows the model's tokens."""

    reason: ClassVar[str] = NO_TOKENIZER


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSettings:
    """Limits of tokenizing in this process."""

    budget_tokens: int = 500_000  # of one request: what is beyond is not looked up
    # a million tokens take fastokens some 50 ms; only a body made to hurt takes longer than this
    timeout_seconds: float = 2.0
    max_waiting: int = 8  # large prompts of a tenant


class PromptTokenSource:
    """The tokens of every model that is served here."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        render: PodRender | None = None,
        settings: TokenSettings | None = None,
        load: Callable[[ServedModel], ModelTokenizer] | None = None,
        long_work: LongWork | None = None,
        watch: TokenWatch | None = None,
    ) -> None:
        """Load the tokenizers; raise TokenizerError or ChatTemplateError naming the file that is unusable.

        `load` may have them already. `long_work` is a thread that others share; who made it closes it.
        `watch` counts where tokens come from.
        """
        self._settings = settings or TokenSettings()
        self._render = render
        self._watch = watch or TokenWatch()
        load = load or load_tokenizer
        self._tokenizers = {model.name: load(model) for model in models if model.tokens_from is TokensFrom.TOKENIZER}
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
        """Return what can be known of the first `limit` prompts; `tenant` waits for the thread, if it is needed.

        `body` is what the pod will get, its content encoding undone: a render endpoint is asked with it. `adapter` (a
        LoRA name) keeps text chunks apart; block keys get it from their root. Raise TokenizerError for a model with a
        tokenizer that was not among those of the constructor, and nothing else.
        """
        if not request.prompts and request.unsupported_reason is None:
            return NO_PROMPT
        tokenizer = self._tokenizer(model)
        reason, why = UNSUPPORTED, request.unsupported_reason or ""
        if request.prompts:
            try:
                tokens = await self._tokenized(request, tokenizer, model, limit=limit, tenant=tenant)
                self._watch.took(model.name, TokenSource.CLIENT if tokenizer is None else TokenSource.FOLDER)
                return tokens
            except PromptTokensError as error:
                reason, why = error.reason, str(error)
        may_ask = reason in POD_MAY_KNOW and model.tokens_from is not TokensFrom.TEXT
        # what a pod keeps it does not render
        if body is not None and self._render and may_ask and request.kept_response is None:
            try:
                rendered = await self._render.prompts(request, body, model=model, limit=limit)
                self._watch.took(model.name, TokenSource.PODS)
                total = _count([prompt.tokens for prompt in rendered]) + estimated_tokens(request.prompts[limit:])
                return PromptTokens(prompts=rendered, estimated_tokens=total)
            except PromptTokensError as error:
                reason, why = (error.reason, str(error)) if reason == NO_TOKENIZER else (reason, f"{why}; {error}")
        predicted = _predicted(request, body, model=model, adapter=adapter, reason=reason, why=why)
        if predicted.chunks:
            self._watch.took(model.name, TokenSource.TEXT, why=why)
        return predicted

    def close(self) -> None:
        """Take nothing new; what is under way ends by itself."""
        if self._owns_long_work:
            self._long_work.close()

    @property
    def tokenizers(self) -> Mapping[str, ModelTokenizer]:
        """Return the tokenizers that are loaded, by model."""
        return self._tokenizers

    def engines(self) -> dict[str, str]:
        """Return the tokenizer library by model, for pages and logs."""
        return {name: tokenizer.engine for name, tokenizer in self._tokenizers.items()}

    async def _away(self, request: InferenceRequest, tokenize: Callable[[], _T], tenant: str) -> _T:
        """Tokenize in the thread; raise PromptTooLargeError when it takes too long or too many wait."""
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
            return self._tokenizers[model.name]
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
        """Return the tokens that this process can make, as many as the budget allows. Raise PromptTokensError."""
        budget, left_out, max_len = self._settings.budget_tokens, 0, model.max_model_len
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
            estimated_tokens=known + left_out + estimated_tokens(request.prompts[limit:]),
            degraded=degraded,
            degraded_why=why,
        )


def load_tokenizer(model: ServedModel) -> ModelTokenizer:
    """Load one model's tokenizer as its pods use it; raise TokenizerError or ChatTemplateError."""
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
    """Return the first tokens of the buffers, as many as the budget allows in all."""
    kept: list[bytes] = []
    for tokens in buffers:
        left = budget_tokens - _count(kept)
        if left > 0:
            kept.append(tokens[: left * TOKEN_BYTES])
    return tuple(kept)


def _sent_by_client(request: InferenceRequest, model: ServedModel, limit: int) -> tuple[bytes, ...]:
    """Return the token ids that the client sent, which need no tokenizer. Raise NoTokenizerError for any other."""
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
    """Predict from the first prompt's text; the others of a batch have little in common with the next batch anyway."""
    prompts = request.prompts
    if not prompts and body is not None and len(body) <= MAX_READ_AGAIN_BYTES:
        found = prompt_in_body(body)
        prompts = () if found is None else (found,)
    if not prompts:
        return PromptTokens(degraded=reason, degraded_why=why, estimated_tokens=request.body_bytes // BYTES_PER_TOKEN)
    salt = request.cache_salt
    if salt is not None:
        salt = salt.encode("utf-8", "replace").decode()  # half of a surrogate pair is no salt for vLLM
    root = root_key(hash_seed=TEXT_SEED, model=model.name, lora=adapter, cache_salt=salt)
    chunks, tokens = chunk_text(prompts[0], root=root)
    return PromptTokens(
        chunks=chunks,
        chunk_tokens=CHUNK_TOKENS,
        estimated_tokens=tokens + estimated_tokens(prompts[1:]),
        degraded=reason,
        degraded_why=why,
    )

"""The picker itself in virtual time: the path of `extproc.pick`, on inputs that are never late."""

from collections.abc import Sequence
from typing import Any

from bench.overload.load import PATH, TENANT_HEADER, body_of
from bench.overload.refusable_http import Answer
from bench.overload.script import Request
from bench.overload.virtual_pods import MODEL, Texts, VirtualPods
from bench.overload.virtual_pool import VirtualPool
from bench.routing.one_cache import BLOCK_TOKENS, block_keys
from extproc.errors import PickError
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pick import pick
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, IndexHits, PromptKeys
from extproc.prompts.tokenized_prompt import PromptTokens, TokenizedPrompt
from extproc.requests.request import InferenceRequest

REQUEST_NUMBER = "x-request-number"
TOKEN_BYTES = 4


class VirtualPicker:
    """One replica of the picker."""

    def __init__(self, pods: VirtualPods, policy: PickPolicy, *, seed: int) -> None:
        self._pods = pods
        self._pool = VirtualPool(
            list(pods.pods),
            endpoints=pods,
            prompts=_Tokens(pods.texts),
            index=_Caches(pods),
            policy=policy,
            models=ModelTable(served=(ServedModel(name=MODEL, tokens_from=TokensFrom.RENDER),)),
            clock=pods.clock,
            seed=seed,
        )
        self.books = self._pool.books

    def close(self) -> None:
        """Let nothing wait any more."""
        self._pool.close()

    async def ask(self, request: Request, answer: Answer) -> None:
        """One request from its arrival at the gateway to its last token."""
        facts = RequestFacts(
            method="POST",
            path=PATH,
            objective=request.class_name,
            request_id=str(request.number),
            headers={TENANT_HEADER: request.tenant, "content-type": "application/json"},
        )
        try:
            exchange = await pick(facts, body_of(MODEL, request), self._pool.runtime)
        except PickError as refusal:
            answer.status = refusal.status
            answer.headers = {"x-kvmesh-reason": refusal.reason, **refusal.headers}
            if refusal.retry_after_seconds is not None:
                answer.headers = {"retry-after": str(refusal.retry_after_seconds), **answer.headers}
            return
        address = exchange.endpoints[0]
        answer.headers = exchange.response_headers

        def responded() -> None:
            exchange.responded(status=200, served_by=address, from_pod=True)

        try:
            await self._pods.answer(address, request, answer, responded=responded)
        finally:
            exchange.finish()


class _Caches:
    """The index: it looks into the pods' caches, and is never late."""

    def __init__(self, pods: VirtualPods) -> None:
        self._pods = pods
        self._states = dict.fromkeys(pods.pods, LIVE)

    async def lookup(self, prompts: Sequence[TokenizedPrompt], **_: Any) -> IndexHits:
        (prompt,) = prompts
        tokens = list(memoryview(prompt.tokens).cast("I"))
        hits, keys = self._pods.cached_blocks(tokens), block_keys(tokens)
        packed = b"".join(key.to_bytes(8, "little") for key in keys)
        return IndexHits(
            prompts=(hits,), keys=(PromptKeys(keys=packed, tokens_each=BLOCK_TOKENS),), states=self._states
        )


class _Tokens:
    """The tokenizer."""

    def __init__(self, texts: Texts) -> None:
        self._texts = texts

    async def prompts(self, request: InferenceRequest, body: bytes | None, **_: Any) -> PromptTokens:  # noqa: ARG002
        (text,) = request.prompts
        tokens = self._texts.tokens(text.text)  # type: ignore[union-attr]
        packed = b"".join(token.to_bytes(TOKEN_BYTES, "little") for token in tokens)
        return PromptTokens(prompts=(TokenizedPrompt(tokens=packed),), estimated_tokens=len(tokens))

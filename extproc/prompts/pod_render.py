"""Asks a vLLM pod for a prompt's tokens: POST …/render, which knows media and all formats, else POST /tokenize.

Every question has a deadline, so a slow pod costs a prediction, never a request. Pods that refuse, are away or too slow
are left alone for a while. Answers are cached by the body's digest.

A pod may answer anything: an answer is as long as its request can make it, and it is read in steps (`page_turns`).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import xxhash

from extproc.errors import MalformedRequestError, PromptTokensError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts import pod_tokenize
from extproc.prompts.pod_answers import RenderAnswerError, read_refusal, read_render_answer, read_tokenize_answer
from extproc.prompts.token_ids import TokenizedPrompt
from extproc.requests.json_edit import replace_top_level
from extproc.requests.request import ApiKind, InferenceRequest
from kvmesh.pods.http_response import HttpResponseError
from kvmesh.pods.page_steps import Steps
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_http import PodPages

log = logging.getLogger(__name__)

RENDER_PATHS = {
    ApiKind.CHAT_COMPLETIONS: "/v1/chat/completions/render",
    ApiKind.COMPLETIONS: "/v1/completions/render",
    ApiKind.RESPONSES: "/v1/responses/render",
    ApiKind.MESSAGES: "/v1/messages/render",
}
# the pod then answers with hashes and places only, not with megabytes of pixels (the second is the older name)
NO_PIXELS = {"mm_payload": b'"none"', "return_mm_kwargs": b"false"}
PODS_TRIED = 2  # one that has just gone away must not cost the tokens
MAX_ANSWER_BYTES = 8 << 20  # about a million tokens
# of a prompt without media: what templates add, and the digits of a token for each byte of the request
ANSWER_BYTES, ANSWER_BYTES_A_BYTE = 1 << 19, 12
TURNS_SHARE = 0.5  # of a core, for reading long answers: clients wait for them
TOKENIZE_IS_WRONG = (
    "the pods count other prompt tokens than their /tokenize says; it is not asked until the pods change"
)
CONNECTIONS_KEPT = 4  # to each pod


class RenderUnavailableError(PromptTokensError):
    """No pod renders this now: none does at all, all are away or asked enough."""

    reason: ClassVar[str] = "render-unavailable"


class RenderTimeoutError(PromptTokensError):
    """The pod did not answer within the deadline."""

    reason: ClassVar[str] = "render-timeout"


class RenderRefusedError(PromptTokensError):
    """The pod will not have this request, so it would not serve it either."""

    reason: ClassVar[str] = "render-refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """Limits of asking pods for tokens."""

    timeout_seconds: float = 0.5  # all of it, a second pod included; the client waits for it
    media_timeout_seconds: float = 2.0  # the pod fetches the media first
    max_body_bytes: int = 32 << 20  # larger ones are not sent twice
    max_under_way: int = 16
    cache_bytes: int = 32 << 20
    cache_seconds: float = 300.0  # harmony prompts carry the date
    retry_seconds: float = 5.0  # a pod that was away or too slow is left alone so long
    disabled_seconds: float = 120.0  # one that has no render endpoint


class _Cached(NamedTuple):
    prompts: tuple[TokenizedPrompt, ...]
    size: int  # bytes
    until: float


class _Question(NamedTuple):
    """What a pod is asked, and how its answer is read."""

    path: str
    body: bytes
    read: Callable[[bytes], Steps[tuple[TokenizedPrompt, ...]]]
    has_media: bool

    @property
    def longest_answer(self) -> int:
        """In bytes: a prompt without media has no more tokens than its request makes."""
        return (
            MAX_ANSWER_BYTES
            if self.has_media
            else min(ANSWER_BYTES + ANSWER_BYTES_A_BYTE * len(self.body), MAX_ANSWER_BYTES)
        )


class _Resting(NamedTuple):
    """Why a pod is not asked, and until when."""

    until: float
    why: str


class PodRender:
    """Token ids from the pods. `endpoints` names those that serve a model now (host:port); they take turns."""

    def __init__(
        self,
        *,
        endpoints: Callable[[ServedModel], Sequence[str]],
        settings: RenderSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._endpoints = endpoints
        self._settings = settings or RenderSettings()
        self._clock = clock
        self._pages = PodPages(most_kept=CONNECTIONS_KEPT)
        self._turns = PageTurns(share=TURNS_SHARE)
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._cached_bytes = 0
        self._resting: dict[tuple[str, str], _Resting] = {}  # by address and path
        self._kept: frozenset[str] = frozenset()  # endpoints
        self._tokenized: set[str] = set()  # models whose prompts came from /tokenize
        self._distrusted: set[str] = set()  # of these: it is not asked any more
        self._turn = 0
        self._under_way = 0

    async def prompts(
        self, request: InferenceRequest, body: bytes, *, model: ServedModel, limit: int
    ) -> tuple[TokenizedPrompt, ...]:
        """Return the first `limit` prompts as a pod renders exactly this body.

        Raise RenderUnavailableError, RenderTimeoutError or RenderRefusedError.
        """
        is_distrusted = model.name in self._distrusted
        questions = list(_questions(request, body, model, may_tokenize=not is_distrusted))
        if not questions or len(body) > self._settings.max_body_bytes:
            raise RenderUnavailableError(
                "the body is too large to be sent twice" if questions else f"pods do not render {request.api.value}"
            )
        key = xxhash.xxh3_128_digest(f"{model.name}\0{request.api.value}\0".encode() + body)
        prompts = self._cached(key)
        if prompts is None:
            try:
                prompts = await self._asked(questions, model, request)
            except RenderUnavailableError as error:
                raise RenderUnavailableError(f"{TOKENIZE_IS_WRONG}; {error}") if is_distrusted else error from None
            self._put(key, prompts)
        return prompts[:limit]

    def problems(self) -> dict[str, str]:
        """Return why pods are not asked now, by endpoint."""
        now = self._clock()
        return {address: rest.why for (address, _), rest in self._resting.items() if rest.until > now}

    def distrust_tokenize(self, model: str) -> None:
        """Ask no /tokenize for this model until other endpoints are kept: what it said has not come true.

        Nothing changes for a model whose prompts never came from there.
        """
        if model in self._tokenized and model not in self._distrusted:
            self._distrusted.add(model)
            self._cache.clear()
            self._cached_bytes = 0
            log.warning("prompts of the model %s: %s", model, TOKENIZE_IS_WRONG)

    def keep(self, endpoints: Iterable[str]) -> frozenset[str]:
        """Let go of all other endpoints: they are gone. Return the models whose /tokenize may be asked again."""
        kept = frozenset(endpoints)
        self._pages.keep(kept)
        if kept == self._kept:
            return frozenset()
        again, self._kept = frozenset(self._distrusted), kept
        self._distrusted.clear()
        self._tokenized.clear()
        return again

    def close(self) -> None:
        """Close the connections."""
        self._pages.close()

    async def _asked(
        self, questions: Sequence[_Question], model: ServedModel, request: InferenceRequest
    ) -> tuple[TokenizedPrompt, ...]:
        settings = self._settings
        if self._under_way >= settings.max_under_way:
            raise RenderUnavailableError(f"{self._under_way} other prompts wait for a pod to render them")
        seconds = settings.media_timeout_seconds if request.has_media else settings.timeout_seconds
        self._under_way += 1
        whys: list[str] = []
        asked = "", ""
        try:
            async with asyncio.timeout(seconds):
                for question in questions:
                    try:
                        addresses = self._awake(model, question.path)
                    except RenderUnavailableError as error:
                        whys.append(str(error))
                        continue
                    for address in addresses[:PODS_TRIED]:  # at the deadline, the last one asked is the slow one
                        asked = address, question.path
                        prompts = await self._ask(address, question)
                        if prompts is not None:
                            if question.path == pod_tokenize.PATH:
                                self._tokenized.add(model.name)
                            return prompts
        except TimeoutError:
            if not request.has_media:  # fetching media says nothing of the pod
                self._rest(asked, settings.retry_seconds, f"no answer within {seconds:g} s")
            raise RenderTimeoutError(f"{asked[0]} did not render the prompt within {seconds:g} s") from None
        finally:
            self._under_way -= 1
        whys += [f"{name}: {why}" for name, why in sorted(self.problems().items())[:3]]
        raise RenderUnavailableError(
            "; ".join(dict.fromkeys(whys)) or f"{request.model!r} is not on the pods that were asked"
        )

    def _awake(self, model: ServedModel, path: str) -> list[str]:
        """Return the pods to ask, another one first each time."""
        now = self._clock()
        known = self._endpoints(model)
        rests = {address: rest for address in known if (rest := self._resting.get((address, path))) is not None}
        awake = [address for address in known if address not in rests or rests[address].until <= now]
        if not awake:
            whys = {rest.why for rest in rests.values()}
            raise RenderUnavailableError("; ".join(sorted(whys)[:3]) or f"no pod serves {model.name!r} now")
        self._turn += 1
        first = self._turn % len(awake)
        return awake[first:] + awake[:first]

    async def _ask(self, address: str, question: _Question) -> tuple[TokenizedPrompt, ...] | None:
        """Return what one pod says; None if another should be asked. Raise RenderRefusedError."""
        soon, late = self._settings.retry_seconds, self._settings.disabled_seconds
        path, body, most = question.path, question.body, question.longest_answer
        try:
            # our caller sets the deadline
            answer = await self._pages.post(address, path, body, timeout_seconds=None, max_body_bytes=most)
            status = answer.status
            if status == 200:
                return await self._turns.read(question.read(answer.body))
            if status == 404 and "does not exist" in read_refusal(answer.body):
                return None  # it knows the path, not the model: an adapter that another pod may have
        except (HttpResponseError, OSError) as error:
            rest = soon, f"not reached: {str(error) or type(error).__name__}"
        except RenderAnswerError as error:
            rest = late, str(error)
        else:
            if status == 403:
                rest = late, "render is not enabled: start vLLM with --enable-scale-out"
            elif status == 401:
                rest = late, "wants an API key (--api-key), and the picker has none"
            elif status in (404, 405, 501):
                rest = late, f"has no {path} (status {status}): vLLM is too old"
            elif status >= 500:
                rest = soon, f"answered {path} with status {status}"
            else:
                # its text may repeat the prompt: the client gets it from the pod, the log and the pages do not
                raise RenderRefusedError(f"{address} answered {path} with status {status}")
        self._rest((address, path), *rest)
        return None

    def _rest(self, asked: tuple[str, str], seconds: float, why: str) -> None:
        """Leave a pod alone; logged once for each reason, not for each request."""
        now = self._clock()
        before = self._resting.get(asked)
        if before is None or before.why != why:
            log.warning("endpoint renders no prompts: %s", why, extra={"endpoint": asked[0]})
        # pods come and go: forget those of long ago
        self._resting = {name: rest for name, rest in self._resting.items() if rest.until > now - 10 * seconds}
        self._resting[asked] = _Resting(now + seconds, why)

    def _cached(self, key: bytes) -> tuple[TokenizedPrompt, ...] | None:
        cached = self._cache.get(key)
        if cached is None or cached.until <= self._clock():
            return None
        self._cache.move_to_end(key)
        return cached.prompts

    def _put(self, key: bytes, prompts: tuple[TokenizedPrompt, ...]) -> None:
        size = sum(len(prompt.tokens) + 200 * (1 + len(prompt.features)) for prompt in prompts)
        old = self._cache.pop(key, None)
        self._cached_bytes += size - (old.size if old is not None else 0)
        self._cache[key] = _Cached(prompts, size, self._clock() + self._settings.cache_seconds)
        while self._cached_bytes > self._settings.cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.size


def _questions(
    request: InferenceRequest, body: bytes, model: ServedModel, *, may_tokenize: bool
) -> Iterator[_Question]:
    """Yield what may be asked, the more knowing path first; what a folder cannot do, /tokenize cannot, either."""
    path = RENDER_PATHS.get(request.api)
    if path is not None:
        yield _Question(path, _without_pixels(request, body), read_render_answer, request.has_media)
    plain = None
    if may_tokenize and model.tokens_from is TokensFrom.AUTO and not pod_tokenize.renders_in_code(request, model):
        plain = pod_tokenize.tokenize_body(request, body)
    if plain is not None:
        yield _Question(pod_tokenize.PATH, plain, read_tokenize_answer, has_media=False)


def _without_pixels(request: InferenceRequest, body: bytes) -> bytes:
    if not request.has_media or request.api not in (ApiKind.CHAT_COMPLETIONS, ApiKind.MESSAGES):
        return body
    try:
        return replace_top_level(body, NO_PIXELS)
    except MalformedRequestError:
        return body  # the pod says what is wrong with it

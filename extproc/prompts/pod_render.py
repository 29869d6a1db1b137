"""Asks a vLLM pod for a prompt's tokens: POST …/render, which handles media and all formats, else POST /tokenize.

Every question has a deadline, so a slow pod costs a prediction, never a request. Pods that fail, are unreachable or too
slow are not asked for a while. Answers are cached by the body's digest and dropped when their pod may have changed.
vLLM reads its tokenizer, template and flags at process start. So a pod may have changed when it is gone, is a new
process, or starts or stops answering a path.

Pods are not trusted: an answer's length is bounded by its request's, and it is read in steps (`page_turns`).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import xxhash

from extproc.errors import MalformedRequestError, PromptTokensError
from extproc.models.models import ServedModel, TokensFrom
from extproc.prompts import pod_tokenize
from extproc.prompts.pod_tokenize import RenderAnswerError, read_refusal, read_render_answer, read_tokenize_answer
from extproc.prompts.tokenized_prompt import TokenizedPrompt
from extproc.requests.json_edit import replace_top_level
from extproc.requests.request import ApiKind, InferenceRequest
from kvmesh.pods.http_response import HttpResponseError
from kvmesh.pods.page_steps import Steps
from kvmesh.pods.page_turns import PageTurns
from kvmesh.pods.pod_access import FORBIDDEN, UNAUTHORIZED
from kvmesh.pods.pod_http import PodPages
from kvmesh.pods.pod_key import PodKey

log = logging.getLogger(__name__)

RENDER_PATHS = {
    ApiKind.CHAT_COMPLETIONS: "/v1/chat/completions/render",
    ApiKind.COMPLETIONS: "/v1/completions/render",
    ApiKind.RESPONSES: "/v1/responses/render",
    ApiKind.MESSAGES: "/v1/messages/render",
}
# the pod then answers with hashes and positions only, not megabytes of pixels (the second is the older name)
NO_PIXELS = {"mm_payload": b'"none"', "return_mm_kwargs": b"false"}
PODS_TRIED = 2  # a pod that has just gone must not cost the tokens
MAX_ANSWER_BYTES = 8 << 20  # about a million tokens
# of a prompt without media: a constant for the template, and the digits of one token per byte of the request
ANSWER_BYTES, ANSWER_BYTES_A_BYTE = 1 << 19, 12
TURNS_SHARE = 0.5  # of a core, for reading long answers: clients wait for them
CONNECTIONS_KEPT = 4  # to each pod
NOT_IMPLEMENTED = 501


class RenderUnavailableError(PromptTokensError):
    """No pod renders this now: none can, all are unreachable or resting, or too many questions are under way."""

    reason: ClassVar[str] = "render-unavailable"


class RenderTimeoutError(PromptTokensError):
    """The pod did not answer within the deadline."""

    reason: ClassVar[str] = "render-timeout"


class RenderRefusedError(PromptTokensError):
    """The pod refuses this request, so it would not serve it either."""

    reason: ClassVar[str] = "render-refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderSettings:
    """Limits of asking pods for tokens."""

    timeout_seconds: float = 0.5  # in total, including a second pod; the client waits for it
    media_timeout_seconds: float = 2.0  # the pod fetches the media first
    max_body_bytes: int = 32 << 20  # larger bodies are not sent twice
    max_under_way: int = 16
    cache_bytes: int = 32 << 20
    cache_seconds: float = 300.0  # harmony prompts carry the date
    retry_seconds: float = 5.0  # pause after a pod was unreachable or too slow
    disabled_seconds: float = 120.0  # pause for a pod without the endpoint


class _Cached(NamedTuple):
    prompts: tuple[TokenizedPrompt, ...]
    size: int  # bytes
    until: float
    address: str  # of the pod that gave the answer


class _Answer(NamedTuple):
    prompts: tuple[TokenizedPrompt, ...]
    address: str  # of the pod


class _NoAnswer(NamedTuple):
    """Why a pod gave no answer, and how long not to ask it (seconds)."""

    why: str
    seconds: float
    is_able: bool | None = None  # False if it does not serve this path at all


class _Question(NamedTuple):
    path: str
    body: bytes
    read: Callable[[bytes], Steps[tuple[TokenizedPrompt, ...]]]
    has_media: bool

    @property
    def longest_answer(self) -> int:
        """Bytes. Without media, the length of the request bounds the number of tokens."""
        return (
            MAX_ANSWER_BYTES
            if self.has_media
            else min(ANSWER_BYTES + ANSWER_BYTES_A_BYTE * len(self.body), MAX_ANSWER_BYTES)
        )


class _Resting(NamedTuple):
    until: float
    why: str


class PodRender:
    """Token ids from the pods. `endpoints` returns the pods that serve a model now (host:port), asked in rotation."""

    def __init__(
        self,
        *,
        endpoints: Callable[[ServedModel], Sequence[str]],
        settings: RenderSettings | None = None,
        doubts: Mapping[str, str] | None = None,
        is_sglang: Callable[[str], bool] = lambda _: False,
        clock: Callable[[], float] = time.monotonic,
        key: PodKey | None = None,
    ) -> None:
        """`doubts`: the models whose folder is distrusted; `is_sglang` is asked for an address."""
        self._endpoints = endpoints
        self._settings = settings or RenderSettings()
        self._doubts = {} if doubts is None else doubts
        self._is_sglang = is_sglang
        self._clock = clock
        self._pages = PodPages(most_kept=CONNECTIONS_KEPT, key=key)
        self._shows_key = key is not None
        self._turns = PageTurns(share=TURNS_SHARE)
        self._cache: OrderedDict[bytes, _Cached] = OrderedDict()
        self._cached_bytes = 0
        self._changes = 0  # counts cache drops: an answer requested before a drop is not cached
        self._resting: dict[tuple[str, str], _Resting] = {}  # by address and path
        self._able: dict[tuple[str, str], bool] = {}  # by address and path: whether the pod serves the path
        self._turn = 0
        self._under_way = 0

    async def prompts(
        self, request: InferenceRequest, body: bytes, *, model: ServedModel, limit: int
    ) -> tuple[TokenizedPrompt, ...]:
        """Return the first `limit` prompts as a pod renders exactly this body.

        Raise RenderUnavailableError, RenderTimeoutError or RenderRefusedError.
        """
        questions = list(self._questions(request, body, model))
        if not questions or len(body) > self._settings.max_body_bytes:
            why = "the body is too large to be sent twice" if questions else f"pods do not render {request.api.value}"
            raise RenderUnavailableError(why)
        key = xxhash.xxh3_128_digest(f"{model.name}\0{request.api.value}\0".encode() + body)
        cached = self._cached(key)
        if cached is not None:
            return cached.prompts[:limit]
        changes = self._changes
        answer = await self._asked(questions, model, request)
        if changes == self._changes:
            self._put(key, answer)
        return answer.prompts[:limit]

    async def ask_one(
        self, address: str, request: InferenceRequest, body: bytes, *, model: ServedModel
    ) -> TokenizedPrompt | None:
        """Return one pod's tokens of one prompt now, or None if it refuses such a prompt.

        For comparisons: nothing is cached, and a failure does not pause the pod. Raise RenderUnavailableError.
        """
        whys: list[str] = []
        questions = self._questions(request, body, model, anything=True)
        for question in sorted(questions, key=lambda each: each.path != pod_tokenize.PATH):
            try:
                async with asyncio.timeout(self._settings.timeout_seconds):
                    answer = await self._answer(address, question)
            except RenderRefusedError:
                return None
            except TimeoutError:
                raise RenderUnavailableError(f"no answer within {self._settings.timeout_seconds:g} s") from None
            if isinstance(answer, tuple) and not isinstance(answer, _NoAnswer):
                return answer[0] if answer else None
            whys.append(f"{question.path} does not know the model" if answer is None else answer.why)
        raise RenderUnavailableError("; ".join(whys) or f"pods do not render {request.api.value}")

    def problems(self) -> dict[str, str]:
        """Return why pods are not asked now, by endpoint."""
        now = self._clock()
        return {address: rest.why for (address, _), rest in self._resting.items() if rest.until > now}

    def is_another(self, address: str) -> None:
        """Drop a pod's answers and pauses: it is a new process now, perhaps with another model."""
        self._resting = {name: rest for name, rest in self._resting.items() if name[0] != address}
        self._able = {name: able for name, able in self._able.items() if name[0] != address}
        self._drop(lambda cached: cached.address == address)

    def keep(self, endpoints: Iterable[str]) -> None:
        """Drop all other endpoints and their answers: they are gone."""
        kept = frozenset(endpoints)
        self._pages.keep(kept)
        self._able = {name: able for name, able in self._able.items() if name[0] in kept}
        self._drop(lambda cached: cached.address not in kept)

    def close(self) -> None:
        """Close the connections."""
        self._pages.close()

    def _questions(
        self, request: InferenceRequest, body: bytes, model: ServedModel, *, anything: bool = False
    ) -> Iterator[_Question]:
        """Yield the possible questions, the more capable path first; with `anything`, always also /tokenize.

        /tokenize cannot help where the folder's tokenizer failed; it is asked only if the folder is distrusted.
        """
        path = RENDER_PATHS.get(request.api)
        if path is not None:
            yield _Question(path, _without_pixels(request, body), read_render_answer, request.has_media)
        if pod_tokenize.renders_in_code(request, model) or not (anything or self._may_tokenize(model)):
            return
        plain = pod_tokenize.tokenize_body(request, body)
        if plain is not None:
            yield _Question(pod_tokenize.PATH, plain, read_tokenize_answer, has_media=False)

    def _may_tokenize(self, model: ServedModel) -> bool:
        if model.tokens_from is TokensFrom.TOKENIZER:
            return model.name in self._doubts
        return model.tokens_from is TokensFrom.AUTO

    async def _asked(self, questions: Sequence[_Question], model: ServedModel, request: InferenceRequest) -> _Answer:
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
                    refusal = None
                    for address in addresses[:PODS_TRIED]:  # at the deadline, the last pod asked is the slow one
                        asked = address, question.path
                        try:
                            prompts = await self._ask(address, question)
                        except RenderRefusedError as error:  # one pod may be wrong
                            refusal = error
                            continue
                        if prompts is not None:
                            return _Answer(prompts, address)
                    if refusal is not None:
                        raise refusal
        except TimeoutError:
            if not request.has_media:  # slow media say nothing about the pod
                self._rest(asked, settings.retry_seconds, f"no answer within {seconds:g} s")
            raise RenderTimeoutError(f"{asked[0]} did not render the prompt within {seconds:g} s") from None
        finally:
            self._under_way -= 1
        whys += [f"{name}: {why}" for name, why in sorted(self.problems().items())[:3]]
        raise RenderUnavailableError(
            "; ".join(dict.fromkeys(whys)) or f"{request.model!r} is not on the pods that were asked"
        )

    def _awake(self, model: ServedModel, path: str) -> list[str]:
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
        """Return one pod's answer, or None to try another pod. Raise RenderRefusedError."""
        asked = address, question.path
        if question.path == pod_tokenize.PATH and self._is_sglang(address):
            question = question._replace(body=replace_top_level(question.body, pod_tokenize.UNREAD_BY_SGLANG))
        answer = await self._answer(address, question)
        if not isinstance(answer, _NoAnswer):
            self._notice(asked, is_able=True)
            return answer
        if answer.is_able is not None:
            self._notice(asked, is_able=answer.is_able)
        self._rest(asked, answer.seconds, answer.why)
        return None

    async def _answer(self, address: str, question: _Question) -> tuple[TokenizedPrompt, ...] | _NoAnswer | None:
        """Return None if it does not know the model; raise RenderRefusedError. The caller sets the deadline."""
        soon, late = self._settings.retry_seconds, self._settings.disabled_seconds
        path, body, most = question.path, question.body, question.longest_answer
        try:
            answer = await self._pages.post(address, path, body, timeout_seconds=None, max_body_bytes=most)
            status = answer.status
            if status == 200:
                return await self._turns.read(question.read(answer.body))
            if status == 404 and "does not exist" in read_refusal(answer.body):
                return None  # the path exists but not the model: an adapter that another pod may have
        except (HttpResponseError, OSError) as error:
            return _NoAnswer(f"not reached: {str(error) or type(error).__name__}", soon)
        except RenderAnswerError as error:
            return _NoAnswer(str(error), late)
        if (unable := self._unable(status, path)) is not None:
            return unable
        # its text may repeat the prompt: the client gets it from the pod, but logs and pages must not
        raise RenderRefusedError(f"{address} answered {path} with status {status}")

    def _unable(self, status: int, path: str) -> _NoAnswer | None:
        """Return why a pod does not serve a path at all, or None if it refused only this request."""
        soon, late = self._settings.retry_seconds, self._settings.disabled_seconds
        if status == UNAUTHORIZED:  # the key file may soon have a new key, so ask again soon
            return _NoAnswer(f"{path}: {self._pages.why_refused(status)}", soon if self._shows_key else late)
        if status == FORBIDDEN:
            return _NoAnswer("render is not enabled: start vLLM with --enable-scale-out", late, is_able=False)
        if status in (404, 405, NOT_IMPLEMENTED):
            return _NoAnswer(f"has no {path} (status {status}): vLLM is too old", late, is_able=False)
        return _NoAnswer(f"answered {path} with status {status}", soon) if status >= 500 else None

    def _notice(self, asked: tuple[str, str], *, is_able: bool) -> None:
        """Drop a pod's answers when it starts or stops serving a path: it was restarted with other flags."""
        if self._able.get(asked, is_able) is not is_able:
            self._drop(lambda cached: cached.address == asked[0])
        self._able[asked] = is_able

    def _rest(self, asked: tuple[str, str], seconds: float, why: str) -> None:
        now = self._clock()
        before = self._resting.get(asked)
        if before is None or before.why != why:
            log.warning("endpoint renders no prompts: %s", why, extra={"endpoint": asked[0]})
        # pods come and go: forget long expired pauses
        self._resting = {name: rest for name, rest in self._resting.items() if rest.until > now - 10 * seconds}
        self._resting[asked] = _Resting(now + seconds, why)

    def _cached(self, key: bytes) -> _Cached | None:
        cached = self._cache.get(key)
        if cached is None or cached.until <= self._clock():
            return None
        self._cache.move_to_end(key)
        return cached

    def _put(self, key: bytes, answer: _Answer) -> None:
        size = sum(len(prompt.tokens) + 200 * (1 + len(prompt.features)) for prompt in answer.prompts)
        old = self._cache.pop(key, None)
        self._cached_bytes += size - (old.size if old is not None else 0)
        until = self._clock() + self._settings.cache_seconds
        self._cache[key] = _Cached(answer.prompts, size, until, answer.address)
        while self._cached_bytes > self._settings.cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= dropped.size

    def _drop(self, concerns: Callable[[_Cached], bool]) -> None:
        """Drop these cached answers. Do not cache any answer under way either: its origin is not known yet."""
        self._changes += 1
        self._cache = OrderedDict((key, cached) for key, cached in self._cache.items() if not concerns(cached))
        self._cached_bytes = sum(cached.size for cached in self._cache.values())


def _without_pixels(request: InferenceRequest, body: bytes) -> bytes:
    if not request.has_media or request.api not in (ApiKind.CHAT_COMPLETIONS, ApiKind.MESSAGES):
        return body
    try:
        return replace_top_level(body, NO_PIXELS)
    except MalformedRequestError:
        return body  # the pod reports the error

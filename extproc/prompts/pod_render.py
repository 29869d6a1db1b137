"""Asks a vLLM pod for a prompt's tokens (POST …/render), for media and formats that only the pod knows.

Every question has a deadline, so a slow pod costs a prediction, never a request. Pods that refuse, are away or too slow
are left alone for a while. Answers are cached by the body's digest. Their format is `GenerateRequest` of vLLM 0.32
(vllm/entrypoints/scale_out/token_in_token_out/protocol.py); completions answer a list, one for each prompt.

A pod may answer anything: an answer is as long as its request can make it, and it is read in steps (`page_turns`).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec
import xxhash

from extproc.errors import MalformedRequestError, PromptTokensError
from extproc.models.models import ServedModel
from extproc.prompts.token_ids import TOKEN_BYTES, Feature, TokenizedPrompt
from extproc.requests.json_edit import replace_top_level
from extproc.requests.request import ApiKind, InferenceRequest, TokenPrompt
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
MAX_PARTS = 1 << 14  # objects in an answer: prompts, and places of media
STEP_BYTES = 1 << 16  # of token ids read between two turns of the event loop
TURNS_SHARE = 0.5  # of a core, for reading long answers: clients wait for them
MAX_IDENTIFIER_CHARACTERS = 256  # of a medium: vLLM's are 64 hex digits, clients may give others
MAX_COVER = 4  # times, that media may cover a prompt: sound and video share their places
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
        self._turn = 0
        self._under_way = 0

    async def prompts(
        self, request: InferenceRequest, body: bytes, *, model: ServedModel, limit: int
    ) -> tuple[TokenizedPrompt, ...]:
        """Return the first `limit` prompts as a pod renders exactly this body.

        Raise RenderUnavailableError, RenderTimeoutError or RenderRefusedError.
        """
        path = RENDER_PATHS.get(request.api)
        if path is None or len(body) > self._settings.max_body_bytes:
            raise RenderUnavailableError(
                f"pods do not render {request.api.value}" if path is None else "the body is too large to be sent twice"
            )
        key = xxhash.xxh3_128_digest(f"{model.name}\0{path}\0".encode() + body)
        prompts = self._cached(key)
        if prompts is None:
            prompts = await self._asked(path, _without_pixels(request, body), model, request)
            self._put(key, prompts)
        return prompts[:limit]

    def problems(self) -> dict[str, str]:
        """Return why pods are not asked now, by endpoint."""
        now = self._clock()
        return {address: rest.why for (address, _), rest in self._resting.items() if rest.until > now}

    def keep(self, endpoints: Iterable[str]) -> None:
        """Let go of all other endpoints: they are gone."""
        self._pages.keep(endpoints)

    def close(self) -> None:
        """Close the connections."""
        self._pages.close()

    async def _asked(
        self, path: str, body: bytes, model: ServedModel, request: InferenceRequest
    ) -> tuple[TokenizedPrompt, ...]:
        settings = self._settings
        addresses = self._awake(model, path)
        if self._under_way >= settings.max_under_way:
            raise RenderUnavailableError(f"{self._under_way} other prompts wait for a pod to render them")
        seconds = settings.media_timeout_seconds if request.has_media else settings.timeout_seconds
        self._under_way += 1
        asked = addresses[0]
        try:
            async with asyncio.timeout(seconds):
                for asked in addresses[:PODS_TRIED]:  # at the deadline, the last one asked is the slow one
                    prompts = await self._ask(asked, path, body, has_media=request.has_media)
                    if prompts is not None:
                        return prompts
        except TimeoutError:
            if not request.has_media:  # fetching media says nothing of the pod
                self._rest((asked, path), settings.retry_seconds, f"no answer within {seconds:g} s")
            raise RenderTimeoutError(f"{asked} did not render the prompt within {seconds:g} s") from None
        finally:
            self._under_way -= 1
        whys = "; ".join(f"{name}: {why}" for name, why in sorted(self.problems().items())[:3])
        raise RenderUnavailableError(whys or f"{request.model!r} is not on the pods that were asked")

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

    async def _ask(
        self, address: str, path: str, body: bytes, *, has_media: bool
    ) -> tuple[TokenizedPrompt, ...] | None:
        """Return what one pod says; None if another should be asked. Raise RenderRefusedError."""
        soon, late = self._settings.retry_seconds, self._settings.disabled_seconds
        most = MAX_ANSWER_BYTES if has_media else min(ANSWER_BYTES + ANSWER_BYTES_A_BYTE * len(body), MAX_ANSWER_BYTES)
        try:
            # our caller sets the deadline
            answer = await self._pages.post(address, path, body, timeout_seconds=None, max_body_bytes=most)
            status = answer.status
            if status == 200:
                return await self._turns.read(read_render_answer(answer.body))
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


def _without_pixels(request: InferenceRequest, body: bytes) -> bytes:
    if not request.has_media or request.api not in (ApiKind.CHAT_COMPLETIONS, ApiKind.MESSAGES):
        return body
    try:
        return replace_top_level(body, NO_PIXELS)
    except MalformedRequestError:
        return body  # the pod says what is wrong with it


# --- what pods answer; unknown fields are skipped unread --------------------------------------------------------------


class RenderAnswerError(ValueError):
    """The answer is not what vLLM's render endpoint gives."""


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw  # a list of numbers
    features: _Features | None = None


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | None = None
    message: str = ""  # older versions have no `error` around it


_ANSWER = msgspec.json.Decoder(_Rendered | list[_Rendered])
_REFUSAL = msgspec.json.Decoder(_Refusal)
_IDS = msgspec.json.Decoder(list[int])


def read_render_answer(body: bytes) -> Steps[tuple[TokenizedPrompt, ...]]:
    """Return the prompts of a 200 answer. Raise RenderAnswerError."""
    if body.count(b"{") > MAX_PARTS:
        raise RenderAnswerError(f"its answer has more than {MAX_PARTS} parts")
    try:
        answer = _ANSWER.decode(body)
        yield
        prompts: list[TokenizedPrompt] = []
        for rendered in answer if isinstance(answer, list) else [answer]:
            tokens = yield from _packed(bytes(rendered.token_ids))
            features = () if rendered.features is None else _features(rendered.features, len(tokens) // TOKEN_BYTES)
            prompts.append(TokenizedPrompt(tokens=tokens, features=features))
        return tuple(prompts)
    except RenderAnswerError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise RenderAnswerError(f"not an answer of vLLM's render endpoint: {error}") from error


def read_refusal(body: bytes) -> str:
    """Return the message of a 4xx or 5xx answer, shortened; "" if it has none."""
    try:
        refusal = _REFUSAL.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return (refusal.error.message if refusal.error is not None else refusal.message)[:200]


def _packed(ids: bytes) -> Steps[bytes]:
    """Return a list of token ids as little-endian uint32, read piece by piece."""
    if not ids.startswith(b"[") or len(ids) <= STEP_BYTES:
        return TokenPrompt.of(_IDS.decode(ids)).token_bytes
    packed: list[bytes] = []
    begin, size = 1, len(ids) - 1  # between the brackets
    while begin < size:
        end = ids.find(b",", begin + STEP_BYTES, size)
        end = size if end < 0 else end
        packed.append(TokenPrompt.of(_IDS.decode(b"[%b]" % ids[begin:end])).token_bytes)
        begin = end + 1
        yield
    return b"".join(packed)


def _features(features: _Features, tokens: int) -> tuple[Feature, ...]:
    """Return the media of a prompt of so many tokens, in the order of their places, as the engine hashes them."""
    found: list[Feature] = []
    covered = 0
    for kind, identifiers in features.mm_hashes.items():
        places = features.mm_placeholders.get(kind, [])
        if len(places) != len(identifiers):
            raise RenderAnswerError(f"{len(identifiers)} hashes but {len(places)} places of kind {kind[:40]!r}")
        for identifier, place in zip(identifiers, places, strict=True):
            if place.offset < 0 or place.length < 0 or place.offset + place.length > tokens:
                raise RenderAnswerError(f"an item of kind {kind[:40]!r} stands beyond the prompt's {tokens} tokens")
            if len(identifier) > MAX_IDENTIFIER_CHARACTERS:
                raise RenderAnswerError(f"an item has a name of more than {MAX_IDENTIFIER_CHARACTERS} characters")
            covered += place.length
            found.append(Feature(identifier=identifier, first_token=place.offset, length=place.length))
    if covered > MAX_COVER * tokens:
        raise RenderAnswerError("its media cover the prompt again and again")
    return tuple(sorted(found, key=lambda feature: feature.first_token))

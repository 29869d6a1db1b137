"""The HTTP API of one pod: the routes, and every endpoint that does not generate text.

The server passes each request to `PodApi.handle`. Answers and errors have the form of vLLM 0.32's API server.
"""

import asyncio
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from podsim.answering import answer_chat, answer_completion, request_id
from podsim.errors import EngineDeadError, MalformedRequestError, RequestRefusedError, ScaleOutDisabledError
from podsim.model_folder import ModelFolder
from podsim.pod import Pod
from podsim.prompts import bounded_prompt, chat_token_ids, completion_token_ids, limits_for
from podsim.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    check_chat,
    check_completion,
    check_model,
    check_template_use,
    decode_body,
)
from podsim.wire.openai_responses import VLLM_VERSION, encode_json, error_body

_READ_TIMEOUT_SECONDS = 60.0
_GUARDED = ("/v1", "/v2", "/inference", "/cohere")  # by --api-key (vllm/entrypoints/serve/middleware/authenticate.py)
_JSON = "application/json"
_SAMPLING_DEFAULTS = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop_token_ids": [],
    "output_kind": 2,
    "skip_clone": True,
    "bad_words": [],
    "skip_reading_prefix_cache": False,
}

_Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class PodApi:
    """Dispatches the requests to one pod."""

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._created = int(pod.metrics.started_at)
        self._in_flight = 0
        scale_out = pod.settings.scale_out
        self._routes: dict[str, tuple[str, _Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/chat/completions/render": ("POST", self._render_chat if scale_out else _refuse_scale_out),
            "/v1/completions/render": ("POST", self._render_completion if scale_out else _refuse_scale_out),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/reset_prefix_cache": ("POST", self._reset_prefix_cache),
            "/v1/models": ("GET", self._models),
            "/kv_event_sources": ("GET", self._kv_event_sources),
            "/metrics": ("GET", self._metrics),
            "/health": ("GET", self._health),
            "/ping": ("GET", self._health),
            "/version": ("GET", self._version),
            "/load": ("GET", self._load),
        }
        if not pod.settings.tokenizes:
            del self._routes["/tokenize"]

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; a refused one gets vLLM's error object."""
        if not self._lets_in(request):
            return _json({"error": "Unauthorized"}, status=401)
        route = self._routes.get(request.path)
        if route is None:
            return _json({"detail": "Not Found"}, status=404)
        method, handler = route
        if request.method != method:
            return _json({"detail": "Method Not Allowed"}, status=405)
        try:
            return await handler(request)
        except RequestRefusedError as error:
            return web.Response(body=error_body(error), status=error.http_status, content_type=_JSON)

    def _lets_in(self, request: web.BaseRequest) -> bool:
        keys = self._pod.settings.api_keys
        if not keys or request.method == "OPTIONS" or not request.path.startswith(_GUARDED):
            return True
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return scheme.lower() == "bearer" and any(secrets.compare_digest(key.encode(), each.encode()) for each in keys)

    async def _chat(self, request: web.BaseRequest) -> web.StreamResponse:
        self._in_flight += 1
        try:
            body = decode_body(await _body(request), ChatRequest)
            return await self._answer(answer_chat(self._pod, request, body), body)
        finally:
            self._in_flight -= 1

    async def _completion(self, request: web.BaseRequest) -> web.StreamResponse:
        self._in_flight += 1
        try:
            body = decode_body(await _body(request), CompletionRequest)
            return await self._answer(answer_completion(self._pod, request, body), body)
        finally:
            self._in_flight -= 1

    async def _answer(
        self, answer: Awaitable[web.StreamResponse], body: ChatRequest | CompletionRequest
    ) -> web.StreamResponse:
        if not body.kv_transfer_params:
            return await answer
        try:
            return await answer
        except EngineDeadError:
            raise  # a dead engine tells the prefill pod nothing
        except RequestRefusedError:
            self._pod.reject_kv(body.kv_transfer_params)
            raise
        except asyncio.CancelledError:  # a streamed answer has begun by then
            if not body.stream:
                self._pod.reject_kv(body.kv_transfer_params)
            raise

    async def _render_chat(self, request: web.BaseRequest) -> web.StreamResponse:
        body = decode_body(await _body(request), ChatRequest)
        check_chat(body)
        check_model(body, served=self._model)
        token_ids = chat_token_ids(
            body, folder=self._folder, model=self._model, encode=self._folder.encode_by_reference
        )
        return _json(self._generate_request(body, token_ids, request_id=f"chatcmpl-{request_id(request, body)}"))

    async def _render_completion(self, request: web.BaseRequest) -> web.StreamResponse:
        body = decode_body(await _body(request), CompletionRequest)
        prompt = check_completion(body)
        check_model(body, served=self._model)
        prompts = completion_token_ids(
            prompt,
            add_special_tokens=body.add_special_tokens is not False,
            folder=self._folder,
            encode=self._folder.encode_by_reference,
        )
        base_id = f"cmpl-{request_id(request, body)}"
        ids = [base_id] if len(prompts) == 1 else [f"{base_id}-{index}" for index in range(len(prompts))]
        return _json(
            [
                self._generate_request(body, token_ids, request_id=one)
                for one, token_ids in zip(ids, prompts, strict=True)
            ]
        )

    def _generate_request(
        self, body: ChatRequest | CompletionRequest, token_ids: list[int], *, request_id: str
    ) -> dict[str, Any]:
        longest = self._pod.settings.max_model_len
        token_ids = bounded_prompt(token_ids, request=body, max_model_len=longest)
        limits = limits_for(body, prompt_tokens=len(token_ids), max_model_len=longest)
        return {
            "request_id": request_id,
            "token_ids": token_ids,
            "token_offsets": None,
            "features": None,
            "content_parts": None,
            "sampling_params": {
                **_SAMPLING_DEFAULTS,
                "stop": body.stop_strings,
                # vLLM's encoder leaves out what equals its default
                **({} if limits.max_tokens == 16 else {"max_tokens": limits.max_tokens}),
            },
            "model": body.model,
            "reasoning_ended": None,
            "reasoning_parser_kwargs": None,
            "return_token_ids": None,
            "output_mode": "tokens",
            "stream": bool(body.stream),
            "stream_options": body.stream_options if body.stream else None,
            "cache_salt": body.cache_salt,
            "priority": body.priority,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
        }

    async def _tokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        body = decode_body(await _body(request), TokenizeRequest)
        encode = self._folder.encode_by_reference
        if body.prompt is not None:
            check_model(body, served=self._model)
            token_ids = encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
        elif body.messages is not None:
            check_template_use(body)
            check_model(body, served=self._model)
            token_ids = chat_token_ids(body, folder=self._folder, model=self._model, encode=encode)
        else:
            raise MalformedRequestError("Field required", location="body.prompt", kind="missing")
        token_strs = None
        if body.return_token_strs:
            token_strs = [self._folder.tokenizer.id_to_token(token_id) for token_id in token_ids]
        return _json(
            {
                "count": len(token_ids),
                "max_model_len": self._pod.settings.max_model_len,
                "tokens": token_ids,
                "token_strs": token_strs,
            }
        )

    async def _detokenize(self, request: web.BaseRequest) -> web.StreamResponse:
        body = decode_body(await _body(request), DetokenizeRequest)
        check_model(body, served=self._model)
        return _json({"prompt": self._folder.decode(body.tokens)})

    async def _reset_prefix_cache(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"success": self._pod.reset_prefix_cache()})

    async def _models(self, _: web.BaseRequest) -> web.StreamResponse:
        permission = {
            "id": f"modelperm-{os.urandom(8).hex()}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": str(self._folder.path),
            "parent": None,
            "max_model_len": self._pod.settings.max_model_len,
            "permission": [permission],
        }
        return _json({"object": "list", "data": [card]})

    async def _kv_event_sources(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"0": self._pod.publisher.config()})

    async def _metrics(self, _: web.BaseRequest) -> web.StreamResponse:
        text = self._pod.metrics.render(self._pod.engine_state())
        if self._pod.kv_transfer is not None:
            text += self._pod.kv_transfer.render_metrics()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=1.0.0; charset=utf-8"})

    async def _health(self, _: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    async def _version(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"version": VLLM_VERSION})

    async def _load(self, _: web.BaseRequest) -> web.StreamResponse:
        return _json({"server_load": self._in_flight})

    @property
    def _folder(self) -> ModelFolder:
        return self._pod.folder

    @property
    def _model(self) -> str:
        return self._pod.settings.model


async def _refuse_scale_out(_: web.BaseRequest) -> web.StreamResponse:
    raise ScaleOutDisabledError


async def _body(request: web.BaseRequest) -> bytes:
    media_type = request.headers.get("Content-Type", "").lower().partition(";")[0].strip()
    if media_type != _JSON:
        raise RequestRefusedError(
            "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed",
            error_type="Bad Request",
        )
    async with asyncio.timeout(_READ_TIMEOUT_SECONDS):
        return await request.read()


def _json(content: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=encode_json(content), status=status, content_type=_JSON)

"""Answers chat and text completions for one pod, either whole or as a stream of server-sent events.

The API calls these. If a request ends early, its generations are aborted, so a client that disconnects frees its slot
and its blocks.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from podsim.errors import GenerationFailedError, RequestRefusedError
from podsim.pod import Pod, Ticket
from podsim.prompts import bounded_prompt, chat_token_ids, completion_token_ids, limits_for
from podsim.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    check_chat,
    check_completion,
    check_model,
)
from podsim.wire.openai_responses import (
    STREAM_END,
    Choice,
    ChunkWriter,
    Envelope,
    Usage,
    chat_answer,
    completion_answer,
    encode_json,
    error_event,
)

_WRITE_TIMEOUT_SECONDS = 60.0  # for a client that does not read


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """One accepted request: n tickets for each prompt, in the order of their choices."""

    body: ChatRequest | CompletionRequest
    envelope: Envelope
    prompts: Sequence[list[int]]
    echoes: Sequence[str]  # what precedes each prompt's answers
    tickets: Sequence[Ticket]
    block_size: int

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatRequest)

    def prompt_index(self, choice: int) -> int:
        return choice // (len(self.tickets) // len(self.prompts))

    def usage(self, *, streamed: bool) -> Usage:
        """Return the counts summed over all prompts and choices; cached tokens are one prompt's only, as in vLLM."""
        ticket = self.tickets[0 if streamed else -1]
        told = ticket.generation
        full_blocks = told.prompt_tokens // self.block_size * self.block_size
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.prompts),
            completion_tokens=sum(ticket.generation.produced for ticket in self.tickets),
            cached_tokens=ticket.cached_tokens,
            created_cache_tokens=max(0, full_blocks - told.cached_tokens) if self.chat else None,
        )

    def kv_transfer_params(self) -> dict[str, Any] | None:
        """Return the parameters of the first prompt's last choice, as in vLLM; leases free the others' blocks."""
        return self.tickets[len(self.tickets) // len(self.prompts) - 1].kv_transfer_params

    def choice(self, index: int) -> Choice:
        answer, ids = self.tickets[index].answer, self.body.return_token_ids
        prompt = self.prompt_index(index)
        return Choice(
            index=index,
            text=self.echoes[prompt] + "".join(answer.pieces),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if ids else None,
            prompt_token_ids=self.prompts[prompt] if ids else None,
        )


async def answer_chat(pod: Pod, request: web.BaseRequest, body: ChatRequest) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    check_chat(body)
    check_model(body, served=pod.settings.model)
    prompt = chat_token_ids(body, folder=pod.folder, model=pod.settings.model, encode=pod.folder.encode)
    return await _answer(pod, request, body, prompts=[prompt], base_id=f"chatcmpl-{request_id(request, body)}")


async def answer_completion(pod: Pod, request: web.BaseRequest, body: CompletionRequest) -> web.StreamResponse:
    """POST /v1/completions."""
    prompt = check_completion(body)
    check_model(body, served=pod.settings.model)
    prompts = completion_token_ids(
        prompt,
        add_special_tokens=body.add_special_tokens is not False,
        folder=pod.folder,
        encode=pod.folder.encode,
    )
    return await _answer(pod, request, body, prompts=prompts, base_id=f"cmpl-{request_id(request, body)}")


async def _answer(
    pod: Pod,
    request: web.BaseRequest,
    body: ChatRequest | CompletionRequest,
    *,
    prompts: Sequence[list[int]],
    base_id: str,
) -> web.StreamResponse:
    longest = pod.settings.max_model_len
    prompts = [bounded_prompt(prompt, request=body, max_model_len=longest) for prompt in prompts]
    limits = [limits_for(body, prompt_tokens=len(prompt), max_model_len=longest) for prompt in prompts]
    pod.check_admission(len(prompts) * (body.n or 1))
    tickets = [
        pod.submit(
            prompt,
            limit,
            choice=choice,
            cache_salt=body.cache_salt,
            reports_hits=body.reports_cache_hits,
            streamed=bool(body.stream),
            kv_transfer_params=body.kv_transfer_params,
            request_id=_engine_id(body, base_id, prompt=number, choice=choice) if body.kv_transfer_params else "",
        )
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        for choice in range(body.n or 1)
    ]
    echo = isinstance(body, CompletionRequest) and body.echo
    exchange = _Exchange(
        body=body,
        envelope=Envelope(request_id=base_id, created=int(time.time()), model=pod.settings.model),
        prompts=prompts,
        echoes=[pod.folder.decode(prompt) if echo else "" for prompt in prompts],
        tickets=tickets,
        block_size=pod.settings.engine.block_size,
    )
    try:
        return await (_stream(exchange, request) if body.stream else _collect(exchange))
    finally:
        for ticket in tickets:
            pod.abort(ticket)


async def _collect(exchange: _Exchange) -> web.Response:
    for ticket in exchange.tickets:
        await ticket.progress(0)
    choices = [exchange.choice(index) for index in range(len(exchange.tickets))]
    answer = chat_answer if exchange.chat else completion_answer
    content = answer(
        exchange.envelope,
        choices,
        exchange.usage(streamed=False),
        kv_transfer_params=exchange.kv_transfer_params(),
    )
    return web.Response(body=encode_json(content), content_type="application/json")


async def _stream(exchange: _Exchange, request: web.BaseRequest) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    writer = ChunkWriter(exchange.envelope, chat=exchange.chat)
    options = exchange.body.stream_options
    tail = STREAM_END
    try:
        if len(exchange.tickets) == 1:
            await _stream_choice(exchange, 0, writer=writer, response=response)
        else:
            async with asyncio.TaskGroup() as streams:
                for index in range(len(exchange.tickets)):
                    streams.create_task(
                        _stream_choice(exchange, index, writer=writer, response=response), name=f"choice-{index}"
                    )
    except* GenerationFailedError as failures:
        [failure, *_] = failures.exceptions
        assert isinstance(failure, RequestRefusedError)
        tail = error_event(failure) + tail
    else:
        if options is not None and options.include_usage:
            tail = writer.usage(exchange.usage(streamed=True)) + tail
    await _write(response, tail)
    await response.write_eof()
    return response


async def _stream_choice(exchange: _Exchange, index: int, *, writer: ChunkWriter, response: web.StreamResponse) -> None:
    body, ticket = exchange.body, exchange.tickets[index]
    options, answer, ids = body.stream_options, ticket.answer, body.return_token_ids
    prompt = exchange.prompts[exchange.prompt_index(index)]
    continuous = options is not None and options.include_usage and options.continuous_usage_stats
    includes_usage = options is not None and options.include_usage
    text_before = exchange.echoes[exchange.prompt_index(index)]
    chunks: list[bytes] = []
    if exchange.chat:
        usage = _counts(prompt, 0) if continuous else None
        chunks.append(writer.role(index, usage=usage, prompt_token_ids=prompt if ids else None))
    try:
        seen = await ticket.progress(0)
    except GenerationFailedError:
        await _write(response, b"".join(chunks))
        raise
    written = 0
    while True:
        for position in range(written, seen):
            last = position == len(answer.token_ids) - 1
            chunks.append(
                writer.delta(
                    index,
                    text_before + answer.pieces[position],
                    choice=exchange.choice(index) if last else None,
                    token_ids=[answer.token_ids[position]] if ids else None,
                    prompt_token_ids=prompt if ids and position == 0 else None,
                    usage=_counts(prompt, position + 1) if continuous else None,
                    fingerprint=last and not includes_usage,
                )
            )
            text_before = ""
        written = seen
        await _write(response, b"".join(chunks))
        if ticket.finished and written == len(answer.token_ids):
            return
        chunks = []
        seen = await ticket.progress(written)


def request_id(request: web.BaseRequest, body: ChatRequest | CompletionRequest) -> str:
    """Return the id that the client sent in the header X-Request-Id or in the body, or else a random one."""
    given = request.headers.get("X-Request-Id", "")
    # as vLLM's server reads headers, so that any bytes can be answered in JSON
    return given.encode("utf-8", "surrogateescape").decode("latin-1") or body.request_id or os.urandom(8).hex()


def _engine_id(body: ChatRequest | CompletionRequest, base_id: str, *, prompt: int, choice: int) -> str:
    """Return the id that vLLM's engine would give to one generation; it ends in random digits."""
    told = base_id if isinstance(body, ChatRequest) else f"{base_id}-{prompt}"
    drawn = f"{told}-{os.urandom(4).hex()}"
    return drawn if (body.n or 1) == 1 else f"{choice}_{drawn}"


def _counts(prompt: Sequence[int], completion_tokens: int) -> Usage:
    return Usage(prompt_tokens=len(prompt), completion_tokens=completion_tokens, cached_tokens=0)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    async with asyncio.timeout(_WRITE_TIMEOUT_SECONDS):
        await response.write(data)

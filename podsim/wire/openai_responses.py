"""Answers of vLLM's OpenAI-compatible API: every key that vLLM 0.32 writes, in its order.

The server calls this with what the engine produced. Stream chunks are formatted directly as bytes, since there is one
per token and client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from podsim.errors import RequestRefusedError

VLLM_VERSION = "0.32.0"
SYSTEM_FINGERPRINT = f"vllm-{VLLM_VERSION}-podsim"
STREAM_END = b"data: [DONE]\n\n"

encode_json = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request. `created_cache_tokens` is None where vLLM does not report it (completions)."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_cache_tokens: int | None = None

    def as_object(self) -> dict[str, Any]:
        """Return the `usage` of an answer that is not streamed."""
        return {
            **self.as_counts(),
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "created_cache_tokens": self.created_cache_tokens,
                "multimodal_tokens": None,
            },
            "completion_tokens_details": None,
        }

    def as_stream_object(self) -> dict[str, Any]:
        """Return the `usage` of a stream's last chunk, without nulls."""
        details = {"cached_tokens": self.cached_tokens}
        if self.created_cache_tokens is not None:
            details["created_cache_tokens"] = self.created_cache_tokens
        return {**self.as_counts(), "prompt_tokens_details": details}

    def as_counts(self) -> dict[str, Any]:
        """Return only the three sums, as in chunks with continuous usage."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One finished generation. Token ids are given only if the client asked for them."""

    index: int
    text: str
    finish_reason: str
    stop_reason: str | None
    token_ids: Sequence[int] | None = None
    prompt_token_ids: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields that all answers and chunks of one request share."""

    request_id: str
    created: int  # unix seconds
    model: str


def chat_answer(
    envelope: Envelope,
    choices: Sequence[Choice],
    usage: Usage,
    *,
    kv_transfer_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the body of a chat completion."""
    return {
        "id": envelope.request_id,
        "object": "chat.completion",
        "created": envelope.created,
        "model": envelope.model,
        "choices": [_chat_choice(choice) for choice in choices],
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": usage.as_object(),
        "prompt_logprobs": None,
        "prompt_token_ids": choices[0].prompt_token_ids,
        "prompt_text": None,
        "kv_transfer_params": kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }


def completion_answer(
    envelope: Envelope,
    choices: Sequence[Choice],
    usage: Usage,
    *,
    kv_transfer_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the body of a text completion."""
    return {
        "id": envelope.request_id,
        "object": "text_completion",
        "created": envelope.created,
        "model": envelope.model,
        "choices": [_completion_choice(choice) for choice in choices],
        "service_tier": None,
        "system_fingerprint": SYSTEM_FINGERPRINT,
        "usage": usage.as_object(),
        "kv_transfer_params": kv_transfer_params,
        "ec_transfer_params": None,
        "metrics": None,
    }


class ChunkWriter:
    """Writes the server-sent events of one stream, as chat chunks if `chat` is set, else as completion chunks."""

    def __init__(self, envelope: Envelope, *, chat: bool) -> None:
        self._chat = chat
        kind = b"chat.completion.chunk" if chat else b"text_completion"
        self._head = b'data: {"id":%b,"object":"%b","created":%d,"model":%b,"choices":[' % (
            encode_json(envelope.request_id),
            kind,
            envelope.created,
            encode_json(envelope.model),
        )

    def role(self, index: int, *, usage: Usage | None, prompt_token_ids: Sequence[int] | None) -> bytes:
        """Return the first chunk of a chat choice."""
        return (
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b,'
            b'"prompt_token_ids":%b,"prompt_text":null}\n\n'
            % (self._head, index, _usage_member(usage, chat=True), encode_json(prompt_token_ids))
        )

    def delta(  # one per token: formatted in one go
        self,
        index: int,
        text: str,
        *,
        choice: Choice | None = None,
        token_ids: Sequence[int] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        usage: Usage | None = None,
        fingerprint: bool = False,
    ) -> bytes:
        """Return a chunk of text; `choice` is given in the last one and tells how the generation ended."""
        finish = b"null" if choice is None else encode_json(choice.finish_reason)
        stop = b"null" if choice is None else encode_json(choice.stop_reason)
        ids = b"null" if token_ids is None else encode_json(token_ids)
        tail = b',"system_fingerprint":%b' % encode_json(SYSTEM_FINGERPRINT) if fingerprint else b""
        if self._chat:
            stop_member = b"" if choice is None else b',"stop_reason":%b' % stop
            return (
                b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":%b%b,"token_ids":%b}]%b%b}\n\n'
                % (
                    self._head,
                    index,
                    encode_json(text),
                    finish,
                    stop_member,
                    ids,
                    _usage_member(usage, chat=True),
                    tail,
                )
            )
        return (
            b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b,'
            b'"prompt_token_ids":%b,"token_ids":%b}]%b%b}\n\n'
            % (
                self._head,
                index,
                encode_json(text),
                finish,
                stop,
                encode_json(prompt_token_ids),
                ids,
                _usage_member(usage, chat=False),
                tail,
            )
        )

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that ends a stream with `include_usage`."""
        return b'%b],"usage":%b,"system_fingerprint":%b}\n\n' % (
            self._head,
            encode_json(usage.as_stream_object()),
            encode_json(SYSTEM_FINGERPRINT),
        )


def error_event(error: RequestRefusedError) -> bytes:
    """Return the chunk of a stream that fails."""
    return b"data: %b\n\n" % error_body(error)


def error_body(error: RequestRefusedError) -> bytes:
    """Return vLLM's error object."""
    return encode_json(
        {
            "error": {
                "message": error.message,
                "type": error.error_type,
                "param": error.param,
                "code": error.http_status,
            }
        }
    )


def _usage_member(usage: Usage | None, *, chat: bool) -> bytes:
    if usage is None:
        return b""
    counts = usage.as_counts()
    return b',"usage":%b' % encode_json({**counts, "completion_tokens_details": None} if chat else counts)


def _chat_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {
            "role": "assistant",
            "content": choice.text,
            "refusal": None,
            "annotations": None,
            "audio": None,
            "function_call": None,
            "reasoning": None,
        },
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "routed_experts": None,
    }


def _completion_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
        "token_ids": choice.token_ids,
        "prompt_logprobs": None,
        "prompt_token_ids": choice.prompt_token_ids,
        "routed_experts": None,
    }

"""Sessions -> bodies of the OpenAI API. Pure.

A salt is some words at the very beginning of a prompt. Block keys are chained, so that with another salt nothing of it
is in any cache, and it is as long as before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.load.script import Session, Turn

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"

Message = Mapping[str, Any]


def opening(session: Session, *, salt: str) -> tuple[Message, ...]:
    """What a session's chat begins with, before its first turn."""
    return () if session.system is None else ({"role": "system", "content": _salted(session.system, salt)},)


def request_of(
    session: Session, turn: Turn, messages: Sequence[Message], *, model: str, salt: str = ""
) -> tuple[str, dict[str, Any]]:
    """Return the path and the body; `messages` hold the chat so far and this turn."""
    if session.body is not None:
        path, body = _recorded(session.body, salt=salt)
        body.setdefault("model", model)
    else:
        body = {"model": model, "temperature": 0}
        if session.system is None:
            path, body["prompt"] = COMPLETION_PATH, _salted(turn.text, salt)
        else:
            path, body["messages"] = CHAT_PATH, list(messages)
    if "max_completion_tokens" not in body:
        body["max_tokens"] = turn.answer_tokens
    return path, body | {"stream": True, "stream_options": {"include_usage": True}}


def encoded(body: Mapping[str, Any]) -> bytes:
    """The bytes that are sent."""
    return msgspec.json.encode(body)


def _recorded(body: Mapping[str, Any], *, salt: str) -> tuple[str, dict[str, Any]]:
    copy = dict(body)
    if "messages" not in copy:
        copy["prompt"] = _salted(copy["prompt"], salt)
        return COMPLETION_PATH, copy
    first, *others = copy["messages"]
    copy["messages"] = [{**first, "content": _salted(first["content"], salt)}, *others]
    return CHAT_PATH, copy


def _salted(text: str, salt: str) -> str:
    return f"{salt} {text}" if salt else text

"""Sessions -> bodies of the OpenAI API. Pure.

A salt is a few words at the very beginning of a prompt. Block keys are chained, so a prompt with a new salt has no
cache hits anywhere, at the same length.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from operate.load.script import Session, Turn

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"

Message = Mapping[str, Any]


def opening(session: Session, *, salt: str) -> tuple[Message, ...]:
    """Return the messages before the first turn: the system prompt, if any."""
    return () if session.system is None else ({"role": "system", "content": _salted(session.system, salt)},)


def request_of(
    session: Session, turn: Turn, messages: Sequence[Message], *, model: str, salt: str = ""
) -> tuple[str, dict[str, Any]]:
    """Return the path and the body; `messages` are the chat including this turn."""
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

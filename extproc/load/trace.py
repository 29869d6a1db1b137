"""Recorded requests in a file -> sessions. Two forms, one JSON object a line.

Mooncake's traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens) hold no text:
equal leading blocks become equal leading text. Bodies as clients send them (`messages`, or `prompt` as text) may say
`at`, in seconds; without, they come at a rate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

from extproc.errors import ConfigError
from extproc.load.script import Session, Turn
from extproc.load.workloads import Texts

TRACE_BLOCK_TOKENS = 512
LEAST_TEXT_TOKENS = 4
USUAL_ANSWER_TOKENS = 32  # of a body that names no `max_tokens`
MOST_TOKENS = 10_000_000  # of one request; more is nonsense
MOST_SECONDS = 1e12  # as unix times have them


class TraceRow(msgspec.Struct, frozen=True):
    """A request of the trace, as Mooncake publishes it; equal leading `hash_ids` are equal leading blocks."""

    timestamp: float  # ms
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]


class RecordedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body that was sent once, and when: seconds, None where the file does not say."""

    at: float | None
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSize:
    """The Mooncake trace, made smaller: tokens divided, time compressed."""

    times_faster: float = 360  # the hour of the trace in 10 s
    tokens_divisor: int = 8  # 512-token blocks become 64 tokens
    answer_divisor: int = 16
    longest_answer_tokens: int = 48


def read_requests(lines: Iterable[bytes], *, where: str) -> list[TraceRow] | list[RecordedBody]:
    """Return the requests in the order of their times. Raise ConfigError with the line that cannot be used."""
    rows: list[TraceRow] = []
    bodies: list[RecordedBody] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = _object(line)
            if "timestamp" in given:
                rows.append(_row(given))
            else:
                bodies.append(_body(given))
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise ConfigError(f"{where}:{number}: {error}") from error
        if rows and bodies:
            raise ConfigError(f"{where}:{number}: lines of two forms: all need a timestamp, or none")
    if not rows and not bodies:
        raise ConfigError(f"{where}: has no request")
    if rows:
        return sorted(rows, key=lambda row: row.timestamp)
    if len({body.at is None for body in bodies}) > 1:
        raise ConfigError(f"{where}: some lines have `at` and some have not: all need it, or none")
    return sorted(bodies, key=lambda body: body.at or 0.0)


def _object(line: bytes) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(line)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(given, dict):
        raise TypeError("an object is needed, with timestamp and hash_ids, or with messages or prompt")
    return given


def _row(given: Mapping[str, Any]) -> TraceRow:
    row = msgspec.convert(given, TraceRow)
    if not 0 < row.input_length <= MOST_TOKENS or not 0 <= row.output_length <= MOST_TOKENS or not row.hash_ids:
        raise ValueError("input_length must be from 1 on, output_length from 0 on, and hash_ids must not be empty")
    if not isfinite(row.timestamp) or row.timestamp < 0:
        raise ValueError("timestamp must be milliseconds from 0 on")
    return row


def _body(given: Mapping[str, Any]) -> RecordedBody:
    at = given.get("at")
    if at is not None and (isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at <= MOST_SECONDS):
        raise ValueError("at must be seconds from 0 on")
    # what has both is sent as a chat
    if not _is_chat(given) and ("messages" in given or not isinstance(given.get("prompt"), str)):
        raise ValueError("needs messages (at least one, with text as content) or a prompt that is a text")
    return RecordedBody(at=at, body={name: value for name, value in given.items() if name != "at"})


def _is_chat(body: Mapping[str, Any]) -> bool:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        return False
    return isinstance(messages[0].get("content"), str)


def trace_sessions(
    rows: Sequence[TraceRow], size: TraceSize, *, seconds: float, texts: Texts, name: str = "row"
) -> Iterator[Session]:
    """One completion per row; rows that share leading `hash_ids` share that much leading text."""
    block_tokens = TRACE_BLOCK_TOKENS // size.tokens_divisor
    blocks: dict[int, str] = {}
    for number, row in enumerate(rows):
        due = row.timestamp / 1000 / size.times_faster
        if due > seconds:
            return
        ids = row.hash_ids
        for one in ids:
            if one not in blocks:
                blocks[one] = texts.draw(block_tokens)
        tail = row.input_length // size.tokens_divisor - block_tokens * (len(ids) - 1)
        words = blocks[ids[-1]].split(" ")[: max(LEAST_TEXT_TOKENS, tail)]
        text = " ".join([*(blocks[one] for one in ids[:-1]), " ".join(words)])
        answer = min(max(1, row.output_length // size.answer_divisor), size.longest_answer_tokens)
        turn = Turn(due=due, text=text, answer_tokens=answer)
        yield Session(name=f"{name}-{number}", system=None, turns=(turn,))


def recorded_sessions(bodies: Sequence[RecordedBody], dues: Sequence[float]) -> Iterator[Session]:
    """One request per body, sent as it was written down, at the due of its place."""
    for number, (recorded, due) in enumerate(zip(bodies, dues, strict=True)):
        body = recorded.body
        named = body.get("max_completion_tokens", body.get("max_tokens"))
        tokens = named if isinstance(named, int) and named > 0 else USUAL_ANSWER_TOKENS
        turn = Turn(due=due, text=str(body.get("prompt", "")), answer_tokens=tokens)
        yield Session(name=f"line-{number}", system=None, turns=(turn,), body=body)

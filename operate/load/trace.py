"""Converts recorded requests to sessions. A file has one of two forms, with one JSON object per line.

Mooncake traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512-token blocks) hold no text: equal
leading blocks become equal leading text. Request bodies (`messages`, or `prompt` as text) may have `at` in seconds;
without it they are sent at a rate.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import msgspec

from extproc.errors import ConfigError
from operate.load.script import Session, Turn
from operate.load.workloads import Texts

TRACE_BLOCK_TOKENS = 512
LEAST_TEXT_TOKENS = 4
USUAL_ANSWER_TOKENS = 32  # for bodies without `max_tokens`
MOST_TOKENS = 10_000_000  # of one request; sanity check
MOST_SECONDS = 1e12  # covers Unix times


class TraceRow(msgspec.Struct, frozen=True):
    """A request of a Mooncake trace; equal leading `hash_ids` mean equal leading blocks."""

    timestamp: float  # ms
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]


class RecordedBody(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded request body and its time in seconds, or None if the file has no times."""

    at: float | None
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSize:
    """How to shrink a Mooncake trace: token divisors, time compression."""

    times_faster: float = 360  # the hour of the trace in 10 s
    tokens_divisor: int = 8  # 512-token blocks become 64 tokens
    answer_divisor: int = 16
    longest_answer_tokens: int = 48


def read_requests(lines: Iterable[bytes], *, where: str) -> list[TraceRow] | list[RecordedBody]:
    """Return the requests sorted by time. Raise ConfigError naming the invalid line."""
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
    # a body with both messages and prompt is a chat
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
    """Yield one completion per row; rows with common leading `hash_ids` share the corresponding text."""
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
    """Yield one request per body, with the due time at the same position."""
    for number, (recorded, due) in enumerate(zip(bodies, dues, strict=True)):
        body = recorded.body
        named = body.get("max_completion_tokens", body.get("max_tokens"))
        tokens = named if isinstance(named, int) and named > 0 else USUAL_ANSWER_TOKENS
        turn = Turn(due=due, text=str(body.get("prompt", "")), answer_tokens=tokens)
        yield Session(name=f"line-{number}", system=None, turns=(turn,), body=body)

"""Recorded requests -> what comes a second in each slot of time. Reads lines; pure.

Two formats, one JSON object a line: Mooncake's traces (`timestamp` in ms, `input_length`, `output_length`, `hash_ids`
of blocks of 512 tokens), where what began like a request before counts as cached, as with caches without an end; and
the picker's access log (`at`, `prompt_tokens`, `output_tokens`, cached tokens as realised, or as predicted).
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

import msgspec

from extproc.errors import ConfigError
from extproc.scaling.plan import Demand

BLOCK_TOKENS = 512
MOST_TOKENS = 1e8  # of one request; more is nonsense
LEAST_REQUESTS = 10
SLOT_SECONDS = 300.0


class TraceError(ConfigError):
    """A trace that cannot be used."""


class TraceRequest(NamedTuple):
    """One request; `times`: it stands for so many, of a log with a sample."""

    at: float  # seconds
    uncached: float
    cached: float
    output: float | None  # None: not known
    times: float = 1.0


class Slot(NamedTuple):
    """A part of the trace."""

    at: float  # seconds since the first request
    demand: Demand


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace has come to."""

    requests: int
    seconds: float
    slots: Sequence[Slot]
    average: Demand
    prompt_tokens: float  # of the average request, not cached

    @property
    def busiest(self) -> Slot:
        """The slot with most tokens."""
        return max(self.slots, key=lambda slot: (slot.demand.total, -slot.at))


def read_trace(lines: Iterable[bytes], *, where: str) -> list[TraceRequest]:
    """Return the requests in the order of their times. Raise TraceError with the line that cannot be used."""
    found: list[TraceRequest] = []
    seen: set[int] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"{where}:{number}: no JSON: {error}") from error
        if not isinstance(given, dict):
            raise TraceError(f"{where}:{number}: a JSON object is needed, with timestamp and input_length, or at")
        try:
            request = _mooncake(given, seen) if "timestamp" in given else _logged(given)
        except (KeyError, TypeError, ValueError) as error:
            named = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{where}:{number}: {named}") from error
        if request is not None:
            found.append(request)
    if len(found) < LEAST_REQUESTS:
        raise TraceError(f"{where}: has {len(found)} requests; {LEAST_REQUESTS} at least are needed to plan for")
    return sorted(found, key=lambda request: request.at)


def trace_of(requests: Sequence[TraceRequest], *, times: float = 1.0, slot_seconds: float = SLOT_SECONDS) -> Trace:
    """Add up the requests by slots; `times` as many come. The rest of the last slot counts with the one before."""
    first = requests[0].at
    seconds = max(requests[-1].at - first, 1.0)
    count = max(int(seconds // slot_seconds), 1)
    length = [slot_seconds] * (count - 1) + [seconds - slot_seconds * (count - 1)]
    known = [request for request in requests if request.output is not None]
    usual = sum(request.output or 0.0 for request in known) / len(known) if known else 0.0
    sums = [[0.0, 0.0, 0.0] for _ in range(count)]
    weight = 0.0
    for request in requests:
        slot = sums[min(int((request.at - first) // slot_seconds), count - 1)]
        output = usual if request.output is None else request.output
        for kind, tokens in enumerate((request.uncached, request.cached, output)):
            slot[kind] += tokens * request.times * times
        weight += request.times
    slots = [
        Slot(at=slot_seconds * i, demand=Demand(input=each[0], cached=each[1], output=each[2]).times(1.0 / length[i]))
        for i, each in enumerate(sums)
    ]
    whole = [sum(each[kind] for each in sums) for kind in range(3)]
    return Trace(
        requests=len(requests),
        seconds=seconds,
        slots=slots,
        average=Demand(input=whole[0], cached=whole[1], output=whole[2]).times(1.0 / seconds),
        prompt_tokens=whole[0] / times / weight,
    )


def _mooncake(given: Mapping[str, Any], seen: set[int]) -> TraceRequest:
    length = _number(given, "input_length")
    blocks = given.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(isinstance(block, int) for block in blocks):
        raise TypeError("hash_ids must be a list of whole numbers")
    held = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
    seen.update(blocks)
    cached = min(held * BLOCK_TOKENS, max(length - 1.0, 0.0))  # an engine always computes the last token
    return TraceRequest(
        at=_number(given, "timestamp") / 1000.0,
        uncached=length - cached,
        cached=cached,
        output=_number(given, "output_length"),
    )


def _logged(given: Mapping[str, Any]) -> TraceRequest | None:
    """Return a request of the access log; None: its tokens are not known, or the line is none of a request."""
    if not given.get("prompt_tokens"):
        if "at" not in given and "kind" not in given:
            raise KeyError("timestamp")
        return None
    prompt = _number(given, "prompt_tokens")
    cached = given.get("realised_cached_tokens", given.get("predicted_cached_tokens"))
    held = min(_number({"cached tokens": cached}, "cached tokens"), prompt) if cached is not None else 0.0
    share = given.get("share")
    times = 1.0 if share is None else 1.0 / max(_number(given, "share"), 1e-6)
    output = _number(given, "output_tokens") if given.get("output_tokens") is not None else None
    return TraceRequest(at=_number(given, "at"), uncached=prompt - held, cached=held, output=output, times=times)


def _number(given: Mapping[str, Any], name: str) -> float:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a number from 0 on, not {str(value)[:40]!r}")
    if name not in ("timestamp", "at") and value > MOST_TOKENS:
        raise ValueError(f"{name} is {value:g}: more than any request has")
    return float(value)

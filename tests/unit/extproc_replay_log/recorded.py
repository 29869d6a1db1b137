"""Access logs for tests: lines as a picker writes them, of traffic whose truth is known."""

import random
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from extproc.records.access_log import AccessRecord

START = 1_800_000_000.0  # unix seconds
ALONE, STREAM, PROMPT = 0.02, 0.0005, 0.0003  # seconds of a step, a stream, a prompt token


def line(at: float, **fields: Any) -> AccessRecord:
    """Return a request that arrived so many seconds after START and was routed at once."""
    decided = fields.pop("waited", 0.0) + 0.001
    given: Mapping[str, Any] = {
        "kind": "decision",
        "at": START + at + decided,
        "fate": "routed",
        "request_id": f"{at:.3f}",
        "method": "POST",
        "path": "/v1/completions",
        "tenant": "aaaa",
        "api": "completions",
        "model": "tiny",
        "served_model": "tiny",
        "class_": "standard",
        "class_by": "default",
        "stream": True,
        "endpoint": "10.0.0.1:8000",
        "prompt_tokens": 100,
        "predicted_cached_tokens": 0,
        "decided_us": int(decided * 1e6),
        "status": 200,
        "served_by": fields.get("endpoint", "10.0.0.1:8000"),
        "ended_us": 500_000,
    }
    return AccessRecord(**{**given, **fields})


def refused(at: float, reason: str = "shed", **fields: Any) -> AccessRecord:
    """Return a request that never reached a pod."""
    nowhere = {"endpoint": None, "served_by": None, "ended_us": None, "prompt_tokens": None, "status": 503}
    return line(at, **{**nowhere, "fate": "refused", "reason": reason, "predicted_cached_tokens": None, **fields})


def encoded(records: Iterable[AccessRecord]) -> list[bytes]:
    return [msgspec.json.encode(record) + b"\n" for record in records]


def alone(count: int, *, seed: int = 5, every: float = 30.0) -> list[AccessRecord]:
    """Requests that meet no other one, on two pods, which take exactly what ALONE, STREAM and PROMPT say."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        prompt, output = draw.randint(50, 4000), draw.randint(2, 200)
        seconds = output * (ALONE + STREAM) + prompt * PROMPT
        found.append(
            line(
                number * every,
                endpoint=f"10.0.0.{number % 2 + 1}:8000",
                prompt_tokens=prompt,
                output_tokens=output,
                max_tokens=200,
                ended_us=int((seconds + 0.001) * 1e6),
            )
        )
    return found

"""The JSON that a benchmark of routers leaves, and how its run is ended. Used by `routing.run` and `overload.run`."""

import asyncio
import os
import sys
from collections.abc import Coroutine, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from bench.machine import machine, versions
from bench.routing.subject import Subject

RESULTS = Path(__file__).parents[1] / "results"

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T], *, limit_seconds: float) -> T:
    """The work's result, or the end of the process with a word why there is none."""
    try:
        return asyncio.run(work)
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("interrupted: everything that was started has ended, nothing is written")
    except TimeoutError:
        sys.exit(f"the measurement was not done within {limit_seconds:g} s")


def write_result(
    found: Mapping[str, Any], *, out: Path | None, name: str, began: datetime, load_before: float, subject: Subject
) -> str:
    """Write what was found under what it was found on; return the line that says so."""
    seconds = round((datetime.now(UTC) - began).total_seconds())
    result = {
        "date": began.isoformat(timespec="seconds"),
        "seconds": seconds,
        "machine": machine(),
        "load_average": {"before": round(load_before, 2), "after": round(os.getloadavg()[0], 2)},
        "versions": versions(),
        "kvmesh": subject.revision(),
        **found,
    }
    out = out or RESULTS / f"{began:%Y-%m-%d}-{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return f"{seconds} s, load average {load_before:.2f} before; written to {out}"

"""Durations as Go and CEL write them: 1h30m, 250ms, -1.5s. Pure."""

import re
from datetime import timedelta

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|ns)")
_WHOLE = re.compile(rf"^([-+]?)((?:{_PART.pattern})+|0)$")


def parse_duration(text: str) -> timedelta | None:
    """None for what is no duration."""
    found = _WHOLE.match(text)
    if not found:
        return None
    seconds = sum(float(amount) * _SECONDS[unit] for amount, unit in _PART.findall(found[2]))
    return timedelta(seconds=-seconds if found[1] == "-" else seconds)

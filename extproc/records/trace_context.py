"""W3C trace context (https://www.w3.org/TR/trace-context/): what a client says of its trace, and whether we record it.

Pure; asked by `records.tracing` once a request while traces are on. Clients write these headers: nothing is believed
of one that is malformed.
"""

import re

import msgspec

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_INVALID_VERSION, _CURRENT_VERSION = "ff", "00"
_SAMPLED = 0x01
LONGEST_TRACESTATE = 512  # characters: what everybody must pass on; a longer one is left out
_TRACESTATE = re.compile(r"[\x20-\x7e]*", re.ASCII)


class Parent(msgspec.Struct, frozen=True, kw_only=True):
    """The client's span."""

    trace_id: int
    span_id: int
    is_sampled: bool


def parse_traceparent(text: str | None) -> Parent | None:
    """Return the client's span, None where there is none or the header is malformed. Later versions are read as 00."""
    if text is None or (found := _TRACEPARENT.fullmatch(text)) is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == _INVALID_VERSION or (version == _CURRENT_VERSION and rest):
        return None
    parent = Parent(trace_id=int(trace_id, 16), span_id=int(span_id, 16), is_sampled=bool(int(flags, 16) & _SAMPLED))
    return parent if parent.trace_id and parent.span_id else None


def passed_on(tracestate: str | None) -> str:
    """Return the vendors' part as the pod gets it, "" where it cannot be passed on whole."""
    if not tracestate or len(tracestate) > LONGEST_TRACESTATE or not _TRACESTATE.fullmatch(tracestate):
        return ""
    return tracestate


def is_chosen(trace_id: int, *, share: float) -> bool:
    """Tell whether a trace without a parent's decision is recorded: the same everywhere, by the id's random half.

    As OpenTelemetry's TraceIdRatioBased, so that services with the same share record the same traces.
    """
    return (trace_id & ((1 << 64) - 1)) < round(share * (1 << 64))

"""The two forms in which a page of metrics is given, and which of them a client's Accept header asks for.

OpenMetrics has what the older text format has, and exemplars besides: the trace of one request that fell into a bucket.
Formats: https://prometheus.io/docs/specs/om/open_metrics_spec/ and
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from enum import Enum

OPENMETRICS_TYPE = "application/openmetrics-text"
OPENMETRICS_VERSIONS = ("", "1.0.0")  # of the Accept header; what other versions read, is not promised


class Form(Enum):
    """How a page is written; the value is its content type."""

    TEXT = "text/plain; version=1.0.0; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

    @property
    def end(self) -> bytes:
        """What the whole page ends with: a reader of OpenMetrics takes a page without it for cut off."""
        return b"# EOF\n" if self is Form.OPENMETRICS else b""


def form_for(accept: str) -> Form:
    """Return OpenMetrics where the client names it and likes nothing else of ours better, else the text format."""
    openmetrics = text = 0.0
    for entry in accept.split(","):
        media_type, *parameters = (part.strip() for part in entry.split(";"))
        values = {name.lower(): value.strip('"') for name, _, value in (each.partition("=") for each in parameters)}
        quality = _quality(values.get("q", "1"))
        if media_type.lower() == OPENMETRICS_TYPE and values.get("version", "") in OPENMETRICS_VERSIONS:
            openmetrics = max(openmetrics, quality)
        elif media_type.lower() == "text/plain":
            text = max(text, quality)
    return Form.OPENMETRICS if openmetrics > 0 and openmetrics >= text else Form.TEXT


def _quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0

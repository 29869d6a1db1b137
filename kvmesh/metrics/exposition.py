"""The two formats of a metrics page, and the choice between them by a client's Accept header.

OpenMetrics has all of the older text format, and exemplars in addition: the trace of one request in a bucket. Formats:
https://prometheus.io/docs/specs/om/open_metrics_spec/ and
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from enum import Enum

OPENMETRICS_TYPE = "application/openmetrics-text"
OPENMETRICS_VERSIONS = ("", "1.0.0")  # of the Accept header; other versions may read something else


class Form(Enum):
    """The format of a page; the value is its content type."""

    TEXT = "text/plain; version=1.0.0; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"

    @property
    def end(self) -> bytes:
        """The end of the whole page: a reader of OpenMetrics takes a page without it for truncated."""
        return b"# EOF\n" if self is Form.OPENMETRICS else b""


def form_for(accept: str) -> Form:
    """Return OpenMetrics if the client names it and prefers none of our other formats, else the text format."""
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

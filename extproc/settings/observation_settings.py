"""A picker's records of its requests: access log, audit chain, traces. All off by default."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.errors import ConfigError
from kvmesh.settings import setting, text_setting

MEGABYTE = 1_000_000
STDOUT, STREAM = "stdout", "redis:"
FLAG = "--access-log"


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessLogTargets:
    """Destinations of the access log's lines; at most one of each kind."""

    stdout: bool = False
    file: Path | None = None
    max_bytes: int = 100 * MEGABYTE  # of the file, which is then rotated
    files: int = 10  # that are kept, the current one among them
    stream: str | None = None  # the name of a Redis Stream
    stream_length: int = 100_000  # records that the stream keeps, about

    @property
    def is_empty(self) -> bool:
        """Whether no record is written."""
        return not self.stdout and self.file is None and self.stream is None


def read_access_log(text: str) -> AccessLogTargets:
    """Read `stdout,PATH?max_mb=100&files=10,redis:NAME?length=100000`. Raise ConfigError."""
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        target, _, query = part.partition("?")
        found: dict[str, Any]
        if target == STDOUT:
            found = {"stdout": True, **_parameters(part, query, {})}
        elif target.startswith(STREAM):
            name = target.removeprefix(STREAM)
            found = {"stream": name, **_parameters(part, query, {"length": ("stream_length", 1000, 1)})}
        else:
            known = {"max_mb": ("max_bytes", 1, MEGABYTE), "files": ("files", 1, 1)}
            found = {"file": Path(target), **_parameters(part, query, known)}
        if not target.removeprefix(STREAM):
            raise ConfigError(f"{FLAG}: {part!r} has no name")
        if not values.keys().isdisjoint(found):
            raise ConfigError(f"{FLAG} {text}: there may be one file and one stream")
        values |= found
    return AccessLogTargets(**values)


def _parameters(part: str, query: str, known: Mapping[str, tuple[str, int, int]]) -> dict[str, int]:
    """Read `name=number&…`; `known` has the field, the least number and its unit by name."""
    found = {}
    for pair in filter(None, query.split("&")):
        name, _, number = pair.partition("=")
        if name not in known:
            takes = f"takes {' and '.join(known)} only" if known else "takes none"
            raise ConfigError(f"{FLAG}: {part!r}: behind '?' it {takes}")
        field, least, unit = known[name]
        if not (number.isascii() and number.isdecimal()) or int(number) < least:
            raise ConfigError(f"{FLAG}: {part!r}: {name} must be a whole number of at least {least}")
        found[field] = int(number) * unit
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSettings:
    """Destinations and volume of access log lines and spans."""

    trace_share: float = setting(
        0.01,
        "Share of requests to trace (--otlp-endpoint) if the client sent no `traceparent`. A trace costs as "
        "much CPU as a pick.",
        least=0,
        most=1,
    )
    access_log: AccessLogTargets = text_setting(
        AccessLogTargets(),
        "Write one JSON line for each request and its outcome (docs/guides/audit.md): stdout, a file with its "
        "rotation, redis:NAME for a Redis Stream of --redis, or several of them, separated by commas.",
        read=read_access_log,
        metavar="stdout|PATH[?max_mb=100&files=10]|redis:NAME[?length=100000]",
    )
    audit: bool = setting(False, "Chain each record to the one before; `kvmesh audit verify` finds any change.")
    audit_key_file: Path | None = setting(
        None,
        "File with keys for the hashes of tenants and the chain: lines `id:key`, at least 16 bytes; the last "
        "one is used. Default: a random key for this process.",
    )

    def __post_init__(self) -> None:
        if self.audit and not self.writes:
            raise ConfigError(f"--audit chains the lines of an access log, and there is none: give {FLAG}, too")

    @property
    def writes(self) -> bool:
        """Whether any record is written."""
        return not self.access_log.is_empty

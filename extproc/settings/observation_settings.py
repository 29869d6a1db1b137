"""What a picker records of its requests: access log, audit chain, traces. All off by default."""

from dataclasses import dataclass
from pathlib import Path

from extproc.errors import ConfigError
from kvmesh.settings import setting

MEGABYTE = 1_000_000


def _bytes(megabytes: float) -> int:
    return int(megabytes * MEGABYTE)


def _megabytes(count: int) -> int:
    return count // MEGABYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSettings:
    """Where lines and spans go, and how many of them."""

    trace_share: float = setting(
        0.01,
        "Share of the requests that are traced, with --otlp-endpoint, where no `traceparent` of the client's "
        "decides. A traced one costs as much CPU as a pick.",
        least=0,
        most=1,
    )
    access_log: bool = setting(
        False, "Write one JSON line for each request and its outcome to standard output (docs/guides/audit.md)."
    )
    access_log_file: Path | None = setting(None, "Write these lines to a file instead; rotated by size.")
    access_log_stream: str | None = setting(
        None, "Write these lines to a Redis Stream of this name, too (--redis).", metavar="NAME"
    )
    access_log_max_bytes: int = setting(
        100 * MEGABYTE,
        "Megabytes after which the file is rotated.",
        "access_log_max_mb",
        given=float,
        read=_bytes,
        write=_megabytes,
        least=1,
    )
    access_log_files: int = setting(10, "Files that are kept, the current one among them.", least=1)
    access_log_stream_length: int = setting(100000, "Records that the stream keeps, about.", least=1000)
    audit: bool = setting(False, "Chain each record to the one before, so that `kvmesh audit verify` finds any change.")
    audit_key_file: Path | None = setting(
        None,
        "Key (at least 16 bytes) of the hashes of tenants and of the chain: lines `id:key`, the last one is "
        "used. Default: a random key, for this process only.",
    )

    def __post_init__(self) -> None:
        """Raise ConfigError where nothing would be written although it is asked for."""
        if self.audit and not self.writes:
            raise ConfigError(
                "--audit chains the lines of an access log, and there is none: "
                "give --access-log-file, --access-log-stream or --access-log, too"
            )

    @property
    def writes(self) -> bool:
        """Whether any record is written."""
        return self.access_log or self.access_log_file is not None or self.access_log_stream is not None

"""What a picker writes down of its requests: access log, audit chain, traces. Filled from flags; all off by default."""

from dataclasses import dataclass
from pathlib import Path

from extproc.errors import ConfigError

MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationSettings:
    """Where lines and spans go, and how many of them."""

    access_log: bool = False  # to standard output
    access_log_file: Path | None = None
    access_log_stream: str | None = None  # the name of a Redis Stream
    access_log_max_bytes: int = 100 * MEGABYTE  # of one file
    access_log_files: int = 10  # that are kept, the current one among them
    access_log_stream_length: int = 100_000  # records, about
    audit: bool = False  # each record is chained to the one before
    audit_key_file: Path | None = None  # lines `id:key`, the last one is in use
    trace_share: float = 0.01  # of the requests whose client has not decided, 0..1; one costs as much CPU as a pick

    def __post_init__(self) -> None:
        """Raise ConfigError where nothing would be written although somebody counts on it."""
        if self.audit and not self.writes:
            raise ConfigError(
                "--audit chains the lines of an access log, and there is none: "
                "give --access-log-file, --access-log-stream or --access-log, too"
            )

    @property
    def writes(self) -> bool:
        """Whether any record is written."""
        return self.access_log or self.access_log_file is not None or self.access_log_stream is not None

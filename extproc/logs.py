"""Log lines as text for people or JSON for machines; called once by the command line before anything else runs."""

import enum
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

# where commands that start others find what was chosen: keys of the command line's context
LOG_FORMAT, LOG_LEVEL = "kvmesh.log_format", "kvmesh.log_level"


class LogFormat(enum.StrEnum):
    """How a log line is written."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """Least severity that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


CHATTY = ("httpx2",)  # libraries that tell of each request: a lease alone is two every 2 s

# what every LogRecord has; the rest came in by `extra=`
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(*, level: LogLevel, form: LogFormat) -> None:
    """Send all loggers to standard error in one form, replacing what was configured before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form is LogFormat.JSON else _TextFormatter())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        least = logging.NOTSET if level is LogLevel.DEBUG else max(logging.WARNING, logging.getLogger().level)
        logging.getLogger(name).setLevel(least)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        facts = "".join(f" {name}={value}" for name, value in _facts(record).items())
        line = f"{when} {record.levelname.lower():7} {record.name}: {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()

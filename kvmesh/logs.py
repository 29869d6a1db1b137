"""Log lines as text for people or JSON for machines; called once by the command line before anything else runs."""

import enum
import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from kvmesh.plain_traceback import plain_traceback

# the options' names, by which commands that start others find what was chosen in the command line's context
LOG_FORMAT, LOG_LEVEL = "log_format", "log_level"


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


ASYNCIO_CALLS = ("Exception in callback ", "Executing ")  # then the call is printed, with its arguments
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


def _message(record: logging.LogRecord) -> str:
    """Return what a record says. Of asyncio only the first words: then it prints objects, with what they hold.

    An exception's own words come with its traceback, as far as they may be told.
    """
    message = record.getMessage()
    if record.name != "asyncio":
        return message
    first = message.partition("\n")[0]
    return first.partition("(")[0] if first.startswith(ASYNCIO_CALLS) else first


def _exception(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return plain_traceback(error) if error is not None else ""


def _one_line(text: str) -> str:
    """Return a text whose control characters are escaped: what comes from outside must not look like another line."""
    return text if text.isprintable() else "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).strftime("%H:%M:%S.%f")[:-3]
        facts = "".join(f" {name}={value}" for name, value in _facts(record).items())
        said = _one_line(f"{_message(record)}{facts}")
        line = f"{when} {record.levelname.lower():7} {record.name}: {said}"
        exception = _exception(record)
        return f"{line}\n{exception}" if exception else line


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_facts(record),
        }
        if exception := _exception(record):
            line["exception"] = exception
        try:
            return msgspec.json.encode(line, enc_hook=str).decode()
        except (ValueError, OverflowError, TypeError):  # a lone surrogate, of bytes that are no UTF-8
            return json.dumps({name: str(value) for name, value in line.items()})

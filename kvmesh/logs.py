"""Log lines as text for people or JSON for machines, with tracebacks that leave out the messages of foreign errors.

The message of a defect may hold anything that the code had at hand: a KeyError names the key, a ValueError the text
that is no number. In a picker these come from requests, and prompts are never logged. Where a defect happened is
shown in full.

Every line of a process passes one limit (`log_limit`), so that no pod and no client can fill the log.
"""

import enum
import json
import logging
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from kvmesh.log_limit import LeftOut, LineLimit
from kvmesh.plain_text import cut_end

# whose messages are about connections, addresses, files and settings, never about a request's content
DISCREET = frozenset({"extproc", "kv_indexer", "kvmesh", "podsim", "redis", "grpc", "zmq", "lightkube", "httpx2"})
LEFT_OUT = "(its message is left out: it may hold what a client sent)"
SUBJECTS = ("endpoint", "pool")  # by which facts lines are limited; without them, by their first text
STREAM_MARK = "#"  # HOST:PORT#RANK: all streams of a pod are one subject
LONGEST_SUBJECT = 100  # characters
LONGEST_TEXT = 4096  # characters of a message or a fact: pods may write any number
DEEPEST = 8  # causes and groups in one another
# where commands that start others find what was chosen: keys of the command line's context
LOG_FORMAT, LOG_LEVEL = "log_format", "log_level"
ASYNCIO_CALLS = ("Exception in callback ", "Executing ")  # then the call is printed, with its arguments
CHATTY = ("httpx2",)  # libraries that log each request: a lease alone is two every 2 s
# what every LogRecord has; the rest came in by `extra=`
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def plain_traceback(error: BaseException) -> str:
    """Return what `traceback.format_exception` would, with the messages of foreign errors left out."""
    return "\n".join(_lines(error, depth=0))


def tell_crashes_so() -> None:
    """Print uncaught exceptions of this process and its threads that way, too. Call it first in a command."""

    def crashed(_: type[BaseException], error: BaseException, __: Any) -> None:
        print(plain_traceback(error), file=sys.stderr)  # noqa: T201

    def thread_crashed(crash: threading.ExceptHookArgs) -> None:
        if crash.exc_value is not None and not isinstance(crash.exc_value, SystemExit):
            crashed(crash.exc_type, crash.exc_value, None)

    sys.excepthook = crashed
    threading.excepthook = thread_crashed


def _lines(error: BaseException, *, depth: int) -> Iterator[str]:
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if before is not None and depth < DEEPEST:
        yield from _lines(before, depth=depth + 1)
        yield "which led to:"
    yield "Traceback (most recent call last):"
    yield from (line.rstrip("\n") for line in traceback.format_tb(error.__traceback__))
    yield f"{type(error).__module__}.{type(error).__qualname__}: {_safe_message(error)}".removeprefix("builtins.")
    if isinstance(error, BaseExceptionGroup) and depth < DEEPEST:
        for number, each in enumerate(error.exceptions, start=1):
            yield f"--- {number} of {len(error.exceptions)}:"
            yield from (f"  {line}" for line in _lines(each, depth=depth + 1))


def _safe_message(error: BaseException) -> str:
    if isinstance(error, OSError | ImportError | AttributeError | NameError | BaseExceptionGroup):
        return str(error)  # of the system, or names in code
    if type(error).__module__.partition(".")[0] in DISCREET:
        return str(error)
    return LEFT_OUT if error.args else ""


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


def configure_logging(*, level: LogLevel, form: LogFormat) -> None:
    """Send all loggers to standard error in one form, replacing what was configured before."""
    handler = LimitedHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form is LogFormat.JSON else _TextFormatter())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        least = logging.NOTSET if level is LogLevel.DEBUG else max(logging.WARNING, logging.getLogger().level)
        logging.getLogger(name).setLevel(least)


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes lines within a limit, and how many were left out; those for debugging are not limited."""

    def __init__(
        self, stream: TextIO, *, limit: LineLimit | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self._limit = limit or LineLimit()
        self._clock = clock
        self._timer: threading.Timer | None = None  # runs while something was left out and not told

    def handle(self, record: logging.LogRecord) -> bool:
        """Write the record if its place and its subject have room."""
        if record.levelno <= logging.DEBUG:
            return super().handle(record)
        place, subject = f"{record.name}:{record.lineno}", _subject(record)
        with self._locked():
            now = self._clock()
            self._tell(now)
            if self._limit.passes(place, subject, now=now):
                return super().handle(record)
            self._limit.leave_out(place, subject, text=_message(record))
            self._watch()
        return False

    def close(self) -> None:
        """Tell what was left out and not told yet."""
        with self._locked():
            self._tell(math.inf)
            if self._timer is not None:
                self._timer.cancel()
        super().close()

    def _tell(self, now: float) -> None:
        for left_out in self._limit.ended(now=now):
            self.emit(_summary(left_out))

    def _watch(self) -> None:
        """Tell also where no further line comes."""
        if self._timer is None:
            self._timer = threading.Timer(self._limit.window_seconds, self._time_is_over)
            self._timer.daemon = True
            self._timer.start()

    def _time_is_over(self) -> None:
        with self._locked():
            self._timer = None
            self._tell(self._clock())

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.acquire()
        try:
            yield
        finally:
            self.release()


def _subject(record: logging.LogRecord) -> str:
    for name in SUBJECTS:
        if name in vars(record):
            return str(vars(record)[name])[:LONGEST_SUBJECT]
    args = record.args if isinstance(record.args, tuple) else ()
    first = next((each for each in args if isinstance(each, str)), "")
    return first.partition(STREAM_MARK)[0][:LONGEST_SUBJECT]


def _summary(left_out: LeftOut) -> logging.LogRecord:
    logger, _, _ = left_out.place.rpartition(":")
    message = f"{left_out.count} more lines like this were left out in {left_out.seconds:g} s: {left_out.last}"
    level = logging.WARNING
    return logging.makeLogRecord({"name": logger, "msg": message, "levelno": level, "levelname": "WARNING"})


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {name: _cut(value) for name, value in vars(record).items() if name not in _STANDARD}


def _cut(value: Any) -> Any:
    """Return a fact as it is, or the beginning of its text where that is long: a pod's models are a long table."""
    text = str(value)
    return value if len(text) <= LONGEST_TEXT else cut_end(text, limit=LONGEST_TEXT)


def _message(record: logging.LogRecord) -> str:
    """Return a record's message. Of asyncio's only the beginning: the rest prints objects, with what they hold.

    An exception's own message comes with its traceback, as far as they may be shown.
    """
    message = cut_end(record.getMessage(), limit=LONGEST_TEXT)
    if record.name != "asyncio":
        return message
    first = message.partition("\n")[0]
    return first.partition("(")[0] if first.startswith(ASYNCIO_CALLS) else first


def _exception(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return plain_traceback(error) if error is not None else ""


def _one_line(text: str) -> str:
    """Return a text whose control characters are escaped: what comes from outside must not look like another line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)


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

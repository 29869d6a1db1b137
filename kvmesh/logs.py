"""Log lines as text for people or JSON for machines, with tracebacks that omit the messages of foreign errors.

The message of an unexpected error may contain any data that the code handled: a KeyError names the key, a ValueError
the text that is no number. In a picker these come from requests, and prompts are never logged. The place of the error
is shown in full.

Every line of a process passes one limit, so that no pod and no client can fill the log. It counts per subject (a pod,
pool or stream) and place (a logging call): a pod that causes thousands of lines hides its own at that place, and no
others. Lines without a subject, such as those about clients, are limited by their place. Omitted lines are counted, and
the count is logged after the minute.
"""

import enum
import json
import logging
import math
import sys
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec

from kvmesh.plain_text import cut_end, plain_json

# modules whose messages are about connections, addresses, files and settings, never about a request's content
DISCREET = frozenset({"extproc", "kv_indexer", "kvmesh", "podsim", "redis", "grpc", "zmq", "lightkube", "httpx2"})
LEFT_OUT = "(its message is left out: it may hold what a client sent)"
SUBJECTS = ("endpoint", "pool")  # facts that limit lines; else their first string argument does
STREAM_MARK = "#"  # HOST:PORT#RANK: all streams of a pod are one subject
LONGEST_SUBJECT = 100  # characters
LONGEST_TEXT = 4096  # characters of a message or a fact: pods may send any number
DEEPEST = 8  # nesting of causes and exception groups
# keys of the command line's context, where commands that start others find the chosen values
LOG_FORMAT, LOG_LEVEL = "log_format", "log_level"
ASYNCIO_CALLS = ("Exception in callback ", "Executing ")  # asyncio then prints the call with its arguments
CHATTY = ("httpx2",)  # libraries that log each request: a lease alone causes two every 2 s
# the attributes of every LogRecord; others came by `extra=`
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
MOST_OF_SUBJECT = 10  # lines of one subject and place
MOST_OF_PLACE = 200  # lines of one place, whatever they are about
WINDOW_SECONDS = 60.0
ANY = ""  # the subject of lines about nothing in particular, or about too many things


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Omitted lines."""

    place: str
    subject: str
    count: int
    seconds: float  # within which they came, at most
    last: str  # the text of the last line


@dataclass(slots=True)
class _Window:
    began_at: float
    passed: int = 0
    left_out: int = 0
    last: str = ""


class LineLimit:
    """Counts the lines of the last minute; `now` is in monotonic seconds and never falls."""

    def __init__(
        self,
        *,
        most_of_subject: int = MOST_OF_SUBJECT,
        most_of_place: int = MOST_OF_PLACE,
        window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self.window_seconds = window_seconds
        self._most_of_subject = most_of_subject
        self._most_of_place = most_of_place
        self._places: OrderedDict[str, _Window] = OrderedDict()  # oldest first: the next to end
        self._subjects: OrderedDict[tuple[str, str], _Window] = OrderedDict()  # few for each place

    def passes(self, place: str, subject: str, *, now: float) -> bool:
        """Tell whether to write a line, and count it if so; otherwise call `leave_out`."""
        of_place = self._places.get(place)
        if of_place is None:
            of_place = self._places[place] = _Window(now)
        if of_place.passed >= self._most_of_place:
            return False
        of_subject = self._subjects.get((place, subject))
        if of_subject is None:
            of_subject = self._subjects[place, subject] = _Window(now)
        if of_subject.passed >= self._most_of_subject:
            return False
        of_place.passed += 1
        of_subject.passed += 1
        return True

    def leave_out(self, place: str, subject: str, *, text: str) -> None:
        """Count an omitted line."""
        window = self._subjects.get((place, subject)) or self._places[place]
        window.left_out += 1
        window.last = text

    def ended(self, *, now: float) -> list[LeftOut]:
        """Forget the windows that are over, and return the lines omitted in them."""
        found = []
        while self._subjects and self._is_over(window := next(iter(self._subjects.values())), now):
            (place, subject), _ = self._subjects.popitem(last=False)
            found.append((place, subject, window))
        while self._places and self._is_over(window := next(iter(self._places.values())), now):
            place, _ = self._places.popitem(last=False)
            found.append((place, ANY, window))
        return [
            LeftOut(
                place=place,
                subject=subject,
                count=window.left_out,
                seconds=self.window_seconds,
                last=window.last,
            )
            for place, subject, window in found
            if window.left_out
        ]

    def _is_over(self, window: _Window, now: float) -> bool:
        return now - window.began_at >= self.window_seconds


def plain_traceback(error: BaseException) -> str:
    """Do the same as `traceback.format_exception`, but omit the messages of foreign errors."""
    return "\n".join(_lines(error, depth=0))


def tell_crashes_so() -> None:
    """Print uncaught exceptions of this process and its threads in this form, too. Call it first in a command."""

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
        return str(error)  # the system's messages, or names in the code
    if type(error).__module__.partition(".")[0] in DISCREET:
        return str(error)
    return LEFT_OUT if error.args else ""


class LogFormat(enum.StrEnum):
    """The form of log lines."""

    TEXT = "text"
    JSON = "json"


class LogLevel(enum.StrEnum):
    """The lowest severity that is written."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def configure_logging(*, level: LogLevel, form: LogFormat) -> None:
    """Send all loggers to standard error in one form, replacing any earlier configuration."""
    handler = LimitedHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if form is LogFormat.JSON else _TextFormatter())
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
    for name in CHATTY:
        least = logging.NOTSET if level is LogLevel.DEBUG else max(logging.WARNING, logging.getLogger().level)
        logging.getLogger(name).setLevel(least)


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes lines within a limit, and counts of omitted lines; debug lines are not limited."""

    def __init__(
        self, stream: TextIO, *, limit: LineLimit | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(stream)
        self._limit = limit or LineLimit()
        self._clock = clock
        self._timer: threading.Timer | None = None  # runs while omitted lines are unreported

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
        """Report omitted lines that are still unreported."""
        with self._locked():
            self._tell(math.inf)
            if self._timer is not None:
                self._timer.cancel()
        super().close()

    def _tell(self, now: float) -> None:
        for left_out in self._limit.ended(now=now):
            self.emit(_summary(left_out))

    def _watch(self) -> None:
        """Report omitted lines even if no further line comes."""
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
    return logging.makeLogRecord({"name": logger, "msg": message, "levelno": logging.WARNING, "levelname": "WARNING"})


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    return {name: _cut(value) for name, value in vars(record).items() if name not in _STANDARD}


def _cut(value: Any) -> Any:
    """Return a fact, or the beginning of its text if that is long: a pod's models may be a long table."""
    text = str(value)
    return value if len(text) <= LONGEST_TEXT else cut_end(text, limit=LONGEST_TEXT)


def _message(record: logging.LogRecord) -> str:
    """Return a record's message; of asyncio's only the beginning, because the rest prints objects and their contents.

    An exception's own message comes with its traceback, if it may be shown.
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
    """Return the text with escaped control characters: foreign text must not look like another log line."""
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
            return plain_json(msgspec.json.encode(line, enc_hook=str)).decode()
        except (ValueError, OverflowError, TypeError):  # a lone surrogate, from bytes that are not UTF-8
            return json.dumps({name: str(value) for name, value in line.items()})

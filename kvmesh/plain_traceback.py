"""An exception as text for the log, without the messages of errors that we did not write. Used by `logs` and `cli`.

A defect's message may hold anything that the code had in its hands: a KeyError names the key, a ValueError the
text that is no number. In a picker these come from requests, and prompts are never logged. Where it happened is
told in full.
"""

import sys
import threading
import traceback
from collections.abc import Iterator
from typing import Any

# whose words are about connections, addresses, files and settings, never about a request's content
DISCREET = frozenset({"extproc", "kv_indexer", "kvmesh", "podsim", "redis", "grpc", "zmq", "lightkube", "httpx2"})
LEFT_OUT = "(its message is left out: it may hold what a client sent)"
DEEPEST = 8  # causes and groups in one another


def plain_traceback(error: BaseException) -> str:
    """Return what `traceback.format_exception` would, with the messages of strangers left out."""
    return "\n".join(_lines(error, depth=0))


def tell_crashes_so() -> None:
    """Have whatever ends this process or one of its threads told that way, too. For commands, before anything else."""

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
    yield f"{type(error).__module__}.{type(error).__qualname__}: {_message(error)}".removeprefix("builtins.")
    if isinstance(error, BaseExceptionGroup) and depth < DEEPEST:
        for number, each in enumerate(error.exceptions, start=1):
            yield f"--- {number} of {len(error.exceptions)}:"
            yield from (f"  {line}" for line in _lines(each, depth=depth + 1))


def _message(error: BaseException) -> str:
    if isinstance(error, OSError | ImportError | AttributeError | NameError | BaseExceptionGroup):
        return str(error)  # of the system, or names in code
    if type(error).__module__.partition(".")[0] in DISCREET:
        return str(error)
    return LEFT_OUT if error.args else ""

"""An event loop whose time passes only when nothing is left to do, and a transport that keeps what it is given."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Selector(selectors.SelectSelector):
    """Does not wait: moves the loop's clock on to the next timer instead."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.loop.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(scenario: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end in virtual time; what the loop would have reported as unhandled is an error."""
    loop = VirtualLoop()
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    try:
        result = loop.run_until_complete(scenario)
    finally:
        loop.close()
    assert unhandled == []
    return result


class FakeTransport(asyncio.Transport):
    """Keeps what is written. `full` says whether the next write finds the buffer over its mark."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.reading = True
        self.ended = self.closing = self.aborted = False

    def write(self, data: Any) -> None:
        assert not (self.ended or self.closing), "written after the end"
        self.written.append(bytes(data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

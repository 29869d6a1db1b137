"""An event loop whose time jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.SelectSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nobody is left who could wake this loop")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jumping = _Jumping()
        super().__init__(self.jumping)

    def time(self) -> float:
        return self.jumping.now


def play(main: Coroutine[Any, Any, T]) -> T:
    """Run it to its end in no time; fail where it would wait for ever."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def turns(count: int = 3) -> None:
    """Let the loop turn, without time passing."""
    for _ in range(count):
        await asyncio.sleep(0)


def now() -> float:
    return asyncio.get_running_loop().time()

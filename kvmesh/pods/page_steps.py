"""Work on a pod's page in steps, so that the event loop may turn in between. Pure; `page_turns` lets it turn.

A step takes a few hundred microseconds at most, whatever the page holds.
"""

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields after each step but the last


class UnreadablePageError(ValueError):
    """A page exceeds the limits for all pods; the message says which."""


def at_once(steps: Steps[T]) -> T:
    """Take all steps one after the other, when no other work has to go on."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result

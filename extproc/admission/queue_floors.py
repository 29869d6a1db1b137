"""The share of the work that goes to a class while it waits, whatever is above it. Pure; one for each pool."""

from collections.abc import Sequence
from math import inf


class Floors:
    """What each class with a reserved share has saved, in tokens.

    A class earns its share of all that is sent while it waits, and has a turn of its own once it has saved the tokens
    of its next request: so it gets its share, never more of it at the cost of a higher class, and nothing in advance.
    """

    __slots__ = ("_most", "_saved", "_shares")

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._saved: dict[str, float] = {}
        self._most: dict[str, float] = {}  # that a class saves which found no room, until it has gone

    def join(self, class_name: str, share: float) -> None:
        """A ticket of the class waits; a class without a share earns nothing."""
        if share > 0.0 and class_name not in self._shares:
            self._shares[class_name] = share
            self._saved[class_name] = 0.0

    def leave(self, class_name: str) -> None:
        """The last ticket of the class is gone, and its savings with it."""
        self._shares.pop(class_name, None)
        self._saved.pop(class_name, None)
        self._most.pop(class_name, None)

    def saved(self) -> Sequence[tuple[str, float]]:
        """Return the classes that have saved anything, those with most first."""
        saved = [(name, tokens) for name, tokens in self._saved.items() if tokens > 0.0]
        if len(saved) > 1:
            saved.sort(key=_tokens, reverse=True)
        return saved

    def went(self, class_name: str, tokens: int) -> None:
        """Share out what was sent: every class that waits earns its part, the one that went pays."""
        for name, share in self._shares.items():
            self._saved[name] = min(self._saved[name] + share * tokens, self._most.get(name, inf))
        if class_name in self._saved:
            self._saved[class_name] = max(0.0, self._saved[class_name] - tokens)
            self._most.pop(class_name, None)

    def could_not(self, class_name: str, *, most: float) -> None:
        """It had its turn and found no room: it saves at most so many tokens until it has gone."""
        self._most[class_name] = most
        self._saved[class_name] = min(self._saved[class_name], most)


def _tokens(entry: tuple[str, float]) -> float:
    return entry[1]

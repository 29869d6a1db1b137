"""Makes text from outside safe to show in a terminal: one line, no control characters.

Whatever rich prints of it must be a `Text` or printed with markup=False: brackets in data are no markup.
"""

import unicodedata

CUT_MARK = "…"


def printable(text: str) -> str:
    """The text without control, format and surrogate characters; line breaks and tabs become spaces."""
    return text if text.isprintable() else "".join(_shown(character) for character in text)


def cut_end(text: str, *, limit: int) -> str:
    """The first `limit` characters at most, the last of them a mark where something is missing."""
    return text if len(text) <= limit else text[: limit - 1] + CUT_MARK


def cut_start(text: str, *, limit: int) -> str:
    """The last `limit` characters at most, the first of them a mark where something is missing."""
    return text if len(text) <= limit else CUT_MARK + text[len(text) - limit + 1 :]


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    return "" if unicodedata.category(character).startswith("C") else character

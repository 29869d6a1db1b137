"""Makes foreign text safe to show in a terminal: one line, no control characters.

rich must print it as a `Text` or with markup=False: brackets in data are no markup.
"""

import re
import unicodedata

CUT_MARK = "…"
# C1 controls, and characters that hide or reorder text
_HIDDEN = re.compile(rb"\xc2[\x80-\x9f]|\xd8\x9c|\xe2\x80[\x8b-\x8f\xa8-\xae]|\xe2\x81[\xa0-\xaf]|\xef\xbb\xbf")


def printable(text: str) -> str:
    """The text without control, format and surrogate characters; line breaks and tabs become spaces."""
    return text if text.isprintable() else "".join(_shown(character) for character in text)


def plain_json(document: bytes) -> bytes:
    """Return JSON with C1 controls and hidden characters escaped, because terminals obey them."""
    return document if document.isascii() else _HIDDEN.sub(_escape, document)


def cut_end(text: str, *, limit: int) -> str:
    """The first `limit` characters at most, the last of them a mark where something is missing."""
    return text if len(text) <= limit else text[: limit - 1] + CUT_MARK


def cut_start(text: str, *, limit: int) -> str:
    """The last `limit` characters at most, the first of them a mark where something is missing."""
    return text if len(text) <= limit else CUT_MARK + text[len(text) - limit + 1 :]


def _escape(found: re.Match[bytes]) -> bytes:
    return b"\\u%04x" % ord(found[0].decode())


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    return "" if unicodedata.category(character).startswith("C") else character

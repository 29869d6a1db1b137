"""Finds series on a page of metrics, and their labels: Prometheus' text format, as far as it is needed. No I/O.

`engine_metrics` says which series, and what they mean. Everything is done in steps (`page_steps`).
"""

import re
from collections.abc import Collection, Iterable, Iterator

from kvmesh.pods.page_steps import Steps, UnreadablePageError

Series = tuple[bytes, float]  # labels as they are written, and the value

# \b and possessive repeats: no byte is looked at twice, whatever does not match
LABEL = re.compile(rb'\b(\w++)="((?:[^"\\]++|\\.)*+)"', re.DOTALL)
ESCAPED = re.compile(rb"\\(.)", re.DOTALL)
MOST_SERIES = 1 << 14  # of those that one function reads: a hundred for each engine, of as many as a page has room for
MAX_LINE_BYTES = PIECE_BYTES = 1 << 16  # of whole lines, searched in one step: the usual page is one or two
STEP_BYTES = 1 << 15  # of labels read in one step
LABELS_BYTES = 256  # what reading a line's labels takes beside their length, in bytes of a step
LARGEST_COUNT = 10**15  # what no pod reaches, and what sums of which are exact


def lines_of(prefix: bytes, names: Iterable[bytes]) -> re.Pattern[bytes]:
    """Return what finds name, labels and value of all lines of exactly these names; a timestamp may follow."""
    rests = _one_of({name.removeprefix(prefix) for name in names})
    return re.compile(rb"\n(" + prefix + rests + rb")(?:\{([^\n]*)\})?[ \t]++(\S++)")


def _one_of(words: Collection[bytes]) -> bytes:
    """Return what matches one of the words, and looks at no letter twice: lines of other names cost half as much."""
    low, high = min(words), max(words)  # what these share all of them do
    shared = next((at for at, letters in enumerate(zip(low, high, strict=False)) if len(set(letters)) > 1), len(low))
    rests = {word[shared:] for word in words}
    if rests == {b""}:
        return low
    begins = sorted({rest[:1] for rest in rests})
    branches = [_one_of({rest for rest in rests if rest[:1] == begin}) for begin in begins if begin]
    return low[:shared] + b"(?:" + b"|".join(branches) + b")" + (b"?" if b"" in rests else b"")


def read_series(lines: re.Pattern[bytes], text: bytes) -> Steps[dict[bytes, list[Series]]]:
    """Return the series by name; those whose value is no count are left out."""
    found: dict[bytes, list[Series]] = {}
    series = 0
    for begin, end in pieces(text):
        if begin:
            yield
        # the first line is found like any other
        for name, labels, number in lines.findall(b"\n" + text[begin:end]):
            series += 1
            try:
                value = float(number)
            except ValueError:
                continue
            if 0 <= value <= LARGEST_COUNT:  # NaN is neither
                found.setdefault(name, []).append((labels, value))
        if series > MOST_SERIES:
            raise UnreadablePageError(f"/metrics has more than {MOST_SERIES} series of the names that are read")
    return found


def pieces(text: bytes) -> Iterator[tuple[int, int]]:
    """Return where pieces of whole lines begin and end."""
    begin, size = 0, len(text)
    while size - begin > PIECE_BYTES:
        end = text.rfind(b"\n", begin, begin + PIECE_BYTES)
        if end < 0:
            raise UnreadablePageError(f"/metrics has a line of more than {MAX_LINE_BYTES} bytes")
        yield begin, end
        begin = end + 1
    yield begin, size


def label_sets(series: Iterable[Series], wanted: Collection[bytes]) -> Steps[list[dict[bytes, bytes]]]:
    """Return the wanted labels of each series."""
    sets = []
    read = 0
    for written, _ in series:
        sets.append(labels_of(written, wanted))
        read += LABELS_BYTES + len(written)
        if read > STEP_BYTES:
            read = 0
            yield
    return sets


def labels_of(written: bytes, wanted: Collection[bytes]) -> dict[bytes, bytes]:
    """Return the wanted ones of a series' labels, as they are written."""
    return {name: value for name, value in LABEL.findall(written) if name in wanted}


def plain(escaped: bytes) -> str:
    """Return a label's value as it is meant."""
    text = ESCAPED.sub(lambda found: b"\n" if found[1] == b"n" else found[1], escaped)
    return text.decode("utf-8", "replace")

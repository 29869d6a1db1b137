"""Which log lines are written where one cause makes many: so many of each subject, and of each place in the code. Pure.

A place is a call that logs. Its subject is whom a line is about: a pod, a pool, a stream. A pod that makes thousands of
lines hides its own at that place, and no others. Where no subject bounds them (clients have none), the place does. What
was left out is counted, and told once its minute is over.
"""

from collections import OrderedDict
from dataclasses import dataclass

MOST_OF_SUBJECT = 10  # lines of one subject and place
MOST_OF_PLACE = 200  # lines of one place, whatever they are about
WINDOW_SECONDS = 60.0
ANY = ""  # the subject of the lines that are about no one, or about too many


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Lines that were not written."""

    place: str
    subject: str
    count: int
    seconds: float  # in which they came, at most
    last: str  # of their texts


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
        self._places: OrderedDict[str, _Window] = OrderedDict()  # the oldest first, as the next
        self._subjects: OrderedDict[tuple[str, str], _Window] = OrderedDict()  # few for each place

    def passes(self, place: str, subject: str, *, now: float) -> bool:
        """Tell whether a line is to be written, and count it. `leave_out` is to be called for one that is not."""
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
        """Count a line that does not pass."""
        window = self._subjects.get((place, subject)) or self._places[place]
        window.left_out += 1
        window.last = text

    def ended(self, *, now: float) -> list[LeftOut]:
        """Forget the windows that are over, and return what was left out in them."""
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

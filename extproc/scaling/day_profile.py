"""What the work is at each time of day, by the days that were seen. Pure; times of day come as arguments.

A day has 144 slots of ten minutes, in UTC. Each keeps a mean of what it was on the days before, of which the last one
counts for a seventh at least. Only the shape counts: what the work will be is what it is now, times what the profile
has then over what it has now. Slots are known once they were seen on two days; there is no week in it.

A clock that jumps would write into wrong slots: nothing is written or said until it has run evenly for a while.
"""

from dataclasses import dataclass, field
from enum import StrEnum

SLOT_SECONDS = 600.0
DAY_SECONDS = 86_400.0
SLOTS = int(DAY_SECONDS / SLOT_SECONDS)
LEAST_DAYS = 2  # on which a slot was seen, before it says something
MOST_DAYS = 7  # the share of the last day is one over the number of days, and this at most
FORGOTTEN_DAYS = 8  # after which a slot that was not seen again is new
LEAST_SHARE = 0.5  # of a slot that has to be seen
JUMP_SECONDS = 60.0  # between two samples, by which the time of day and the monotonic one differ
EVEN_SECONDS = 2 * SLOT_SECONDS  # for which it has to run evenly after a jump
LEAST_LEVEL = 0.05  # busy pods: below, a ratio says nothing
MOST_RATIO = 4.0


class DayState(StrEnum):
    """Whether the time of day says anything."""

    KNOWN = "known"
    LEARNING = "learning"  # too few days were seen at this time, or at the one that is asked for
    CLOCK_JUMPED = "clock-jumped"  # the time of day has jumped, and nobody knows which one was right


@dataclass(slots=True)
class _Slot:
    mean: float = 0.0
    days: int = 0
    day: int = -1  # the last one, since the epoch

    def close(self, mean: float, day: int) -> None:
        if day - self.day > FORGOTTEN_DAYS:
            self.days = 0
        self.days = min(self.days + 1, MOST_DAYS)
        self.mean += (mean - self.mean) / self.days
        self.day = day


@dataclass(slots=True, eq=False)
class DayProfile:
    """Of one kind of work in one role: 144 slots, whatever comes."""

    _slots: list[_Slot] = field(default_factory=lambda: [_Slot() for _ in range(SLOTS)])
    _open: int | None = None  # the slot since the epoch that samples go into
    _sum: float = 0.0
    _seconds: float = 0.0  # of the open slot that were seen
    _last: tuple[float, float] | None = None  # the last sample's monotonic time, and time of day
    _even_since: float | None = None  # monotonic, after a jump; None: there was none

    def add(self, value: float, *, now: float, wall: float) -> None:
        """Take what the work is `now`, in monotonic seconds, which do not fall; `wall`: seconds since the epoch."""
        last, self._last = self._last, (now, wall)
        slot = int(wall // SLOT_SECONDS)
        if last is None:
            self._begin(slot)
            return
        seconds = now - last[0]
        if abs((wall - last[1]) - seconds) > JUMP_SECONDS:
            self._even_since = now
            self._begin(slot)
            return
        if self._even_since is not None:
            if now - self._even_since < EVEN_SECONDS:
                self._begin(slot)
                return
            self._even_since = None
        if slot != self._open or seconds > JUMP_SECONDS:  # or nobody has looked meanwhile
            self._close()
            self._begin(slot)
            return
        self._sum += value * seconds
        self._seconds += seconds

    def ratio(self, *, wall: float, seconds: float) -> float | None:
        """Return how many times the work of now it will be in so many seconds; None: see `state`."""
        if self._even_since is not None or self._last is None:
            return None
        here, there = self._level(wall), self._level(wall + seconds)
        if here is None or there is None or here < LEAST_LEVEL:
            return None
        return min(there / here, MOST_RATIO)

    def state(self, *, wall: float, seconds: float) -> DayState:
        """Tell whether the time of day says something of the time in so many seconds."""
        if self._even_since is not None:
            return DayState.CLOCK_JUMPED
        return DayState.LEARNING if self.ratio(wall=wall, seconds=seconds) is None else DayState.KNOWN

    def _begin(self, slot: int) -> None:
        self._open, self._sum, self._seconds = slot, 0.0, 0.0

    def _close(self) -> None:
        if self._open is not None and self._seconds >= LEAST_SHARE * SLOT_SECONDS:
            self._slots[self._open % SLOTS].close(self._sum / self._seconds, self._open // SLOTS)

    def _level(self, wall: float) -> float | None:
        """Return the profile at a time, between the middles of the slots around it; None where one is not known."""
        at = wall / SLOT_SECONDS - 0.5
        first = int(at // 1)
        before, after = self._slots[first % SLOTS], self._slots[(first + 1) % SLOTS]
        day = int(wall // DAY_SECONDS)
        if any(slot.days < LEAST_DAYS or day - slot.day > FORGOTTEN_DAYS for slot in (before, after)):
            return None
        share = at - first
        return before.mean * (1.0 - share) + after.mean * share

"""Writing what is wanted into a Deployment's scale: when, in what steps, and why not. Pure; time is an argument.

One picker, which leads, looks at each named Deployment every few seconds. It writes only what it has tried before (a
dry run on the server), in bounded steps, and not where an autoscaler or somebody else decides.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from extproc.scaling.holding import DOWN_SECONDS, DOWN_SHARE, UP_FACTOR, UP_PODS, UP_SECONDS
from extproc.scaling.seen import State

OTHERS_WRITE_TIMES, OTHERS_WRITE_SECONDS = 3, 600.0  # so often in so long, and we leave it to them for as long


class ActState(StrEnum):
    """How it stands with one Deployment."""

    AS_WANTED = "as-wanted"
    WRITTEN = "written"  # it was, at the last look
    IN_STEPS = "in-steps"  # the next one is not due yet
    HELD = "held"  # it has more pods than are wanted, and too little is known, or not for long enough
    NOT_LEADING = "not-leading"
    NAMED_TWICE = "named-twice"
    NOT_FOUND = "deployment-not-found"
    AUTOSCALER = "autoscaler-decides"
    OTHERS_WRITE = "others-write"
    FORBIDDEN = "forbidden"
    REFUSED = "refused"
    UNREACHABLE = "api-unreachable"


WRONG = frozenset(
    {
        ActState.NAMED_TWICE,
        ActState.NOT_FOUND,
        ActState.AUTOSCALER,
        ActState.OTHERS_WRITE,
        ActState.FORBIDDEN,
        ActState.REFUSED,
        ActState.UNREACHABLE,
    }
)
SURE = frozenset({State.OK, State.NONSENSE_REPORTS, State.PROMISE_OUT_OF_REACH})  # a signal says how few are enough


class ScaleWish(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy wants in the scale of one Deployment."""

    pool: str
    role: str
    variant: str  # "": of a role without variants
    namespace: str
    deployment: str
    replicas: int
    may_lower: bool  # False: the signal rests on too little to let pods go
    window_seconds: float  # for which we have to have looked before pods go


class ActOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of a wish."""

    wish: ScaleWish
    state: ActState
    words: str
    replicas: int | None = None  # that the Deployment says; None: it was not read


@dataclass(slots=True, eq=False)
class ActMemory:
    """Of one Deployment, while we lead."""

    began_at: float
    has_tried: bool = False  # a dry run was granted
    _written: int | None = None  # what we wrote last
    _raised_at: float = float("-inf")
    _lowered_at: float = float("-inf")
    _foreign: deque[float] = field(default_factory=deque)  # times at which others had changed it

    def see(self, replicas: int, *, now: float) -> None:
        """Take what the Deployment says."""
        if self._written is not None and replicas != self._written:
            self._foreign.append(now)
            self._written = replicas
        while self._foreign and self._foreign[0] < now - OTHERS_WRITE_SECONDS:
            self._foreign.popleft()

    def next(self, wish: ScaleWish, replicas: int, *, now: float) -> tuple[int | None, ActState, str]:
        """Return what to write now, None for nothing, and how it stands."""
        if (why_not := self._why_not(wish, replicas, now=now)) is not None:
            return None, *why_not
        if wish.replicas > replicas:
            number = min(wish.replicas, max(int(UP_FACTOR * replicas), replicas + UP_PODS))
        else:
            number = max(wish.replicas, replicas - max(int(DOWN_SHARE * replicas), 1))
        return number, ActState.WRITTEN, ""

    def _why_not(self, wish: ScaleWish, replicas: int, *, now: float) -> tuple[ActState, str] | None:
        wanted, found = wish.replicas, None
        if len(self._foreign) >= OTHERS_WRITE_TIMES:
            words = f"somebody else has changed it {len(self._foreign)} times in ten minutes: it is left to them"
            found = ActState.OTHERS_WRITE, words
        elif wanted == replicas:
            found = ActState.AS_WANTED, ""
        elif wanted < replicas and not wish.may_lower:
            found = ActState.HELD, f"not down to {wanted}: too little is known"
        elif wanted < replicas and now - self.began_at < wish.window_seconds:
            words = f"not down to {wanted}: this picker leads for less than {wish.window_seconds:g} s"
            found = ActState.HELD, words
        elif now - self._raised_at < UP_SECONDS if wanted > replicas else now - self._lowered_at < DOWN_SECONDS:
            found = ActState.IN_STEPS, f"{wanted} in steps"
        return found

    def wrote(self, replicas: int, *, before: int, now: float) -> None:
        """Note that a write was granted."""
        self._written = replicas
        if replicas > before:
            self._raised_at = now
        else:
            self._lowered_at = now

"""Requests under which a pod died are not sent to another pod for a minute: they may end it, too. Pure.

The suspects of a death are the requests that the pod left without an answer. A single suspect is refused at once;
several are refused after their second death, since all but one of them are innocent. Time is an argument, monotonic
seconds.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from extproc.errors import DeadlyRequestError

REFUSED_SECONDS = 60.0
SUSPECT_SECONDS = 5.0  # between the end of a suspect and the discovery of the death, in either order
UNSURE_SECONDS = 2.0  # without a report of its pod, until an unserved request may be sent again
MOST_SUSPECTS = 64  # of one pod
MOST_DEATHS = 64


@dataclass(frozen=True, slots=True)
class _Death:
    endpoint: str
    at: float
    suspects: set[int] = field(default_factory=set)


class DeadlyRequests:
    """Requests are named by the digest of their body; None is a request that computes nothing."""

    def __init__(self) -> None:
        self.has_some = False  # whether any request may have to be refused
        self._unanswered: dict[str, deque[tuple[int, float]]] = {}  # by endpoint: (request, its end)
        self._unsure: dict[int, tuple[str, float]] = {}  # request -> (endpoint, its end)
        self._deaths: deque[_Death] = deque(maxlen=MOST_DEATHS)

    def unanswered(self, endpoint: str, request: int | None, *, is_unserved: bool, now: float) -> None:
        """Take a request that ended without a whole answer; `is_unserved`: without any from its pod."""
        if request is None:
            return
        for death in self._deaths:
            if death.endpoint == endpoint and now - death.at <= SUSPECT_SECONDS:
                death.suspects.add(request)
                return
        self._unanswered.setdefault(endpoint, deque(maxlen=MOST_SUSPECTS)).append((request, now))
        if is_unserved and len(self._unsure) < MOST_SUSPECTS:
            self._unsure[request] = endpoint, now
            self.has_some = True

    def reported(self, endpoint: str) -> None:
        """Take a sign of life."""
        if self._unsure:
            self._unsure = {request: seen for request, seen in self._unsure.items() if seen[0] != endpoint}

    def died(self, endpoint: str, *, now: float) -> None:
        """Take a refused connection, or a new process."""
        self.reported(endpoint)
        ended = self._unanswered.pop(endpoint, ())
        self.has_some = True
        self._deaths.append(_Death(endpoint, now, {request for request, at in ended if now - at <= SUSPECT_SECONDS}))

    def forget(self, endpoint: str) -> None:
        """Drop an endpoint that has left the pool: its requests were cut on purpose."""
        self.reported(endpoint)
        self._unanswered.pop(endpoint, None)

    def turn_away(self, request: int | None, *, now: float) -> None:
        """Raise DeadlyRequestError if the request may end a pod."""
        if request is not None and (seconds := self._refused_seconds(request, now)) > 0.0:
            raise DeadlyRequestError("a pod may have died under this request", retry_after_seconds=ceil(seconds))

    def _refused_seconds(self, request: int, now: float) -> float:
        while self._deaths and now - self._deaths[0].at > REFUSED_SECONDS:
            self._deaths.popleft()
        seen = self._unsure.get(request)
        if seen is not None and now - seen[1] > UNSURE_SECONDS:
            del self._unsure[request]
            seen = None
        self.has_some = bool(self._deaths or self._unsure)
        deaths = [death for death in self._deaths if request in death.suspects]
        if len(deaths) > 1 or any(len(death.suspects) == 1 for death in deaths):
            return REFUSED_SECONDS - (now - deaths[-1].at)
        return 0.0 if seen is None else UNSURE_SECONDS - (now - seen[1])

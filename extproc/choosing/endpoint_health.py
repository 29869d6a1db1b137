"""Outlier detection: which endpoints to avoid by the outcomes of their last requests, and which are full. Pure.

`outcome_of` defines failure, "full" and the client's own fault. Time is an argument, monotonic seconds.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec
from msgspec import structs

from extproc.pods.inflight import Bookings
from extproc.policy.values import HealthPolicy
from kvmesh.pods.pod_report import EndpointLoad

BUSY = 503
TOO_MANY_REQUESTS = 429
NOT_IMPLEMENTED = 501  # vLLM's answer if the model cannot serve the request: the pod is healthy
UNANSWERED_SECONDS = 1.0  # without headers, after which a client that leaves counts against the pod
BRIEF_SECONDS = 0.1  # from headers to end: such a stream may hold only an error event, or broke off

HUNG_SECONDS = 3.0  # without a change of the pod's numbers, with a request there
LONGEST_WINDOW = 256  # outcomes kept per endpoint: at a high rate the last ones are enough
NONE_AVOIDED: Mapping[str, str] = {}
NEVER_FULL: Mapping[str, float] = {}
FULL_SECONDS = 1.0  # after a pod's own 429 or 503
MOST_FULL_SECONDS = 8.0  # longest backoff for repeated 429 or 503
STREAK = 3  # failures in a row that mark a pod as bad if it has few good answers in the window
LONG_STREAK = 12  # the same for a pod with many good answers
QUIET_SECONDS, QUIET_GAPS = 1.0, 5.0  # without good headers, in seconds and mean gaps: then STREAK is enough for it
WINDOW_SECONDS = 10.0  # failures within it count
LEAST_REQUESTS = 5  # in the window; fewer are not judged
LONGEST_AVOIDED = 12.0  # the longest avoidance, as a multiple of the first
BREAKS = 32  # the last broken streams of all endpoints
BREAKS_FACTOR = 4  # broken streams of one endpoint for each of another: below, clients leave everywhere


class Outcome(StrEnum):
    """What the health of the request's pod learns."""

    GOOD = "good"
    FAILED = "failed"
    FULL = "full"
    BROKEN = "broken"  # ended before its first token: the pod broke it off, or its client left
    UNPROVEN = "unproven"  # an unread stream
    NEITHER = "neither"  # nothing: above all the client's own fault


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one request at its end."""

    status: int  # 0: no headers
    is_stream: bool = False
    is_whole: bool = False  # the last byte was read
    seconds: float = 0.0  # since it was sent
    answer_seconds: float = 0.0  # since its headers
    tokens: int | None = None  # events with tokens, None if not read
    has_failed: bool = False  # an error event of the server's, or the end without any event
    stood_still: bool | None = None  # whether no number of the pod's has changed since it was sent; None if unknown


def outcome_of(seen: Seen) -> Outcome:
    """Return an ended request's evidence about its pod."""
    if seen.status == 0:
        is_hung = seen.seconds >= UNANSWERED_SECONDS and seen.stood_still is not False
        return Outcome.FAILED if is_hung else Outcome.NEITHER
    outcome = outcome_of_headers(seen.status)
    return _of_stream(seen) if outcome is Outcome.GOOD and seen.is_stream else outcome


def outcome_of_headers(status: int, *, from_pod: bool = True, content_type: str = "") -> Outcome:
    """Return the headers' evidence about their pod; `from_pod` is False if Envoy answered instead."""
    if from_pod and status < 400:
        return Outcome.GOOD
    is_busy = status == BUSY and content_type.startswith("application/json")  # a proxy's own 503 is text
    if from_pod and (is_busy or status == TOO_MANY_REQUESTS):
        return Outcome.FULL
    return Outcome.FAILED if status >= 500 and status != NOT_IMPLEMENTED else Outcome.NEITHER


def _of_stream(seen: Seen) -> Outcome:
    if seen.has_failed:
        return Outcome.FAILED
    if seen.tokens is None:
        is_known = seen.answer_seconds >= BRIEF_SECONDS and seen.stood_still is False
        return Outcome.GOOD if is_known else Outcome.UNPROVEN
    if seen.is_whole:
        return Outcome.GOOD if seen.tokens else Outcome.NEITHER
    return Outcome.NEITHER if seen.tokens else Outcome.BROKEN


@dataclass(slots=True)
class _Avoidance:
    since: float  # start of the first of consecutive avoidances
    until: float
    why: str
    times: int  # in a row
    is_whole: bool  # the endpoint has failed every request


@dataclass(slots=True)
class _Record:
    outcomes: deque[tuple[float, bool]] = field(default_factory=lambda: deque(maxlen=LONGEST_WINDOW))  # (when, failed)
    streak: int = 0  # failures since the last good answer
    briefs: int = 0  # unproven streams since the last good answer
    doubted_since: float = 0.0  # the first doubtful stream since its numbers changed, 0.0 without one
    unread: int = 0  # brief streams selected for reading, since the last that was read
    full_in_a_row: int = 0  # 429 or 503 since the last other answer
    trial_until: float | None = None  # deadline of a trial under way
    avoidance: _Avoidance | None = None

    def is_avoided(self, now: float) -> bool:
        """Tell whether its avoidance has not ended; a trial under way does not count."""
        return self.avoidance is not None and now < self.avoidance.until


@dataclass(slots=True)
class _Reports:
    last: EndpointLoad
    moved_at: float | None = None  # the last report with other numbers than before; None before the first such report


class EndpointHealth:
    """The outcomes of each endpoint's last requests. An avoided endpoint gets a trial after a time that doubles."""

    def __init__(self, policy: HealthPolicy | None = None) -> None:
        self._policy = policy or HealthPolicy()
        self._records: dict[str, _Record] = {}
        # a pick reads only these three, which are nearly always empty
        self._avoided: dict[str, _Record] = {}  # the records with an avoidance
        self._full_until: dict[str, float] = {}
        self._hung: dict[str, str] = {}  # why
        self._reports: dict[str, _Reports] = {}
        self._breaks: deque[tuple[float, str]] = deque(maxlen=BREAKS)  # (when, endpoint)
        self._can_read = False  # a stream was read, so Envoy is set up for it
        self._asks_for_proof = False  # unproven streams wait for the first that Envoy lets be read
        self.endpoints = 0

    def reconfigure(self, policy: HealthPolicy) -> None:
        """Apply a new policy; running avoidance times stay as they were set."""
        self._policy = policy

    def note(self, endpoint: str, *, failed: bool, now: float) -> None:
        """Record the headers of one answer; failed means a 5xx, a reset or a failed connection.

        Good headers end a trial, so that the next one may begin; only `ended` lifts the avoidance.
        """
        record = self._record(endpoint)
        if record.is_avoided(now):
            return  # the request was sent earlier: its answer neither prolongs nor ends the time
        record.trial_until = None
        if not failed and record.full_in_a_row:
            record.full_in_a_row = 0
            self._full_until.pop(endpoint, None)
        outcomes = record.outcomes
        outcomes.append((now, failed))
        while outcomes and now - outcomes[0][0] > WINDOW_SECONDS:
            outcomes.popleft()
        if failed:
            self._judge(endpoint, record, now)

    def ended(self, endpoint: str, *, good: bool, now: float) -> None:
        """Record the end of an answer."""
        record = self._record(endpoint)
        if not good:
            if record.outcomes and not record.outcomes[-1][1]:
                record.outcomes.pop()  # its good headers were counted as a success
            self.note(endpoint, failed=True, now=now)
        elif not record.is_avoided(now):
            record.streak = record.briefs = 0
            record.doubted_since = 0.0
            if record.avoidance is not None:
                self._forget(endpoint)  # the trial has gone well

    def closed(
        self,
        endpoint: str,
        *,
        status: int,
        is_stream: bool,
        sent_at: float,
        answered_at: float,
        most_unread: int | None,
        now: float,
    ) -> Outcome:
        """Record the end of an exchange, and return its evidence; `most_unread` as of `unproven`."""
        seen = Seen(
            status=status,
            is_stream=is_stream,
            seconds=now - sent_at,
            answer_seconds=now - answered_at,
            stood_still=self.stood_still(endpoint, since=sent_at),
        )
        outcome = outcome_of(seen)
        if outcome is Outcome.UNPROVEN:
            self.unproven(endpoint, sent_at=sent_at, most_unread=most_unread, now=now)
        elif outcome is Outcome.GOOD or (outcome is Outcome.FAILED and not status):  # else known since its headers
            self.ended(endpoint, good=outcome is Outcome.GOOD, now=now)
        return outcome

    def read(self, endpoint: str, outcome: Outcome, *, seconds: float, now: float) -> bool:
        """Record the end of a stream read for `seconds`; return whether it is a failure."""
        self._can_read, self._asks_for_proof = True, False
        if outcome is not Outcome.BROKEN:
            self._record(endpoint).unread = 0
        if outcome in (Outcome.GOOD, Outcome.FAILED):
            self.ended(endpoint, good=outcome is Outcome.GOOD, now=now)
        elif outcome is Outcome.BROKEN:
            return self._doubt(endpoint, since=now - seconds, is_broken=True, now=now)
        return outcome is Outcome.FAILED

    def unproven(self, endpoint: str, *, sent_at: float, most_unread: int | None, now: float) -> None:
        """Record the end of an unread stream: a short answer, or none.

        `most_unread`: how many streams selected for reading may end unread in a row; None if this one was not selected.
        Beyond that, each counts as broken, or as good if Envoy lets none be read.
        """
        record = self._record(endpoint)
        record.briefs += 1
        self._asks_for_proof = self._asks_for_proof or (record.briefs >= STREAK and not self._can_read)
        is_broken = False
        if most_unread is not None:
            record.unread += 1
            if record.unread > most_unread:
                is_broken = self._can_read
                if not is_broken:
                    self.ended(endpoint, good=True, now=now)
                    return
        self._doubt(endpoint, since=sent_at, is_broken=is_broken, now=now)

    def _doubt(self, endpoint: str, *, since: float, is_broken: bool, now: float) -> bool:
        """Blame the endpoint for a doubtful stream if its engine does nothing, or most broken streams are its own."""
        record = self._record(endpoint)
        stood_still = self.stood_still(endpoint, since=record.doubted_since or since)
        if stood_still is False or not record.doubted_since:
            record.doubted_since = since
        if is_broken and self.moved_at(endpoint) is None:  # its numbers tell nothing
            self._breaks.append((now, endpoint))
            recent = [where for when, where in self._breaks if now - when <= WINDOW_SECONDS]
            own = recent.count(endpoint)
            stood_still = own >= BREAKS_FACTOR * (len(recent) - own)
        if stood_still:
            self.ended(endpoint, good=False, now=now)
        return bool(stood_still)

    def reported(self, endpoint: str, load: EndpointLoad, bookings: Bookings) -> None:
        """Take a report, to know whether the engine does anything; avoid the endpoint if not, with requests there."""
        self._note_report(endpoint, load)
        moved_at, oldest = self.moved_at(endpoint), None
        if moved_at is not None and load.reported_at - moved_at >= HUNG_SECONDS:
            oldest = min(
                [each.booked_at for each in bookings.sent_since(endpoint, moved_at) if each.is_engines], default=None
            )
        if oldest is not None and load.reported_at - oldest >= HUNG_SECONDS:
            self._hung[endpoint] = f"it has done nothing for {load.reported_at - oldest:.0f} s, with requests there"
        elif self._hung:
            self._hung.pop(endpoint, None)

    def _note_report(self, endpoint: str, load: EndpointLoad) -> None:
        known = self._reports.get(endpoint)
        if known is None:
            self._reports[endpoint] = _Reports(load)
            return
        if not load.shows_last_step and structs.replace(load, reported_at=known.last.reported_at) != known.last:
            known.moved_at = load.reported_at
        known.last = load

    def stood_still(self, endpoint: str, *, since: float) -> bool | None:
        """Tell whether a report UNANSWERED_SECONDS after `since` has the same numbers; None if no report tells."""
        known = self._reports.get(endpoint)
        if known is None or known.moved_at is None:
            return None
        if known.moved_at > since:
            return False
        return True if known.last.reported_at >= since + UNANSWERED_SECONDS else None

    def moved_at(self, endpoint: str) -> float | None:
        """Return when the endpoint's reported numbers last changed (monotonic seconds), None if they never did."""
        known = self._reports.get(endpoint)
        return None if known is None else known.moved_at

    def is_suspect(self, endpoint: str, take_read: Callable[[], bool]) -> bool:
        """Tell whether to read the next stream: after a failure, or STREAK unproven ones if `take_read` allows."""
        record = self._records.get(endpoint)
        is_unproven = self._asks_for_proof or (record is not None and record.briefs >= STREAK)
        return (record is not None and record.streak > 0) or (is_unproven and take_read())

    def avoided(self, *, now: float) -> Mapping[str, str]:
        """Return the endpoints to avoid at `now`, each with a short reason."""
        if not self._avoided and not self._hung:
            return NONE_AVOIDED
        return self._hung | {
            endpoint: avoidance.why
            for endpoint, record in self._avoided.items()
            if (avoidance := record.avoidance) is not None
            and (now < avoidance.until or (record.trial_until is not None and now < record.trial_until))
        }

    def failing(self) -> frozenset[str]:
        """Return the endpoints that have failed every request."""
        return frozenset(
            endpoint
            for endpoint, record in self._avoided.items()
            if record.avoidance is not None and record.avoidance.is_whole
        )

    def avoided_times(self, endpoint: str) -> tuple[float, float] | None:
        """Return when avoidance for failures began and when its trial is due, or None if it is not avoided."""
        record = self._avoided.get(endpoint)
        if record is None or record.avoidance is None:
            return None
        return record.avoidance.since, record.avoidance.until

    def sent(self, endpoint: str, *, now: float) -> None:
        """Note a request to the endpoint; a trial is one request, until it is answered or its deadline passes."""
        record = self._records.get(endpoint)
        if record is None:
            return
        if record.avoidance is not None and now >= record.avoidance.until:
            record.trial_until = now + self._policy.avoid_seconds
        if record.full_in_a_row >= STREAK and now >= self._full_until.get(endpoint, 0.0):
            record.trial_until = self._full_until[endpoint] = now + FULL_SECONDS

    def full(self, endpoint: str, *, now: float) -> None:
        """Record a pod's own 429 or 503: it is full for a while, which is no failure.

        The time doubles with each such answer in a row. After three in a row the pod gets one request at a time until
        it serves one. One that refuses again although it has nothing to do fails.
        """
        record = self._record(endpoint)
        is_trial, record.trial_until = record.trial_until is not None, None  # the pod answered: it is alive
        if now < self._full_until.get(endpoint, 0.0) and not is_trial:
            return  # the request was sent before the pod called itself full
        times, reports = record.full_in_a_row, self._reports.get(endpoint)
        record.full_in_a_row = times + 1
        if times >= STREAK and reports is not None and not reports.last.unfinished_requests:
            record.outcomes.clear()
            record.streak = max(record.streak, STREAK - 1)
            self.note(endpoint, failed=True, now=now)
            return
        self._full_until[endpoint] = now + min(FULL_SECONDS * 2.0 ** min(times, 30), MOST_FULL_SECONDS)

    def full_until(self, *, now: float) -> Mapping[str, float]:
        """Return the endpoints that called themselves full, and until when (monotonic seconds)."""
        if not self._full_until:
            return NEVER_FULL
        ended = [endpoint for endpoint, until in self._full_until.items() if until <= now]
        for endpoint in ended:
            del self._full_until[endpoint]
        return self._full_until

    def restarted(self, endpoint: str) -> None:
        """Drop all that is known of the endpoint: its process is new."""
        self._forget(endpoint)
        self._reports.pop(endpoint, None)
        self._hung.pop(endpoint, None)

    def _forget(self, endpoint: str) -> None:
        self._records.pop(endpoint, None)
        self._avoided.pop(endpoint, None)
        self._full_until.pop(endpoint, None)

    def _record(self, endpoint: str) -> _Record:
        record = self._records.get(endpoint)
        if record is None:
            record = self._records[endpoint] = _Record()
        return record

    def _judge(self, endpoint: str, record: _Record, now: float) -> None:
        policy, outcomes, before = self._policy, record.outcomes, record.avoidance
        goods = [when for when, failed in outcomes if not failed]
        failures = len(outcomes) - len(goods)
        record.streak += 1
        gap = (goods[-1] - goods[0]) / (len(goods) - 1) if len(goods) > 1 else WINDOW_SECONDS
        is_quiet = bool(goods) and now - goods[-1] >= max(QUIET_SECONDS, QUIET_GAPS * gap)
        is_share = failures >= policy.failure_share * len(outcomes)
        is_streak = record.streak >= (STREAK if is_share or is_quiet else LONG_STREAK)
        # after a trial the first failure is enough
        if not (before or is_streak or (is_share and len(outcomes) >= LEAST_REQUESTS)):
            return
        streak, times = record.streak, 0 if before is None else before.times
        why = f"{streak} requests in a row" if streak >= STREAK else f"{failures} of {len(outcomes)} requests"
        if len(self._avoided) >= self.endpoints > 0:
            times = 0  # no other endpoint serves: try often
        seconds = policy.avoid_seconds * min(2.0 ** min(times, 30), LONGEST_AVOIDED)
        record.trial_until = None
        record.avoidance = _Avoidance(
            since=now if before is None else before.since,
            until=now + seconds,
            why=f"{why} failed",
            times=times + 1,
            is_whole=before.is_whole if before is not None else streak >= STREAK and failures == len(outcomes),
        )
        self._avoided[endpoint] = record
        outcomes.clear()

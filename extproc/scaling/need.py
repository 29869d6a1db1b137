"""Pods that the load of one role needs, with the reasons: forecast, margin for peaks, overdue queue. Pure.

Square-root staffing gives the margin: with only the mean number of busy pods they would be too few half of the time.
Halfin and Whitt (Heavy-traffic limits for queues with many exponential servers, Operations Research 29, 1981): with
R + beta sqrt(R) servers a request waits with probability 1 / (1 + beta Phi(beta) / phi(beta)), and a waiting one waits
longer than t with probability exp(-beta sqrt(R) t / s), where s is its service time. Beta is the smallest value at
which at most `LATE_SHARE` of the requests wait longer than the target allows.
"""

from math import erf, exp, inf, pi, sqrt

import msgspec

from extproc.scaling.demand import Work

DRAIN_SECONDS = 60.0  # to work off the overdue queue, once the pods are ready
LATE_SHARE = 0.1
USUAL_BETA = 1.0  # without a target: 22 of 100 requests wait at all
MOST_BETA = 3.0
MOST_BUSY = 0.95  # of the pods, on average: the estimates have an error of 5 %
HALVINGS = 30


def waits(beta: float) -> float:
    """Return the probability that a request waits."""
    if beta <= 0.0:
        return 1.0
    density = exp(-beta * beta / 2.0) / sqrt(2.0 * pi)
    below = (1.0 + erf(beta / sqrt(2.0))) / 2.0
    return 1.0 / (1.0 + beta * below / density)


def beta_for(busy: float, *, slack_seconds: float | None, own_seconds: float) -> float:
    """Return beta for a mean number of busy pods.

    `slack_seconds` is the longest wait within the target, or None without a target; `own_seconds` is the service time.
    """
    if slack_seconds is None or own_seconds <= 0.0 or busy <= 0.0:
        return USUAL_BETA
    if slack_seconds <= 0.0:
        return MOST_BETA
    patience = sqrt(busy) * slack_seconds / own_seconds
    low, high = 0.0, MOST_BETA
    for _ in range(HALVINGS):
        middle = (low + high) / 2.0
        if waits(middle) * exp(-middle * patience) > LATE_SHARE:
            low = middle
        else:
            high = middle
    return high


def pods_for(busy: float, *, beta: float, streams: float = 1.0) -> float:
    """Return the pods, not rounded, for a mean number of busy ones, each with `streams` concurrent requests."""
    return max(busy + beta * sqrt(busy / max(streams, 1.0)), busy / MOST_BUSY)


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work, now and at the time when a pod requested now is ready; in busy pods and seconds."""

    level: float
    busy: float  # at the horizon
    horizon: float
    alone_seconds: float  # until the next pod is ready: less than the horizon if one is already starting
    ready: float  # pods
    ttft_seconds: float | None  # target, or None without one
    inter_token_seconds: float | None

    def in_pods_of(self, pace: float) -> "Outlook":
        """Return the outlook in pods that are `pace` times as fast."""
        return msgspec.structs.replace(self, level=self.level / pace, busy=self.busy / pace, ready=self.ready / pace)

    @property
    def words(self) -> str:
        """The level and the forecast in words."""
        if not self.horizon:
            return f"{self.level:.2g} pods busy"
        return f"{self.level:.2g} pods busy, {self.busy:.2g} by forecast in {self.horizon:g} s"


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """The pods that the load needs, not rounded, and the reason."""

    pods: float
    words: str
    is_out_of_reach: bool = False  # no number of pods meets a target


def for_prompts(outlook: Outlook, work: Work) -> Need:
    """Return the need for prefill."""
    own, promise = work.request_seconds, outlook.ttft_seconds
    is_out_of_reach = promise is not None and own >= promise
    slack = None if promise is None or is_out_of_reach else promise - own
    beta = beta_for(outlook.busy, slack_seconds=slack, own_seconds=own)
    pods = pods_for(outlook.busy, beta=beta)
    words = f"prompts keep {outlook.words}, and chance needs {pods - outlook.busy:.2g}"
    draining = _draining(outlook, waiting_seconds=work.waiting_seconds)
    if draining:
        words += f", and what waits too long {draining:.2g}"
    if is_out_of_reach:
        words += f"; a prompt alone takes {own:.3g} s of the promised {promise:g} s: no number of pods keeps that"
    return Need(pods=pods + draining, words=words, is_out_of_reach=is_out_of_reach)


def for_decoding(outlook: Outlook, work: Work) -> Need:
    """Return the need for decoding."""
    pods = pods_for(outlook.busy, beta=USUAL_BETA, streams=work.streams or inf)
    each = "" if work.streams is None else f" ({work.streams:.0f} streams each by {work.limit})"
    words = f"decoding keeps {outlook.words}{each}, and chance needs {pods - outlook.busy:.2g}"
    draining = _draining(outlook, waiting_seconds=work.waiting_decode_seconds)
    if draining:
        words += f", and what waits too long {draining:.2g}"
    if work.is_out_of_reach:
        promise = outlook.inter_token_seconds
        words += f"; one stream alone takes more than the promised {promise:g} s a token: no number of pods keeps that"
    return Need(pods=pods + draining, words=words, is_out_of_reach=work.is_out_of_reach)


def _draining(outlook: Outlook, *, waiting_seconds: float) -> float:
    """Return the extra pods for the overdue part of the queue; `waiting_seconds` is the queue in seconds of one pod.

    Until new pods are ready the queue grows by the load above the capacity of the ready pods.
    """
    late = waiting_seconds - outlook.ready * (outlook.ttft_seconds or 0.0)
    if late <= 0.0:
        return 0.0
    return (late + max(outlook.busy - outlook.ready, 0.0) * outlook.alone_seconds) / DRAIN_SECONDS


class Outlooks(msgspec.Struct, frozen=True, kw_only=True):
    """Both kinds of work; None if the role has none of it, or if too little is known."""

    prompts: Outlook | None = None
    decoding: Outlook | None = None

    def needs(self, work: Work) -> tuple[Need | None, Need | None]:
        """Return the needs for prefill and decoding."""
        return (
            None if self.prompts is None else for_prompts(self.prompts, work),
            None if self.decoding is None else for_decoding(self.decoding, work),
        )


def larger(needs: tuple[Need | None, Need | None]) -> Need | None:
    """Return the larger need; if only the other one is out of reach, say so in the words."""
    given = [each for each in needs if each is not None]
    if not given:
        return None
    need = max(given, key=lambda each: each.pods)
    out_of_reach = next((each for each in given if each.is_out_of_reach), None)
    if out_of_reach is not None and out_of_reach is not need:
        return msgspec.structs.replace(need, words=f"{need.words}; {out_of_reach.words}", is_out_of_reach=True)
    return need

"""Busy pods -> pods: what chance needs beside the mean, by the promise. Pure.

With as many pods as are busy on average, half of the time they are too few. Halfin and Whitt (Heavy-traffic limits for
queues with many exponential servers, Operations Research 29, 1981): with R + beta sqrt(R) servers a request waits with
the probability 1 / (1 + beta Phi(beta) / phi(beta)), and then longer than t with exp(-beta sqrt(R) t / s), where s is
its own time at a server. Beta is the least by which no more than `LATE_SHARE` wait longer than the promise leaves.
"""

from math import erf, exp, pi, sqrt

LATE_SHARE = 0.1
USUAL_BETA = 1.0  # where no promise says it: 22 of 100 wait at all
MOST_BETA = 3.0
MOST_BUSY = 0.95  # of the pods, on average: estimates are off by as much
HALVINGS = 30


def waits(beta: float) -> float:
    """Return the probability that a request waits."""
    if beta <= 0.0:
        return 1.0
    density = exp(-beta * beta / 2.0) / sqrt(2.0 * pi)
    below = (1.0 + erf(beta / sqrt(2.0))) / 2.0
    return 1.0 / (1.0 + beta * below / density)


def beta_for(busy: float, *, slack_seconds: float | None, own_seconds: float) -> float:
    """Return beta for so many busy pods.

    `slack_seconds`: what the promise leaves for waiting, None where there is none; `own_seconds` that a request keeps
    its pod.
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
    """Return the pods, not rounded, for so many busy ones, of which each serves so many requests at the same time."""
    return max(busy + beta * sqrt(busy / max(streams, 1.0)), busy / MOST_BUSY)

"""How much slower each pod is looked at as pods become many, so that a quiet fleet costs next to nothing. Pure.

What a pod says is heard at once at any pace; only what nobody says, and must be asked for, is asked for later.
"""

FULL_PACE_PODS = 200  # up to so many, each is looked at as often as a single one
SLOWEST = 20.0


def slowdown(pods: int) -> float:
    """Return by what to multiply the time between two looks at one pod: 1.0 up to 200 pods, 10.0 at 2,000."""
    return min(max(pods / FULL_PACE_PODS, 1.0), SLOWEST)

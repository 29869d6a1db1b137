"""What a tenant would have been given by a half of its own: pure, from its requests to tokens.

Called by `summary`, to compare: who asks for just its share, at random times and with a limit to the wait, does not get
all of it even where nobody else is served.
"""

from collections.abc import Iterable

from bench.overload.script import Outcome


def own_half_tokens(
    outcomes: Iterable[Outcome], *, tokens_per_second: float, limit_seconds: float, begins: float, ends: float
) -> int:
    """Return the work begun from `begins` to `ends` by a server that does these requests alone, in their order.

    It knows every wait, and refuses just what it could not begin within `limit_seconds`; nobody comes back to it.
    """
    free_at, begun = 0.0, 0
    for outcome in sorted(outcomes, key=lambda each: each.due):
        starts = max(free_at, outcome.due)
        if not tokens_per_second or starts - outcome.due > limit_seconds:
            continue
        free_at = starts + outcome.work_tokens / tokens_per_second
        if begins <= starts < ends:
            begun += outcome.work_tokens
    return begun

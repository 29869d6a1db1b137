"""Who of a class's tenants got less of a pool of late than the one that got most. Pure; one for each class and pool.

Tenants that always have requests waiting get equal parts, and nobody gets more: who got less had not enough of them, or
they were refused. `pool_pressure` asks before it refuses one more.
"""

from math import exp

ROUNDING = 1e-9  # of sums that fade in more or fewer steps
SECONDS = 10.0  # of the fading sums: some requests each
MOST_TENANTS = 1000  # remembered; one that was forgotten got nothing


class TenantShares:
    """Of one class in one pool. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[float, float]] = {}  # tenant -> tokens as of when
        self._most = (0.0, 0.0)  # of all tenants; as all fade alike, only who is sent something can come to have more

    def went(self, tenant: str, tokens: int, *, now: float) -> None:
        """Take a request of the tenant that was sent on."""
        sum_now = _faded(self._sent.pop(tenant, (0.0, now)), now) + tokens
        if len(self._sent) >= MOST_TENANTS:
            del self._sent[next(iter(self._sent))]  # the one that was sent nothing for longest
        self._sent[tenant] = (sum_now, now)
        if sum_now > _faded(self._most, now):
            self._most = (sum_now, now)

    def __len__(self) -> int:
        """Return how many tenants are remembered."""
        return len(self._sent)

    def is_behind(self, tenant: str, *, now: float) -> bool:
        """Tell whether another tenant got more."""
        return _faded(self._sent.get(tenant, (0.0, now)), now) < _faded(self._most, now) * (1.0 - ROUNDING)


def _faded(entry: tuple[float, float], now: float) -> float:
    tokens, at = entry
    return tokens * exp(min(at - now, 0.0) / SECONDS)

"""Who of several replicas leads, by a Kubernetes Lease (coordination.k8s.io/v1). Pure: time is an argument.

The rules of client-go's `leaderelection`: a lease counts as held for as long as it was seen to change less than its
duration ago, by our own monotonic clock. What the leader writes of wall time is for people and is never compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEASE_SECONDS = 15.0  # a leader that is silent for so long has lost it
RENEW_WITHIN_SECONDS = 10.0  # a leader that could not renew for so long stops leading: well before anybody else starts
RETRY_SECONDS = 2.0


@dataclass(slots=True)
class Leadership:
    """What one replica knows of a lease."""

    identity: str
    _seen: Mapping[str, Any] | None = None  # the last spec seen
    _seen_at: float = 0.0  # monotonic seconds
    _renewed_at: float | None = field(default=None)  # when our last successful write began; None: we do not lead

    def leads(self, *, now: float) -> bool:
        """Tell whether we lead, for certain."""
        return self._renewed_at is not None and now - self._renewed_at < RENEW_WITHIN_SECONDS

    def wish(self, spec: Mapping[str, Any] | None, *, now: float, wall_time: str) -> dict[str, Any] | None:
        """Return the spec to write over what was just read (None: no lease yet), or None: another one leads."""
        if spec is not None and spec != self._seen:
            self._seen, self._seen_at = dict(spec), now
        holder = str((spec or {}).get("holderIdentity") or "")
        if holder and holder != self.identity and now - self._seen_at < self._duration(spec):
            self._renewed_at = None
            return None
        fresh = {"holderIdentity": self.identity, "leaseDurationSeconds": int(LEASE_SECONDS), "renewTime": wall_time}
        if spec is not None and holder == self.identity:
            return {**spec, **fresh}
        changes = (spec or {}).get("leaseTransitions")
        transitions = changes + 1 if isinstance(changes, int) else 0
        return {**(spec or {}), **fresh, "acquireTime": wall_time, "leaseTransitions": transitions}

    def wrote(self, spec: Mapping[str, Any], *, began_at: float) -> None:
        """Note that our wish was granted; `began_at`: monotonic, before the request was sent."""
        self._seen, self._seen_at, self._renewed_at = dict(spec), began_at, began_at

    def released(self) -> None:
        """Note that we have given the lease back."""
        self._renewed_at = None

    @staticmethod
    def _duration(spec: Mapping[str, Any] | None) -> float:
        seconds = (spec or {}).get("leaseDurationSeconds")
        return float(seconds) if isinstance(seconds, int) and seconds > 0 else LEASE_SECONDS

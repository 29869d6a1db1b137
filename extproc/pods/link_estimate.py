"""The cost of KV transfers between pods, learned from the reports of the fetching pods. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.pods.pod_report import EndpointLoad

FADING_SECONDS = 60.0  # half-life of the sums
LEAST_BYTES = 1.0  # a rate of fewer bytes means nothing


@dataclass(slots=True)
class _Sums:
    last: EndpointLoad
    tokens: float = 0.0
    moved_bytes: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class LinkEstimates:
    """KV bytes per token, and the transfer rate to each pod."""

    _pods: dict[str, _Sums] = field(default_factory=dict)

    def report(self, endpoint: str, load: EndpointLoad) -> None:
        """Add the tokens, bytes and seconds that a pod has fetched since its last report."""
        sums = self._pods.get(endpoint)
        if sums is None or load.fetched_bytes < sums.last.fetched_bytes:  # new, or another process
            if load.fetched_bytes or sums is not None:
                self._pods[endpoint] = _Sums(last=load)
            return
        share = 0.5 ** (max(load.reported_at - sums.last.reported_at, 0.0) / FADING_SECONDS)
        sums.tokens = sums.tokens * share + max(load.fetched_tokens - sums.last.fetched_tokens, 0)
        sums.moved_bytes = sums.moved_bytes * share + load.fetched_bytes - sums.last.fetched_bytes
        sums.seconds = sums.seconds * share + max(load.fetch_seconds_sum - sums.last.fetch_seconds_sum, 0.0)
        sums.last = load

    def forget(self, endpoint: str) -> None:
        """Forget a pod that is gone or has restarted."""
        self._pods.pop(endpoint, None)

    def bytes_per_token(self, *, declared: float) -> float:
        """Return the KV bytes per token over all fetches, or `declared` until there are any."""
        moved = sum(sums.moved_bytes for sums in self._pods.values())
        tokens = sum(sums.tokens for sums in self._pods.values())
        return moved / tokens if tokens >= 1.0 and moved >= LEAST_BYTES else declared

    def bytes_per_second(self, endpoint: str, *, declared: float) -> float:
        """Return the rate of a single fetch to a pod: its own mean, else the pool's, else `declared`."""
        own = self._pods.get(endpoint)
        for sums in ([own] if own is not None else [], list(self._pods.values())):
            moved, seconds = sum(each.moved_bytes for each in sums), sum(each.seconds for each in sums)
            if moved >= LEAST_BYTES and seconds > 0.0:
                return moved / seconds
        return declared

    def seen(self) -> Mapping[str, float]:
        """Return bytes per second by endpoint, for endpoints with recent fetches."""
        return {
            endpoint: sums.moved_bytes / sums.seconds
            for endpoint, sums in self._pods.items()
            if sums.moved_bytes >= LEAST_BYTES and sums.seconds > 0.0
        }

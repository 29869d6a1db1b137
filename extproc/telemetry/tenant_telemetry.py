"""What is counted of tenants: requests, prompt tokens, time in the queue. Part of `overload_telemetry`.

Who a tenant is clients say in a header, so that a tenant has series of its own only where the policy names it in a
quota; all others are `other`, requests without a tenant `none`. What clients write never becomes a label.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.policy.priority import Quota

NOBODY, OTHER = "none", "other"
ANY = "*"  # a quota for each tenant by itself names none
MOST_TENANTS = 100  # with series of their own, as long as the process lives
ADMITTED, SHED = "admitted", "shed"


class _Tenant:
    __slots__ = ("cached_tokens", "prompt_tokens", "queue_seconds", "requests")

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = 0
        self.queue_seconds = 0.0
        self.requests: defaultdict[tuple[str, str], int] = defaultdict(int)  # (class, outcome)


class TenantTelemetry(Collector):
    """Only the event loop's thread may touch it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._others, self._nobody = _Tenant(), _Tenant()
        self._known: dict[str, _Tenant] = {}  # that a policy has ever named
        self._by_name: dict[str, _Tenant] = {"": self._nobody}  # that the policy names now
        registry.register(self)

    def know(self, quotas: Iterable[Quota]) -> None:
        """Count the tenants that these name by themselves from now on, the first ones if there are too many."""
        self._by_name = {"": self._nobody}
        for quota in quotas:
            name = quota.tenant
            if name in (ANY, NOBODY, OTHER):
                continue
            if name not in self._known and len(self._known) < MOST_TENANTS:
                self._known[name] = _Tenant()
            if name in self._known:
                self._by_name[name] = self._known[name]

    def admitted(self, tenant: str, class_name: str) -> None:
        """Count a request that was sent to an endpoint."""
        self._by_name.get(tenant, self._others).requests[class_name, ADMITTED] += 1

    def shed(self, tenant: str, class_name: str) -> None:
        """Count a refusal for load."""
        self._by_name.get(tenant, self._others).requests[class_name, SHED] += 1

    def waited(self, tenant: str, *, seconds: float) -> None:
        """Count time in the queue."""
        self._by_name.get(tenant, self._others).queue_seconds += seconds

    def routed(self, tenant: str, *, prompt: int, cached: int) -> None:
        """Count a prompt."""
        line = self._by_name.get(tenant, self._others)
        line.prompt_tokens += prompt
        line.cached_tokens += cached

    def describe(self) -> Iterator[Metric]:
        """Yield the names."""
        yield from self._families()

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        requests, prompt, cached, waited = self._families()
        for name, tenant in ((NOBODY, self._nobody), (OTHER, self._others), *self._known.items()):
            for (class_name, outcome), count in tenant.requests.items():
                requests.add_metric((name, class_name, outcome), count)
            prompt.add_metric((name,), tenant.prompt_tokens)
            cached.add_metric((name,), tenant.cached_tokens)
            waited.add_metric((name,), tenant.queue_seconds)
        yield from (requests, prompt, cached, waited)

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, ...]:
        def counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
            return CounterMetricFamily(f"kvmesh_tenant_{name}", text, labels=labels)

        return (
            counter(
                "requests",
                "Requests by tenant (named in a quota of the policy; none, other), class, and what became of them: "
                "admitted, or shed for load.",
                *("tenant", "class", "outcome"),
            ),
            counter("prompt_tokens", "Tokens of routed prompts, by tenant.", "tenant"),
            counter(
                "predicted_cached_tokens", "Prompt tokens that the endpoint was expected to hold, by tenant.", "tenant"
            ),
            counter("queue_seconds", "Time that requests spent in the queue, by tenant.", "tenant"),
        )

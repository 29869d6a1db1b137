"""What is counted of tenants: requests, prompt tokens, time in the queue.

Clients name their tenant in a header, so a tenant has series of its own only where a quota of the policy names it; all
others are `other`, requests without a tenant `none`. What clients write never becomes a label.
"""

from collections.abc import Iterable

from extproc.policy.priority import Quota
from extproc.telemetry import metrics
from extproc.telemetry.metrics import OTHER
from kvmesh.metrics.registry import Registry

NO_TENANT = "none"
ANY = "*"  # a quota for each tenant by itself names none
MOST_TENANTS = 100  # with series of their own, as long as the process lives
ADMITTED, SHED = "admitted", "shed"


class TenantTelemetry:
    """The tenants of one pool."""

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.values(metrics.TENANT_REQUESTS)
        self._prompt_tokens = registry.values(metrics.TENANT_PROMPT_TOKENS)
        self._predicted_tokens = registry.values(metrics.TENANT_PREDICTED_TOKENS)
        self._queue_seconds = registry.values(metrics.TENANT_QUEUE_SECONDS)
        self._known: set[str] = set()  # that a policy has ever named
        self._labels = {"": NO_TENANT}  # of those that the policy names now
        for name in (NO_TENANT, OTHER):
            self._show(name)

    def know(self, quotas: Iterable[Quota]) -> None:
        """Count the tenants that these name by themselves from now on, the first ones if there are too many."""
        self._labels = {"": NO_TENANT}
        for name in (quota.tenant for quota in quotas):
            if name in (ANY, NO_TENANT, OTHER):
                continue
            if name not in self._known and len(self._known) < MOST_TENANTS:
                self._known.add(name)
                self._show(name)
            if name in self._known:
                self._labels[name] = name

    def _show(self, name: str) -> None:
        for family in (self._prompt_tokens, self._predicted_tokens, self._queue_seconds):
            family.of(name)

    def label_of(self, tenant: str) -> str:
        """Return the name under which a tenant is counted, whatever a client has written."""
        return self._labels.get(tenant, OTHER)

    def admitted(self, tenant: str, class_name: str) -> None:
        """Count a request that was sent to an endpoint."""
        self._requests.of(self.label_of(tenant), class_name, ADMITTED).value += 1

    def shed(self, tenant: str, class_name: str) -> None:
        """Count a refusal for load."""
        self._requests.of(self.label_of(tenant), class_name, SHED).value += 1

    def waited(self, tenant: str, *, seconds: float) -> None:
        """Count time in the queue."""
        self._queue_seconds.of(self.label_of(tenant)).value += seconds

    def routed(self, tenant: str, *, prompt: int, cached: int) -> None:
        """Count a prompt's tokens, and those of them that the endpoint is expected to hold."""
        label = self.label_of(tenant)
        self._prompt_tokens.of(label).value += prompt
        self._predicted_tokens.of(label).value += cached

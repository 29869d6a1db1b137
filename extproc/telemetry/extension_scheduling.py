"""How requests were scheduled and queued, under the inference extension's names (`inference_extension_*`).

Of its release 1.5.0, as `extension_metrics`. Left out is what has no counterpart here: plugins, dispatch cycles, and a
prefix index of its own (docs/reference/metrics.md).
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from extproc.admission.admission_queue import Outcome
from extproc.admission.fair_order import Ticket
from extproc.telemetry.metrics import OTHER
from kvmesh.metrics.metric import Metric, counter, gauge, histogram
from kvmesh.metrics.registry import Reading, Registry

_SHORT = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
_WAITS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_TENTHS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_FLOW = ("fairness_id", "priority", "inference_pool", "model_name", "target_model_name")

SCHEDULING = histogram(
    "inference_extension_scheduler_e2e_duration_seconds",
    "Time from the look at the endpoints to the decision.",
    bounds=_SHORT,
)
ATTEMPTS = counter(
    "inference_extension_scheduler_attempts_total",
    "Requests that were given a pod (success), and those for which no pod was there (failure).",
    *("status", "target_model_name", "pod_name", "namespace", "port"),
)
HIT_RATIO = histogram(
    "inference_extension_prefix_indexer_hit_ratio",
    "Share of a prompt's tokens that the chosen pod was expected to hold.",
    bounds=_TENTHS,
)
QUEUE_SECONDS = histogram(
    "inference_extension_flow_control_request_queue_duration_seconds",
    "Time that requests spent in the queue, of those that had to wait.",
    *("fairness_id", "priority", "outcome", "inference_pool", "model_name", "target_model_name"),
    bounds=_WAITS,
)
QUEUE_SIZE = gauge("inference_extension_flow_control_queue_size", "Requests that wait in the queue.", *_FLOW)
QUEUE_BYTES = gauge("inference_extension_flow_control_queue_bytes", "Bytes of these requests' bodies.", *_FLOW)
SCHEDULING_METRICS: Sequence[Metric] = (SCHEDULING, ATTEMPTS, HIT_RATIO, QUEUE_SECONDS, QUEUE_SIZE, QUEUE_BYTES)

SUCCESS, FAILURE = "success", "failure"
NO_POD = ("", "", "")
# its words for how a request left the queue (pkg/epp/flowcontrol/types)
OUTCOMES: Mapping[Outcome, str] = {
    Outcome.DISPATCHED: "Dispatched",
    Outcome.FULL: "RejectedCapacity",
    Outcome.TIMEOUT: "EvictedTTL",
    Outcome.CANCELLED: "EvictedContextCancelled",
    Outcome.DISPLACED: "EvictedOther",
    Outcome.FAILED: "EvictedOther",
    Outcome.CLOSED: "EvictedOther",
}
MOST_SERIES = 1000  # of pairs of a model and a pod; more are counted as of the model `other`

Pods = Mapping[str, tuple[str, str, str]]  # address -> the pod's name, namespace and port


class ExtensionScheduling:
    """What is counted of one pool under these names."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._scheduling = registry.histograms(SCHEDULING).of()
        self._hit_ratio = registry.histograms(HIT_RATIO).of()
        self._queue_seconds = registry.histograms(QUEUE_SECONDS)
        self._given: Counter[tuple[str, str]] = Counter()  # by target model and endpoint
        self._not_given: Counter[str] = Counter()  # by target model
        self._pool = ""
        self._tenant_label: Callable[[str], str] = lambda _: OTHER
        self._models: Callable[[], Collection[str]] = tuple

    def decided(self, seconds: float) -> None:
        """Count how long a decision took."""
        self._scheduling.observe(seconds)

    def given(self, endpoint: str, *, target: str, prompt_tokens: int, matched_tokens: int) -> None:
        """Count a request that was given a pod; `target` is the pod's name of its model, as a label."""
        known = (target, endpoint) in self._given or len(self._given) < MOST_SERIES
        self._given[target if known else OTHER, endpoint] += 1
        if prompt_tokens:
            self._hit_ratio.observe(matched_tokens / prompt_tokens)

    def not_given(self, *, target: str) -> None:
        """Count a request for which no pod was there."""
        self._not_given[target] += 1

    def left_queue(self, ticket: Ticket, outcome: Outcome, seconds: float) -> None:
        """Count a request that does not wait any more."""
        tenant, priority, pool, *models = self._flow_of(ticket)
        self._queue_seconds.of(tenant, priority, OUTCOMES[outcome], pool, *models).observe(seconds)

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that is gone."""
        for key in [key for key in self._given if key[1] == endpoint]:
            del self._given[key]

    def show(
        self,
        pool: str,
        *,
        waiting: Callable[[], Iterable[Ticket]],
        pods: Callable[[], Pods],
        tenant_label: Callable[[str], str],
        models: Callable[[], Collection[str]],
    ) -> None:
        """Show what these return at each scrape; to be called once. `models`: names that may be labels."""
        self._pool, self._tenant_label, self._models = pool, tenant_label, models
        self._registry.read(lambda: self._read(waiting(), pods()))

    def _read(self, waiting: Iterable[Ticket], pods: Pods) -> Reading:
        given = [
            ((SUCCESS, target, *pods.get(endpoint, (endpoint, "", endpoint.rpartition(":")[2]))), count)
            for (target, endpoint), count in self._given.items()
        ]
        yield ATTEMPTS, [*given, *(((FAILURE, target, *NO_POD), count) for target, count in self._not_given.items())]
        sizes: Counter[tuple[str, ...]] = Counter()
        body_bytes: Counter[tuple[str, ...]] = Counter()
        for ticket in waiting:
            flow = self._flow_of(ticket)
            sizes[flow] += 1
            body_bytes[flow] += ticket.body_bytes
        yield QUEUE_SIZE, list(sizes.items())
        yield QUEUE_BYTES, list(body_bytes.items())

    def _flow_of(self, ticket: Ticket) -> tuple[str, ...]:
        requested, target = ticket.requested_model, ticket.pool
        if requested is None:
            names = ("", "")
        else:
            names = (requested, target) if requested in self._models() else (OTHER, OTHER)
        priority = str(ticket.priority_class.priority)
        return (self._tenant_label(ticket.tenant), priority, self._pool, *names)

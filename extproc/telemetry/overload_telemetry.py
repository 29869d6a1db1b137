"""What admission, the queue, the steps of degradation and quotas count, in the picker's registry.

Label values are the policy's own words (classes, steps), configured endpoints, and closed sets of ours.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.admission.admission_queue import Outcome
from extproc.admission.degradation import StepChange
from extproc.policy.priority import PriorityClass
from extproc.telemetry.tallies import TalliesFirst
from extproc.telemetry.tenant_telemetry import TenantTelemetry

log = logging.getLogger(__name__)

WAIT_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Samples = Iterable[tuple[tuple[str, ...], float]]  # label values, value


class _Now(Collector):
    """Gauges that are read when somebody asks for the metrics."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], read: Callable[[], Samples]) -> None:
        self._name, self._text, self._labels, self._read = name, text, labels, read

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(self._name, self._text, labels=self._labels)
        for values, number in self._read():
            family.add_metric(values, number)
        yield family

    def describe(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._text, labels=self._labels)


class OverloadTelemetry:
    """Implements the telemetry of `admit_request` and of `admission_queue`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        classes: Mapping[str, PriorityClass],
        tenants: TenantTelemetry | None = None,
        queued: Callable[[float], None] | None = None,
    ) -> None:
        """`tenants` counts tenants, `queued` is told how long each request has waited."""
        self._registry = registry
        self._tenants = tenants or TenantTelemetry(CollectorRegistry())
        self._queued = queued
        self._classes = classes
        self._kept: dict[str, int] = {}  # class -> admitted requests that are not in the metric yet
        TalliesFirst(self._count_kept, registry=registry)
        self._admitted = Counter(
            "kvmesh_admitted_requests", "Requests sent to an endpoint, by priority class.", ["class"], registry=registry
        )
        self._shed = Counter(
            "kvmesh_shed_requests",
            "Requests refused for load, by class and reason.",
            ["class", "reason"],
            registry=registry,
        )
        self._left = Counter(
            "kvmesh_queue_left",
            "Requests that left the queue, by class and how.",
            ["class", "outcome"],
            registry=registry,
        )
        self._waits = Histogram(
            "kvmesh_queue_seconds",
            "Time that requests spent in the queue, however it ended.",
            ["class"],
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self._steps = Counter(
            "kvmesh_degradation_changes",
            "Steps of degradation that were entered or left.",
            ["class", "step", "change"],
            registry=registry,
        )
        self._ignored = Counter(
            "kvmesh_ignored_objectives",
            "Requests whose objective header did not count: unknown to the policy, or not trusted to raise.",
            ["why"],
            registry=registry,
        )
        self._full = Counter(
            "kvmesh_endpoint_full_answers",
            "503 of an endpoint itself: it has no room.",
            ["endpoint"],
            registry=registry,
        )
        # looked up by label once: a request counts itself in a few hundred nanoseconds
        self._waits_of: dict[str, Histogram] = {}
        self.know(classes)
        for gauge in (
            _Now(
                "kvmesh_class_ttft_target_seconds",
                "Time to the first token that the policy promises a class.",
                ("class",),
                lambda: (((name,), each.targets.ttft_seconds) for name, each in self._classes.items()),
            ),
            _Now(
                "kvmesh_class_priority",
                "A class's priority; higher ones go first.",
                ("class",),
                lambda: (((name,), float(each.priority)) for name, each in self._classes.items()),
            ),
        ):
            registry.register(gauge)

    def know(self, classes: Mapping[str, PriorityClass]) -> None:
        """Count requests of these classes, too: a policy has named them."""
        self._classes = classes
        for name in classes:
            self._admitted.labels(name)  # shown before the first one
            self._kept.setdefault(name, 0)
            self._waits_of[name] = self._waits.labels(name)

    def _count_kept(self) -> None:
        """Move what was kept into the metric."""
        for name, count in self._kept.items():
            if count:
                self._admitted.labels(name).inc(count)
                self._kept[name] = 0

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that is gone."""
        with suppress(KeyError):
            self._full.remove(endpoint)

    def show(
        self,
        *,
        queued: Callable[[], Mapping[str, int]],
        steps_in_force: Callable[[], Samples],
        estimate_errors: Callable[[], Samples],
    ) -> None:
        """Show what the parts know at the moment of each scrape."""
        for gauge in (
            _Now(
                "kvmesh_queued_requests",
                "Requests that wait for room at an endpoint.",
                ("class",),
                lambda: (((class_name,), float(count)) for class_name, count in queued().items()),
            ),
            _Now("kvmesh_degradation_step", "1 while a step is in force.", ("class", "step"), steps_in_force),
            _Now(
                "kvmesh_ttft_estimate_error_seconds",
                "Mean distance between the expected and the real time to the first token, lately.",
                ("endpoint",),
                estimate_errors,
            ),
        ):
            self._registry.register(gauge)

    def admitted(self, class_name: str, *, tenant: str = "") -> None:
        """Count a request that was sent to an endpoint; the tenant may be anything."""
        self._kept[class_name] += 1
        self._tenants.admitted(tenant, class_name)

    def shed(self, class_name: str, *, reason: str, tenant: str = "") -> None:
        """Count a refusal."""
        self._shed.labels(class_name, reason).inc()
        self._tenants.shed(tenant, class_name)

    def left_queue(self, class_name: str, *, outcome: Outcome, seconds: float, tenant: str = "") -> None:
        """Count a request that does not wait any more."""
        self._left.labels(class_name, outcome.value).inc()
        self._waits_of[class_name].observe(seconds)
        self._tenants.waited(tenant, seconds=seconds)
        if self._queued is not None:
            self._queued(seconds)

    def objective_ignored(self, why: str) -> None:
        """Count a header that did not count."""
        self._ignored.labels(why).inc()

    def endpoint_full(self, endpoint: str) -> None:
        """Count a pod's own 503."""
        self._full.labels(endpoint).inc()

    def step_changed(self, change: StepChange) -> None:
        """Count and log a step that was entered or left."""
        word = "entered" if change.entered else "left"
        self._steps.labels(change.class_name, change.step.step.value, word).inc()
        log.log(
            logging.WARNING if change.entered else logging.INFO,
            "class %s: step %s %s at pressure %.2f",
            change.class_name,
            change.step.step.value,
            word,
            change.pressure,
            extra={"pool": change.pool},
        )

"""What admission, the queue and the steps of degradation count, in the picker's registry.

The values of labels are the policy's own names (classes, steps), configured endpoints, and closed sets of ours.
"""

import logging
from collections.abc import Callable, Mapping

from extproc.admission.admission_queue import Outcome
from extproc.admission.degradation import StepChange
from extproc.policy.priority import PriorityClass
from extproc.telemetry import metrics
from extproc.telemetry.tenant_telemetry import TenantTelemetry
from kvmesh.metrics.registry import Reading, Registry, Rows

log = logging.getLogger(__name__)

UNCACHED, CACHED, REFUSED = "uncached", "cached", "refused"  # parts of the prompts' tokens
ELSEWHERE, NO_ROOM = "elsewhere", "no-room"  # what a promised inter-token time makes of a pick


class OverloadTelemetry:
    """Implements the telemetry of `admit_request` and of `admission_queue`."""

    def __init__(
        self,
        registry: Registry,
        *,
        classes: Mapping[str, PriorityClass],
        tenants: TenantTelemetry | None = None,
        queued: Callable[[float], None] | None = None,
    ) -> None:
        """`tenants` counts tenants; `queued` is called with the seconds that each request has waited."""
        self._registry = registry
        self._tenants = tenants or TenantTelemetry(Registry())
        self._queued = queued
        self._admitted = registry.values(metrics.ADMITTED)
        self._shed = registry.values(metrics.SHED)
        self._left = registry.values(metrics.QUEUE_LEFT)
        self._waits = registry.histograms(metrics.QUEUE_WAITS)
        self._held = registry.values(metrics.PROMISE_HELD)
        self._step_changes = registry.values(metrics.STEP_CHANGES)
        self._ignored = registry.values(metrics.IGNORED_OBJECTIVES)
        self._tokens = registry.values(metrics.CLASS_PROMPT_TOKENS)
        self.refused_requests = self.refused_tokens = 0.0
        self.is_shadow = False  # steps are entered and left, and change no request
        self._full = registry.values(metrics.ENDPOINT_FULL)
        self._targets = registry.values(metrics.CLASS_TARGET)
        self._inter_token_targets = registry.values(metrics.CLASS_INTER_TOKEN_TARGET)
        self._priorities = registry.values(metrics.CLASS_PRIORITY)
        self.know(classes)

    def know(self, classes: Mapping[str, PriorityClass]) -> None:
        """Show these classes from now on: a policy names them. Those before keep what was counted."""
        self._targets.series.clear()
        self._inter_token_targets.series.clear()
        self._priorities.series.clear()
        for name, each in classes.items():
            self._admitted.of(name)  # shown before the first request
            self._waits.of(name)
            for how in (ELSEWHERE, NO_ROOM):
                self._held.of(name, how)
            targets = each.targets
            self._targets.of(name).value = targets.ttft_seconds
            self._inter_token_targets.of(name).value = targets.inter_token_seconds
            self._priorities.of(name).value = each.priority

    def show(
        self,
        *,
        queued: Callable[[], Mapping[str, int]],
        steps_in_force: Callable[[], Rows],
        estimate_errors: Callable[[], Rows],
    ) -> None:
        """Show what these return at the time of each page."""

        def read() -> Reading:
            yield metrics.QUEUED, (((class_name,), count) for class_name, count in queued().items())
            yield metrics.STEPS, () if self.is_shadow else steps_in_force()
            yield metrics.SHADOW_STEPS, steps_in_force() if self.is_shadow else ()
            yield metrics.ESTIMATE_ERROR, estimate_errors()

        self._registry.read(read)

    def forget(self, endpoint: str) -> None:
        """Drop the series of an endpoint that is gone."""
        self._full.remove(endpoint)

    @property
    def admitted_by_class(self) -> Mapping[str, float]:
        """How many requests of each class were sent to an endpoint."""
        return {name: value.value for (name,), value in self._admitted.series.items()}

    def admitted(self, class_name: str, *, tenant: str = "", uncached_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Count a request that was sent to an endpoint, with its prompt's tokens; the tenant may be anything."""
        self._admitted.of(class_name).value += 1
        self._tokens.of(class_name, UNCACHED).value += uncached_tokens
        self._tokens.of(class_name, CACHED).value += cached_tokens
        self._tenants.admitted(tenant, class_name)

    def shed(self, class_name: str, *, reason: str, tenant: str = "") -> None:
        """Count a refusal."""
        self._shed.of(class_name, reason).value += 1
        # most are refused before anybody knows their tokens
        count = self._admitted.of(class_name).value
        tokens = self._tokens.of(class_name, UNCACHED).value / count if count else 0.0
        self._tokens.of(class_name, REFUSED).value += tokens
        self.refused_requests += 1
        self.refused_tokens += tokens
        self._tenants.shed(tenant, class_name)

    def held_by_promise(self, class_name: str, *, has_room: bool) -> None:
        """Count a pick that a promised inter-token time kept from an endpoint; `has_room`: another one had room."""
        self._held.of(class_name, ELSEWHERE if has_room else NO_ROOM).value += 1

    def found_no_pod(self) -> None:
        """Note a request that no pod was there for: one is wanted."""
        self.refused_requests += 1

    def left_queue(self, class_name: str, *, outcome: Outcome, seconds: float, tenant: str = "") -> None:
        """Count a request that does not wait any more."""
        self._left.of(class_name, outcome.value).value += 1
        self._waits.of(class_name).observe(seconds)
        self._tenants.waited(tenant, seconds=seconds)
        if self._queued is not None:
            self._queued(seconds)

    def objective_ignored(self, why: str) -> None:
        """Count a header that did not count."""
        self._ignored.of(why).value += 1

    def endpoint_full(self, endpoint: str) -> None:
        """Count a pod's own 503."""
        self._full.of(endpoint).value += 1

    def step_changed(self, change: StepChange) -> None:
        """Count and log a step that was entered or left."""
        direction = "entered" if change.entered else "left"
        if self.is_shadow:
            log.info(
                "class %s: step %s would be %s at pressure %.2f (shadow)",
                change.class_name,
                change.step.step.value,
                direction,
                change.pressure,
                extra={"pool": change.pool},
            )
            return
        self._step_changes.of(change.class_name, change.step.step.value, direction).value += 1
        log.log(
            logging.WARNING if change.entered else logging.INFO,
            "class %s: step %s %s at pressure %.2f",
            change.class_name,
            change.step.step.value,
            direction,
            change.pressure,
            extra={"pool": change.pool},
        )

"""Metrics of single features of a pool: tenants, admission and queue, prefill requests, shadow mode, first pods.

Label values are names of the policy (classes, steps), configured endpoints, and closed sets of ours. Clients name their
tenant in a header, so only tenants named in a quota of the policy have their own series. All others count as `other`,
requests without a tenant as `none`. Client text never becomes a label.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

from extproc.admission.admission_queue import Outcome
from extproc.admission.degradation import StepChange
from extproc.admission.waiting_bodies import WaitingBodies
from extproc.choosing.decision import Decision
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.disaggregation.transfer_protocols import LegOutcome
from extproc.errors import Cause
from extproc.ledger import metrics
from extproc.ledger.facts import Decided, EndpointFull, Held, LegEnd, LegsEnded, NoDecision
from extproc.ledger.metrics import OTHER
from extproc.policy.priority import PriorityClass, Quota
from extproc.policy.shadow import ShadowAction
from kvmesh.metrics.registry import Reading, Registry, Rows

log = logging.getLogger(__name__)

UNCACHED, CACHED, REFUSED = "uncached", "cached", "refused"  # kinds of prompt tokens
NO_TENANT = "none"
ANY = "*"  # a quota for every tenant names none
MOST_TENANTS = 100  # with their own series, over the life of the process
ADMITTED, SHED = "admitted", "shed"
WINNERS = {0: "first", 1: "second", -1: "none"}  # of a race; labels
REMOTE, LOCAL, FELL_BACK = "remote", "local", "fell-back"  # where a prompt is computed; labels


class TenantTelemetry:
    """The tenant metrics of one pool."""

    def __init__(self, registry: Registry) -> None:
        self._requests = registry.values(metrics.TENANT_REQUESTS)
        self._prompt_tokens = registry.values(metrics.TENANT_PROMPT_TOKENS)
        self._predicted_tokens = registry.values(metrics.TENANT_PREDICTED_TOKENS)
        self._queue_seconds = registry.values(metrics.TENANT_QUEUE_SECONDS)
        self._known: set[str] = set()  # tenants named by any policy so far
        self._labels = {"": NO_TENANT}  # tenants of the current policy -> label
        for name in (NO_TENANT, OTHER):
            self._show(name)

    def know(self, quotas: Iterable[Quota]) -> None:
        """Give the tenants of these quotas their own series from now on, up to `MOST_TENANTS`."""
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
        """Return the label of a tenant, which may be any client text."""
        return self._labels.get(tenant, OTHER)

    def shed(self, tenant: str, class_name: str) -> None:
        """Count a request refused for load."""
        self._requests.of(self.label_of(tenant), class_name, SHED).value += 1

    def waited(self, tenant: str, *, seconds: float) -> None:
        """Count time in the queue."""
        self._queue_seconds.of(self.label_of(tenant)).value += seconds

    def routed(self, tenant: str, class_name: str, *, prompt: int, cached: int) -> None:
        """Count a request that was sent to an endpoint, its tokens, and the part predicted to be cached there."""
        label = self.label_of(tenant)
        self._requests.of(label, class_name, ADMITTED).value += 1
        self._prompt_tokens.of(label).value += prompt
        self._predicted_tokens.of(label).value += cached


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
        """`tenants` counts by tenant; `queued` is called with each request's wait in seconds."""
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
        self.is_shadow = False  # degradation levels are entered and left, but change no request
        self._full = registry.values(metrics.ENDPOINT_FULL)
        self._targets = registry.values(metrics.CLASS_TARGET)
        self._inter_token_targets = registry.values(metrics.CLASS_INTER_TOKEN_TARGET)
        self.know(classes)

    def know(self, classes: Mapping[str, PriorityClass]) -> None:
        """Show the policy's classes from now on. Former classes keep their counts."""
        self._targets.series.clear()
        self._inter_token_targets.series.clear()
        for name, each in classes.items():
            self._admitted.of(name)  # so that the series exists before the first request
            self._waits.of(name)
            for how in Held:
                self._held.of(name, how.value)
            targets = each.targets
            self._targets.of(name).value = targets.ttft_seconds
            self._inter_token_targets.of(name).value = targets.inter_token_seconds

    def show(
        self,
        *,
        queued: Callable[[], Mapping[str, int]],
        steps_in_force: Callable[[], Rows],
        estimate_errors: Callable[[], Rows],
        answer_length_errors: Callable[[], Rows],
    ) -> None:
        """Show the results of these functions at each scrape."""

        def read() -> Reading:
            yield metrics.QUEUED, (((class_name,), count) for class_name, count in queued().items())
            yield metrics.STEPS, () if self.is_shadow else steps_in_force()
            yield metrics.SHADOW_STEPS, steps_in_force() if self.is_shadow else ()
            yield metrics.ESTIMATE_ERROR, estimate_errors()
            yield metrics.ANSWER_LENGTH_ERROR, answer_length_errors()

        self._registry.read(read)

    @property
    def admitted_by_class(self) -> Mapping[str, float]:
        """Requests sent to an endpoint, by class."""
        return {name: value.value for (name,), value in self._admitted.series.items()}

    def decided(self, fact: Decided) -> None:
        """Count a decision by class."""
        outcome, asked = fact.record.outcome, fact.record.asked
        if asked is not None and not asked.costs_gpu:
            return  # no demand
        if isinstance(outcome, NoDecision) and outcome.cause is Cause.NO_POD:
            self.found_no_pod()
        if asked is None:
            return
        request_class = asked.request_class
        class_name, tenant = request_class.class_name, request_class.tenant
        if request_class.ignored_objective:
            self._ignored.of(request_class.ignored_objective.value).value += 1
        if fact.held is not None:
            self._held.of(class_name, fact.held.value).value += 1
        if isinstance(outcome, Decision):
            cached = outcome.matched_tokens
            uncached = max(outcome.prompt_tokens - cached, 0)
            self.admitted(class_name, uncached_tokens=uncached, cached_tokens=cached)
        elif outcome.cause is Cause.SHED:
            self.shed(class_name, reason=outcome.reason, tenant=tenant)

    def admitted(self, class_name: str, *, uncached_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Count a request that was sent to an endpoint, with its prompt's tokens."""
        self._admitted.of(class_name).value += 1
        self._tokens.of(class_name, UNCACHED).value += uncached_tokens
        self._tokens.of(class_name, CACHED).value += cached_tokens

    def shed(self, class_name: str, *, reason: str, tenant: str = "") -> None:
        """Count a refusal."""
        self._shed.of(class_name, reason).value += 1
        # most are refused before tokenization: assume the mean of the admitted ones
        count = self._admitted.of(class_name).value
        tokens = self._tokens.of(class_name, UNCACHED).value / count if count else 0.0
        self._tokens.of(class_name, REFUSED).value += tokens
        self.refused_requests += 1
        self.refused_tokens += tokens
        self._tenants.shed(tenant, class_name)

    def found_no_pod(self) -> None:
        """Note a request that found no pod: it counts as refused load, so that scaling asks for one."""
        self.refused_requests += 1

    def left_queue(self, class_name: str, *, outcome: Outcome, seconds: float, tenant: str = "") -> None:
        """Count a request that has left the queue."""
        self._left.of(class_name, outcome.value).value += 1
        self._waits.of(class_name).observe(seconds)
        self._tenants.waited(tenant, seconds=seconds)
        if self._queued is not None:
            self._queued(seconds)

    def endpoint_full(self, fact: EndpointFull) -> None:
        """Count a pod's own 429 or 503."""
        self._full.of(fact.endpoint).value += 1

    def step_changed(self, change: StepChange) -> None:
        """Count and log a degradation level that was entered or left."""
        direction = "entered" if change.entered else "left"
        if not self.is_shadow:
            self._step_changes.of(change.class_name, change.step.step.value, direction).value += 1
        log.log(
            logging.WARNING if change.entered and not self.is_shadow else logging.INFO,
            "class %s: step %s %s at pressure %.2f",
            change.class_name,
            change.step.step.value,
            f"would be {direction} (shadow)" if self.is_shadow else direction,
            change.pressure,
            extra={"pool": change.pool},
        )


class PrefillTelemetry:
    """Counts where prompts are computed, and the outcomes of prefill requests."""

    def __init__(self, registry: Registry) -> None:
        self._prompts = registry.values(metrics.PREFILL_PROMPTS)
        self._legs = registry.values(metrics.PREFILL_LEGS)
        self._races = registry.values(metrics.PREFILL_RACES)
        self._lost_tokens = registry.values(metrics.PREFILL_RACE_LOST_TOKENS).of()
        self._seconds = registry.histograms(metrics.PREFILL_LEG_SECONDS).of()

    def planned(self, plan: PrefillPlan) -> None:
        """Count the prompt of a routed request with a choice of prefill pods."""
        self._prompts.of(REMOTE if plan.is_remote else LOCAL).value += 1

    def leg_ended(self, fact: LegEnd) -> None:
        """Count a prefill request, its time, and the cost of a race's loser."""
        self._legs.of(fact.endpoint, fact.outcome.value).value += 1
        if fact.outcome is LegOutcome.ANSWERED:
            self._seconds.observe(fact.seconds, fact.trace_id)
        if fact.lost_tokens is not None:
            self._lost_tokens.value += fact.lost_tokens

    def legs_ended(self, fact: LegsEnded) -> None:
        """Count the winner of a race, or a prompt whose prefill requests have all failed."""
        if fact.race_winner is not None:
            self._races.of(WINNERS[fact.race_winner]).value += 1
        if fact.fell_back:
            self._prompts.of(FELL_BACK).value += 1


class ShadowTelemetry:
    """Counts withheld decisions; nothing else counts them."""

    def __init__(self, registry: Registry) -> None:
        self._decisions = registry.values(metrics.SHADOW_DECISIONS)
        self._refused = registry.values(metrics.SHADOW_REFUSED)
        self._is_shadow = registry.values(metrics.SHADOW).of()

    def know(self, *, is_shadow: bool) -> None:
        """Show whether the policy is in shadow mode."""
        self._is_shadow.value = float(is_shadow)

    def decided(self, fact: Decided) -> None:
        """Count one request's withheld decisions, and its first withheld refusal once more as a refusal."""
        decisions, asked = fact.record.shadow, fact.record.asked
        if not decisions or asked is None:
            return
        class_name = asked.request_class.class_name
        for each in decisions:
            self._decisions.of(class_name, each.rule.value, each.action.value, each.reason).value += 1
        refusal = next((each for each in decisions if each.action is ShadowAction.REFUSE), None)
        if refusal is not None:
            self._refused.of(class_name, refusal.reason).value += 1


class FirstPodTelemetry:
    """Implements `admission.first_pod.FirstPodTelemetry`."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._ended = registry.values(metrics.FIRST_POD_WAITS)
        self._seconds = registry.histograms(metrics.FIRST_POD_SECONDS)

    def show(self, waiting: Callable[[], Mapping[str, int]]) -> None:
        """Show the number of waiting requests by class at each scrape; call it once."""
        self._registry.read(
            lambda: [(metrics.FIRST_POD_WAITING, (((name,), count) for name, count in waiting().items()))]
        )

    def ended(self, class_name: str, *, outcome: str, seconds: float) -> None:
        """Count a request that has stopped waiting."""
        self._ended.of(class_name, outcome).value += 1
        self._seconds.of(class_name).observe(seconds)


def show_waiting_bodies(registry: Registry, bodies: WaitingBodies) -> None:
    """Show the bytes held by the process's requests that wait for first pods."""
    registry.read(
        lambda: (
            (metrics.WAITING_BODY_BYTES, [((), bodies.held_bytes)]),
            (metrics.WAITING_BODIES_GAVE_WAY, [((), bodies.gave_way)]),
        )
    )

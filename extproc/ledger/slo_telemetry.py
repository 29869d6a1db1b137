"""SLO metrics: targets met, missed and judged, and the pods' own measurements for comparison.

Label values are names of the policy, names of models and tenants (bounded elsewhere), and closed sets of ours.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import msgspec

from extproc.answers.attainment import Attainment, AttainmentWindow
from extproc.answers.judgement import Judgement, Outcome, Target
from extproc.answers.promise import OpenPromise, Promise, TokenTargets, targets_of
from extproc.errors import Cause
from extproc.ledger import metrics
from extproc.ledger.endpoint_telemetry import LatencyTelemetry
from extproc.ledger.facts import Decided, Ended, Judged, NoDecision, RequestOutcome
from extproc.ledger.feature_telemetry import TenantTelemetry
from extproc.policy.priority import PriorityClass
from extproc.policy.request_class import RequestClass
from kvmesh.metrics.registry import Family, Histogram, Reading, Registry

MOST_MODELS = 100  # with their own series
OF_CLASS, OF_REQUEST = "class", "request"  # whose targets are judged
NOT_IMPLEMENTED = 501  # the pod is healthy, and cannot serve the request
NO_ROLE = "none"  # no pod has served the request
LEAST, ESTIMATE, MOST = "least", "estimate", "most"


Key = tuple[str, str]  # model, role


class Within(msgspec.Struct, kw_only=True):
    """Number of observations within a target, and in all."""

    observed: float = 0.0  # in all
    least: float = 0.0  # if the target's whole bucket is beyond the target
    estimate: float = 0.0  # if the bucket's observations are spread evenly
    most: float = 0.0  # if the target's whole bucket is within the target


def within(bounds: Sequence[float], counts: Sequence[float], target: float) -> Within:
    """Return the number of observations that are at most `target`.

    `counts`: by bucket, not cumulative, one more than bounds; a bucket includes its bound. `least` and `estimate` count
    observations above the last bound as beyond every target.
    """
    at = bisect_left(bounds, target)
    least, here = sum(counts[:at]), counts[at]
    share = 0.0
    if at < len(bounds):
        below = bounds[at - 1] if at else 0.0
        share = (target - below) / (bounds[at] - below)
    if share >= 1:
        least, here = least + here, 0.0  # the target is the bucket's bound: nothing to estimate
    return Within(observed=sum(counts), least=least, estimate=least + share * here, most=least + here)


class PodShares:
    """Sums up the pods' observations per class while the class's target was in force."""

    def __init__(self) -> None:
        self._last: dict[Key, tuple[float, ...]] = {}
        self.sums: dict[tuple[str, Key], Within] = {}  # (class, key) -> sums

    def take(self, key: Key, bounds: Sequence[float], counts: Sequence[float], targets: Mapping[str, float]) -> None:
        """Take a histogram's current counts, which only grow; `targets`: seconds by class."""
        last = self._last.get(key)
        self._last[key] = now = tuple(counts)
        more = now if last is None else tuple(map(float.__sub__, now, last))
        for class_name, target in targets.items():
            sums = self.sums.setdefault((class_name, key), Within())
            if not any(more):
                continue
            found = within(bounds, more, target)
            sums.observed += found.observed
            sums.least += found.least
            sums.estimate += found.estimate
            sums.most += found.most


class SloTelemetry:
    """The SLO metrics of one pool."""

    def __init__(
        self,
        registry: Registry,
        *,
        tenants: TenantTelemetry,
        latencies: LatencyTelemetry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tenants = tenants
        self._latencies = latencies
        self._clock = clock
        self._objectives = registry.values(metrics.SLO_OBJECTIVE)
        self._sample_share = registry.values(metrics.SLO_SAMPLE_SHARE).of()
        self._promised = registry.values(metrics.SLO_PROMISED)
        self._judged = registry.values(metrics.SLO_JUDGED)
        self._requests = registry.values(metrics.SLO_REQUESTS)
        self._ignored = registry.values(metrics.SLO_HEADERS_IGNORED)
        self._window = AttainmentWindow()
        self._classes: Mapping[str, TokenTargets] = {}
        self._promises: dict[tuple[str, str, str], Promise] = {}  # by the labels
        self._models: set[str] = set()
        self._pods = {Target.TTFT: PodShares(), Target.INTER_TOKEN: PodShares()}
        self._has_read = False
        registry.read(self._read)

    def know(self, classes: Mapping[str, PriorityClass]) -> None:
        """Judge by the targets of these classes from now on."""
        self._promises.clear()
        self._objectives.series.clear()
        self._classes = {name: targets_of(each) for name, each in classes.items()}
        for name, each in classes.items():
            self._objectives.of(name).value = each.objective
            self._promised.of(name)  # so that the series exists before the first request
            self._judged.of(name)

    def sampled(self, share: float) -> None:
        """Show the sampled share of the answers."""
        self._sample_share.value = share

    def attainment(self, class_name: str) -> Attainment | None:
        """Return the share of a class's last requests within all targets, or None if none was judged lately."""
        return self._window.of(class_name, now=self._clock())

    def promise_of(self, request_class: RequestClass, model: str) -> Promise:
        """Return a request's SLO; `model` is a configured name or "", the tenant any client text."""
        key = request_class.class_name, self._tenants.label_of(request_class.tenant), model
        return self._promises.get(key) or self._new_promise(key, request_class)

    def decided(self, fact: Decided) -> None:
        """Count a request with targets, and the ones that it surely missed; a client or its quota is not judged."""
        promise, kind, outcome = fact.promise, fact.outcome_kind, fact.record.outcome
        for why in fact.ignored_targets:
            self._ignored.of(why.value).value += 1
        if promise is None:
            return
        if kind is RequestOutcome.ROUTED:
            self.promised(promise.promise)
            if fact.is_late and fact.endpoint is not None:
                self.missed(promise, Outcome.LATE, role=self._latencies.role_of(fact.endpoint))
        elif kind is RequestOutcome.ABANDONED and fact.is_late:  # else nothing is known
            self.promised(promise.promise)
            self.missed(promise, Outcome.LATE)
        elif kind is RequestOutcome.REFUSED and isinstance(outcome, NoDecision) and _is_ours(outcome):
            self.promised(promise.promise)
            self.missed(promise, Outcome.REFUSED)

    def ended(self, fact: Ended) -> None:
        """Count a target that was surely missed; it was not if the client left before the deadline."""
        promise, status = fact.promise, fact.status
        if promise is None or fact.booked_on is None or 0 < status < 500 or status == NOT_IMPLEMENTED:
            return
        if status or promise.is_broken(now=fact.at):
            outcome = Outcome.FAILED if status else Outcome.LATE
            self.missed(promise, outcome, role=self._latencies.role_of(fact.booked_on))

    def promised(self, promise: Promise) -> None:
        """Count a request, judged or not."""
        self._promised.of(promise.class_name).value += 1

    def judged(self, fact: Judged) -> None:
        """Count an answer; one without a body only if response bodies reach the picker."""
        self._has_read = self._has_read or fact.has_come
        if not self._has_read:
            return
        answer, role = fact.answer, self._latencies.role_of(fact.served_by)
        missed = Outcome.FAILED if fact.failed else Outcome.LATE
        for promise_of, verdict in ((OF_CLASS, fact.judgement), (OF_REQUEST, fact.asked)):
            if verdict is not None:
                weight = answer.weight
                self._take(answer.promise, verdict, promise_of=promise_of, role=role, weight=weight, missed=missed)

    def missed(self, promise: OpenPromise, outcome: Outcome, *, role: str = NO_ROLE) -> None:
        """Count a request that surely missed its SLO, read or not; `promised` has counted it already."""
        late = False if outcome is Outcome.LATE else None
        judgement = Judgement(ttft=late, whole=False)
        for promise_of in (OF_CLASS,) if promise.asked is None else (OF_CLASS, OF_REQUEST):
            self._take(promise.promise, judgement, promise_of=promise_of, role=role, weight=1.0, missed=outcome)

    def _new_promise(self, key: tuple[str, str, str], request_class: RequestClass) -> Promise:
        class_name, tenant, model = key
        if model not in self._models:
            if len(self._models) >= MOST_MODELS:
                model = metrics.OTHER
            self._models.add(model)
        targets = self._classes.get(class_name) or targets_of(request_class.priority_class)
        promise = Promise(class_name=class_name, tenant=tenant, model=model, targets=targets)
        return self._promises.setdefault(key, promise)

    def _take(
        self,
        promise: Promise,
        judgement: Judgement,
        *,
        promise_of: str,
        role: str,
        weight: float,
        missed: Outcome = Outcome.LATE,
    ) -> None:
        labels = promise.class_name, promise.tenant, promise.model, role
        for target, is_met in judgement.verdicts:
            if is_met is not None:
                outcome = Outcome.MET if is_met else missed
                self._requests.of(*labels, target.value, promise_of, outcome.value).value += weight
        if promise_of == OF_CLASS and judgement.whole is not None:
            self._judged.of(promise.class_name).value += 1
            self._window.add(promise.class_name, met=judgement.whole, weight=weight, now=self._clock())

    def _read(self) -> Reading:
        """Show the pods' measurements, of all classes together, judged by each class's targets."""
        ttft = {name: targets.ttft_seconds for name, targets in self._classes.items()}
        inter_token = {name: targets.inter_token_seconds for name, targets in self._classes.items()}
        self._take_histograms(Target.TTFT, self._latencies.ttft, ttft)
        self._take_histograms(Target.INTER_TOKEN, self._latencies.inter_token, inter_token)
        sums = [
            ((class_name, *key, target.value), each)
            for target, pods in self._pods.items()
            for (class_name, key), each in pods.sums.items()
        ]
        yield metrics.SLO_POD_OBSERVED, [(labels, each.observed) for labels, each in sums]
        yield (
            metrics.SLO_POD_WITHIN,
            [
                ((*labels, bound), value)
                for labels, each in sums
                for bound, value in ((LEAST, each.least), (ESTIMATE, each.estimate), (MOST, each.most))
            ],
        )

    def _take_histograms(self, target: Target, family: Family[Histogram], targets: Mapping[str, float]) -> None:
        for (model, role), series in family.series.copy().items():
            self._pods[target].take((model, role), series.bounds, series.counts, targets)


def _is_ours(refusal: NoDecision) -> bool:
    """Tell whether a refusal is not the fault of the client or its quota."""
    return refusal.status >= 500 or refusal.cause in (Cause.SHED, Cause.LIMIT)

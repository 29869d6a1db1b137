"""What is counted of promises: kept, missed, judged, and what the pods have measured beside it.

The values of labels are the policy's own names, the names of models and tenants as they are bounded elsewhere, and
closed sets of ours.
"""

import time
from collections.abc import Callable, Mapping

from extproc.policy.priority import PriorityClass
from extproc.policy.request_class import RequestClass
from extproc.slo.attainment import Attainment, AttainmentWindow
from extproc.slo.judgement import Judgement, Outcome, Target
from extproc.slo.pod_shares import PodShares
from extproc.slo.promise import AnswerPromise, IgnoredTarget, OpenPromise, Promise, TokenTargets, targets_of
from extproc.telemetry import metrics
from extproc.telemetry.endpoint_telemetry import LatencyTelemetry
from extproc.telemetry.tenant_telemetry import TenantTelemetry
from kvmesh.metrics.registry import Family, Histogram, Reading, Registry

MOST_MODELS = 100  # with series of their own
OF_CLASS, OF_REQUEST = "class", "request"  # whose promise is judged
NO_ROLE = "none"  # no pod has served it
LEAST, ESTIMATE, MOST = "least", "estimate", "most"


class SloTelemetry:
    """The promises of one pool."""

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
        """Judge by what these are promised from now on."""
        self._promises.clear()
        self._objectives.series.clear()
        self._classes = {name: targets_of(each) for name, each in classes.items()}
        for name, each in classes.items():
            self._objectives.of(name).value = each.objective
            self._promised.of(name)  # shown before the first request
            self._judged.of(name)

    def sampled(self, share: float) -> None:
        """Show how many of the answers are read."""
        self._sample_share.value = share

    def attainment(self, class_name: str) -> Attainment | None:
        """Return the share of a class's last requests within all targets; None: nothing was judged lately."""
        return self._window.of(class_name, now=self._clock())

    def promise_of(self, request_class: RequestClass, *, model: str) -> Promise:
        """Return what a request is promised; `model`: a configured name or "", its tenant anything."""
        key = request_class.class_name, self._tenants.label_of(request_class.tenant), model
        return self._promises.get(key) or self._new_promise(key, request_class)

    def promised(self, promise: Promise) -> None:
        """Count a request, judged or not."""
        self._promised.of(promise.class_name).value += 1

    def judged(self, answer: AnswerPromise, judgement: Judgement, asked: Judgement | None, *, role: str) -> None:
        """Count an answer that was read; `asked`: by the targets that its request asked for."""
        self._has_read = True
        self._take(answer.promise, judgement, promise_of=OF_CLASS, role=role, weight=answer.weight)
        if asked is not None:
            self._take(answer.promise, asked, promise_of=OF_REQUEST, role=role, weight=answer.weight)

    def missed(self, promise: OpenPromise, outcome: Outcome, *, role: str = NO_ROLE) -> None:
        """Count a request whose promise was surely broken, read or not; `promised` has counted it."""
        late = False if outcome is Outcome.LATE else None
        judgement = Judgement(ttft=late, whole=False)
        for promise_of in (OF_CLASS,) if promise.asked is None else (OF_CLASS, OF_REQUEST):
            self._take(promise.promise, judgement, promise_of=promise_of, role=role, weight=1.0, missed=outcome)

    def left_unseen(self, answer: AnswerPromise, judgement: Judgement, asked: Judgement | None, *, role: str) -> None:
        """Count a stream of which nothing had come when its client left; not where no body ever comes to us."""
        if self._has_read:
            self.judged(answer, judgement, asked, role=role)

    def header_ignored(self, why: IgnoredTarget) -> None:
        """Count a header that did not count."""
        self._ignored.of(why.value).value += 1

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
        """Show what the pods have measured: of all classes' requests, by each class's targets."""
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

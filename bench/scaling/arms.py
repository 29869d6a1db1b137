"""Who says how many pods there are to be: kvmesh's signal, Kubernetes' autoscaler on two metrics, and who knows all.

The autoscaler is that of Kubernetes 1.35 with its defaults (pkg/controller/podautoscaler): a tolerance of 0.1, twice
the pods or four more a step, fewer only to the highest recommendation of five minutes. It is given its best target.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Protocol

import msgspec

from bench.scaling.loads import Request
from bench.scaling.plan import Plan
from bench.scaling.pods import Pod
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.autoscale import Autoscale, ScalePolicy
from extproc.scaling.pool_scaling import PoolScaling
from extproc.scaling.seen import PodSeen, PoolSeen
from kvmesh.pods.pod_report import EndpointLoad

TOLERANCE, WINDOW_SECONDS = 0.1, 300.0


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """The pool as an autoscaler may see it."""

    now: float
    ready: Sequence[tuple[Pod, EndpointLoad]]
    starting: Sequence[Pod]
    queued: Sequence[Request]  # in the picker
    refused_requests: int = 0  # by it, since it started
    refused_tokens: float = 0.0

    @property
    def present(self) -> int:
        """Pods that serve or start."""
        return len(self.ready) + len(self.starting)


class Arm(Protocol):
    """One autoscaler."""

    def reports(self, seen: Seen) -> None:
        """See the pods' reports, every second or two."""

    def wanted(self, seen: Seen) -> int:
        """Return how many pods there are to be, every 15 s."""


class Kvmesh:
    """`PoolScaling` over the picker's own estimates."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._estimates = LatencyEstimates(tokens_per_second=plan.engine.tokens_per_second / 2)  # a policy that is off
        policy = ScalePolicy(start_seconds=plan.start_seconds, stabilization_seconds=plan.window_seconds)
        self._scaling = PoolScaling(Autoscale(both=policy))
        self.reason = ""

    def reports(self, seen: Seen) -> None:
        for pod, load in seen.ready:
            self._estimates.report(pod.address, load, now=seen.now)
        estimates = self._estimates
        pods = [
            PodSeen(
                address=pod.address,
                role="both",
                serves=True,
                load=load,
                tokens_per_second=estimates.tokens_per_second(pod.address)
                or 1.0 / estimates.pace(pod.address).backlog_seconds_a_token,
                request_seconds=estimates.pace(pod.address).request_seconds,
                running_limit=estimates.pace(pod.address).running_limit,
            )
            for pod, load in seen.ready
        ]
        pods += [
            PodSeen(
                address=pod.address, role="both", serves=False, load=None, tokens_per_second=1.0, request_seconds=0.0
            )
            for pod in seen.starting
        ]
        signals = self._scaling.look(
            PoolSeen(
                pods=pods,
                queued_requests=len(seen.queued),
                refused_requests=seen.refused_requests,
                refused_tokens=seen.refused_tokens,
                queued_tokens=sum(request.uncached_tokens for request in seen.queued),
                ttft_seconds=self._plan.ttft_seconds,
                inter_token_seconds=self._plan.inter_token_seconds,
            ),
            now=seen.now,
        )
        self.reason = signals["both"].reason

    def wanted(self, seen: Seen) -> int:
        del seen
        return self._scaling.signals["both"].told


class Hpa:
    """Kubernetes' autoscaler on one metric."""

    def __init__(self, metric: str, target: float) -> None:
        """`metric`: "kv" is the mean use of the pods' caches, "queue" the requests that wait anywhere, for each pod."""
        self._metric, self._target = metric, target
        self._recent: deque[tuple[float, int]] = deque()

    def reports(self, seen: Seen) -> None:
        pass

    def wanted(self, seen: Seen) -> int:
        recommended = self._recommended(seen)
        self._recent.append((seen.now, recommended))
        while self._recent[0][0] < seen.now - WINDOW_SECONDS:
            self._recent.popleft()
        present = seen.present
        if recommended > present:
            return min(recommended, max(2 * present, present + 4))
        return min(max(number for _, number in self._recent), present)

    def _recommended(self, seen: Seen) -> int:
        ready, present = len(seen.ready), seen.present
        if not ready:
            return present
        if self._metric == "queue":
            total = len(seen.queued) + sum(load.waiting_requests for _, load in seen.ready)
            ratio = total / (self._target * present)
            return present if abs(ratio - 1.0) <= TOLERANCE else ceil(total / self._target)
        usage = sum(load.kv_usage for _, load in seen.ready)
        ratio = usage / ready / self._target
        if ratio > 1.0:  # pods that start count as idle when more are wanted
            ratio = max(usage / present / self._target, 1.0)
        return present if abs(ratio - 1.0) <= TOLERANCE else ceil(ratio * (present if ratio > 1.0 else ready))


class Oracle:
    """Knows all that will come: as many pods in each slot as its work needs at this utilisation, started in time."""

    def __init__(self, coming: Sequence[Request], *, plan: Plan, seconds: float, utilisation: float) -> None:
        length = plan.slot_seconds
        slots = int(seconds / length) + 2
        prompts, answers = [0.0] * slots, [0.0] * slots
        for request in coming:
            slot = int(request.at / length)
            prompts[slot] += request.uncached_tokens / plan.engine.tokens_per_second / length
            answers[slot] += request.answer_tokens / decode_rate(plan, coming) / length
        busy = [max(pair) for pair in zip(prompts, answers, strict=True)]
        self._needed = [max(ceil(each / utilisation), 1) for each in busy]
        self._start_seconds, self._slot_seconds = plan.start_seconds, length

    def reports(self, seen: Seen) -> None:
        pass

    def wanted(self, seen: Seen) -> int:
        """Return the most of all slots until a pod that is asked for now serves, and a look later."""
        first = int(seen.now / self._slot_seconds)
        last = int((seen.now + self._start_seconds + self._slot_seconds / 2) / self._slot_seconds)
        return max(self._needed[first : last + 1], default=1)


def decode_rate(plan: Plan, coming: Sequence[Request]) -> float:
    """Return the tokens a second that a pod generates with as many streams as keep the promise and fit in its cache."""
    engine = plan.engine
    within = (plan.inter_token_seconds - engine.alone_seconds - engine.prompt_seconds / 2) / engine.stream_seconds
    size = sum(each.uncached_tokens + each.cached_tokens + each.answer_tokens for each in coming[:1000]) / 1000
    streams = min(within, 0.9 * engine.cache_tokens / size)
    return streams / (engine.alone_seconds + engine.prompt_seconds / 2 + engine.stream_seconds * streams)


KVMESH, ORACLE, HPA_KV, HPA_QUEUE = "kvmesh", "oracle", "hpa-kv", "hpa-queue"
# arm -> what it is tried with; the best counts
SETTINGS: Mapping[str, tuple[float, ...]] = {
    KVMESH: (0.0,),
    ORACLE: (0.9, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5),  # utilisation of the most busy slot in view
    HPA_KV: (0.15, 0.3),
    HPA_QUEUE: (0.5, 2.0),
}


def made(arm: str, setting: float, coming: Sequence[Request], *, plan: Plan, seconds: float) -> Arm:
    """Return an arm with one of its settings, before this load."""
    if arm == KVMESH:
        return Kvmesh(plan)
    if arm == ORACLE:
        return Oracle(coming, plan=plan, seconds=seconds, utilisation=setting)
    return Hpa(arm.removeprefix("hpa-"), setting)

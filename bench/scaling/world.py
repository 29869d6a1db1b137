"""Requests, pods that come and go, and one autoscaler, in virtual time: a queue of events. Nothing here waits.

The picker is the same for all arms: a request goes to the pod with the least prompts left where one has less than 0.2 s
of them and room in its cache; else it waits in the picker, first come, first served. One whose first token would come
too late is refused, and does not come back.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from bench.scaling.arms import Arm, Seen
from bench.scaling.loads import Request
from bench.scaling.plan import Plan
from bench.scaling.pods import NEVER, Pod, UnderWay

BACKLOG_SECONDS = 0.2  # `spec.load.overload.backlogSeconds`


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run has come to."""

    requests: int = 0
    kept: int = 0  # within both promises
    ttft_kept: int = 0
    inter_token_kept: int = 0
    pod_seconds: float = 0.0
    most_pods: int = 0
    changes: int = 0  # of the wanted number


@dataclass(slots=True, kw_only=True)
class World:
    """One run."""

    plan: Plan
    arm: Arm
    seconds: float
    outcome: Outcome = field(default_factory=Outcome)
    pods: dict[str, Pod] = field(default_factory=dict)
    _queue: deque[Request] = field(default_factory=deque)
    _events: list[tuple[float, str, int]] = field(default_factory=list)  # times, pods, versions
    _queued_tokens: float = 0.0
    _refused_requests: int = 0
    _refused_tokens: float = 0.0
    _now: float = 0.0
    _made: int = 0
    _wanted: int = 0

    def run(self, coming: Iterable[Request]) -> Outcome:
        """Play until the load ends; what is open then is not counted."""
        plan = self.plan
        for _ in range(plan.first_pods):
            self._ask_for_pod(serves_at=0.0)
        arrivals: Iterator[Request] = iter(coming)
        request = next(arrivals, None)
        report_at, sync_at = plan.report_seconds, plan.sync_seconds
        while True:
            due = self._events[0][0] if self._events else NEVER
            arrives = request.at if request is not None else NEVER
            now = min(due, arrives, report_at, sync_at)
            if now > self.seconds:
                break
            self._now = now
            if now == due:
                self._pod_event()
            elif request is not None and now == arrives:
                self.outcome.requests += self._counts(request)
                self._arrive(request)
                request = next(arrivals, None)
            elif now == report_at:
                self.arm.reports(self._seen())
                report_at += 2 * plan.report_seconds
            else:
                self._sync()
                sync_at += plan.sync_seconds
        for pod in self.pods.values():
            self._count_pod(pod, until=self.seconds)
        return self.outcome

    def _pod_event(self) -> None:
        _, address, version = heapq.heappop(self._events)
        pod = self.pods.get(address)
        if pod is None or pod.version != version:
            return
        self._advance(pod)
        self._plan_next(pod)
        self._send()

    def _advance(self, pod: Pod) -> None:
        for under_way, has_ended in pod.advance(self._now):
            if has_ended:
                self._count(under_way)
        if pod.leaves_at is not None and not pod.running and not pod.waiting:
            self._count_pod(pod, until=self._now)
            del self.pods[pod.address]

    def _plan_next(self, pod: Pod) -> None:
        pod.version += 1
        due = pod.next_event()
        if due < NEVER and pod.address in self.pods:
            heapq.heappush(self._events, (max(due, self._now), pod.address, pod.version))

    def _arrive(self, request: Request) -> None:
        """Queue a request whose first token can come in time, by the pods' rate; refuse any other."""
        rate = self.plan.engine.tokens_per_second
        serving = sum(self._takes(pod) for pod in self.pods.values())
        waits = self._queued_tokens / (rate * serving) if serving else 0.0
        if waits + request.uncached_tokens / rate > self.plan.ttft_seconds and self._queue:
            self._refuse(request)
            return
        self._queue.append(request)
        self._queued_tokens += request.uncached_tokens
        self._send()

    def _refuse(self, request: Request) -> None:
        self._refused_requests += 1
        self._refused_tokens += request.uncached_tokens

    def _dequeue(self) -> Request:
        request = self._queue.popleft()
        self._queued_tokens = self._queued_tokens - request.uncached_tokens if self._queue else 0.0
        return request

    def _send(self) -> None:
        most = BACKLOG_SECONDS * self.plan.engine.tokens_per_second
        while self._queue:
            request = self._queue[0]
            if self._now - request.at > self.plan.ttft_seconds:
                self._refuse(self._dequeue())
                continue
            fitting = [pod for pod in self.pods.values() if self._takes(pod) and pod.fits(request)]
            if not fitting:
                return
            backlog, _, _, best = min(
                (pod.backlog_tokens(self._now), pod.running, i, pod) for i, pod in enumerate(fitting)
            )
            if backlog > most:
                return
            self._advance(best)
            best.add(self._dequeue())
            self._plan_next(best)

    def _takes(self, pod: Pod) -> bool:
        return pod.leaves_at is None and pod.serves_at <= self._now

    def _seen(self) -> Seen:
        there = [pod for pod in self.pods.values() if pod.leaves_at is None]
        ready = []
        for pod in there:
            if pod.serves_at <= self._now:
                self._advance(pod)
                self._plan_next(pod)
                ready.append((pod, pod.report(self._now)))
        starting = [pod for pod in there if pod.serves_at > self._now]
        return Seen(
            now=self._now,
            ready=ready,
            starting=starting,
            queued=tuple(self._queue),
            refused_requests=self._refused_requests,
            refused_tokens=self._refused_tokens,
        )

    def _sync(self) -> None:
        seen = self._seen()
        wanted = min(max(self.arm.wanted(seen), 1), self.plan.most_pods)
        if wanted != self._wanted and self._now > self.plan.warm_seconds:
            self.outcome.changes += 1
        self._wanted = wanted
        for _ in range(wanted - seen.present):
            self._ask_for_pod(serves_at=self._now + self.plan.start_seconds)
        # as a ReplicaSet: those that do not serve yet first, then those with the fewest requests here
        last = sorted(
            (pod for pod in self.pods.values() if pod.leaves_at is None),
            key=lambda pod: (pod.serves_at <= self._now, pod.running + pod.waiting),
        )
        for pod in last[: max(seen.present - wanted, 0)]:
            pod.leaves_at = self._now
            if pod.serves_at > self._now or not (pod.running or pod.waiting):
                self._count_pod(pod, until=self._now)
                del self.pods[pod.address]

    def _ask_for_pod(self, *, serves_at: float) -> None:
        self._made += 1
        address = f"10.0.{self._made // 250}.{self._made % 250}:8000"
        self.pods[address] = Pod(address, self.plan.engine, asked_at=self._now, serves_at=serves_at)
        self.outcome.most_pods = max(self.outcome.most_pods, len(self.pods))

    def _count_pod(self, pod: Pod, *, until: float) -> None:
        self.outcome.pod_seconds += max(until - max(pod.asked_at, self.plan.warm_seconds), 0.0)

    def _counts(self, request: Request) -> bool:
        """Whether it comes in the time that counts, and had time to end."""
        return self.plan.warm_seconds <= request.at <= self.seconds - self.plan.end_seconds

    def _count(self, under_way: UnderWay) -> None:
        request, plan = under_way.request, self.plan
        if not self._counts(request):
            return
        ttft = under_way.first - request.at <= plan.ttft_seconds
        took = (self._now - under_way.first) / max(request.answer_tokens - 1.0, 1.0)
        inter_token = took <= plan.inter_token_seconds
        outcome = self.outcome
        outcome.ttft_kept += ttft
        outcome.inter_token_kept += inter_token
        outcome.kept += ttft and inter_token

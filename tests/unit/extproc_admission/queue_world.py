"""Pods, a queue and a stream of prompts in virtual time: what the order of waiting requests does to their waiting."""

import heapq
import math
import random
from dataclasses import dataclass
from statistics import mean, quantiles

from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue
from extproc.policy.priority import OverloadPolicy, PriorityClass
from extproc.policy.request_class import PriorityPolicy

PODS, TOKENS_PER_SECOND = 4, 8000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Seconds to the first token."""

    mean: float
    p50: float
    p95: float
    p99: float
    longest: float
    in_time: float  # share within 5 s
    requests: int


def prompts(*, load: float, seconds: float, seed: int) -> list[tuple[float, int]]:
    """Arrivals (Poisson) of prompts (lognormal: median 600, mean 2,100 tokens) for so much of the pods' capacity."""
    draw = random.Random(seed)
    median, sigma, most = 600.0, 1.6, 32_000
    sample = [min(most, max(1, int(draw.lognormvariate(math.log(median), sigma)))) for _ in range(20_000)]
    each = 1.0 / (load * PODS * TOKENS_PER_SECOND / mean(sample))
    arrivals, at = [], 0.0
    while at < seconds:
        at += draw.expovariate(1.0 / each)
        arrivals.append((at, draw.choice(sample)))
    return arrivals


def play(arrivals: list[tuple[float, int]], *, age_seconds: float) -> Waits:
    """Every pod computes one prompt at a time, in the queue's order (age bound 0: first come, first served)."""
    classes = {"standard": PriorityClass(queue_requests=10**6)}
    policy = PriorityPolicy(classes=classes, overload=OverloadPolicy(queue_requests=10**6))
    queue = FlowQueue(policy, age_seconds=age_seconds)
    events: list[tuple[float, int, int]] = [(at, number, tokens) for number, (at, tokens) in enumerate(arrivals)]
    heapq.heapify(events)
    free, waits = PODS, []
    while events:
        now, _, tokens = heapq.heappop(events)
        if tokens:
            queue.push(
                Ticket(
                    class_name="standard",
                    priority_class=classes["standard"],
                    tenant="",
                    uncached_tokens=tokens,
                    pool="m",
                    arrived_at=now,
                    deadline=math.inf,
                )
            )
        else:
            free += 1
        for ticket in queue.candidates("m", now):
            if not free:
                break
            free -= 1
            queue.went(ticket, now)
            done = now + ticket.cost / TOKENS_PER_SECOND
            waits.append(done - ticket.arrived_at)
            heapq.heappush(events, (done, -ticket.sequence, 0))
    cuts = quantiles(waits, n=100)
    return Waits(
        mean=mean(waits),
        p50=cuts[49],
        p95=cuts[94],
        p99=cuts[98],
        longest=max(waits),
        in_time=sum(each <= 5.0 for each in waits) / len(waits),
        requests=len(waits),
    )


def main() -> None:
    for load, seconds in ((0.8, 120.0), (1.0, 120.0), (1.2, 60.0), (1.5, 60.0)):
        for name, age in (
            ("first come", 0.0),
            ("least work, 5 s", 5.0),
            ("least work, 15 s", 15.0),
            ("least work, 30 s", 30.0),
            ("least work, never late", 1e9),
        ):
            runs = [play(prompts(load=load, seconds=seconds, seed=s), age_seconds=age) for s in range(5)]
            cells = (
                mean(getattr(each, field) for each in runs)
                for field in ("mean", "p50", "p95", "p99", "longest", "in_time")
            )
            print(f"{load:4} {name:24}", *(f"{cell:8.2f}" for cell in cells))


if __name__ == "__main__":
    main()

"""The load as a script: a pure function of the plan and the load, so that every arm gets the very same requests.

The steady tenant's requests, and all critical ones, are the same at every load of one plan.
"""

import math
import random
from collections.abc import Iterator, Sequence

from bench.overload.plan import FLOOD, LOWEST_LOAD, SHEDDABLE, STEADY, ClassLoad, Plan
from bench.overload.script import Request
from operate.load.workloads import Texts

GOLDEN = 0.6180339887498949  # steps of it fill 0..1 evenly


def steady_load(plan: Plan, load: float, *, words: Sequence[str]) -> tuple[Request, ...]:
    """Poisson arrivals at `load` times the capacity for the plan's seconds."""
    return _numbered(_phase(plan, load, begins=0.0, ends=plan.seconds_at(load), words=words))


def falling_load(plan: Plan, *, words: Sequence[str]) -> tuple[Request, ...]:
    """A high load, and from one moment on a low one."""
    falls, ends = plan.fall_after_seconds, plan.fall_seconds
    return _numbered(
        [
            *_phase(plan, plan.fall_high, begins=0.0, ends=falls, words=words),
            *_phase(plan, plan.fall_low, begins=falls, ends=ends, words=words),
        ]
    )


def load_beside_bad_pod(plan: Plan, *, words: Sequence[str]) -> tuple[Request, ...]:
    """A load that the other pods can serve."""
    return _numbered(_phase(plan, plan.bad_pod_load, begins=0.0, ends=plan.bad_pod_seconds, words=words))


def mean_tokens(each: ClassLoad) -> float:
    """Expected work of one request of the class, prompt tokens."""
    return (each.longest_tokens - each.shortest_tokens) / math.log(each.longest_tokens / each.shortest_tokens)


def _phase(plan: Plan, load: float, *, begins: float, ends: float, words: Sequence[str]) -> list[Request]:
    requests: list[Request] = []
    for each in plan.classes:
        above = each.flood_share * max(0.0, load - LOWEST_LOAD)
        scale = min(1.0, load / LOWEST_LOAD)
        requests += _stream(
            plan, each, STEADY, each.steady_load * scale, begins=begins, ends=ends, words=words, part="steady"
        )
        requests += _stream(
            plan, each, FLOOD, each.flood_load * scale, begins=begins, ends=ends, words=words, part="flood"
        )
        if above:
            part = f"above {load:g}"
            requests += _stream(plan, each, FLOOD, above, begins=begins, ends=ends, words=words, part=part)
    return requests


def _stream(
    plan: Plan,
    each: ClassLoad,
    tenant: str,
    load: float,
    *,
    begins: float,
    ends: float,
    words: Sequence[str],
    part: str,
) -> Iterator[Request]:
    rng = random.Random(f"{plan.seed} {each.name} {part} {begins:g}")
    texts = Texts(words, seed=f"{plan.seed} {each.name} {part} {begins:g}")
    shared = Texts(words, seed=f"{plan.seed} {each.name} {tenant}").draw(each.shared_tokens)
    rate = load * plan.capacity / mean_tokens(each)
    due, place = begins + rng.expovariate(rate), rng.random()
    while due < ends:
        # evenly spread, so that few long prompts do not make the load by chance
        place = (place + GOLDEN) % 1.0
        tokens = round(each.shortest_tokens * (each.longest_tokens / each.shortest_tokens) ** place)
        yield Request(
            number=0,
            due=due,
            tenant=tenant,
            class_name=each.name,
            prompt=f"{shared} {texts.draw(tokens)}".strip(),
            work_tokens=tokens,
            answer_tokens=each.answer_tokens,
            obeys=each.name != SHEDDABLE or rng.random() < plan.obeying_share,
        )
        due += rng.expovariate(rate)


def _numbered(requests: Sequence[Request]) -> tuple[Request, ...]:
    ordered = sorted(requests, key=lambda request: request.due)
    return tuple(
        Request(
            number=number,
            due=request.due,
            tenant=request.tenant,
            class_name=request.class_name,
            prompt=request.prompt,
            work_tokens=request.work_tokens,
            answer_tokens=request.answer_tokens,
            obeys=request.obeys,
        )
        for number, request in enumerate(ordered)
    )

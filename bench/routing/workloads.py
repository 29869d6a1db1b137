"""The workloads as scripts: pure functions of their sizes and a seed, so that every arm gets the very same load."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from bench.routing.plan import Plan, UniformSize
from bench.routing.script import POD_MISSING, TURN_SECONDS, BadPod, PodRestart, Way, Workload
from operate.load.script import Session, Turn
from operate.load.trace import TraceRow, trace_sessions
from operate.load.workloads import Texts, burst_sessions, qa_sessions

TRACE_FILE = Path(__file__).parents[1] / "data" / "mooncake_conversation_cut.jsonl"


def build(name: str, plan: Plan, *, words: Sequence[str]) -> Workload:
    """The workload called `name`, one of WORKLOADS."""
    load = POD_MISSING if name in tuple(Way) else name  # these differ only in their pods
    return WORKLOADS[name](plan, Texts(words, seed=f"{plan.seed} {load}"))


def multi_round_qa(plan: Plan, texts: Texts) -> Workload:
    """LMBenchmark's synthetic chat at the plan's rate."""
    return Workload(
        name="qa",
        title=f"multi-round QA, {plan.qa_rate:g} requests/s",
        sessions=tuple(qa_sessions(plan.qa, rate=plan.qa_rate, seconds=plan.qa_seconds, texts=texts)),
        measured_from=plan.qa.users / plan.qa_rate,
    )


def multi_round_qa_fast(plan: Plan, texts: Texts) -> Workload:
    """The same users, each asking twice as often."""
    rate = 2 * plan.qa_rate
    return Workload(
        name="qa-x2",
        title=f"multi-round QA, {rate:g} requests/s",
        sessions=tuple(qa_sessions(plan.qa, rate=rate, seconds=plan.qa_seconds, texts=texts)),
        measured_from=plan.qa.users / rate,
    )


def churn(plan: Plan, texts: Texts) -> Workload:
    """Chats that fill all caches to the brim, a pod that is killed and comes back empty, several routers."""
    return Workload(
        name="churn",
        title=f"evictions, a pod restart, {plan.churn_pickers} routers",
        sessions=tuple(qa_sessions(plan.churn, rate=plan.churn_rate, seconds=plan.churn_seconds, texts=texts)),
        measured_from=0.0,
        routers=plan.churn_pickers,
        restarts=(PodRestart(pod=1, at=plan.churn_kill_at_seconds, back_after=plan.churn_back_after_seconds),),
    )


def beside_bad_pod(plan: Plan, texts: Texts, *, way: Way | None) -> Workload:
    """Chats of which one pod has its share until it turns bad; without a way they are played without that pod."""
    name, at = way or POD_MISSING, plan.bad_pod_at_seconds
    what = "without a pod" if way is None else f"a {way.replace('-', ' ')} from {at:g} s on"
    return Workload(
        name=name,
        title=f"chats, {what}; counted from {at + TURN_SECONDS:g} s on",
        sessions=tuple(qa_sessions(plan.bad_pod, rate=plan.bad_pod_rate, seconds=plan.bad_pod_seconds, texts=texts)),
        measured_from=at + TURN_SECONDS,
        bad_pod=None if way is None else BadPod(pod=1, at=at, way=way),
    )


def shared_prefix_burst(plan: Plan, texts: Texts) -> Workload:
    """Documents that nobody has seen, each asked about by many at once."""
    size = plan.burst
    rng = random.Random(f"{plan.seed} burst")
    sessions = [
        session
        for burst in range(size.bursts)
        for session in burst_sessions(size, number=burst, starts=burst * size.every_seconds, rng=rng, texts=texts)
    ]
    return Workload(
        name="burst",
        title=f"bursts of {size.prefixes} new shared prefixes",
        sessions=tuple(sessions),
        measured_from=0.0,
    )


def uniform(plan: Plan, texts: Texts) -> Workload:
    """Nothing is shared: there is nothing to gain, and nothing must be lost."""
    size, rng = plan.uniform, random.Random(f"{plan.seed} uniform")
    return Workload(
        name="uniform",
        title=f"no shared prefixes, {size.rate:g} requests/s",
        sessions=tuple(_uniform_sessions(size, seconds=plan.uniform_seconds, rng=rng, texts=texts)),
        measured_from=0.0,
    )


def _uniform_sessions(size: UniformSize, *, seconds: float, rng: random.Random, texts: Texts) -> Iterator[Session]:
    due, number = rng.expovariate(size.rate), 0
    while due < seconds:
        text = texts.draw(rng.randint(size.shortest_tokens, size.longest_tokens))
        turn = Turn(due=due, text=text, answer_tokens=size.answer_tokens)
        yield Session(name=f"lone-{number}", system=None, turns=(turn,))
        due, number = due + rng.expovariate(size.rate), number + 1


def long_documents(plan: Plan, texts: Texts) -> Workload:
    """New documents of 4,000 to 12,000 tokens, each asked about four times within seconds."""
    return Workload(
        name="long",
        title=f"{plan.long_documents} documents of 4,000 to 12,000 tokens",
        sessions=tuple(_documents(plan, random.Random(f"{plan.seed} long"), texts)),
        measured_from=0.0,
    )


def _documents(plan: Plan, rng: random.Random, texts: Texts) -> Iterator[Session]:
    due = 0.0
    for number in range(plan.long_documents):
        due += rng.expovariate(plan.long_rate)
        dues = [due + turn * rng.uniform(1.0, 3.0) for turn in range(4)]
        yield Session(
            name=f"document-{number}",
            system=texts.draw(rng.randint(4000, 12_000)),
            turns=tuple(Turn(due=at, text=texts.draw(40), answer_tokens=32) for at in sorted(dues)),
        )


def mooncake(plan: Plan, texts: Texts) -> Workload:
    """The Mooncake conversation trace: whole conversations out of one hour, time compressed, tokens divided."""
    return Workload(
        name="trace",
        title="Mooncake conversation trace",
        sessions=tuple(trace_sessions(read_trace(), plan.trace, seconds=plan.trace_seconds, texts=texts)),
        measured_from=0.0,
    )


def read_trace() -> list[TraceRow]:
    """The cut of the trace."""
    return msgspec.json.decode(b"[" + b",".join(TRACE_FILE.read_bytes().splitlines()) + b"]", type=list[TraceRow])


WORKLOADS: dict[str, Callable[[Plan, Texts], Workload]] = {
    "qa": multi_round_qa,
    "qa-x2": multi_round_qa_fast,
    "trace": mooncake,
    "burst": shared_prefix_burst,
    "uniform": uniform,
    "churn": churn,
    "long": long_documents,
    POD_MISSING: partial(beside_bad_pod, way=None),
    **{way.value: partial(beside_bad_pod, way=way) for way in Way},
}

"""The workloads of the benchmark in virtual time: those of `workloads`, and wider ones on eight pods.

A real run would need more cores than the wide ones' pods leave; virtual time needs one.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from bench.routing.plan import Plan, PodSettings
from bench.routing.script import POD_MISSING, Way, Workload
from bench.routing.workloads import WORKLOADS, build, multi_round_qa, read_trace
from operate.load.script import Session, Turn
from operate.load.trace import TraceRow, trace_sessions
from operate.load.workloads import QaSize, Texts, irregular

EIGHT_PODS = PodSettings(pods=8)
SLOW_PODS = PodSettings(pods=8, kv_blocks=8192, prefill_tokens_per_second=8000)
SECONDS = 20.0
QUIET_SECONDS, WARM_SECONDS = 30.0, 10.0  # at first all users bring their history at once
MOST_LATER_MS = 300_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A workload and the pods that it is played on."""

    workload: Workload
    pods: PodSettings


def mix(name: str, plan: Plan, *, words: Sequence[str]) -> Mix:
    """The mix called `name`, one of MIXES."""
    if name in WORKLOADS:
        return Mix(workload=build(name, plan, words=words), pods=plan.pods_of(name))
    made, pods = WIDE[name]
    workload = made(plan, Texts(words, seed=f"{plan.seed} {name}"))
    return Mix(workload=msgspec.structs.replace(workload, name=name), pods=pods)


def quiet_qa(plan: Plan, texts: Texts, *, rate: float) -> Workload:
    """Multi-round QA that leaves most pods idle most of the time; users do not ask on the stroke of a clock."""
    size = QaSize(system_tokens=512, history_tokens=4000, users=round(3 * rate))
    regular = multi_round_qa(replace(plan, qa=size, qa_rate=rate, qa_seconds=QUIET_SECONDS), texts)
    rng = random.Random(f"{plan.seed} quiet")
    # users think for 1 to 5 s
    sessions = tuple(irregular(each, rng, most_seconds=2.0) for each in regular.sessions)
    return msgspec.structs.replace(regular, sessions=sessions, measured_from=WARM_SECONDS)


def groups(plan: Plan, texts: Texts) -> Workload:
    """Single questions below 200 prompts of 1,500 tokens, a few of them far more popular than the others."""
    rng = random.Random(f"{plan.seed} groups")
    systems = [texts.draw(1500) for _ in range(200)]
    popularity = [1.0 / (place + 1) for place in range(len(systems))]
    sessions: list[Session] = []
    due = rng.expovariate(60.0)
    while due < SECONDS:
        turn = Turn(due=due, text=texts.draw(120), answer_tokens=48)
        (system,) = rng.choices(systems, popularity)
        sessions.append(Session(name=f"group-{len(sessions)}", system=system, turns=(turn,)))
        due += rng.expovariate(60.0)
    return Workload(
        name="groups", title="200 shared prompts, 60 requests/s", sessions=tuple(sessions), measured_from=4.0
    )


def dense_trace(plan: Plan, texts: Texts, *, copies: int) -> Workload:
    """The cut so many times at once, each time with conversations of its own, each of them at another moment."""
    rng = random.Random(f"{plan.seed} dense")
    sessions = [
        session
        for copy in range(copies)
        for session in trace_sessions(
            _moved(read_trace(), rng), plan.trace, seconds=2 * plan.trace_seconds, texts=texts, name=f"copy-{copy}"
        )
    ]
    return Workload(name="trace", title=f"Mooncake trace, {copies} times", sessions=tuple(sessions), measured_from=0.0)


def _moved(rows: Sequence[TraceRow], rng: random.Random) -> list[TraceRow]:
    """Each conversation up to five minutes later; its second block tells it from others."""
    later: dict[Sequence[int], int] = {}
    moved = [
        msgspec.structs.replace(
            row, timestamp=row.timestamp + later.setdefault(tuple(row.hash_ids[1:2]), rng.randrange(MOST_LATER_MS))
        )
        for row in rows
    ]
    return sorted(moved, key=lambda row: row.timestamp)


WIDE: Mapping[str, tuple[Callable[[Plan, Texts], Workload], PodSettings]] = {
    "qa-10": (partial(quiet_qa, rate=10.0), SLOW_PODS),
    "qa-25": (partial(quiet_qa, rate=25.0), SLOW_PODS),
    "groups": (groups, EIGHT_PODS),
    "trace-x3": (partial(dense_trace, copies=3), EIGHT_PODS),
    "trace-x5": (partial(dense_trace, copies=5), EIGHT_PODS),
}
MIXES = (*(name for name in WORKLOADS if name not in (POD_MISSING, *Way)), *WIDE)  # bad pods are real ones

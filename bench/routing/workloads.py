"""The workloads as scripts: pure functions of their sizes and a seed, so that every arm gets the very same load."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from bench.routing.plan import BurstSize, Plan, QaSize, TraceSize, UniformSize
from bench.routing.script import PodRestart, Session, Turn, Workload

TRACE_FILE = Path(__file__).parents[1] / "data" / "mooncake_conversation_cut.jsonl"
TRACE_BLOCK_TOKENS = 512
LEAST_TEXT_TOKENS = 4


class TraceRow(msgspec.Struct, frozen=True):
    """A request of the trace, as Mooncake publishes it; equal leading `hash_ids` are equal leading blocks."""

    timestamp: int  # ms
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]


class Texts:
    """Random text of known length: each word is one token."""

    def __init__(self, words: Sequence[str], *, seed: str) -> None:
        self._words = words
        self._rng = random.Random(seed)

    def draw(self, tokens: int) -> str:
        """Text of about `tokens` tokens that nobody else has."""
        return " ".join(self._rng.choices(self._words, k=tokens))


def build(name: str, plan: Plan, *, words: Sequence[str]) -> Workload:
    """The workload called `name`, one of WORKLOADS."""
    return WORKLOADS[name](plan, Texts(words, seed=f"{plan.seed} {name}"))


def multi_round_qa(plan: Plan, texts: Texts) -> Workload:
    """LMBenchmark's synthetic chat at the plan's rate."""
    return Workload(
        name="qa",
        title=f"multi-round QA, {plan.qa_rate:g} requests/s",
        sessions=tuple(_qa_sessions(plan.qa, rate=plan.qa_rate, seconds=plan.qa_seconds, texts=texts)),
        measured_from=plan.qa.users / plan.qa_rate,
    )


def multi_round_qa_fast(plan: Plan, texts: Texts) -> Workload:
    """The same users, each asking twice as often."""
    rate = 2 * plan.qa_rate
    return Workload(
        name="qa-x2",
        title=f"multi-round QA, {rate:g} requests/s",
        sessions=tuple(_qa_sessions(plan.qa, rate=rate, seconds=plan.qa_seconds, texts=texts)),
        measured_from=plan.qa.users / rate,
    )


def churn(plan: Plan, texts: Texts) -> Workload:
    """Chats that fill all caches to the brim, a pod that is killed and comes back empty, several routers."""
    return Workload(
        name="churn",
        title=f"evictions, a pod restart, {plan.churn_pickers} routers",
        sessions=tuple(_qa_sessions(plan.churn, rate=plan.churn_rate, seconds=plan.churn_seconds, texts=texts)),
        measured_from=0.0,
        routers=plan.churn_pickers,
        restarts=(PodRestart(pod=1, at=plan.churn_kill_at_seconds, back_after=plan.churn_back_after_seconds),),
    )


def _qa_sessions(size: QaSize, *, rate: float, seconds: float, texts: Texts) -> Iterator[Session]:
    """Each user's place is taken by a new user after `rounds` questions; the first ones are somewhere in between."""
    system, gap = texts.draw(size.system_tokens), size.users / rate
    for place in range(size.users):
        due, rounds, number = place / rate, 1 + place * size.rounds // size.users, 0
        while due < seconds:
            dues = [due + turn * gap for turn in range(rounds) if due + turn * gap < seconds]
            yield Session(
                name=f"user-{place}-{number}",
                system=system,
                turns=tuple(_qa_turn(size, at=at, first=at == due, texts=texts) for at in dues),
            )
            due, rounds, number = due + rounds * gap, size.rounds, number + 1


def _qa_turn(size: QaSize, *, at: float, first: bool, texts: Texts) -> Turn:
    tokens = size.question_tokens + (size.history_tokens if first else 0)
    return Turn(due=at, text=texts.draw(tokens), answer_tokens=size.answer_tokens)


def shared_prefix_burst(plan: Plan, texts: Texts) -> Workload:
    """Documents that nobody has seen, each asked about by many at once."""
    size = plan.burst
    rng = random.Random(f"{plan.seed} burst")
    sessions = [
        session
        for burst in range(size.bursts)
        for session in _burst(size, number=burst, starts=burst * size.every_seconds, rng=rng, texts=texts)
    ]
    return Workload(
        name="burst",
        title=f"bursts of {size.prefixes} new shared prefixes",
        sessions=tuple(sessions),
        measured_from=0.0,
    )


def _burst(size: BurstSize, *, number: int, starts: float, rng: random.Random, texts: Texts) -> Iterator[Session]:
    for prefix in range(size.prefixes):
        text = texts.draw(size.prefix_tokens)
        for request in range(size.requests_each if prefix else size.hot_requests):
            turn = Turn(
                due=starts + rng.uniform(0, size.burst_seconds),
                text=texts.draw(size.tail_tokens),
                answer_tokens=size.answer_tokens,
            )
            yield Session(name=f"burst-{number}-{prefix}-{request}", system=text, turns=(turn,))


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


def trace_sessions(
    rows: Sequence[TraceRow], size: TraceSize, *, seconds: float, texts: Texts, name: str = "row"
) -> Iterator[Session]:
    """One completion per row; rows that share leading `hash_ids` share that much leading text."""
    block_tokens = TRACE_BLOCK_TOKENS // size.tokens_divisor
    blocks: dict[int, str] = {}
    for number, row in enumerate(rows):
        due = row.timestamp / 1000 / size.times_faster
        if due > seconds:
            return
        ids = row.hash_ids
        for one in ids:
            if one not in blocks:
                blocks[one] = texts.draw(block_tokens)
        tail = row.input_length // size.tokens_divisor - block_tokens * (len(ids) - 1)
        words = blocks[ids[-1]].split(" ")[: max(LEAST_TEXT_TOKENS, tail)]
        text = " ".join([*(blocks[one] for one in ids[:-1]), " ".join(words)])
        answer = min(max(1, row.output_length // size.answer_divisor), size.longest_answer_tokens)
        turn = Turn(due=due, text=text, answer_tokens=answer)
        yield Session(name=f"{name}-{number}", system=None, turns=(turn,))


WORKLOADS: dict[str, Callable[[Plan, Texts], Workload]] = {
    "qa": multi_round_qa,
    "qa-x2": multi_round_qa_fast,
    "trace": mooncake,
    "burst": shared_prefix_burst,
    "uniform": uniform,
    "churn": churn,
}

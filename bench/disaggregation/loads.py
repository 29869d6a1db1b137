"""What is asked and when: pure functions of a mix, a plan and a seed, so that every arm gets the very same load."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.disaggregation.plan import Kind, Plan
from podsim.core.block_hash import extend_chain

VOCABULARY = 50_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """One turn of a session; all that will be said is known beforehand."""

    kind: str
    due: float  # seconds; a later turn also waits for the answer before it
    token_ids: list[int]  # prompt and answer
    prompt_tokens: int
    hashes: list[bytes]  # of all full blocks, as the engine makes them

    @property
    def answer_tokens(self) -> int:
        """What is generated."""
        return len(self.token_ids) - self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All sessions of one run, by their first turns' times."""

    sessions: tuple[tuple[Request, ...], ...]
    prefill_share: float  # of the pods' work, where each keeps its chats

    @property
    def requests(self) -> int:
        """How many there are."""
        return sum(map(len, self.sessions))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    new_tokens: int  # of the prompt
    answer_tokens: int


def build_load(mix: Mapping[str, Kind], plan: Plan, *, seed: int) -> Load:
    """Sessions at a Poisson rate that keeps the pods busy for `plan.load` of the time."""
    rng = random.Random(f"{seed} sessions")
    names, shares = list(mix), [kind.share for kind in mix.values()]
    sample = [_turns(mix[name], rng) for name in rng.choices(names, shares, k=2000)]
    engine = plan.engine
    prefill = sum(turn.new_tokens for turns in sample for turn in turns) / engine.prefill_tokens_per_second
    answers = sum(turn.answer_tokens for turns in sample for turn in turns)
    decode = answers * engine.inter_token_seconds / engine.max_running
    gap = (prefill + decode) / len(sample) / (plan.pods * plan.load)
    return Load(
        sessions=tuple(_sessions(mix, plan, gap=gap, rng=random.Random(f"{seed} load"))),
        prefill_share=prefill / (prefill + decode),
    )


def _sessions(mix: Mapping[str, Kind], plan: Plan, *, gap: float, rng: random.Random) -> Iterator[tuple[Request, ...]]:
    names, shares = list(mix), [kind.share for kind in mix.values()]
    due = rng.expovariate(1.0 / gap)
    while due < plan.seconds:
        (name,) = rng.choices(names, shares)
        turns = tuple(_requests(name, _turns(mix[name], rng), plan, due=due, rng=rng))
        yield tuple(turn for turn in turns if turn.due < plan.seconds)
        due += rng.expovariate(1.0 / gap)


def _requests(name: str, turns: Sequence[_Turn], plan: Plan, *, due: float, rng: random.Random) -> Iterator[Request]:
    said: list[int] = []
    hashes: list[bytes] = []
    for turn in turns:
        prompt_tokens = len(said) + turn.new_tokens
        said = said + rng.choices(range(VOCABULARY), k=turn.new_tokens + turn.answer_tokens)
        hashes = list(hashes)
        extend_chain(hashes, said, block_size=plan.engine.block_size, tokens=len(said))
        yield Request(kind=name, due=due, token_ids=said, prompt_tokens=prompt_tokens, hashes=hashes)
        due += turn.answer_tokens * plan.engine.inter_token_seconds + rng.uniform(*plan.think_seconds)


def _turns(kind: Kind, rng: random.Random) -> list[_Turn]:
    turns = []
    for number in range(kind.turns):
        new_tokens = rng.randint(*(kind.question_tokens if number else kind.prompt_tokens))
        answer = (
            rng.randint(*kind.answer_tokens) if kind.answer_share is None else round(new_tokens * kind.answer_share)
        )
        turns.append(_Turn(new_tokens=new_tokens, answer_tokens=answer))
    return turns

"""Chats and bursts as scripts: the same size and seed give the same load, so that all that are compared get it."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from extproc.load.script import Session, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class QaSize:
    """Multi-round QA after LMBenchmark: `users` take turns; each asks again `users / rate` seconds later."""

    users: int = 30
    rounds: int = 8
    system_tokens: int = 400  # shared by all users
    history_tokens: int = 2600  # each user's own
    question_tokens: int = 30
    answer_tokens: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstSize:
    """New prefixes that many clients send at once; the first one is asked for far more often than the others."""

    bursts: int = 2
    every_seconds: float = 3.5
    burst_seconds: float = 1.0
    prefixes: int = 8
    requests_each: int = 6
    hot_requests: int = 24  # of the first prefix
    prefix_tokens: int = 2500
    tail_tokens: int = 40
    answer_tokens: int = 16


class Texts:
    """Random text of known length: each word is one token."""

    def __init__(self, words: Sequence[str], *, seed: str) -> None:
        self._words = words
        self._rng = random.Random(seed)  # noqa: S311 - reproducible text

    def draw(self, tokens: int) -> str:
        """Text of about `tokens` tokens that nobody else has."""
        return " ".join(self._rng.choices(self._words, k=tokens))


def qa_sessions(size: QaSize, *, rate: float, seconds: float, texts: Texts) -> Iterator[Session]:
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


def irregular(session: Session, rng: random.Random, *, most_seconds: float) -> Session:
    """Each question up to so much later: users do not ask on the stroke of a clock."""
    turns = [msgspec.structs.replace(turn, due=turn.due + rng.uniform(0.0, most_seconds)) for turn in session.turns]
    return msgspec.structs.replace(session, turns=tuple(turns))


def burst_sessions(
    size: BurstSize, *, number: int, starts: float, rng: random.Random, texts: Texts
) -> Iterator[Session]:
    """One burst: documents that nobody has seen, each asked about by many at once."""
    for prefix in range(size.prefixes):
        text = texts.draw(size.prefix_tokens)
        for request in range(size.requests_each if prefix else size.hot_requests):
            turn = Turn(
                due=starts + rng.uniform(0, size.burst_seconds),
                text=texts.draw(size.tail_tokens),
                answer_tokens=size.answer_tokens,
            )
            yield Session(name=f"burst-{number}-{prefix}-{request}", system=text, turns=(turn,))

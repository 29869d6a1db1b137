"""Chats and bursts as scripts. Size and seed determine the load, so that all compared servers get the same."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from operate.load.script import Session, Turn


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
    """Bursts of requests with new prefixes; the first prefix is far more popular than the others."""

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
        """Return new random text of about `tokens` tokens."""
        return " ".join(self._rng.choices(self._words, k=tokens))


def qa_sessions(size: QaSize, *, rate: float, seconds: float, texts: Texts) -> Iterator[Session]:
    """Yield the users' chats. After `rounds` questions a new user takes over; the first users start mid-chat."""
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
    """Delay each question randomly by up to `most_seconds`: real users are not periodic."""
    turns = [msgspec.structs.replace(turn, due=turn.due + rng.uniform(0.0, most_seconds)) for turn in session.turns]
    return msgspec.structs.replace(session, turns=tuple(turns))


def burst_sessions(
    size: BurstSize, *, number: int, starts: float, rng: random.Random, texts: Texts
) -> Iterator[Session]:
    """Yield one burst: many near-simultaneous requests about each of several new documents."""
    for prefix in range(size.prefixes):
        text = texts.draw(size.prefix_tokens)
        for request in range(size.requests_each if prefix else size.hot_requests):
            turn = Turn(
                due=starts + rng.uniform(0, size.burst_seconds),
                text=texts.draw(size.tail_tokens),
                answer_tokens=size.answer_tokens,
            )
            yield Session(name=f"burst-{number}-{prefix}-{request}", system=text, turns=(turn,))


# one token each in nearly every tokenizer, for random text of known length
_LIST = """
about above access according action actual add address after again all allow already also always and another any
archive argument assume audio available avoid back base because been before best between bit blank block body both
bound break build but cache call can cannot canvas case change character check child class clear close code color
column command comment common compare complete complex compute condition connect contain content context continue
copy correct could count create current data date day default delay different directory display distribution
document does drive during each either element else empty end entry environment equal error even event every exact
example except exist expected extension extra fail false field file final find first fix flag follow for form format
found frame from full function get given group handle happen has have head help here how import include index
information instead into item just keep key kind know known large last leading least left length level like limit
line list little load local lock log long look loop machine mail main make man many map mark match may mean means
memory message method might missing mode more most must name need negative network never new next node normal not
nothing now number object off offset old once one only open operation option order origin original other our out
output over own package pair parent part pass path pattern place point position possible present print process
program provide purpose queue quote raise random range raw read reader real reason reference register relative
release remain remote report request result return right root round row run same sample save screen script search
second section see select sequence set shape short should show sign signal simple since single size small some sort
source space special speed split standard start state still stop string such suffix support table take target test
text than that the them then there these they thing this those through time title too top total true try two type
under until update use useful user valid value version visit wait want was way week were what when where whether
which while who width will with within without word work would write year you zero
"""
WORDS = tuple(_LIST.split())

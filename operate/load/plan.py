"""Builds the load of `kvmesh load` from its options: sessions, title, and the start of the measurement."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from extproc.errors import ConfigError
from operate.load.script import Session
from operate.load.trace import TRACE_BLOCK_TOKENS, RecordedBody, TraceRow, TraceSize, recorded_sessions, trace_sessions
from operate.load.workloads import WORDS, BurstSize, QaSize, Texts, burst_sessions, irregular, qa_sessions

BURST_EVERY_SECONDS = 4.0
BURST_PREFIXES = 5
LEAST_BURST = 2 * BURST_PREFIXES  # requests
USUAL_RATE = 8.0  # requests a second
USUAL_SECONDS = 20.0
SALT_WORDS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSize:
    """The size of a load. A trace has its own `rate` and `seconds` if they are None."""

    rate: float | None = None  # requests a second
    seconds: float | None = None
    seed: int = 0
    users: int = 24  # of questions
    prompt_tokens: int = 2600  # of a user's history, or of a burst's document
    answer_tokens: int = 24
    shrink: int = 1  # divisor of a trace's token counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A load that can be played."""

    title: str
    sessions: Sequence[Session]
    measured_from: float  # seconds; earlier requests only warm up the caches

    @property
    def requests(self) -> int:
        """The number of requests."""
        return sum(len(session.turns) for session in self.sessions)

    @property
    def seconds(self) -> float:
        """The due time of the last request."""
        return max((turn.due for session in self.sessions for turn in session.turns), default=0.0)


def questions(size: LoadSize) -> Load:
    """Return chats of users who ask about their own history, below a shared system prompt. Raise ConfigError."""
    rate, seconds = size.rate or USUAL_RATE, size.seconds or USUAL_SECONDS
    gap = size.users / rate
    most_late = gap / 2  # without jitter, round robin might send each user always to the same pod
    measured_from = gap + most_late
    if seconds <= measured_from:
        raise ConfigError(
            f"--duration {seconds:g}s: {size.users} users at {rate:g} requests a second have all asked once after "
            f"{measured_from:.1f} s, and what comes then is measured: give more, or fewer --users"
        )
    rng = random.Random(f"{size.seed} questions")  # noqa: S311 - reproducible load
    qa = QaSize(users=size.users, history_tokens=size.prompt_tokens, answer_tokens=size.answer_tokens)
    sessions = qa_sessions(qa, rate=rate, seconds=seconds - most_late, texts=_texts(size, "questions"))
    return Load(
        title=f"questions: {size.users} users, {rate:g} requests/s, {seconds:g} s",
        sessions=tuple(irregular(each, rng, most_seconds=most_late) for each in sessions),
        measured_from=measured_from,
    )


def bursts(size: LoadSize) -> Load:
    """Return bursts of requests about new documents, half of them about the same one. Raise ConfigError."""
    rate, seconds = size.rate or USUAL_RATE, size.seconds or USUAL_SECONDS
    requests = round(rate * BURST_EVERY_SECONDS)
    if requests < LEAST_BURST:
        raise ConfigError(
            f"--rate {rate:g}: a burst comes every {BURST_EVERY_SECONDS:g} s and needs {LEAST_BURST} requests at "
            f"least: give {LEAST_BURST / BURST_EVERY_SECONDS:g} or more"
        )
    each = requests // (2 * BURST_PREFIXES)
    burst = BurstSize(
        prefixes=BURST_PREFIXES,
        requests_each=each,
        hot_requests=requests - each * (BURST_PREFIXES - 1),
        prefix_tokens=size.prompt_tokens,
        answer_tokens=size.answer_tokens,
    )
    rng, texts = random.Random(f"{size.seed} burst"), _texts(size, "burst")  # noqa: S311
    count = max(1, int(seconds / BURST_EVERY_SECONDS))
    sessions = tuple(
        session
        for number in range(count)
        for session in burst_sessions(burst, number=number, starts=number * BURST_EVERY_SECONDS, rng=rng, texts=texts)
    )
    return Load(
        title=f"{count} bursts of {requests} requests about {BURST_PREFIXES} new documents",
        sessions=sessions,
        measured_from=0.0,
    )


def replay(requests: Sequence[TraceRow] | Sequence[RecordedBody], size: LoadSize, *, name: str) -> Load:
    """Return the recorded requests at their own rate or `size.rate`, cut at `size.seconds`. Raise ConfigError."""
    seconds = float("inf") if size.seconds is None else size.seconds
    sessions = tuple(_replayed(requests, size, seconds=seconds))
    if not sessions:
        raise ConfigError(f"--duration {seconds:g}s: no request of {name} is due by then")
    last = sessions[-1].turns[0].due
    return Load(title=f"{name}: {len(sessions)} requests in {last:.0f} s", sessions=sessions, measured_from=0.0)


def _replayed(
    requests: Sequence[TraceRow] | Sequence[RecordedBody], size: LoadSize, *, seconds: float
) -> Iterator[Session]:
    rows = [each for each in requests if isinstance(each, TraceRow)]
    if rows:
        first = rows[0].timestamp
        rows = [TraceRow(row.timestamp - first, row.input_length, row.output_length, row.hash_ids) for row in rows]
        factor = _times_faster([row.timestamp / 1000 for row in rows], size.rate)
        trace = TraceSize(
            times_faster=factor,
            tokens_divisor=min(size.shrink, TRACE_BLOCK_TOKENS),
            answer_divisor=size.shrink,
            longest_answer_tokens=size.answer_tokens,
        )
        return trace_sessions(rows, trace, seconds=seconds, texts=_texts(size, "trace"))
    bodies = [each for each in requests if isinstance(each, RecordedBody)]
    dues = _dues(bodies, size)
    kept = sum(due <= seconds for due in dues)
    return recorded_sessions(bodies[:kept], dues[:kept])


def _dues(bodies: Sequence[RecordedBody], size: LoadSize) -> list[float]:
    written = [body.at for body in bodies if body.at is not None]
    if written:
        factor = _times_faster([at - written[0] for at in written], size.rate)
        return [(at - written[0]) / factor for at in written]
    rng, due, dues = random.Random(f"{size.seed} arrivals"), 0.0, []  # noqa: S311
    for _ in bodies:
        due += rng.expovariate(size.rate or USUAL_RATE)
        dues.append(due)
    return dues


def _times_faster(seconds: Sequence[float], rate: float | None) -> float:
    """Return the divisor of the times (which begin at 0) that yields `rate` requests/s on average."""
    if rate is None or seconds[-1] <= 0:
        return 1.0
    return rate * seconds[-1] / len(seconds)


def _texts(size: LoadSize, kind: str) -> Texts:
    return Texts(WORDS, seed=f"{size.seed} {kind}")


def salt_of(text: str) -> str:
    """Return the words that all prompts of an arm begin with, derived from `text`."""
    return " ".join(random.Random(text).choices(WORDS, k=SALT_WORDS))  # noqa: S311

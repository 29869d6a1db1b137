"""The requests to replay: what the log says of each, and where it does not say it, what another of its kind had.

A refused request never reached a pod. Its output and what was cached of its prompt, and the prompt's length where it
was not looked up, are those of the served request of its class and tenant that came nearest in time.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from extproc.records.access_log import MICROSECONDS, AccessRecord
from extproc.replay_log.read_log import ABANDONED, Log, arrived_at
from extproc.replay_log.step_fit import Served, StepFit, uncached_tokens

ANSWERLESS = frozenset({"embeddings", "pooling", "score", "rerank", "tokenize"})  # APIs without generated tokens
FALLBACK_OUTPUT = 128  # where no answer of the log tells its length


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One request as it is replayed."""

    number: int
    at: float  # seconds after the first one
    class_name: str
    tenant: str  # its hash, or its name where the key of the hashes was given
    path: str
    api: str
    model: str | None
    stream: bool
    max_tokens: int | None
    prompt_tokens: int
    cached_tokens: int  # that its pod had: wherever it is sent now, as many
    output_tokens: int
    patience_seconds: float | None = None  # its client left after this time without a decision; None: it stayed


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """All of them, and how much of it is known."""

    requests: tuple[Arrival, ...]
    counted: int  # requests whose output was counted in the answer
    estimated: int  # from how long the answer took
    borrowed: int  # of another request


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def arrivals_of(log: Log, answers: Sequence[Served], fit: StepFit | None, *, names: Mapping[str, str]) -> Arrivals:
    """Return the requests of a log. `names`: hash of a tenant -> its name, as far as they are known."""
    served = {id(each.record): each for each in answers}
    counts: Counter[str] = Counter()
    works = _Works(log.records, served, fit)
    requests = []
    for number, record in enumerate(log.records):
        work, source = works.of(record)
        counts[source] += 1
        waited = record.decided_us / MICROSECONDS
        requests.append(
            Arrival(
                number=number,
                at=arrived_at(record) - log.began,
                class_name=record.class_ or "",
                tenant=names.get(record.tenant or "", record.tenant or ""),
                path=record.path,
                api=record.api or "",
                model=record.model,
                stream=record.stream,
                max_tokens=record.max_tokens,
                prompt_tokens=work.prompt_tokens,
                cached_tokens=work.cached_tokens,
                output_tokens=work.output_tokens,
                patience_seconds=waited if record.fate == ABANDONED else None,
            )
        )
    return Arrivals(
        requests=tuple(requests),
        counted=counts["counted"],
        estimated=counts["estimated"],
        borrowed=counts["borrowed"],
    )


class _Works:
    """What each request asks of a pod."""

    def __init__(self, records: Sequence[AccessRecord], served: Mapping[int, Served], fit: StepFit | None) -> None:
        self._fit = fit
        self._served = served
        known = [each.record.output_tokens for each in served.values() if each.record.output_tokens]
        self._usual = sorted(known)[len(known) // 2] if known else FALLBACK_OUTPUT
        by_kind: defaultdict[tuple[str, ...], list[tuple[float, AccessRecord]]] = defaultdict(list)
        for record in records:
            if id(record) in served:
                for kind in _kinds(record):
                    by_kind[kind].append((record.at, record))
        # compared by time alone: records have no order
        self._by_kind = {kind: ([at for at, _ in each], [one for _, one in each]) for kind, each in _sorted(by_kind)}

    def of(self, record: AccessRecord) -> tuple[_Work, str]:
        """Return a request's work, and how its output is known: counted, estimated, borrowed."""
        served = self._served.get(id(record))
        if served is not None:
            output = self._output(served)
            return self._work(served, output), "counted" if record.output_tokens else "estimated"
        donor = self._nearest(record)
        if donor is None:
            work = _Work(prompt_tokens=record.prompt_tokens or 1, cached_tokens=0, output_tokens=self._usual)
            return work, "borrowed"
        work = self._work(donor, self._output(donor))
        if record.prompt_tokens:  # it was looked up, and refused or given up later
            cached = record.predicted_cached_tokens
            if cached is None:  # what its kind shares, such as a system prompt
                cached = work.cached_tokens
            work = replace(
                work, prompt_tokens=record.prompt_tokens, cached_tokens=max(min(cached, record.prompt_tokens - 1), 0)
            )
        return work, "borrowed"

    def _work(self, served: Served, output: int) -> _Work:
        record = served.record
        prompt = record.realised_prompt_tokens or record.prompt_tokens or 1
        return _Work(prompt_tokens=prompt, cached_tokens=max(prompt - uncached_tokens(record), 0), output_tokens=output)

    def _output(self, served: Served) -> int:
        record = served.record
        if record.api in ANSWERLESS:
            return 1
        if record.output_tokens:
            return record.output_tokens
        if self._fit is None:
            return min(self._usual, record.max_tokens or self._usual)
        tokens = self._fit.output_tokens(served.seconds, streams=served.streams, prompt_tokens=served.prompt_tokens)
        return min(tokens, record.max_tokens) if record.max_tokens else tokens

    def _nearest(self, record: AccessRecord) -> Served | None:
        for kind in _kinds(record):
            times, records = self._by_kind.get(kind, ([], []))
            if times:
                place = bisect_left(times, record.at)
                near = [at for at in (place - 1, place) if 0 <= at < len(times)]
                nearest = min(near, key=lambda at: abs(times[at] - record.at))
                return self._served[id(records[nearest])]
        return None


def _kinds(record: AccessRecord) -> tuple[tuple[str, ...], ...]:
    """Return what a request is alike in with others, the most telling first."""
    model, class_name = record.model or "", record.class_ or ""
    return (class_name, record.tenant or "", model), (class_name, model), (class_name,), ()


def _sorted(
    by_kind: Mapping[tuple[str, ...], list[tuple[float, AccessRecord]]],
) -> Iterable[tuple[tuple[str, ...], list[tuple[float, AccessRecord]]]]:
    return ((kind, sorted(each, key=itemgetter(0))) for kind, each in by_kind.items())

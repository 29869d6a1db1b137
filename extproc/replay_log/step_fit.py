"""How fast the pods were, by the log alone: the times of whole answers, solved for what a step and a prompt token take.

While an answer is generated its pod makes a step for each of its tokens; a step takes some time whatever is in it, more
for each stream, and more for each prompt token computed in it, whoever's it is:

    seconds = base + steps x (alone + streams x a stream) + prompt tokens x a prompt token
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from extproc.records.access_log import MICROSECONDS, AccessRecord

LEAST_ANSWERS = 30  # with known output, from which a fit means something
LEAST_SECONDS = 0.02  # shorter answers weigh as much as these
ROUNDS = 4
_FACTORS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFit:
    """What the log shows of the pods; seconds."""

    base_seconds: float  # of a request, besides its steps: the gateway, the pod's HTTP
    alone_seconds: float  # of a step, whatever is in it
    seconds_a_stream: float
    seconds_a_prompt_token: float
    answers: int  # that it is from
    error: float  # median share by which an answer took longer or shorter

    def output_tokens(self, seconds: float, *, streams: float, prompt_tokens: float) -> int:
        """Return how many tokens an answer had that took so long."""
        left = seconds - self.base_seconds - prompt_tokens * self.seconds_a_prompt_token
        return max(round(left / max(self.alone_seconds + streams * self.seconds_a_stream, 1e-6)), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One answer beside the others of its pod."""

    record: AccessRecord
    seconds: float  # from the decision to the end
    streams: float  # mean number at its pod meanwhile, itself included
    prompt_tokens: float  # computed at its pod meanwhile, its own included


def uncached_tokens(record: AccessRecord) -> int:
    """Return the prompt tokens that were computed, as its pod counted or as expected."""
    prompt = record.realised_prompt_tokens or record.prompt_tokens or 0
    cached = record.realised_cached_tokens
    if cached is None:
        cached = record.predicted_cached_tokens or 0
    return max(prompt - cached, 1)


def served_answers(records: Sequence[AccessRecord], *, prompt_seconds: float = 0.0) -> list[Served]:
    """Return the answers that came to an end, with what was going on at their pods meanwhile.

    `prompt_seconds`: what a pod takes for a prompt token; it computes one prompt after the other.
    """
    by_pod: defaultdict[str, list[AccessRecord]] = defaultdict(list)
    for record in records:
        endpoint = record.served_by or record.endpoint
        if endpoint is not None and record.ended_us is not None and 200 <= (record.status or 0) < 300:
            by_pod[endpoint].append(record)
    return [served for pod in by_pod.values() for served in _beside_each_other(pod, prompt_seconds)]


def _beside_each_other(records: Sequence[AccessRecord], prompt_seconds: float) -> list[Served]:
    ordered = sorted(records, key=lambda record: record.at)
    starts = [record.at for record in ordered]
    ends = [record.at + _seconds(record) for record in ordered]
    sorted_ends = sorted(ends)
    area_of_starts, area_of_ends = _sums(starts), _sums(sorted_ends)
    prompts = _Prompts([(record.at, uncached_tokens(record)) for record in ordered], prompt_seconds)
    found = []
    for record, start, end in zip(ordered, starts, ends, strict=True):
        seconds = max(end - start, 1e-6)
        # stream seconds before a moment: those begun, each for its time since, less the time since those ended
        streams = (
            _area(starts, area_of_starts, end)
            - _area(sorted_ends, area_of_ends, end)
            - _area(starts, area_of_starts, start)
            + _area(sorted_ends, area_of_ends, start)
        ) / seconds
        tokens = max(prompts.computed(end) - prompts.computed(start), float(uncached_tokens(record)))
        found.append(Served(record=record, seconds=seconds, streams=max(streams, 1.0), prompt_tokens=tokens))
    return found


class _Prompts:
    """How many prompt tokens a pod had computed by when, if it computes one prompt after the other."""

    def __init__(self, prompts: Sequence[tuple[float, int]], prompt_seconds: float) -> None:
        """`prompts`: when each came, in that order, and its tokens."""
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._before: list[float] = [0.0]
        free_at = float("-inf")
        for at, tokens in prompts:
            self._begins.append(max(at, free_at))
            free_at = self._begins[-1] + tokens * prompt_seconds
            self._ends.append(free_at)
            self._before.append(self._before[-1] + tokens)

    def computed(self, now: float) -> float:
        """Return the tokens computed before a moment."""
        place = bisect_left(self._begins, now)  # begun before it
        if not place:
            return 0.0
        begin, end = self._begins[place - 1], self._ends[place - 1]
        share = 1.0 if end <= now or end <= begin else (now - begin) / (end - begin)
        return self._before[place - 1] + share * (self._before[place] - self._before[place - 1])


def _sums(times: Sequence[float]) -> list[float]:
    sums = [0.0]
    for time in times:
        sums.append(sums[-1] + time)
    return sums


def _area(times: Sequence[float], sums: Sequence[float], now: float) -> float:
    count = bisect_left(times, now)
    return count * now - sums[count]


def _seconds(record: AccessRecord) -> float:
    return max((record.ended_us or 0) - record.decided_us, 0) / MICROSECONDS


def fit_steps(records: Sequence[AccessRecord], *, step_tokens: int) -> tuple[StepFit | None, list[Served]]:
    """Return what fits the answers of known output best (None: they are too few), and all answers.

    When a prompt is computed depends on how fast, so that it is asked a few times. `step_tokens`: of a prompt's step.
    """
    answers, fit = served_answers(records), None
    for _ in range(ROUNDS):
        fit = _fit(answers)
        if fit is None:
            break
        prompt_seconds = fit.seconds_a_prompt_token + fit.alone_seconds / step_tokens
        answers = served_answers(records, prompt_seconds=prompt_seconds)
    return fit, answers


def _fit(answers: Sequence[Served]) -> StepFit | None:
    known = [each for each in answers if (each.record.output_tokens or 0) > 0]
    if len(known) < LEAST_ANSWERS:
        return None
    matrix = [[0.0] * _FACTORS for _ in range(_FACTORS)]
    vector = [0.0] * _FACTORS
    for each in known:
        row, weight = _factors(each), max(each.seconds, LEAST_SECONDS) ** -2
        for i in range(_FACTORS):
            vector[i] += weight * row[i] * each.seconds
            for j in range(_FACTORS):
                matrix[i][j] += weight * row[i] * row[j]
    base, alone, stream, prompt = non_negative(matrix, vector)
    errors = [
        abs(sum(a * b for a, b in zip((base, alone, stream, prompt), _factors(each), strict=True)) / each.seconds - 1)
        for each in known
    ]
    return StepFit(
        base_seconds=base,
        alone_seconds=alone,
        seconds_a_stream=stream,
        seconds_a_prompt_token=prompt,
        answers=len(known),
        error=median(errors),
    )


def _factors(each: Served) -> tuple[float, float, float, float]:
    steps = float(each.record.output_tokens or 1)
    return 1.0, steps, steps * each.streams, each.prompt_tokens


def non_negative(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    """Solve matrix x = vector, symmetric, for the x that are not negative: what would be is left out."""
    left = list(range(len(vector)))
    while left:
        found = _solved([[matrix[i][j] for j in left] for i in left], [vector[i] for i in left])
        # relative to what the factor would explain alone, so that the units do not decide
        worth = [value * matrix[i][i] / max(abs(vector[i]), 1e-12) for i, value in zip(left, found, strict=True)]
        worst = min(range(len(left)), key=worth.__getitem__)
        if found[worst] >= 0.0:
            values: Mapping[int, float] = dict(zip(left, found, strict=True))
            return [values.get(i, 0.0) for i in range(len(vector))]
        del left[worst]
    return [0.0] * len(vector)


def _solved(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve by elimination with pivots; a factor that nothing tells from the others gets 0."""
    size = len(vector)
    scale = [matrix[i][i] ** 0.5 or 1.0 for i in range(size)]
    rows = [[*(matrix[i][j] / (scale[i] * scale[j]) for j in range(size)), vector[i] / scale[i]] for i in range(size)]
    pivots: dict[int, int] = {}  # row -> column
    for column in range(size):
        pivot = max((i for i in range(size) if i not in pivots), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < 1e-9:
            continue
        pivots[pivot] = column
        for i in range(size):
            if i != pivot:
                share = rows[i][column] / rows[pivot][column]
                rows[i] = [value - share * lead for value, lead in zip(rows[i], rows[pivot], strict=True)]
    found = [0.0] * size
    for row, column in pivots.items():
        found[column] = rows[row][size] / rows[row][column] / scale[column]
    return found

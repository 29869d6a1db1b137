"""The last 15 minutes of a pool as values: `GET /v1/history`, and the feed's event `history`. Pure.

Data is columnar: one value per time slice, oldest first, None for a slice without observations.
"""

from collections.abc import Sequence

import msgspec

from extproc.answers.judgement import Target
from extproc.answers.latency_history import Key, LatencyHistory, Spread
from extproc.ledger.pool_history import PoolHistory
from kvmesh.pods.page_steps import Steps

ANSWERS, PODS = "answers", "pods"
MOST_SERIES = 24  # of each kind: those with the most observations


class SpreadState(msgspec.Struct, frozen=True, kw_only=True):
    """The spread of a latency."""

    observed: int
    p50_ms: float
    p95_ms: float
    p99_ms: float


class SpreadColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The spread per slice; the last slice is incomplete."""

    observed: Sequence[int]
    p50_ms: Sequence[float | None]
    p95_ms: Sequence[float | None]
    p99_ms: Sequence[float | None]


class LatencyState(msgspec.Struct, frozen=True, kw_only=True):
    """One latency series: a kind of latency, of the requests of one class or role and one model."""

    source: str  # answers: streams sampled by this picker; pods: all requests, as measured by the pods
    measure: str  # ttft or inter-token
    class_name: str | None = msgspec.field(name="class", default=None)  # None if the series covers all classes
    model: str
    role: str | None = None  # of the pods
    whole: SpreadState  # of all slices
    slices: SpreadColumns


class LoadColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The load per slice; only complete slices."""

    slice_seconds: float
    first_at: float  # unix seconds; start of the first slice
    requests: Sequence[int]
    refused: Sequence[int]
    prompt_tokens: Sequence[int]
    cached_tokens: Sequence[int]


class HistoryEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One picker's history of one pool."""

    now: float
    pool: str
    picker: str
    since: float  # start of the history
    sample_share: float  # share of answers that the picker reads
    slice_seconds: float
    first_at: float  # unix seconds; start of the first latency slice
    latencies: Sequence[LatencyState]
    left_out: int  # number of series not included
    load: LoadColumns


def history_state(
    history: PoolHistory, *, pool: str, picker: str, sample_share: float, now: float, unix_now: float
) -> Steps[HistoryEvent]:
    """Return the history; `now` is in monotonic seconds, `unix_now` is the same moment in unix seconds.

    Each step is one series. The maximum number of series takes 50 ms in total; requests must not wait that long.
    """
    kinds = (
        (ANSWERS, Target.TTFT, history.ttft),
        (ANSWERS, Target.INTER_TOKEN, history.inter_token),
        (PODS, Target.TTFT, history.pods_ttft),
        (PODS, Target.INTER_TOKEN, history.pods_inter_token),
    )
    latencies: list[LatencyState] = []
    left_out = 0
    for source, measure, kept in kinds:
        keys = kept.known(now=now)
        left_out += max(len(keys) - MOST_SERIES, 0)
        for key in keys[:MOST_SERIES]:
            yield
            if (latency := _latency(source, measure, kept, key, now=now)) is not None:
                latencies.append(latency)
    load, ahead = history.load, unix_now - now
    parts = load.complete(now=now)
    first = history.ttft.number(now) - history.ttft.slices + 1
    return HistoryEvent(
        now=unix_now,
        pool=pool,
        picker=picker,
        since=history.began_at + ahead,
        sample_share=sample_share,
        slice_seconds=history.ttft.slice_seconds,
        first_at=first * history.ttft.slice_seconds + ahead,
        latencies=latencies,
        left_out=left_out,
        load=LoadColumns(
            slice_seconds=load.slice_seconds,
            first_at=parts[0].number * load.slice_seconds + ahead,
            requests=[part.requests for part in parts],
            refused=[part.refused for part in parts],
            prompt_tokens=[part.prompt_tokens for part in parts],
            cached_tokens=[part.cached_tokens for part in parts],
        ),
    )


def _latency(source: str, measure: Target, kept: LatencyHistory, key: Key, *, now: float) -> LatencyState | None:
    whole = kept.whole(key, now=now)
    if whole is None:  # evicted between two steps
        return None
    spreads = kept.spreads(key, now=now)
    is_answers = source == ANSWERS
    return LatencyState(
        source=source,
        measure=measure.value,
        class_name=key[0] if is_answers else None,
        model=key[1] if is_answers else key[0],
        role=None if is_answers else key[1],
        whole=SpreadState(observed=whole.observed, p50_ms=_ms(whole.p50), p95_ms=_ms(whole.p95), p99_ms=_ms(whole.p99)),
        slices=_columns(spreads),
    )


def _columns(spreads: Sequence[Spread | None]) -> SpreadColumns:
    return SpreadColumns(
        observed=[0 if each is None else each.observed for each in spreads],
        p50_ms=[None if each is None else _ms(each.p50) for each in spreads],
        p95_ms=[None if each is None else _ms(each.p95) for each in spreads],
        p99_ms=[None if each is None else _ms(each.p99) for each in spreads],
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)

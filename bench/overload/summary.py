"""What one run comes to: pure, from outcomes to numbers. Seconds are told in milliseconds, work in prompt tokens.

Goodput counts work whose first token came in time; TTFT counts answered requests only, so it is never told without
the share that was answered.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from bench.overload.own_half import own_half_tokens
from bench.overload.plan import FLOOD, STEADY, ClassLoad
from bench.overload.script import Attempt, Outcome
from operate.load.summary import percentile

SHOWN_ERRORS = 4


class ClassSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One class in one run; times in milliseconds."""

    name: str
    ttft_limit: float
    requests: int
    answered: int  # at whichever attempt
    in_time: int  # answered, with a TTFT within the limit
    refused: int  # at the first attempt
    failed: int  # neither answered nor refused at the last attempt: the client left, or worse
    degraded: int
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    inter_token_p50: float
    inter_token_p99: float
    inter_token_p95: float = float("nan")


class TenantSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant within one class; work in prompt tokens that nobody had cached."""

    tenant: str
    class_name: str
    requests: int
    asked_tokens: int
    answered_tokens: int
    begun_tokens: int  # of those that came whenever: first token within the measured seconds
    own_half_tokens: int  # the same, had it half of what the class got, when it got it, for itself alone
    ttft_p50: float
    ttft_p95: float


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """All refusals of a run, those of retries included."""

    count: int
    reasons: dict[str, int]
    ms_p50: float  # from sending to the whole refusal
    ms_p99: float
    without_retry_after: int
    retry_after_p50: float  # seconds
    retry_after_most: float


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """First retries of clients that obey Retry-After, sent after the load fell (or at all, where it did not fall)."""

    count: int
    home: int  # answered


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One arm at one load."""

    arm: str
    scenario: str  # steady, falling, or that of a bad pod
    load: float  # of capacity; the high one where it falls
    seconds: float  # measured
    goodput: float  # work begun in time, prompt tokens a second
    goodput_requests: float  # a second
    throughput: float  # work answered, in time or not
    classes: tuple[ClassSummary, ...]
    tenants: tuple[TenantSummary, ...]
    refusals: Refusals
    retries: Retries
    errors: dict[str, int]
    # how far to trust the run
    late_p99: float = 0.0  # ms, requests that the clients sent late
    busy_cores: float = 0.0  # CPU of the whole machine
    cpu_ms: dict[str, float] = {}  # a request, by process

    @property
    def in_time_per_second(self) -> float:
        """Requests that were due in the measured seconds and answered in time, a second."""
        return sum(each.in_time for each in self.classes) / self.seconds

    def of_class(self, name: str) -> ClassSummary:
        """The class called so."""
        return next(each for each in self.classes if each.name == name)

    def share_of_own_half(self, class_name: str) -> float:
        """Of the work that a half of its own would have begun for it, what the steady tenant got in a class."""
        mine = next(each for each in self.tenants if (each.tenant, each.class_name) == (STEADY, class_name))
        return mine.begun_tokens / mine.own_half_tokens if mine.own_half_tokens else 1.0


def summarise(
    outcomes: Sequence[Outcome],
    *,
    arm: str,
    scenario: str,
    load: float,
    classes: Sequence[ClassLoad],
    measured_from: float,
    ends: float,
    falls_at: float | None = None,
    busy_cores: float = 0.0,
    cpu_ms: dict[str, float] | None = None,
) -> RunSummary:
    """The numbers of one run whose arrivals stop at `ends`."""
    measured = [outcome for outcome in outcomes if outcome.due >= measured_from]
    limits = {each.name: each.ttft_limit for each in classes}
    seconds = ends - measured_from
    good = [outcome for outcome in outcomes if _begun_between(outcome, measured_from, ends)]
    in_time = [outcome for outcome in good if _in_time(outcome, limits[outcome.class_name])]
    errors = Counter(outcome.last.error for outcome in measured if outcome.last.error and not outcome.last.is_refused)
    return RunSummary(
        arm=arm,
        scenario=scenario,
        load=load,
        seconds=seconds,
        goodput=sum(outcome.work_tokens for outcome in in_time) / seconds,
        goodput_requests=len(in_time) / seconds,
        throughput=sum(outcome.work_tokens for outcome in good) / seconds,
        classes=tuple(_class(each, measured) for each in classes),
        tenants=tuple(
            tenant for each in classes for tenant in _tenants(each, outcomes, measured_from=measured_from, ends=ends)
        ),
        refusals=_refusals([attempt for outcome in measured for attempt in outcome.attempts]),
        retries=_retries(outcomes, after=measured_from if falls_at is None else falls_at),
        errors=dict(errors.most_common(SHOWN_ERRORS)),
        late_p99=1000 * percentile([outcome.attempts[0].sent - outcome.due for outcome in outcomes], 0.99),
        busy_cores=busy_cores,
        cpu_ms=cpu_ms or {},
    )


def _in_time(outcome: Outcome, limit: float) -> bool:
    return outcome.last.ttft is not None and outcome.last.ttft <= limit


def _begun_between(outcome: Outcome, begins: float, ends: float) -> bool:
    first = _first_token(outcome)
    return first is not None and begins <= first < ends


def _first_token(outcome: Outcome) -> float | None:
    """When the whole answer that it got in the end began."""
    return None if outcome.last.ttft is None else outcome.last.first


def _class(each: ClassLoad, measured: Sequence[Outcome]) -> ClassSummary:
    mine = [outcome for outcome in measured if outcome.class_name == each.name]
    ttfts = _ttfts(mine)
    gaps = [
        1000 * (last.ended - last.first) / (last.pieces - 1)
        for outcome in mine
        if (last := outcome.last).ttft is not None and last.first is not None and last.pieces > 1
    ]
    return ClassSummary(
        name=each.name,
        ttft_limit=1000 * each.ttft_limit,
        requests=len(mine),
        answered=len(ttfts),
        in_time=sum(ttft <= 1000 * each.ttft_limit for ttft in ttfts),
        refused=sum(outcome.attempts[0].is_refused for outcome in mine),
        failed=sum(outcome.last.error is not None and not outcome.last.is_refused for outcome in mine),
        degraded=sum(bool(outcome.last.degraded) for outcome in mine),
        ttft_mean=sum(ttfts) / len(ttfts) if ttfts else float("nan"),
        ttft_p50=percentile(ttfts, 0.50),
        ttft_p95=percentile(ttfts, 0.95),
        ttft_p99=percentile(ttfts, 0.99),
        inter_token_p50=percentile(gaps, 0.50),
        inter_token_p99=percentile(gaps, 0.99),
        inter_token_p95=percentile(gaps, 0.95),
    )


def _tenants(
    each: ClassLoad, outcomes: Sequence[Outcome], *, measured_from: float, ends: float
) -> Iterator[TenantSummary]:
    mine = [outcome for outcome in outcomes if outcome.class_name == each.name]
    answered = [(outcome, first) for outcome in mine if (first := _first_token(outcome)) is not None]
    begun = Counter[str]()
    for outcome, first in answered:
        if measured_from <= first < ends:
            begun[outcome.tenant] += outcome.work_tokens
    for tenant in (STEADY, FLOOD):
        own = [outcome for outcome in mine if outcome.tenant == tenant]
        measured = [outcome for outcome in own if outcome.due >= measured_from]
        ttfts = _ttfts(measured)
        yield TenantSummary(
            tenant=tenant,
            class_name=each.name,
            requests=len(measured),
            asked_tokens=sum(outcome.work_tokens for outcome in measured),
            answered_tokens=sum(outcome.work_tokens for outcome in measured if outcome.last.ttft is not None),
            begun_tokens=begun[tenant],
            own_half_tokens=own_half_tokens(
                own,
                begun=[(first, outcome.work_tokens) for outcome, first in answered],
                limit_seconds=each.ttft_limit,
                begins=measured_from,
                ends=ends,
            ),
            ttft_p50=percentile(ttfts, 0.50),
            ttft_p95=percentile(ttfts, 0.95),
        )


def _ttfts(outcomes: Iterable[Outcome]) -> list[float]:
    return [1000 * ttft for outcome in outcomes if (ttft := outcome.last.ttft) is not None]


def _refusals(attempts: Sequence[Attempt]) -> Refusals:
    refused = [attempt for attempt in attempts if attempt.is_refused]
    took = [1000 * (attempt.ended - attempt.sent) for attempt in refused]
    waits = [attempt.retry_after for attempt in refused if attempt.retry_after is not None]
    return Refusals(
        count=len(refused),
        reasons=dict(Counter(f"{attempt.status} {attempt.reason}".strip() for attempt in refused).most_common()),
        ms_p50=percentile(took, 0.50),
        ms_p99=percentile(took, 0.99),
        without_retry_after=len(refused) - len(waits),
        retry_after_p50=percentile(waits, 0.50),
        retry_after_most=max(waits, default=float("nan")),
    )


def _retries(outcomes: Sequence[Outcome], *, after: float) -> Retries:
    first = [outcome.attempts[1] for outcome in outcomes if len(outcome.attempts) > 1]
    counted = [attempt for attempt in first if attempt.sent >= after]
    return Retries(count=len(counted), home=sum(attempt.ttft is not None for attempt in counted))

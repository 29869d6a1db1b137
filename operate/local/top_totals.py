"""The totals of `kvmesh top`: sums over all pods, requests/s, hit rate and TTFT. Pure.

A picker counts from its start; rates come from the difference of two states.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import ceil

from extproc.pages.picker_state import EndpointState, MeasuredState, PickerState

WINDOW_SECONDS = 60.0
QUANTILES = (0.5, 0.95, 0.99)
GAP = "   "


class Seen:
    """The states of the last minute in one view."""

    def __init__(self) -> None:
        self._seen: deque[PickerState] = deque()
        self._answering: frozenset[str] = frozenset()

    def before(self, state: PickerState, *, answering: Iterable[str] = ()) -> PickerState | None:
        """Store a state and return the oldest one of the minute before it, or None.

        `answering`: the replicas whose current counts are part of it. If they change, earlier states are dropped: the
        counts of a new replica did not all grow within the last minute.
        """
        replicas = frozenset(answering)
        is_anew = self._seen and (state.now < self._seen[-1].now or _picks(state) < _picks(self._seen[-1]))
        if is_anew or replicas != self._answering:
            self._seen.clear()  # replicas changed or a picker restarted
        self._answering = replicas
        while self._seen and state.now - self._seen[0].now > WINDOW_SECONDS:
            self._seen.popleft()
        earlier = self._seen[0] if self._seen and self._seen[0].now < state.now else None
        if not self._seen or self._seen[-1].now < state.now:
            self._seen.append(state)
        return earlier


def totals_of(endpoints: Sequence[EndpointState]) -> EndpointState:
    """Return the sums over all pods as one pod; KV usage is the mean."""
    return EndpointState(
        address=f"all {len(endpoints)}",
        state=f"{sum(each.state == 'ready' for each in endpoints)} ready",
        role="",
        cached_blocks=sum(each.cached_blocks for each in endpoints),
        running=_sum([each.running for each in endpoints]),
        waiting=_sum([each.waiting for each in endpoints]),
        kv_usage=_average([each.kv_usage for each in endpoints]),
        hit_rate=None,  # the line below shows it, weighted by prompt length
        picks=sum(each.picks for each in endpoints),
        share=1.0 if any(each.picks for each in endpoints) else 0.0,
    )


def lines(state: PickerState, earlier: PickerState | None, *, width: int) -> list[str]:
    """Return the lines below the pods (requests/s, hit rate, TTFT), several on one line if they fit."""
    parts = []
    if earlier is not None and state.now > earlier.now:
        rate = (_picks(state) - _picks(earlier)) / (state.now - earlier.now)
        parts.append(f"{max(rate, 0.0):.1f} requests/s")
    parts += [part for part in (_hit_rate(state), _ttft(state.ttft, earlier)) if part]
    packed: list[str] = []
    for part in parts:
        if packed and len(packed[-1]) + len(GAP) + len(part) <= width:
            packed[-1] += GAP + part
        else:
            packed.append(part)
    return packed


def _hit_rate(state: PickerState) -> str:
    """Return the expected cache hit rate of the latest routed prompts."""
    routed = [each for each in state.decisions if each.endpoint and each.prompt_tokens]
    asked = sum(each.prompt_tokens for each in routed)
    if not asked:
        return ""
    return f"hit rate {sum(each.matched_tokens for each in routed) / asked:.0%} of the last {len(routed)} prompts"


def _ttft(measured: MeasuredState, earlier: PickerState | None) -> str:
    counts, since = list(measured.counts), "since the start"
    if earlier is not None and earlier.ttft.bounds == measured.bounds:
        between = [now - then for now, then in zip(counts, earlier.ttft.counts, strict=True)]
        if min(between, default=0.0) >= 0 and sum(between) > 0:
            counts, since = between, "in the last minute"
    if not sum(counts):
        return ""
    shown = [f"p{round(share * 100)} {_at_most(measured.bounds, counts, share)}" for share in QUANTILES]
    return f"TTFT {', '.join(shown)} {since}"


def _at_most(bounds: Sequence[float], counts: Sequence[float], share: float) -> str:
    rank = ceil(share * sum(counts))
    bucket = next(i for i, reached in enumerate(accumulate(counts)) if reached >= rank)
    return f"≤ {_duration(bounds[bucket])}" if bucket < len(bounds) else f"> {_duration(bounds[-1])}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:g} ms" if seconds < 1.0 else f"{seconds:g} s"


def _picks(state: PickerState) -> int:
    return sum(each.picks for each in state.endpoints)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

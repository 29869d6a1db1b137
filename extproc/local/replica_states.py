"""Several replicas of one picker, seen as one: their states added up, and how long ago each was heard. Pure.

Called by `top_view`. What each replica counts by itself (picks, bookings, waiting requests) is summed; what all of them
see of the same pods and the same index is taken from the one that was heard last, the worse word where they differ.
"""

from collections.abc import Iterable, Sequence

import msgspec

from extproc.local.picker_state import ClassState, DecisionState, EndpointState, IndexState, PickerState, PoolState

MOST_DECISIONS = 50
# the worst first
_ENDPOINT_STATES = ("unreachable", "not-ready", "terminating", "unknown", "ready")
_INDEX_STATES = ("unavailable", "unknown", "stale", "ok")


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One replica as it was heard last; times are monotonic seconds."""

    url: str
    state: PickerState | None = None  # None: it has not answered yet
    heard_at: float | None = None
    problem: str | None = None  # of the last attempt; None: it worked

    def line(self, *, now: float) -> str:
        """Say how it stands."""
        if self.problem is None:
            return f"{self.url}: " + ("connected" if self.state is not None else "not asked yet")
        if self.heard_at is None:
            return f"{self.url}: not heard yet, trying again: {self.problem}"
        return f"{self.url}: lost for {now - self.heard_at:.0f} s, trying again: {self.problem}"


def added_up(replicas: Iterable[Replica]) -> PickerState | None:
    """Return the state of all that were heard, the lost ones as they were; None: nobody was."""
    heard = sorted(
        ((replica.heard_at or 0.0, replica.state) for replica in replicas if replica.state is not None),
        key=lambda item: -item[0],
    )
    states = [state for _, state in heard]
    if len(states) <= 1:
        return states[0] if states else None
    newest = states[0]
    return PickerState(
        now=max(state.now for state in states),
        endpoints=_endpoints(states),
        index=IndexState(
            state=min((state.index.state for state in states), key=lambda word: _rank(word, _INDEX_STATES)),
            sources=newest.index.sources,
        ),
        decisions=_decisions(states),
        classes=_classes(states),
        pool=newest.pool,
        pools=_pools(states),
    )


def _endpoints(states: Sequence[PickerState]) -> tuple[EndpointState, ...]:
    lines: dict[str, list[EndpointState]] = {}
    for state in states:
        for endpoint in state.endpoints:
            lines.setdefault(endpoint.address, []).append(endpoint)
    all_picks = sum(endpoint.picks for same in lines.values() for endpoint in same)
    return tuple(_endpoint(same, all_picks=all_picks) for same in lines.values())


def _endpoint(same: Sequence[EndpointState], *, all_picks: int) -> EndpointState:
    picks = sum(each.picks for each in same)
    reporting = next((each for each in same if each.running is not None), same[0])
    return msgspec.structs.replace(
        reporting,
        state=min((each.state for each in same), key=lambda word: _rank(word, _ENDPOINT_STATES)),
        cached_blocks=same[0].cached_blocks,
        bookings=sum(each.bookings for each in same),
        picks=picks,
        share=picks / all_picks if all_picks else 0.0,
    )


def _decisions(states: Iterable[PickerState]) -> tuple[DecisionState, ...]:
    every = [decision for state in states for decision in state.decisions]
    return tuple(sorted(every, key=lambda decision: -decision.at)[:MOST_DECISIONS])


def _classes(states: Iterable[PickerState]) -> tuple[ClassState, ...]:
    classes: dict[str, ClassState] = {}
    for state in states:
        for each in state.classes:
            before = classes.get(each.name, ClassState(name=each.name))
            steps = tuple(dict.fromkeys((*before.steps, *each.steps)))
            classes[each.name] = ClassState(name=each.name, waiting=before.waiting + each.waiting, steps=steps)
    return tuple(classes.values())


def _pools(states: Iterable[PickerState]) -> tuple[PoolState, ...]:
    pools: dict[str, PoolState] = {}
    for state in states:
        for each in state.pools:
            before = pools.get(each.pool)
            pools[each.pool] = (
                each
                if before is None
                else msgspec.structs.replace(
                    before,
                    open_requests=before.open_requests + each.open_requests,
                    waiting=before.waiting + each.waiting,
                )
            )
    return tuple(pools.values())


def _rank(word: str, worst_first: Sequence[str]) -> int:
    return worst_first.index(word) if word in worst_first else 0

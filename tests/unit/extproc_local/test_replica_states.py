"""Several replicas of one picker, added up for `kvmesh top`."""

import msgspec

from extproc.local.top_view import Replica, added_up
from extproc.pages.picker_state import ClassState, DecisionState, EndpointState, IndexState, PickerState, PoolState

ONE, OTHER = "http://a:9090", "http://b:9090"
OLD = PickerState(
    now=100.0,
    endpoints=(
        EndpointState(
            address="p:1", state="ready", cached_blocks=10, running=1, waiting=2, bookings=3, picks=6, share=1
        ),
        EndpointState(address="p:2", state="ready"),
    ),
    index=IndexState(state="ok", sources=2),
    decisions=(DecisionState(at=99.0, endpoint="p:1"), DecisionState(at=97.0, endpoint="p:1")),
    classes=(ClassState(name="critical", waiting=1), ClassState(name="sheddable", waiting=4, steps=("reject",))),
)
NEW = PickerState(
    now=101.0,
    endpoints=(
        EndpointState(address="p:1", state="unknown", cached_blocks=12, bookings=1, picks=2, share=1.0),
        EndpointState(address="p:3", state="ready", picks=2),
    ),
    index=IndexState(state="stale", sources=3),
    decisions=(DecisionState(at=98.0, endpoint="p:3"),),
    classes=(ClassState(name="critical"), ClassState(name="sheddable", waiting=1, steps=("cap-output", "reject"))),
)


def heard(url: str, state: PickerState, *, at: float) -> Replica:
    return Replica(url=url, state=state, heard_at=at)


def test_what_each_counts_is_summed_and_what_all_see_is_taken_from_the_newest_or_the_worst() -> None:
    assert added_up([heard(ONE, OLD, at=1.0), heard(OTHER, NEW, at=2.0)]) == PickerState(
        now=101.0,
        endpoints=(
            EndpointState(
                address="p:1", state="unknown", cached_blocks=12, running=1, waiting=2, bookings=4, picks=8, share=0.8
            ),
            EndpointState(address="p:3", state="ready", picks=2, share=0.2),
            EndpointState(address="p:2", state="ready"),
        ),
        index=IndexState(state="stale", sources=3),
        decisions=(
            DecisionState(at=99.0, endpoint="p:1"),
            DecisionState(at=98.0, endpoint="p:3"),
            DecisionState(at=97.0, endpoint="p:1"),
        ),
        classes=(
            ClassState(name="critical", waiting=1),
            ClassState(name="sheddable", waiting=5, steps=("cap-output", "reject")),
        ),
    )


def test_a_lost_replica_counts_with_what_it_said_last_and_its_age_is_told() -> None:
    lost = msgspec.structs.replace(heard(ONE, OLD, at=10.0), problem="no answer in 2 s")

    assert added_up([lost]) == OLD
    assert lost.line(now=22.4) == "http://a:9090: lost for 12 s, trying again: no answer in 2 s"


def test_a_replica_that_never_answered_adds_nothing() -> None:
    never = Replica(url=OTHER, problem="refused")

    assert added_up([heard(ONE, OLD, at=1.0), never]) == OLD
    assert added_up([never]) is None
    assert never.line(now=5.0) == "http://b:9090: not heard yet, trying again: refused"


def test_of_several_pools_the_open_and_waiting_requests_are_summed() -> None:
    first = PickerState(now=1.0, pool=None, pools=(PoolState(pool="llm/a", endpoints=2, ready=2, open_requests=1),))
    second = PickerState(
        now=2.0, pool=None, pools=(PoolState(pool="llm/a", endpoints=2, ready=1, open_requests=4, waiting=2),)
    )

    found = added_up([heard(ONE, first, at=1.0), heard(OTHER, second, at=2.0)])

    assert found is not None
    assert found.pools == (PoolState(pool="llm/a", endpoints=2, ready=1, open_requests=5, waiting=2),)

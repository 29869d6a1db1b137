"""Who leads, by a lease and one's own clock only."""

from typing import Any

from kvmesh.documents.status_writer import Leadership

WALL = "2026-01-01T00:00:00.000000Z"


def _held(by: str, renewed: str = WALL) -> dict[str, Any]:
    return {"holderIdentity": by, "leaseDurationSeconds": 15, "renewTime": renewed, "leaseTransitions": 3}


def test_a_lease_that_does_not_exist_is_taken() -> None:
    me = Leadership(identity="a")
    spec = me.wish(None, now=0.0, wall_time=WALL)
    assert spec == {
        "holderIdentity": "a",
        "leaseDurationSeconds": 15,
        "renewTime": WALL,
        "acquireTime": WALL,
        "leaseTransitions": 0,
    }
    assert not me.leads(now=0.0)  # not before it is written
    me.wrote(spec, began_at=0.0)
    assert me.leads(now=9.9)


def test_a_lease_is_taken_over_only_when_it_was_not_seen_to_change_for_its_duration() -> None:
    me = Leadership(identity="a")
    assert me.wish(_held("b"), now=100.0, wall_time=WALL) is None
    assert me.wish(_held("b", "2026-01-01T00:00:10Z"), now=110.0, wall_time=WALL) is None
    assert me.wish(_held("b", "2026-01-01T00:00:10Z"), now=124.9, wall_time=WALL) is None
    taken = me.wish(_held("b", "2026-01-01T00:00:10Z"), now=125.1, wall_time=WALL)
    assert taken is not None
    assert (taken["holderIdentity"], taken["leaseTransitions"]) == ("a", 4)


def test_no_time_of_day_that_others_wrote_is_believed() -> None:
    me = Leadership(identity="a")
    assert me.wish(_held("b", "1970-01-01T00:00:00Z"), now=100.0, wall_time="2100-01-01T00:00:00Z") is None


def test_a_lease_that_was_given_back_is_taken_at_once() -> None:
    taken = Leadership(identity="a").wish({**_held(""), "leaseDurationSeconds": 1}, now=0.0, wall_time=WALL)
    assert taken is not None
    assert (taken["holderIdentity"], taken["leaseDurationSeconds"]) == ("a", 15)


def test_a_leader_that_cannot_renew_stops_before_anybody_else_may_begin() -> None:
    me, other = Leadership(identity="a"), Leadership(identity="b")
    spec = me.wish(None, now=0.0, wall_time=WALL)
    assert spec is not None
    me.wrote(spec, began_at=0.0)
    assert other.wish(spec, now=0.5, wall_time=WALL) is None
    assert not me.leads(now=10.0)
    assert other.wish(spec, now=15.4, wall_time=WALL) is None
    assert other.wish(spec, now=15.6, wall_time=WALL) is not None


def test_a_leader_that_reads_of_another_one_stops_at_once() -> None:
    me = Leadership(identity="a")
    spec = me.wish(None, now=0.0, wall_time=WALL)
    assert spec is not None
    me.wrote(spec, began_at=0.0)
    assert me.wish(_held("b"), now=1.0, wall_time=WALL) is None
    assert not me.leads(now=1.0)


def test_renewing_keeps_when_it_was_acquired() -> None:
    me = Leadership(identity="a")
    spec = me.wish(None, now=0.0, wall_time=WALL)
    assert spec is not None
    me.wrote(spec, began_at=0.0)
    renewed = me.wish(spec, now=2.0, wall_time="later")
    assert renewed == {**spec, "renewTime": "later"}

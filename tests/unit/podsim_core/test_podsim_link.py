"""How transfers share a pod's link."""

import pytest

from podsim.core.link import Link


def test_a_transfer_alone_takes_its_bytes_at_full_speed() -> None:
    link = Link(100.0)
    link.begin("a", 50, now=3.0)
    assert link.next_end() == 3.5
    assert link.ended(now=3.4) == []
    assert link.ended(now=3.5) == ["a"]
    assert link.next_end() is None


def test_transfers_at_the_same_time_get_equal_shares() -> None:
    link = Link(100.0)
    link.begin("long", 100, now=0.0)
    link.begin("short", 50, now=0.0)
    assert link.next_end() == 1.0  # 50 bytes each
    assert link.ended(now=1.0) == ["short"]
    assert link.next_end() == 1.5


def test_one_that_joins_slows_the_other_down_from_then_on() -> None:
    link = Link(100.0)
    link.begin("first", 100, now=0.0)
    link.begin("second", 100, now=0.5)
    assert link.next_end() == 1.5  # 50 bytes are left at half of the speed
    assert link.ended(now=9.0) == ["first", "second"]


def test_the_end_of_one_found_late_does_not_slow_the_others() -> None:
    link = Link(100.0)
    link.begin("short", 50, now=0.0)
    link.begin("long", 100, now=0.0)
    assert link.ended(now=1.25) == ["short"]
    assert link.next_end() == 1.5


def test_a_transfer_that_is_dropped_leaves_its_share_to_the_others() -> None:
    link = Link(100.0)
    link.begin("a", 100, now=0.0)
    link.begin("b", 100, now=0.0)
    link.drop("a", now=1.0)
    assert link.next_end() == pytest.approx(1.5)
    link.drop("nobody", now=1.2)
    assert link.ended(now=1.5) == ["b"]

"""What waiting requests hold: bounded, and the largest of the lowest priority give way."""

import random
from contextlib import suppress

import pytest

from extproc.admission.waiting_bodies import BodiesFullError, HeldBody, WaitingBodies


class Desk:
    def __init__(self, most: int) -> None:
        self.bodies = WaitingBodies(most_bytes=most)
        self.gone: list[str] = []

    def hold(self, name: str, size: int, *, priority: int = 0, tenant: str = "") -> HeldBody:
        body = HeldBody(priority=priority, tenant=tenant, size=size, give_way=lambda: self.gone.append(name))
        self.bodies.hold(body)
        return body


def test_what_fits_stays() -> None:
    desk = Desk(10)
    held = [desk.hold(str(i), 5, priority=i) for i in range(2)]
    assert (desk.bodies.held_bytes, desk.gone) == (10, [])
    for body in held:
        desk.bodies.release(body)
        desk.bodies.release(body)  # once is enough
    assert desk.bodies.held_bytes == 0


def test_the_lowest_priority_gives_way_the_newest_first() -> None:
    desk = Desk(10)
    for name in ("old", "new"):
        desk.hold(name, 3, priority=-1)
    desk.hold("standard", 3)
    desk.hold("critical", 6, priority=9)
    assert desk.gone == ["new", "old"]
    assert (desk.bodies.held_bytes, desk.bodies.gave_way) == (9, 2)


def test_of_one_priority_the_largest_gives_way_and_of_those_alike_the_tenant_that_holds_most() -> None:
    desk = Desk(20)
    desk.hold("a-1", 4, tenant="a")
    desk.hold("a-2", 4, tenant="a")
    desk.hold("b", 4, tenant="b")
    desk.hold("small", 1, tenant="a")
    desk.hold("next", 3, tenant="c")
    assert desk.gone == ["a-2"]
    with pytest.raises(BodiesFullError):
        desk.hold("large", 8, tenant="d")
    assert desk.gone == ["a-2"]


def test_the_newcomer_itself_is_refused_where_it_is_the_first_to_give_way() -> None:
    desk = Desk(10)
    desk.hold("first", 7)
    for size, priority in ((4, -1), (8, 0), (8, 5)):
        with pytest.raises(BodiesFullError):
            desk.hold("newcomer", size, priority=priority)
    assert (desk.gone, desk.bodies.held_bytes, desk.bodies.gave_way) == ([], 7, 3)


def test_no_priority_takes_the_places_of_all_others() -> None:
    desk = Desk(100)
    for number in range(5):
        desk.hold(f"small-{number}", 4, priority=-1)
    for number in range(7):
        desk.hold(f"critical-{number}", 10, priority=9)
    with pytest.raises(BodiesFullError):
        desk.hold("one more", 10, priority=9)
    assert (desk.gone, desk.bodies.held_bytes) == ([], 90)


def test_whatever_comes_and_goes_the_bound_holds_and_nothing_is_left() -> None:
    draw = random.Random(7)
    desk = Desk(1000)
    held: list[HeldBody] = []
    for step in range(3000):
        if held and draw.random() < 0.4:
            desk.bodies.release(held.pop(draw.randrange(len(held))))
            continue
        with suppress(BodiesFullError):
            priority, tenant = draw.randrange(3), draw.choice("abc")
            held.append(desk.hold(str(step), draw.randrange(200), priority=priority, tenant=tenant))
        assert 0 <= desk.bodies.held_bytes <= 1000
    for body in held:
        desk.bodies.release(body)
    assert desk.bodies.held_bytes == 0

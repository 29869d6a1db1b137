"""Tickets and policies for the tests of the queue."""

from collections.abc import Callable, Mapping

from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.waiting_bodies import WaitingBodies
from extproc.policy.priority import DEFAULT_CLASSES, OverloadPolicy, PriorityClass
from extproc.policy.request_class import PriorityPolicy


def room_for_all() -> WaitingBodies:
    """Return a bound that no test reaches."""
    return WaitingBodies(most_bytes=1 << 30)


def policy(
    overload: OverloadPolicy | None = None, classes: Mapping[str, PriorityClass] = DEFAULT_CLASSES
) -> PriorityPolicy:
    """The classes that tickets have by default, or others."""
    return PriorityPolicy(classes=classes, overload=overload or OverloadPolicy())


def ticket(
    class_name: str = "standard",
    *,
    tenant: str = "a",
    tokens: int = 100,
    pool: str = "m",
    group: str = "",
    at: float = 0.0,
    wait: float = 1000.0,
    classes: Mapping[str, PriorityClass] = DEFAULT_CLASSES,
) -> Ticket:
    """A request that came at `at`, may wait for `wait` seconds, and holds a byte a token."""
    return Ticket(
        class_name=class_name,
        priority_class=classes[class_name],
        tenant=tenant,
        uncached_tokens=tokens,
        pool=pool,
        group=group,
        arrived_at=at,
        deadline=at + wait,
        held_bytes=tokens,
    )


def send(
    queue: FlowQueue, *, now: float = 0.0, pool: str = "m", has_room: Callable[[Ticket], bool] = lambda _: True
) -> list[Ticket]:
    """One wake: try in the queue's order, and return those that went."""
    went = []
    for each in queue.candidates(pool, now):
        if has_room(each):
            queue.went(each, now)
            went.append(each)
    return went


def send_one(queue: FlowQueue, *, now: float = 0.0, pool: str = "m") -> Ticket:
    """One wake with room for one."""
    first = next(queue.candidates(pool, now))
    queue.went(first, now)
    return first

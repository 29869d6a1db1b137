"""What goes before a newcomer: all of the bands above, and of its own what fairness puts there."""

import pytest

from extproc.admission.flow_queue import FlowQueue, Ticket
from extproc.policy.priority import PriorityClass
from extproc.policy.request_class import PriorityPolicy

CLASSES = {"high": PriorityClass(priority=1), "low": PriorityClass(priority=0)}


def queue(*waiting: tuple[str, str, int]) -> FlowQueue:
    made = FlowQueue(PriorityPolicy(classes=CLASSES, default_class="low"))
    for class_name, tenant, tokens in waiting:
        made.push(
            Ticket(
                class_name=class_name,
                priority_class=CLASSES[class_name],
                tenant=tenant,
                uncached_tokens=tokens,
                pool="tiny",
                arrived_at=0.0,
                deadline=9.0,
            )
        )
    return made


FLOOD = [("low", "flood", 100)] * 10


@pytest.mark.parametrize(
    ("tenant", "expected"),
    [
        (None, (1500, 12)),  # whoever it is
        ("flood", (1500, 12)),  # all of its own, and meanwhile the other's
        ("steady", (800, 4)),  # the band above, its own 200 in one request, and as much of the flood as itself sends
        ("new", (500, 3)),  # the band above, and 100 of each of the two
    ],
)
def test_a_tenant_with_little_waiting_has_little_before_it(tenant: str | None, expected: tuple[int, int]) -> None:
    waiting = queue(*FLOOD, ("low", "steady", 200), ("high", "x", 300))
    assert waiting.ahead("tiny", 0, tenant, 100) == expected


def test_nobody_is_before_the_highest_and_nothing_in_another_pool() -> None:
    waiting = queue(*FLOOD)
    assert waiting.ahead("tiny", 1, "new", 100) == (0, 0)
    assert waiting.ahead("other", 0, "new", 100) == (0, 0)

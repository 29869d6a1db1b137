"""The policy changes while requests wait: nobody loses a place, and classes are what they are now."""

import pytest
from msgspec import structs

from extproc.admission.flow_queue import FlowQueue, QueueFullError
from extproc.policy.priority import DEFAULT_CLASSES, OverloadPolicy, PriorityClass
from tests.unit.extproc_admission.queue_tickets import policy, send, ticket


def changed(name: str, **changes: object) -> dict[str, PriorityClass]:
    return {**DEFAULT_CLASSES, name: structs.replace(DEFAULT_CLASSES[name], **changes)}


def test_those_that_wait_go_by_their_class_as_it_is_now() -> None:
    queue = FlowQueue(policy())
    low, high = ticket("standard", tokens=5), ticket("critical", tokens=5)
    queue.push(low)
    queue.push(high)
    queue.reconfigure(policy(classes=changed("standard", priority=500)))
    assert send(queue) == [low, high]
    assert not len(queue)


def test_a_request_read_before_the_change_belongs_to_its_class_as_it_is_now() -> None:
    queue = FlowQueue(policy())
    queue.push(ticket("standard"))
    queue.reconfigure(policy(classes=changed("standard", priority=7)))
    late = ticket("standard")  # with the class as it was
    queue.push(late)
    assert late.priority_class.priority == 7
    assert queue.highest("m") == 7
    assert queue.remove(late)
    assert len(queue) == 1


def test_a_class_that_is_gone_is_as_it_was_for_those_that_wait_and_for_those_on_their_way() -> None:
    queue = FlowQueue(policy())
    waits = ticket("critical")
    queue.push(waits)
    queue.reconfigure(policy(classes={"standard": DEFAULT_CLASSES["standard"]}))
    queue.reconfigure(policy(classes={"standard": DEFAULT_CLASSES["standard"]}))
    late, other = ticket("critical"), ticket("sheddable")
    queue.push(late)
    queue.push(other)
    assert queue.sizes == {"standard": 0, "critical": 2, "sheddable": 1}
    assert send(queue) == [waits, late, other]


def test_fewer_places_take_nobodys_and_let_nobody_in() -> None:
    queue = FlowQueue(policy())
    tickets = [ticket(tokens=i) for i in range(5)]
    for each in tickets:
        queue.push(each)
    queue.reconfigure(policy(OverloadPolicy(queue_requests=2), classes=changed("standard", sheddable=True)))
    with pytest.raises(QueueFullError):
        queue.push(ticket(tokens=9))
    assert send(queue) == tickets


def test_deadlines_stay() -> None:
    queue = FlowQueue(policy())
    soon, later = ticket(wait=1.0), ticket(wait=2.0)
    queue.push(later)
    queue.push(soon)
    queue.reconfigure(policy(classes=changed("standard", priority=3)))
    assert queue.next_deadline() == 1.0
    assert queue.expired(1.5) == [soon]
    assert list(queue) == [later]

"""Who is tried next, and who gives way."""

import pytest

from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue, QueueFullError
from extproc.policy.priority import DEFAULT_CLASSES, OverloadPolicy, PriorityClass
from tests.unit.extproc_admission.queue_tickets import policy, send, send_one, ticket


def pushed(queue: FlowQueue, *tickets: Ticket) -> list[Ticket]:
    for each in tickets:
        assert queue.push(each) == ()
    return list(tickets)


def test_a_higher_priority_goes_first_however_late_it_came_and_however_large_it_is() -> None:
    queue = FlowQueue(policy())
    low, middle, high = pushed(
        queue,
        ticket("sheddable", tokens=1000),  # more than the 5 % that it has saved
        ticket("standard", tokens=10),
        ticket("critical", tokens=9000, at=1.0),
    )
    assert send(queue, now=1.0) == [high, middle, low]


def test_of_one_tenant_the_least_work_goes_first_until_one_has_waited_too_long() -> None:
    queue = FlowQueue(policy(), age_seconds=5.0)
    long, short, middle = pushed(queue, ticket(tokens=900), ticket(tokens=10, at=1.0), ticket(tokens=50, at=2.0))
    assert send_one(queue, now=4.9) is short
    assert send_one(queue, now=5.0) is long
    assert send_one(queue, now=5.0) is middle


def test_the_age_bound_is_soon_enough_to_go_before_the_time_in_the_queue_is_over() -> None:
    queue = FlowQueue(policy(), age_seconds=5.0)
    patient, hasty, short = pushed(
        queue, ticket(tokens=900), ticket(tokens=800, at=1.0, wait=5.0), ticket(tokens=10, at=3.0)
    )
    assert send_one(queue, now=3.9) is short
    pushed(queue, ticket(tokens=10, at=3.9))
    assert send_one(queue, now=4.0) is hasty
    assert send_one(queue, now=5.0) is patient


def test_tenants_take_turns_by_tokens_and_not_by_requests() -> None:
    queue = FlowQueue(policy(), quantum_tokens=100)
    pushed(queue, *(ticket(tenant="short", tokens=50) for _ in range(8)))
    pushed(queue, *(ticket(tenant="long", tokens=200) for _ in range(2)))
    # two rounds of 100 tokens bring one of the long ones and four of the short ones
    went = [each.tenant for each in send(queue)]
    assert went == ["short", "short", "short", "short", "long", "short", "short", "short", "short", "long"]


def test_a_tenant_that_floods_does_not_delay_the_first_request_of_another() -> None:
    queue = FlowQueue(policy(), quantum_tokens=100)
    pushed(queue, *(ticket(tenant="flood", tokens=100) for _ in range(500)))
    assert [send_one(queue).tenant for _ in range(3)] == ["flood"] * 3
    other = ticket(tenant="other", tokens=100)
    queue.push(other)
    assert send_one(queue) is other


def test_ever_new_tenants_do_not_starve_one_that_waits() -> None:
    queue = FlowQueue(policy(), quantum_tokens=100)
    patient = ticket(tenant="patient", tokens=1000)
    queue.push(patient)
    queue.push(ticket(tenant="new -1"))
    for number in range(100):
        queue.push(ticket(tenant=f"new {number}", tokens=100))
        if send_one(queue) is patient:
            break
    assert 9 < number < 25  # 10 rounds of 100 tokens, in each of which a few others go


def test_one_large_request_goes_at_once_where_nobody_else_waits() -> None:
    queue = FlowQueue(policy(), quantum_tokens=1)
    (large,) = pushed(queue, ticket(tokens=1_000_000))
    assert send(queue) == [large]


def test_a_tenant_that_found_no_room_has_not_saved_its_turns_up() -> None:
    queue = FlowQueue(policy(), quantum_tokens=100)
    pushed(queue, *(ticket(tenant="pinned", tokens=100, group="full") for _ in range(100)))
    pushed(queue, *(ticket(tenant="free", tokens=100) for _ in range(100)))
    assert len(send(queue, has_room=lambda each: each.group == "" and each.sequence <= 150)) == 50
    went = [send_one(queue).tenant for _ in range(10)]
    assert 4 <= went.count("free") <= 5


def test_what_a_turn_leaves_over_counts_for_the_next() -> None:
    queue = FlowQueue(policy(), quantum_tokens=100)
    pushed(queue, *(ticket(tenant="odd", tokens=110) for _ in range(40)))
    pushed(queue, *(ticket(tenant="even", tokens=100) for _ in range(40)))
    went = [send_one(queue) for _ in range(40)]
    sent = {name: sum(each.cost for each in went if each.tenant == name) for name in ("odd", "even")}
    assert abs(sent["odd"] - sent["even"]) <= 210


def test_a_request_that_grows_late_takes_its_tenant_s_turn_and_not_that_of_another() -> None:
    queue = FlowQueue(policy(), quantum_tokens=100, age_seconds=5.0)
    late = ticket(tenant="one", tokens=1000)
    pushed(queue, late, ticket(tenant="one", tokens=10, at=1.0))
    pushed(queue, *(ticket(tenant="other", tokens=100, at=1.0) for _ in range(20)))
    went = send(queue, now=5.0)
    assert went.index(late) == 9  # in the tenth round


def test_turns_by_a_floor_put_no_newcomer_behind_the_tenants_that_had_none() -> None:
    classes = {
        "high": PriorityClass(priority=10),
        "kept": PriorityClass(reserved_share=0.5),
        "plain": PriorityClass(),
    }
    queue = FlowQueue(policy(classes=classes), quantum_tokens=100)
    pushed(queue, *(ticket("plain", tenant="old", classes=classes) for _ in range(60)))
    kept = pushed(queue, *(ticket("kept", tenant="kept", classes=classes) for _ in range(60)))
    high = pushed(queue, *(ticket("high", classes=classes) for _ in range(60)))
    assert {send_one(queue).class_name for _ in range(60)} == {"high", "kept"}
    for each in kept + high:
        queue.remove(each)
    new = ticket("plain", tenant="new", classes=classes)
    queue.push(new)
    assert send(queue).index(new) <= 2


def test_a_class_that_found_no_room_saves_as_before_once_it_has_gone() -> None:
    classes = {
        "critical": PriorityClass(priority=100),
        "standard": PriorityClass(),
        "sheddable": PriorityClass(priority=-100, reserved_share=0.5, ceiling=0.5),
    }
    queue = FlowQueue(policy(classes=classes), quantum_tokens=10)
    pushed(queue, *(ticket("critical", tokens=100, classes=classes) for _ in range(40)))
    first = ticket("sheddable", tokens=10, classes=classes)
    pushed(queue, first, *(ticket("sheddable", tokens=200, classes=classes) for _ in range(3)))
    send_one(queue)  # 50 tokens saved
    assert send(queue, has_room=lambda _: False) == []
    assert send_one(queue) is first
    assert "sheddable" in [send_one(queue).class_name for _ in range(5)]  # 200 tokens saved after four


def test_a_large_request_of_a_class_below_its_floor_goes_once_there_is_room_for_it() -> None:
    classes = {
        "critical": PriorityClass(priority=100),
        "sheddable": PriorityClass(priority=-100, reserved_share=0.5, ceiling=0.5),
    }
    queue = FlowQueue(policy(classes=classes), quantum_tokens=10)
    large = ticket("sheddable", tokens=200, classes=classes)
    pushed(queue, large, *(ticket("critical", tokens=100, classes=classes) for _ in range(40)))
    for _ in range(4):
        assert send_one(queue).class_name == "critical"
    assert next(queue.candidates("m", 0.0)) is large
    assert send(queue, has_room=lambda _: False) == []
    assert send_one(queue) is large


def test_what_a_class_sends_in_its_own_turn_is_not_held_against_it() -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": PriorityClass(priority=-100, reserved_share=0.5)}
    queue = FlowQueue(policy(classes=classes))
    pushed(queue, *(ticket("sheddable", tokens=100, classes=classes) for _ in range(60)))
    for _ in range(50):
        send_one(queue)
    pushed(queue, *(ticket("critical", tokens=100, classes=classes) for _ in range(20)))
    assert [send_one(queue).class_name for _ in range(4)].count("sheddable") >= 1


def test_of_two_classes_of_one_priority_a_tenant_s_longest_waiting_head_goes_first() -> None:
    classes = {"one": PriorityClass(), "other": PriorityClass()}
    queue = FlowQueue(policy(classes=classes))
    late, long, short, early = pushed(
        queue,
        ticket("other", tokens=9, at=3.0, classes=classes),
        ticket("one", tokens=9, at=0.0, classes=classes),
        ticket("one", tokens=1, at=2.0, classes=classes),
        ticket("other", tokens=1, at=1.0, classes=classes),
    )
    assert send(queue, now=3.0) == [early, short, long, late]


def test_a_class_with_a_reserved_share_gets_it_and_no_more_while_higher_ones_wait() -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": PriorityClass(priority=-100, sheddable=True, reserved_share=0.25)}
    queue = FlowQueue(policy(classes=classes))
    pushed(queue, *(ticket("critical", tokens=10, classes=classes) for _ in range(400)))
    pushed(queue, *(ticket("sheddable", tokens=30, classes=classes) for _ in range(100)))
    sent = {"critical": 0, "sheddable": 0}
    for _ in range(300):
        each = send_one(queue)
        sent[each.class_name] += each.cost
        total = sum(sent.values())
        assert 0.25 * total - 40 <= sent["sheddable"] <= 0.25 * total
    assert sent["sheddable"] > 800


def test_nothing_is_saved_while_nothing_waits() -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": PriorityClass(priority=-100, sheddable=True, reserved_share=0.5)}
    queue = FlowQueue(policy(classes=classes))
    pushed(queue, *(ticket("critical", tokens=100, classes=classes) for _ in range(20)))
    gone = ticket("sheddable", tokens=500, classes=classes)
    queue.push(gone)
    for _ in range(9):
        send_one(queue)
    queue.remove(gone)  # it had saved 450
    queue.push(ticket("sheddable", tokens=100, classes=classes))
    assert send_one(queue).class_name == "critical"


def test_a_class_whose_turn_found_no_room_does_not_make_up_for_it_later() -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": PriorityClass(priority=-100, reserved_share=0.5, ceiling=0.5)}
    queue = FlowQueue(policy(classes=classes), quantum_tokens=100)
    pushed(queue, *(ticket("critical", tokens=100, classes=classes) for _ in range(40)))
    pushed(queue, *(ticket("sheddable", tokens=10, group="full", classes=classes) for _ in range(100)))
    assert len(send(queue, has_room=lambda each: each.class_name == "critical" and each.sequence <= 30)) == 30
    went = [send_one(queue).class_name for _ in range(50)]
    assert went.index("critical") == 18  # 100 tokens saved, 10 to pay each time, 5 earned each time but the first


def test_who_finds_no_room_holds_up_nobody_who_may_use_other_endpoints() -> None:
    queue = FlowQueue(policy())
    pinned = [ticket("critical", group="pinned", tenant=f"{number}") for number in range(1000)]
    free = ticket("sheddable")
    for each in [*pinned, free]:
        queue.push(each)
    tried = list(queue.candidates("m", 0.0))
    assert [each.group for each in tried] == ["pinned", ""]


def test_a_lower_ceiling_is_not_tried_where_a_higher_one_found_no_room_but_the_other_way_round() -> None:
    queue = FlowQueue(policy())
    standard, sheddable = pushed(queue, ticket("standard"), ticket("sheddable"))
    assert list(queue.candidates("m", 0.0)) == [standard]
    queue.remove(standard)
    assert list(queue.candidates("m", 0.0)) == [sheddable]
    classes = {**DEFAULT_CLASSES, "critical": PriorityClass(priority=100, ceiling=0.5)}
    narrow = ticket("critical", classes=classes)
    queue.push(narrow)
    assert list(queue.candidates("m", 0.0)) == [narrow, sheddable]


def test_of_many_full_groups_a_few_are_tried_a_wake_and_all_in_turn() -> None:
    queue = FlowQueue(policy())
    groups = [f"{number:02}" for number in range(20)]
    for group in groups:
        queue.push(ticket(group=group))
    wakes = [[each.group for each in queue.candidates("m", 0.0)] for _ in range(10)]
    assert {len(wake) for wake in wakes} == {6}
    assert {group for wake in wakes for group in wake} == set(groups)
    assert all(wake[:4] == groups[:4] for wake in wakes)


def test_pools_do_not_know_each_other() -> None:
    queue = FlowQueue(policy())
    one, other = pushed(queue, ticket(pool="one"), ticket("critical", pool="other"))
    assert list(queue.candidates("one", 0.0)) == [one]
    assert list(queue.candidates("other", 0.0)) == [other]
    assert (queue.ahead("one", -100), queue.ahead("other", 100), queue.ahead("other", 101)) == (
        (100, 1),
        (100, 1),
        (0, 0),
    )


def test_a_full_queue_gives_the_place_of_the_newest_of_the_lowest_class_to_a_higher_one() -> None:
    queue = FlowQueue(policy(OverloadPolicy(queue_requests=4)))
    pushed(
        queue,
        ticket("sheddable", tenant="one"),
        ticket("sheddable", tenant="two"),
        newest := ticket("sheddable", tenant="two"),
        ticket("standard"),
    )
    assert queue.push(ticket("standard")) == (newest,)
    assert newest not in queue
    assert queue.sizes == {"critical": 0, "standard": 2, "sheddable": 2}


def test_work_that_may_not_be_refused_never_gives_way() -> None:
    queue = FlowQueue(policy(OverloadPolicy(queue_requests=2)))
    pushed(queue, ticket("standard"), ticket("standard"))
    with pytest.raises(QueueFullError):
        queue.push(ticket("critical"))
    assert queue.sizes == {"critical": 0, "standard": 2, "sheddable": 0}


def test_a_lower_or_equal_newcomer_displaces_nobody_of_a_higher_class() -> None:
    classes = {**DEFAULT_CLASSES, "free": PriorityClass(priority=200, sheddable=True)}
    queue = FlowQueue(policy(OverloadPolicy(queue_requests=2), classes=classes))
    pushed(queue, ticket("free", classes=classes), ticket("free", classes=classes))
    with pytest.raises(QueueFullError):
        queue.push(ticket("critical", classes=classes))


def test_a_tenant_with_more_waiting_gives_way_to_another_of_its_class_and_not_to_itself() -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": PriorityClass(sheddable=True, queue_requests=4)}
    queue = FlowQueue(policy(classes=classes))

    def of(tenant: str) -> Ticket:
        return ticket("sheddable", tenant=tenant, classes=classes)

    flood = pushed(queue, of("flood"), of("flood"), of("flood"), of("flood"))
    with pytest.raises(QueueFullError):
        queue.push(of("flood"))
    assert queue.push(of("other")) == (flood[3],)
    assert queue.push(of("other")) == (flood[2],)
    with pytest.raises(QueueFullError):  # two each: nobody has more than the newcomer would have
        queue.push(of("other"))


def test_nobody_gives_way_where_that_would_only_swap_who_has_more() -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": PriorityClass(sheddable=True, queue_requests=3)}
    for limits in (OverloadPolicy(), OverloadPolicy(queue_requests=3)):
        queue = FlowQueue(policy(limits, classes))
        pushed(queue, *(ticket("sheddable", tenant=tenant, classes=classes) for tenant in "aab"))
        with pytest.raises(QueueFullError):
            queue.push(ticket("sheddable", tenant="b", classes=classes))
        assert len(queue.push(ticket("sheddable", tenant="c", classes=classes))) == 1


def test_in_a_full_queue_a_tenant_with_more_gives_way_to_another_of_its_priority() -> None:
    classes = {name: PriorityClass(sheddable=True) for name in ("one", "other")}
    queue = FlowQueue(policy(OverloadPolicy(queue_requests=3), classes))
    flood = pushed(queue, *(ticket("one", tenant="flood", classes=classes) for _ in range(3)))
    assert queue.push(ticket("other", tenant="b", classes=classes)) == (flood[2],)


@pytest.mark.parametrize(("of_class", "of_all"), [(3, 100), (100, 3)])
def test_in_a_class_that_may_not_be_refused_the_oldest_makes_room_for_a_newcomer(of_class: int, of_all: int) -> None:
    classes = {"standard": PriorityClass(queue_requests=of_class), "other": PriorityClass(queue_requests=of_class)}
    queue = FlowQueue(policy(OverloadPolicy(queue_requests=of_all), classes=classes))
    first, gone, second, third = (ticket(tenant=tenant, classes=classes) for tenant in "abbc")
    pushed(queue, gone, first)
    queue.remove(gone)
    pushed(queue, second, third)
    fourth, fifth = (ticket(tenant="b", pool="other", classes=classes) for _ in range(2))
    assert [queue.push(fourth), queue.push(fifth)] == [(first,), (second,)]
    assert list(queue) == [third, fourth, fifth]


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize(("of_class", "of_all"), [(2, 100), (100, 2)])
def test_requests_for_room_and_for_a_first_pod_give_way_each_by_its_own_rule(
    is_first: bool, of_class: int, of_all: int
) -> None:
    classes = {"standard": PriorityClass(queue_requests=of_class), "critical": PriorityClass(priority=100)}
    queue = FlowQueue(policy(OverloadPolicy(queue_requests=of_all), classes=classes))
    for_room, for_pod = ticket(classes=classes), ticket(classes=classes)
    for_pod.gives_way = True
    pushed(queue, *((for_pod, for_room) if is_first else (for_room, for_pod)))
    assert queue.sizes["standard"] == 2
    if of_all == 2:
        assert queue.push(ticket("critical", classes=classes)) == (for_pod,)
    else:
        assert queue.push(ticket(classes=classes)) == (for_room,)


def test_a_floor_turn_is_tried_with_the_highest_ceiling_of_those_that_wait_or_have_passed() -> None:
    classes = {
        "critical": PriorityClass(priority=100),
        "standard": PriorityClass(ceiling=0.8),
        "sheddable": PriorityClass(priority=-100, reserved_share=0.5, ceiling=0.6),
    }
    queue = FlowQueue(policy(classes=classes))
    pushed(queue, *(ticket("standard", classes=classes) for _ in range(3)))
    pushed(queue, *(ticket("sheddable", classes=classes) for _ in range(3)))

    def tries() -> list[tuple[str, float]]:
        return [(each.class_name, each.tried_ceiling) for each in queue.candidates("m", 0.0)]

    assert tries() == [("standard", 0.8)]
    queue.passed("m", "standard", 0.8, cost=200)
    assert tries() == [("sheddable", 0.8)]  # its turn, and standard then has no room either
    queue.passed("m", "critical", 1.0, cost=2)
    assert tries() == [("sheddable", 1.0)]
    assert [each.class_name for each in send(queue)][:2] == ["sheddable", "standard"]


def test_a_reserved_share_is_kept_where_higher_classes_fill_everything_above_the_own_ceiling() -> None:
    classes = {
        "standard": PriorityClass(ceiling=0.8, queue_requests=1000),
        "sheddable": PriorityClass(priority=-100, sheddable=True, reserved_share=0.2, ceiling=0.6),
    }
    queue = FlowQueue(policy(classes=classes))
    pushed(queue, *(ticket("standard", classes=classes) for _ in range(300)))
    pushed(queue, *(ticket("sheddable", classes=classes) for _ in range(100)))
    went = []
    for _ in range(200):
        places = 1  # the pod is filled up to 0.7
        for each in queue.candidates("m", 0.0):
            if places and each.tried_ceiling > 0.7:
                places = 0
                queue.went(each, 0.0)
                went.append(each.class_name)
    assert 38 <= went.count("sheddable") <= 40


def test_a_class_limit_of_nothing_lets_nobody_wait() -> None:
    classes = {**DEFAULT_CLASSES, "sheddable": PriorityClass(sheddable=True, queue_requests=0)}
    queue = FlowQueue(policy(classes=classes))
    with pytest.raises(QueueFullError):
        queue.push(ticket("sheddable", classes=classes))
    assert len(queue) == 0


def test_a_newcomer_that_finds_no_place_leaves_nothing_behind() -> None:
    queue = FlowQueue(policy(OverloadPolicy(queue_requests=1)))
    (first,) = pushed(queue, ticket())
    late = ticket("critical", pool="other", tenant="b")
    with pytest.raises(QueueFullError):
        queue.push(late)
    assert (list(queue), queue.waits_in("other"), queue.remove(late)) == ([first], False, False)


def test_those_whose_time_is_over_leave_in_the_order_of_their_deadlines() -> None:
    queue = FlowQueue(policy())
    late, early, later = pushed(queue, ticket(wait=2.0), ticket(wait=1.0), ticket("critical", wait=3.0))
    assert (queue.next_deadline(), queue.expired(0.9)) == (1.0, [])
    assert queue.expired(2.0) == [early, late]
    assert (queue.next_deadline(), list(queue)) == (3.0, [later])


def test_a_ticket_waits_once_at_a_time_and_may_come_again() -> None:
    queue = FlowQueue(policy())
    (once,) = pushed(queue, ticket())
    with pytest.raises(ValueError, match="waits already"):
        queue.push(once)
    assert queue.remove(once)
    assert queue.push(once) == ()


def test_what_is_ahead_of_a_newcomer_is_what_goes_before_its_turn() -> None:
    queue = FlowQueue(policy(), quantum_tokens=100)
    pushed(queue, *(ticket(tenant="flood", tokens=50) for _ in range(200)), ticket("critical", tokens=30))
    assert queue.ahead("m", 0) == (10_030, 201)
    assert queue.ahead("m", 0, "flood", 50) == (10_030, 201)
    assert queue.ahead("m", 0, "other", 250) == (280, 2)  # as much of the one that floods, and the critical one
    assert queue.ahead("m", 100, "other", 250) == (30, 1)
    assert queue.ahead("n", 0, "other", 250) == (0, 0)
    queue.push(mine := ticket(tenant="other", tokens=250))
    assert send(queue).index(mine) in (5, 6, 7)
    assert queue.ahead("m", 0, "other", 250) == (0, 0)


def test_beyond_a_bound_tenants_share_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.admission.flow_queue.MOST_TENANTS", 2)
    queue = FlowQueue(policy(), quantum_tokens=100)
    pushed(queue, *(ticket(tenant=f"{number}") for number in range(10)), *(ticket(tenant="0") for _ in range(3)))
    order = [each.tenant for each in send(queue)]
    assert order[:3] == ["0", "1", "2"]
    assert [order.index("0", 1), order.index("3")] == [3, 4]  # the second of the first, the second of all others
    assert len(queue) == 0

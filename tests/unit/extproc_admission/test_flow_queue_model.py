"""The queue does what the naive model does, whatever comes, leaves, waits and finds room."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec import structs

from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue, QueueFullError
from extproc.policy.priority import OverloadPolicy, PriorityClass
from extproc.policy.request_class import PriorityPolicy
from tests.unit.extproc_admission.queue_model import Model
from tests.unit.extproc_admission.queue_tickets import ticket

CLASSES = {
    "high": PriorityClass(priority=10, queue_requests=12),
    "mid": PriorityClass(priority=0, reserved_share=0.25, queue_requests=12),
    "mid-plain": PriorityClass(priority=0, ceiling=0.9, queue_requests=12),
    "mid-sheddable": PriorityClass(priority=0, sheddable=True, reserved_share=0.125, queue_requests=5),
    "low": PriorityClass(priority=-10, sheddable=True, reserved_share=0.125, ceiling=0.8, queue_requests=8),
    "lowest": PriorityClass(priority=-20, sheddable=True, ceiling=0.8, queue_requests=8),
}
GROUPS = ("", "g", "h", "i", "j", "k", "l", "n")


class Machine(RuleBasedStateMachine):
    @initialize(places=st.sampled_from([6, 15, 40]), quantum=st.sampled_from([1, 64, 500]))
    def start(self, places: int, quantum: int) -> None:
        policy = PriorityPolicy(classes=CLASSES, overload=OverloadPolicy(queue_requests=places))
        self.queue = FlowQueue(policy, quantum_tokens=quantum, age_seconds=5.0)
        self.model = Model(policy, quantum_tokens=quantum, age_seconds=5.0)
        self.now = 0.0

    @rule(
        class_name=st.sampled_from(sorted(CLASSES)),
        tenant=st.sampled_from("abc"),
        tokens=st.integers(min_value=0, max_value=1500),
        pool=st.sampled_from(["m", "m", "m", "n"]),
        group=st.sampled_from(GROUPS),
        before=st.sampled_from([0.0, 0.5, 4.0]),
        wait=st.sampled_from([1.0, 10.0, 60.0]),
        gives_way=st.sampled_from([False, False, False, True]),
    )
    def push(
        self,
        class_name: str,
        tenant: str,
        tokens: int,
        pool: str,
        group: str,
        before: float,
        wait: float,
        gives_way: bool,
    ) -> None:
        new = ticket(
            class_name,
            tenant=tenant,
            tokens=tokens,
            pool=pool,
            group=group,
            at=self.now - before,
            wait=wait,
            classes=CLASSES,
        )
        if gives_way:
            new.gives_way, new.priority_class = True, structs.replace(new.priority_class, sheddable=True)
        why = self.model.victim(new)
        try:
            displaced = self.queue.push(new)
        except QueueFullError:
            assert why == "full" or (why == "total" and not self.model.can_displace(new))
            return
        if why is None:
            assert displaced == ()
        else:
            (victim,) = displaced
            assert isinstance(why, str)
            assert self.model.may_give_way(victim, new, why=why)
            self.model.remove(victim)
        self.model.push(new)

    @rule(
        pool=st.sampled_from(["m", "m", "m", "n", "nobody"]),
        room=st.dictionaries(st.sampled_from(GROUPS), st.integers(min_value=0, max_value=4)),
        ceiling=st.sampled_from([0.0, 0.0, 0.85, 0.95]),
    )
    def wake(self, pool: str, room: dict[str, int], ceiling: float) -> None:
        expected = self.model.wake(pool, self.now, dict(room), ceiling)
        left = dict(room)
        tried: list[tuple[Ticket, bool]] = []
        for each in self.queue.candidates(pool, self.now):
            goes = left.get(each.group, 0) > 0 and each.tried_ceiling > ceiling
            tried.append((each, goes))
            if goes:
                left[each.group] -= 1
                self.queue.went(each, self.now)
        assert tried == expected

    @rule(pool=st.sampled_from(["m", "n"]), tries=st.integers(min_value=1, max_value=8))
    def give_up_in_the_middle_of_a_wake(self, pool: str, tries: int) -> None:
        expected = self.model.wake(pool, self.now, {}, 0.0, given_up_at=tries)
        tried = []
        for each in self.queue.candidates(pool, self.now):
            tried.append((each, False))
            if len(tried) == tries:
                break
        assert tried == expected

    @rule(
        pool=st.sampled_from(["m", "m", "n", "nobody"]),
        class_name=st.sampled_from(sorted(CLASSES)),
        cost=st.integers(1, 3000),
    )
    def one_goes_that_has_not_waited(self, pool: str, class_name: str, cost: int) -> None:
        self.queue.passed(pool, class_name, CLASSES[class_name].ceiling, cost)
        self.model.passed(pool, class_name, CLASSES[class_name].ceiling, cost)

    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        assume(self.model.waiting)
        gone = data.draw(st.sampled_from(self.model.waiting))
        assert self.queue.remove(gone)
        assert not self.queue.remove(gone)
        self.model.remove(gone)

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        assert list(self.queue.expired(self.now)) == self.model.expired(self.now)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "queue"):
            return
        waiting = self.model.waiting
        assert list(self.queue) == waiting
        assert len(self.queue) == len(waiting) <= self.model.overload.queue_requests
        assert self.queue.next_deadline() == min((each.deadline for each in waiting), default=None)
        assert self.queue.sizes == {n: sum(1 for e in waiting if e.class_name == n) for n in CLASSES}
        for pool in ("m", "n"):
            here = [each.priority_class.priority for each in self.model.here(pool)]
            assert self.queue.highest(pool) == max(here, default=None)
            assert self.queue.is_ahead(pool, 0, None) == any(each >= 0 for each in here)
            assert self.queue.waits_in(pool) == any(each.pool == pool for each in waiting)
            for priority in (-20, -5, 0, 11):
                above = [e for e in self.model.here(pool) if e.priority_class.priority >= priority]
                assert self.queue.ahead(pool, priority) == (sum(e.cost for e in above), len(above))
                for group in GROUPS[:3]:
                    is_ahead = any(each.group == group for each in above)
                    assert self.queue.is_ahead(pool, priority, group) == is_ahead
        for each in waiting:
            alone = not any(
                e is not each
                and (e.pool, e.group) == (each.pool, each.group)
                and e.priority_class.ceiling >= each.priority_class.ceiling
                for e in waiting
            )
            assert self.queue.is_alone(each) == alone


TestMachine = pytest.mark.thorough(Machine.TestCase)
TestMachine.settings = settings(max_examples=40, stateful_step_count=50)


@given(st.lists(st.tuples(st.sampled_from(sorted(CLASSES)), st.sampled_from("abc"), st.integers(0, 3000)), max_size=40))
def test_whatever_waits_goes_once_and_nothing_is_left(arrivals: list[tuple[str, str, int]]) -> None:
    queue = FlowQueue(PriorityPolicy(classes=CLASSES))
    waiting: list[Ticket] = []
    for class_name, tenant, tokens in arrivals:
        new = ticket(class_name, tenant=tenant, tokens=tokens, classes=CLASSES)
        try:
            displaced = queue.push(new)
        except QueueFullError:
            continue
        waiting = [each for each in waiting if each not in displaced] + [new]
    went = []
    for each in queue.candidates("m", 0.0):
        queue.went(each, 0.0)
        went.append(each)
    assert sorted(went, key=id) == sorted(waiting, key=id)
    assert len(queue) == 0
    assert (queue.next_deadline(), queue.waits_in("m"), queue.ahead("m", -100)) == (None, False, (0, 0))
    assert vars_of(queue) == ({}, {}, {}, [])


def vars_of(queue: FlowQueue) -> tuple[object, object, object, object]:
    return queue._pools, queue._backlogs, queue._tenants, queue._deadlines

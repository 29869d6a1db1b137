"""What the order promises, measured on what is sent, whatever the sizes: shares, floors, bounds on waiting."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.admission.flow_queue import FlowQueue
from extproc.policy.priority import OverloadPolicy, PriorityClass
from extproc.policy.request_class import PriorityPolicy
from tests.unit.extproc_admission.queue_tickets import send_one, ticket

sizes = st.lists(st.integers(min_value=1, max_value=4000), min_size=1, max_size=12)
few = settings(max_examples=25)
ONE_CLASS = PriorityPolicy(
    classes={"standard": PriorityClass(queue_requests=10**6)}, overload=OverloadPolicy(queue_requests=10**6)
)


@few
@given(work=st.dictionaries(st.sampled_from("abcdef"), sizes, min_size=2), quantum=st.integers(1, 5000))
def test_tenants_that_always_have_work_waiting_get_the_same_tokens(work: dict[str, list[int]], quantum: int) -> None:
    classes = {"standard": PriorityClass(queue_requests=10**6)}
    queue = FlowQueue(PriorityPolicy(classes=classes), quantum_tokens=quantum)
    turns = dict.fromkeys(work, 0)

    def come(tenant: str) -> None:
        tokens = work[tenant][turns[tenant] % len(work[tenant])]
        turns[tenant] += 1
        queue.push(ticket(tenant=tenant, tokens=tokens, classes=classes))

    for tenant in work:
        for _ in range(3):
            come(tenant)
    sent: Counter[str] = Counter(dict.fromkeys(work, 0))
    largest = max(max(each) for each in work.values())
    for _ in range(100):
        went = send_one(queue)
        sent[went.tenant] += went.cost
        come(went.tenant)
        assert max(sent.values()) - min(sent.values()) <= 2 * (quantum + largest)


@few
@given(
    floods=st.integers(50, 3000),
    other=st.lists(st.integers(1, 3000), min_size=1, max_size=10),
    quantum=st.integers(64, 4096),
)
def test_a_tenant_that_sends_now_and_then_waits_no_longer_than_its_turn(
    floods: int, other: list[int], quantum: int
) -> None:
    """However much the other one has waiting: what goes before is bounded by the quantum and the own size."""
    queue = FlowQueue(ONE_CLASS, quantum_tokens=quantum)
    for _ in range(20):
        queue.push(ticket(tenant="flood", tokens=floods))
    for tokens in other:
        mine = ticket(tenant="other", tokens=tokens)
        queue.push(mine)
        before = 0
        while True:
            went = send_one(queue)
            if went is mine:
                break
            before += went.cost
            queue.push(ticket(tenant="flood", tokens=floods))
        assert before <= tokens + 2 * (quantum + floods)


@few
@given(
    shares=st.lists(st.sampled_from([0.0, 0.05, 0.1, 0.2, 0.25]), min_size=4, max_size=4),
    work=st.lists(sizes, min_size=4, max_size=4),
    quantum=st.integers(1, 5000),
)
def test_each_class_that_waits_gets_at_least_its_share_and_lower_ones_no_more(
    shares: list[float], work: list[list[int]], quantum: int
) -> None:
    classes = {
        f"{rank}": PriorityClass(priority=-rank, reserved_share=share, queue_requests=10**6)
        for rank, share in enumerate(shares)
    }
    queue = FlowQueue(PriorityPolicy(classes=classes), quantum_tokens=quantum)
    turns: Counter[str] = Counter()

    def come(name: str) -> None:
        tokens = work[int(name)][turns[name] % len(work[int(name)])]
        turns[name] += 1
        queue.push(ticket(name, tokens=tokens, classes=classes))

    for name in classes:
        for _ in range(3):
            come(name)
    sent: Counter[str] = Counter()
    largest = max(max(each) for each in work)
    for _ in range(120):
        went = send_one(queue)
        sent[went.class_name] += went.cost
        come(went.class_name)
        total = sent.total()
        for name, share in zip(classes, shares, strict=True):
            assert sent[name] >= share * total - (len(classes) + 1) * largest
            if name != "0":
                assert sent[name] <= share * total + 1e-6


@few
@given(tokens=st.integers(1, 5000), quantum=st.integers(1, 4096), newcomers=sizes)
def test_with_ever_shorter_work_coming_nobody_waits_much_beyond_the_age_bound(
    tokens: int, quantum: int, newcomers: list[int]
) -> None:
    queue = FlowQueue(ONE_CLASS, quantum_tokens=quantum, age_seconds=5.0)
    patient = ticket(tokens=tokens)
    queue.push(patient)
    for number in range(100):
        now = number * 0.1
        queue.push(ticket(tokens=min(tokens, newcomers[number % len(newcomers)]), at=now))
        queue.push(ticket(tokens=1, at=now))
        if send_one(queue, now=now) is patient:
            break
    assert now <= 5.0 + 1e-9

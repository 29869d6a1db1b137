"""What a look at a served pool finds: its pods, what waits and was refused, and the promises of classes in use."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue
from extproc.ledger.feature_telemetry import OverloadTelemetry
from extproc.pods.endpoint import EndpointStatus, Reachability, Role
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import PoolConfig
from extproc.pools import scale_looks as module
from extproc.pools.scale_looks import ScaleLooks
from extproc.scaling.pool_scaling import PoolScaling
from extproc.scaling.seen import PoolSeen, Signal
from kvmesh.documents.pools import PoolEndpoint
from kvmesh.metrics.registry import Registry

POLICY, _ = pick_policy({"autoscale": {"both": {"maxReplicas": 8}}})


class Watched(PoolScaling):
    """Notes what it is given."""

    seen: PoolSeen

    def look(self, seen: PoolSeen, *, now: float) -> Mapping[str, Signal]:
        self.seen = seen
        return super().look(seen, now=now)


@dataclass
class Desk:
    """One pool and a clock."""

    pool: Any
    looks: ScaleLooks
    statuses: list[EndpointStatus] = field(default_factory=list)
    now: float = 100.0

    def look(self) -> PoolSeen:
        self.looks.look()
        return cast("Watched", self.looks._scaling).seen


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setattr(module, "PoolScaling", Watched)
    made = Desk(pool=None, looks=cast("ScaleLooks", None))
    made.pool = SimpleNamespace(
        config=PoolConfig(name="llm/a", policy=POLICY),
        order=FlowQueue(POLICY.priorities),
        overload=OverloadTelemetry(Registry(), classes=POLICY.priorities.classes),
        endpoints=SimpleNamespace(known=lambda *, now: made.statuses),
        books=SimpleNamespace(estimates=LatencyEstimates(tokens_per_second=5000.0), own_bookings=dict),
        runtime=SimpleNamespace(others=lambda: None),
    )
    made.looks = ScaleLooks(POLICY, see=lambda: made.pool, pickers=lambda: 3, clock=lambda: made.now)
    return made


def test_pods_that_go_are_left_out_and_others_have_their_role(desk: Desk) -> None:
    for number, reachability in enumerate(Reachability):
        desk.statuses.append(EndpointStatus(address=f"p{number}:1", reachability=reachability, load=None))
    policy = replace(POLICY, roles={"p0:1": Role.PREFILL}, cordoned=frozenset({"p1:1"}))
    desk.pool.config = replace(desk.pool.config, policy=policy)
    found = {pod.address: (pod.role, pod.serves) for pod in desk.look().pods}
    assert found == {
        "p0:1": ("prefill", True),
        "p1:1": ("both", False),
        "p2:1": ("both", False),
        "p3:1": ("both", False),
    }


def test_a_pods_rate_is_the_policys_until_it_is_learned(desk: Desk) -> None:
    desk.statuses.append(EndpointStatus(address="a:1", reachability=Reachability.READY, load=None))
    (pod,) = desk.look().pods
    assert pod.tokens_per_second == pytest.approx(5000.0, rel=0.2)


def test_a_pods_variant_is_the_first_of_its_role_whose_labels_it_has(desk: Desk) -> None:
    variants = [
        {"name": name, "podHourPrice": 1, "selector": {"gpu": gpu}} for name, gpu in (("quick", "h100"), ("slow", "l4"))
    ]
    policy, _ = pick_policy({"autoscale": {"both": {"variants": variants}}})
    desk.looks.reconfigure(policy)
    endpoints = []
    for number, gpu in enumerate(("h100", "l4", "tpu")):
        address = f"p{number}:1"
        desk.statuses.append(EndpointStatus(address=address, reachability=Reachability.READY, load=None))
        endpoints.append(PoolEndpoint(address=address, labels={"gpu": gpu, "app": "llama"}))
    desk.pool.config = replace(desk.pool.config, policy=policy, endpoints=tuple(endpoints))
    assert [(pod.variant, pod.is_learned) for pod in desk.look().pods] == [
        ("quick", False),
        ("slow", False),
        ("", False),
    ]


def test_what_waits_and_was_refused_is_of_this_picker(desk: Desk) -> None:
    for tokens in (100, 200):
        desk.pool.order.push(
            Ticket(
                class_name="standard",
                priority_class=POLICY.priorities.classes["standard"],
                tenant="",
                uncached_tokens=tokens,
                pool="m",
                arrived_at=100.0,
                deadline=200.0,
            )
        )
    desk.pool.overload.admitted("standard", uncached_tokens=50)
    desk.pool.overload.shed("standard", reason="full")
    seen = desk.look()
    assert (seen.pickers, seen.queued_requests, seen.queued_tokens) == (3, 2, 300.0)
    assert (seen.refused_requests, seen.refused_tokens) == (1, 50.0)


def test_only_classes_that_had_requests_lately_have_promises(desk: Desk) -> None:
    assert (desk.look().ttft_seconds, desk.look().inter_token_seconds) == (None, None)
    classes = POLICY.priorities.classes
    desk.pool.overload.admitted("critical")
    desk.pool.overload.admitted("sheddable")
    assert desk.look().ttft_seconds == classes["critical"].targets.ttft_seconds
    desk.now += 599.0
    desk.pool.overload.admitted("sheddable")
    desk.look()
    desk.now += 2.0
    assert desk.look().ttft_seconds == classes["sheddable"].targets.ttft_seconds


def test_without_a_role_in_the_policy_nobody_looks(desk: Desk) -> None:
    plain, _ = pick_policy({})
    desk.looks.reconfigure(plain)
    desk.looks.look()
    assert not hasattr(desk.looks._scaling, "seen")
    assert not desk.looks.signals


def test_a_pool_that_is_gone_wants_nothing(desk: Desk) -> None:
    desk.statuses.append(EndpointStatus(address="a:1", reachability=Reachability.READY, load=None))
    desk.look()
    assert desk.looks.signals["both"].wanted == 1
    desk.looks.end()
    assert not desk.looks.signals


def test_a_plan_is_of_the_last_look(desk: Desk) -> None:
    desk.statuses.append(EndpointStatus(address="a:1", reachability=Reachability.READY, load=None))
    assert desk.looks.plan(seconds=0.0).roles == ()
    desk.look()
    plan = desk.looks.plan(seconds=60.0)
    assert (plan.pool, plan.of, plan.currency, [role.role for role in plan.roles]) == (
        "llm/a",
        "in 60 s",
        "USD",
        ["both"],
    )

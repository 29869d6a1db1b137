"""Scheduling and the queue under the inference extension's names: what was decided, given, and waits."""

import asyncio
from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from extproc.admission.admission_queue import AdmissionQueue, Outcome
from extproc.admission.fair_order import Ticket
from extproc.admission.flow_queue import FlowQueue
from extproc.policy.priority import PriorityClass, PriorityPolicy
from extproc.telemetry.extension_scheduling import OUTCOMES, ExtensionScheduling
from kvmesh.metrics.registry import Registry

PODS = {"10.0.0.1:8000": ("vllm-1", "llm", "8000")}
FLOW = ("fairness_id", "priority", "inference_pool", "model_name", "target_model_name")


def ticket(*, tenant: str = "acme", requested: str | None = "chat", pool: str = "llama", **changes: Any) -> Ticket:
    usual: dict[str, Any] = {"class_name": "standard", "priority_class": PriorityClass(priority=0), "body_bytes": 300}
    return Ticket(
        tenant=tenant,
        requested_model=requested,
        pool=pool,
        **usual | {"uncached_tokens": 1, "arrived_at": 0.0, "deadline": 9.0} | changes,
    )


def shown(waiting: Sequence[Ticket] = ()) -> tuple[ExtensionScheduling, Registry]:
    registry = Registry()
    counts = ExtensionScheduling(registry)
    counts.show(
        "llama-pool",
        waiting=lambda: waiting,
        pods=lambda: PODS,
        tenant_label=lambda tenant: tenant if tenant in {"acme", ""} else "other",
        models=lambda: {"chat"},
    )
    return counts, registry


def samples(registry: Registry, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(registry.text().decode())
        for sample in family.samples
        if sample.name == f"inference_extension_{name}"
    }


def test_each_attempt_names_its_pod_until_the_pod_is_gone() -> None:
    counts, registry = shown()
    for endpoint in ("10.0.0.1:8000", "10.0.0.1:8000", "10.0.0.9:8001"):
        counts.given(endpoint, target="llama", prompt_tokens=100, matched_tokens=25)
    counts.not_given(target="llama")
    # in the order of the names of labels: namespace, pod_name, port, status, target_model_name
    assert samples(registry, "scheduler_attempts_total") == {
        ("llm", "vllm-1", "8000", "success", "llama"): 2.0,
        ("", "10.0.0.9:8001", "8001", "success", "llama"): 1.0,
        ("", "", "", "failure", "llama"): 1.0,
    }
    counts.forget("10.0.0.1:8000")
    assert len(samples(registry, "scheduler_attempts_total")) == 2


def test_the_hit_ratio_is_of_prompts_whose_tokens_are_known() -> None:
    counts, registry = shown()
    counts.given("a:1", target="", prompt_tokens=100, matched_tokens=25)
    counts.given("a:1", target="", prompt_tokens=0, matched_tokens=0)
    assert samples(registry, "prefix_indexer_hit_ratio_sum") == {(): 0.25}
    assert samples(registry, "prefix_indexer_hit_ratio_count") == {(): 1.0}


def test_series_of_attempts_are_bounded() -> None:
    counts, registry = shown()
    for number in range(1200):
        counts.given("a:1", target=f"m{number}", prompt_tokens=0, matched_tokens=0)
    found = samples(registry, "scheduler_attempts_total")
    assert (len(found), found["", "a:1", "1", "success", "other"]) == (1001, 200.0)


def test_what_waits_is_shown_by_flow_and_no_name_of_a_clients_is_a_label() -> None:
    waiting = [
        ticket(),
        ticket(body_bytes=50),
        ticket(tenant="planted", requested="planted", pool="planted"),
        ticket(tenant="", requested=None, pool=""),
    ]
    _, registry = shown(waiting)
    # fairness_id, inference_pool, model_name, priority, target_model_name
    assert samples(registry, "flow_control_queue_size") == {
        ("acme", "llama-pool", "chat", "0", "llama"): 2.0,
        ("other", "llama-pool", "other", "0", "other"): 1.0,
        ("", "llama-pool", "", "0", ""): 1.0,
    }
    assert samples(registry, "flow_control_queue_bytes")["acme", "llama-pool", "chat", "0", "llama"] == 350.0
    waiting.clear()
    assert samples(registry, "flow_control_queue_size") == {}


async def test_the_queue_tells_how_long_each_has_waited_and_how_it_ended() -> None:
    class Silent:
        def left_queue(self, class_name: str, **_: Any) -> None: ...

    counts, registry = shown()
    now = [0.0]
    queue = AdmissionQueue(FlowQueue(PriorityPolicy()), clock=lambda: now[0], telemetry=Silent())
    queue.on_left = counts.left_queue
    waits: asyncio.Task[None] = asyncio.create_task(queue.enter(ticket(deadline=1e9), lambda *_: None))
    await asyncio.sleep(0)
    assert [each.requested_model for each in queue.waiting] == ["chat"]
    now[0] = 2.0
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert queue.waiting == ()
    # fairness_id, inference_pool, model_name, outcome, priority, target_model_name
    key = ("acme", "llama-pool", "chat", "EvictedContextCancelled", "0", "llama")
    assert samples(registry, "flow_control_request_queue_duration_seconds_sum") == {key: 2.0}


def test_each_way_out_of_the_queue_has_its_word() -> None:
    assert set(OUTCOMES) == set(Outcome)

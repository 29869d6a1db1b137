"""A policy in shadow: what it would refuse, hold back, degrade, offload or scale is counted and shown, and not done."""

import asyncio
import io
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from extproc.choosing.decision import Decision
from extproc.errors import (
    MalformedRequestError,
    NoReadyEndpointError,
    PromptLimitError,
    QuotaExceededError,
    RequestShedError,
    UnknownModelError,
    UnsupportedEncodingError,
)
from extproc.ledger.access_log import NameHashes, record_of_decision
from extproc.ledger.facts import Arrival, Decided, DecisionRecord, RequestOutcome
from extproc.pages.decision_state import decision_state
from extproc.pages.picker_state import ShadowState
from extproc.pick import explain, pick
from extproc.pods.endpoint import EndpointStatus
from extproc.policy.disaggregation import Disaggregation, OffloadRule, Protocol
from extproc.policy.priority import DEFAULT_CLASSES, DegradationStep, PriorityClass, Quota, StepKind
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.pools.booked_exchange import BookedExchange
from extproc.shared.shared_quotas import Quotas
from kvmesh.redis.link import RedisLink
from operate.local.explain import render
from tests.unit.extproc_pick.pick_fakes import (
    ONE_MODEL,
    FakeIndex,
    FakePrompts,
    ShownPool,
    chat,
    facts,
    pod,
    runtime,
    tokens,
)
from tests.unit.extproc_pick.test_prefill import ALWAYS, ANSWER, PrefillPods, split_pool

SHEDDABLE = facts(objective="sheddable")
HASTY = PriorityClass(priority=-1, sheddable=True, ttft_seconds=0.001)
LABELS = ("class", "rule", "action", "reason", "step")
SHADOW = PriorityPolicy(trust_objective=True, shadow=True)


def full(address: str) -> EndpointStatus:
    return pod(address, waiting_requests=50, running_requests=50)


def counted(pool: ShownPool, name: str = "kvmesh_shadow_decisions_total") -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(pool.telemetry.registry.text().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == name and sample.value]
    return {
        tuple(sample.labels[label] for label in LABELS if label in sample.labels): sample.value for sample in samples
    }


async def sent(
    pool: ShownPool, request: Any = None, body: bytes | None = None
) -> tuple[BookedExchange, DecisionRecord]:
    exchange = await pick(request or facts(), chat() if body is None else body, pool)
    exchange.finish()
    await asyncio.sleep(0)
    return exchange, pool.recent[0]


def codes(record: DecisionRecord) -> list[str]:
    assert isinstance(record.outcome, Decision)
    return [f"{each.rule.value}/{each.code}" for each in record.shadow]


def with_steps(*steps: DegradationStep, sheddable: bool = True, shadow: bool = True) -> PickPolicy:
    pressed = PriorityClass(ttft_seconds=0.01, sheddable=sheddable, degrade=steps)
    return PickPolicy(priorities=PriorityPolicy(classes={**DEFAULT_CLASSES, "standard": pressed}, shadow=shadow))


def pressed(pool: ShownPool, *steps: DegradationStep) -> ShownPool:
    """Have these steps in force."""
    taken = pool.pressure._degradation.measures("standard", pressure=1000.0, now=1.0, pool="tiny")
    assert taken.steps == steps
    return pool


async def test_a_request_that_would_be_refused_for_load_is_sent_to_the_best_endpoint_and_counted() -> None:
    priorities = replace(SHADOW, classes={**DEFAULT_CLASSES, "sheddable": HASTY})
    with pytest.raises(RequestShedError):
        await sent(runtime(full("a"), policy=PickPolicy(priorities=replace(priorities, shadow=False))), SHEDDABLE)
    pool = runtime(full("a"), policy=PickPolicy(priorities=priorities))
    exchange, record = await sent(pool, SHEDDABLE)
    assert exchange.endpoints[0] == "a"
    assert codes(record) == ["admission/refuse:shed"]
    assert "would wait about" in record.shadow[0].words
    assert counted(pool) == {("sheddable", "admission", "refuse", "shed"): 1.0}
    assert counted(pool, "kvmesh_shadow_refused_requests_total") == {("sheddable", "shed"): 1.0}
    assert counted(pool, "kvmesh_shed_requests_total") == {}
    assert pool.overload.refused_requests == 0  # the pods have it: nobody scales for it twice


async def test_a_request_that_would_wait_goes_at_once_and_is_counted() -> None:
    pool = runtime(full("a"), policy=PickPolicy(priorities=SHADOW))
    exchange, record = await asyncio.wait_for(sent(pool), timeout=1.0)
    assert (exchange.endpoints[0], codes(record)) == ("a", ["admission/wait:full"])
    assert counted(pool) == {("standard", "admission", "wait", "full"): 1.0}
    assert counted(pool, "kvmesh_shadow_refused_requests_total") == {}


async def test_where_a_pod_has_room_nothing_is_withheld_and_the_request_goes_there() -> None:
    pool = runtime(full("a"), pod("b"), policy=PickPolicy(priorities=SHADOW))
    exchange, record = await sent(pool)
    assert (exchange.endpoints[0], record.shadow, counted(pool)) == ("b", (), {})


async def test_those_that_wait_go_when_the_policy_goes_into_shadow() -> None:
    pool = runtime(full("a"), policy=PickPolicy(priorities=replace(SHADOW, shadow=False)))
    task = asyncio.create_task(pick(facts(), chat(), pool))
    while not sum(pool.admission.waiting.values()):
        await asyncio.sleep(0)
    pool.view = replace(pool.view, policy=PickPolicy(priorities=SHADOW))
    pool.admission.reconfigure(SHADOW)
    assert (await asyncio.wait_for(task, timeout=1.0)).endpoints[0] == "a"


def limited(quota: Quota, *, shadow: bool = True) -> ShownPool:
    priorities = replace(SHADOW, quotas=(quota,), shadow=shadow)
    quotas = Quotas(RedisLink("redis://127.0.0.1:1"), hash_seed="", quotas=(quota,), clock=lambda: 1.0)
    quotas.is_shadow = shadow

    class Index(FakeIndex):
        async def lookup(self, *asked: Any, quota: Any = None, **what: Any) -> Any:
            hits = await super().lookup(*asked, quota=quota, **what)
            return (
                hits if quota is None else structs.replace(hits, quota=quotas.alone(quota, "no Redis", was_done=False))
            )

    pool = runtime(pod("a"), policy=PickPolicy(priorities=priorities), index=Index(), prompts=FakePrompts(tokens(100)))
    pool.quotas = pool.books.quotas = quotas
    return pool


async def test_a_quota_that_is_used_up_refuses_nobody_says_nothing_to_the_client_and_is_counted() -> None:
    quota = Quota(requests_per_minute=60, burst_seconds=2)
    real = limited(quota, shadow=False)
    for _ in range(2):
        exchange, _record = await sent(real)
        assert "x-ratelimit-limit-requests" in exchange.response_headers
    with pytest.raises(QuotaExceededError):
        await sent(real)
    pool = limited(quota)
    found = []
    for _ in range(4):
        exchange, record = await sent(pool)
        assert exchange.response_headers == {}
        found.append(codes(record))
    assert found == [[], [], ["quota/refuse:requests"], ["quota/refuse:requests"]]
    assert counted(pool, "kvmesh_shadow_refused_requests_total") == {("standard", "requests"): 2.0}
    quotas = pool.quotas
    assert quotas is not None
    # those beyond the quota have taken nothing of it, as if they had been refused
    assert (quotas.facts()["open_requests"], quotas.shadow_refusals) == (0, {("*", "requests"): 2})
    assert {outcome for (outcome, _), count in quotas.decisions.items() if count} == {"allowed"}


async def test_a_bound_on_requests_at_a_time_is_counted_as_if_it_held() -> None:
    pool = limited(Quota(concurrent_requests=1))
    first = await pick(facts(), chat(), pool)
    _, record = await sent(pool)
    assert codes(record) == ["quota/refuse:concurrent-requests"]
    first.finish()
    _, record = await sent(pool)
    assert codes(record) == []


STEPS = {
    "cap": DegradationStep(step=StepKind.CAP_OUTPUT, enter=1, leave=0.5, tokens=7),
    "limit": DegradationStep(step=StepKind.LIMIT_PROMPT, enter=1, leave=0.5, tokens=50),
    "model": DegradationStep(step=StepKind.SMALLER_MODEL, enter=1, leave=0.5, model="small"),
    "reject": DegradationStep(step=StepKind.REJECT, enter=1, leave=0.5),
}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cap", ["degradation/degrade:cap-output"]),
        ("limit", ["degradation/refuse:prompt-limited"]),
        ("model", ["degradation/degrade:smaller-model"]),
        ("reject", ["degradation/refuse:shed"]),
    ],
)
async def test_a_step_in_force_takes_nothing_and_is_counted(name: str, found: list[str]) -> None:
    step = STEPS[name]
    pool = pressed(runtime(pod("a"), policy=with_steps(step), prompts=FakePrompts(tokens(100))), step)
    exchange, record = await sent(pool, body=chat(max_tokens=500))
    assert codes(record) == found
    assert (exchange.body, exchange.response_headers) == (None, {})
    assert record.asked is not None
    assert (record.asked.steps, record.asked.served_model) == ((), "tiny")
    assert sum(counted(pool).values()) == 1.0


@pytest.mark.parametrize("name", ["limit", "reject"])
async def test_the_same_steps_out_of_shadow_refuse(name: str) -> None:
    step = STEPS[name]
    policy = with_steps(step, shadow=False)
    pool = pressed(runtime(pod("a"), policy=policy, prompts=FakePrompts(tokens(100))), step)
    with pytest.raises(PromptLimitError if name == "limit" else RequestShedError):
        await sent(pool)


async def test_a_step_that_would_not_change_the_request_is_not_counted() -> None:
    step = STEPS["cap"]
    pool = pressed(runtime(pod("a"), policy=with_steps(step)), step)
    _, record = await sent(pool, body=chat(max_tokens=7))
    assert (codes(record), counted(pool)) == ([], {})


def split(disaggregation: Disaggregation = ALWAYS) -> tuple[ShownPool, PrefillPods]:
    pods = PrefillPods(p=ANSWER)
    pool = split_pool(pods, "p", "d", disaggregation=disaggregation)
    pool.view = replace(pool.view, policy=replace(pool.view.policy, priorities=SHADOW))
    return pool, pods


async def test_an_offload_is_left_out_and_counted() -> None:
    pool, pods = split()
    exchange, record = await sent(pool)
    assert (exchange.endpoints[0], pods.asked) == ("d", [])
    assert codes(record) == ["disaggregation/offload:always"]
    assert record.shadow[0].words.startswith("p would compute the prompt")
    prefill = decision_state(record, policy=pool.view.policy).prefill
    assert prefill is not None
    assert (prefill.where, prefill.why.partition(":")[0]) == ("local", "shadow, else remote")


async def test_decode_pods_that_compute_no_prompts_have_them_computed_also_in_shadow() -> None:
    pool, pods = split(Disaggregation(enabled=True, rule=OffloadRule.ALWAYS, protocol=Protocol.SGLANG))
    exchange = await pick(facts(), chat(), pool)
    assert exchange.endpoints[0] == "d"
    assert counted(pool) == {}
    while not pods.asked:
        await asyncio.sleep(0)
    exchange.finish()


async def test_what_is_no_decision_about_load_is_refused_also_in_shadow() -> None:
    pool = runtime(pod("a"), policy=PickPolicy(priorities=SHADOW), models=replace(ONE_MODEL, only_listed=True))
    with pytest.raises(UnknownModelError):
        await sent(pool, body=chat("other"))
    with pytest.raises(MalformedRequestError):
        await sent(pool, body=b"{")
    with pytest.raises(NoReadyEndpointError):
        await sent(runtime(policy=PickPolicy(priorities=SHADOW)))


async def test_a_body_that_only_a_quota_has_to_read_passes_unread() -> None:
    coded = facts(headers={"content-encoding": "br"})
    priorities = replace(SHADOW, quotas=(Quota(requests_per_minute=1),))
    exchange, _ = await sent(runtime(pod("a"), policy=PickPolicy(priorities=priorities)), coded, b"\x1b")
    assert exchange.endpoints[0] == "a"
    with pytest.raises(UnsupportedEncodingError):
        await sent(runtime(pod("a"), policy=PickPolicy(priorities=replace(priorities, shadow=False))), coded, b"\x1b")


async def test_an_explanation_says_what_would_have_been_done_and_that_the_request_goes() -> None:
    priorities = replace(SHADOW, classes={**DEFAULT_CLASSES, "sheddable": HASTY})
    pool = runtime(full("a"), policy=PickPolicy(priorities=priorities))
    picked, preview = await explain(SHEDDABLE, chat(), pool)
    assert preview.verdict == "go"
    assert [each.code for each in picked.withheld] == ["refuse:shed"]
    assert counted(pool) == {}


async def test_a_decision_shows_what_was_withheld_on_pages_and_in_the_access_log() -> None:
    pool = runtime(full("a"), policy=PickPolicy(priorities=SHADOW))
    _, record = await sent(pool)
    shown = decision_state(record, policy=pool.view.policy)
    (line,) = shown.shadow
    assert line == ShadowState(rule="admission", action="wait", reason="full", words=record.shadow[0].words)
    text = io.StringIO()
    render(shown, console=Console(file=text, width=200))
    assert "in shadow: would wait (admission, full): no pod has room" in text.getvalue()
    decided = Decided(arrival=Arrival(), outcome_kind=RequestOutcome.ROUTED, record=record, endpoint="a")
    assert record_of_decision(decided, NameHashes(b"key")).shadow == ("wait:full",)


async def test_steps_in_shadow_are_shown_as_what_would_be_in_force() -> None:
    step = STEPS["cap"]
    pool = runtime(pod("a"), policy=with_steps(step))
    steps = {(("standard", "cap-output"), 1.0)}
    pool.overload.show(queued=dict, steps_in_force=lambda: steps, estimate_errors=tuple, answer_length_errors=tuple)
    for is_shadow in (True, False):
        pool.overload.is_shadow = is_shadow
        shown = counted(pool, "kvmesh_shadow_degradation_step"), counted(pool, "kvmesh_degradation_step")
        expected = {("standard", "cap-output"): 1.0}
        assert shown == ((expected, {}) if is_shadow else ({}, expected))

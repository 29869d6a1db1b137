"""What a pick does with a promise: who is in the sample and for how many, and what is missed without an answer."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.answers.promise import TokenTargets
from extproc.errors import (
    InternalPickError,
    MalformedRequestError,
    NoReadyEndpointError,
    PickError,
    PromptLimitError,
    QuotaExceededError,
    RequestShedError,
)
from extproc.pick import pick, prepare
from extproc.pods.endpoint import Reachability
from extproc.policy.priority import FAIRNESS_HEADER, PriorityClass, Quota
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.pools.booked_exchange import BookedExchange
from extproc.shared.shared_quotas import Quotas
from kvmesh.redis.link import RedisLink
from tests.unit.extproc_pick.pick_fakes import FakePrompts, ShownPool, chat, facts, pod, runtime

TARGETS = TokenTargets(ttft_seconds=2.0, inter_token_seconds=0.1)
PRIORITIES = PriorityPolicy(classes={"standard": PriorityClass(ttft_seconds=2.0)})
STREAM = chat(stream=True)


@dataclass
class Desk:
    """A pool with one pod, whose requests take `seconds` to be looked up."""

    share: float = 1.0
    seconds: float = 0.0
    ready: bool = True
    now: float = 100.0
    pool: ShownPool = field(init=False)

    def __post_init__(self) -> None:
        desk = self

        class SlowPrompts(FakePrompts):
            async def prompts(self, *asked: Any, **what: Any) -> Any:
                desk.now += desk.seconds
                return await super().prompts(*asked, **what)

        reachability = Reachability.READY if self.ready else Reachability.UNREACHABLE
        self.pool = runtime(
            pod("a", reachability=reachability),
            policy=PickPolicy(priorities=PRIORITIES),
            prompts=SlowPrompts(),
            clock=lambda: self.now,
        )
        self.pool.sample_share = self.share

    async def pick(self, body: bytes = STREAM, **request: Any) -> BookedExchange:
        return await pick(facts(**request), body, self.pool)

    def counted(self, *labels: str, name: str = "kvmesh_slo_requests_total") -> dict[tuple[str, ...], float]:
        page = text_string_to_metric_families(self.pool.telemetry.registry.text().decode())
        samples = (sample for family in page for sample in family.samples if sample.name == name and sample.value)
        return {tuple(sample.labels[label] for label in labels): sample.value for sample in samples}

    def answer(self, exchange: BookedExchange, status: int, *, from_pod: bool = True) -> None:
        exchange.responded(status=status, served_by="a" if from_pod else None, from_pod=from_pod)
        exchange.finish()


async def test_an_answer_of_the_sample_is_judged_by_its_class_from_when_the_request_was_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.pools.pool_runtime.time.time", lambda: 5000.0)
    desk = Desk(seconds=0.5)
    answer = (await desk.pick()).plan.promise
    assert answer is not None
    assert (answer.promise.class_name, answer.promise.tenant, answer.promise.model) == ("standard", "none", "tiny")
    assert (answer.promise.targets, answer.asked, answer.endpoint, answer.weight) == (TARGETS, None, "a", 1.0)
    assert answer.arrived_at == 4999.5


async def test_one_of_a_small_sample_stands_for_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("extproc.pools.pool_runtime.random.random", lambda: 0.019)
    answer = (await Desk(share=0.02).pick()).plan.promise
    assert answer is not None
    assert answer.weight == pytest.approx(50)


@pytest.mark.parametrize(
    ("quota", "weight"),
    [
        (Quota(tenant="acme", generated_tokens_per_minute=600.0), 1.0),
        (Quota(tenant="acme", requests_per_minute=600.0), None),
    ],
)
async def test_an_answer_that_a_quota_has_read_anyway_stands_for_itself(
    quota: Quota, weight: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("extproc.pools.pool_runtime.random.random", lambda: 0.5)
    desk = Desk(share=0.02)
    quotas = Quotas(RedisLink("redis://127.0.0.1:1/0"), hash_seed="", quotas=(quota,))
    desk.pool.quotas = desk.pool.books.quotas = quotas
    answer = (await desk.pick(headers={FAIRNESS_HEADER: "acme"})).plan.promise
    assert (answer.weight if answer is not None else None) == weight


async def test_a_request_outside_of_the_sample_is_counted_and_its_answer_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("extproc.pools.pool_runtime.random.random", lambda: 0.5)
    desk = Desk(share=0.02)
    assert not (await desk.pick()).plan.wants_body
    assert desk.counted("class", name="kvmesh_slo_promised_requests_total") == {("standard",): 1}


async def test_without_a_sample_nothing_is_judged_not_even_what_is_surely_missed() -> None:
    desk = Desk(share=0.0, seconds=3.0)
    desk.answer(await desk.pick(), 500)
    assert desk.counted("outcome") == {}
    assert desk.counted("class", name="kvmesh_slo_promised_requests_total") == {}


async def test_a_stream_that_waited_longer_than_its_target_is_late_before_it_is_sent() -> None:
    desk = Desk(seconds=2.1)
    exchange = await desk.pick()
    assert exchange.plan.promise is None
    desk.answer(exchange, 500)  # no second miss
    assert desk.counted("role", "target", "outcome") == {("both", "ttft", "late"): 1, ("both", "all", "late"): 1}


async def test_an_answer_at_once_may_take_longer_than_its_first_token() -> None:
    assert (await Desk(seconds=2.1).pick(chat())).plan.promise is not None


async def test_only_requests_for_text_are_promised_anything() -> None:
    desk = Desk()
    exchange = await desk.pick(b'{"model":"tiny","input":"x"}', path="/v1/embeddings")
    assert exchange.plan.promise is None
    assert desk.counted("class", name="kvmesh_slo_promised_requests_total") == {}


async def test_a_header_tightens_what_the_answer_is_judged_by_besides() -> None:
    answer = (await Desk().pick(headers={"x-llm-d-slo-ttft-ms": "300"})).plan.promise
    assert answer is not None
    assert answer.promise.targets == TARGETS
    assert answer.asked == TokenTargets(ttft_seconds=0.3, inter_token_seconds=0.1)


async def test_a_header_that_does_not_count_is_counted_and_told() -> None:
    desk = Desk()
    exchange = await desk.pick(headers={"x-slo-ttft-ms": "9999", "x-slo-tpot-ms": "soon"})
    assert exchange.plan.promise is not None
    assert exchange.plan.promise.asked is None
    assert desk.counted("why", name="kvmesh_ignored_slo_headers_total") == {("looser",): 1, ("unreadable",): 1}


@pytest.mark.parametrize(("status", "outcomes"), [(500, {"failed"}), (503, {"failed"}), (504, {"failed"})])
async def test_a_pod_that_fails_has_missed_every_target(status: int, outcomes: set[str]) -> None:
    desk = Desk(share=0.5)
    desk.answer(await desk.pick(), status, from_pod=status != 504)
    assert desk.counted("target", "outcome") == {("all", each): 1 for each in outcomes}


@pytest.mark.parametrize("status", [200, 400, 404, 501])
async def test_other_answers_are_no_failure(status: int) -> None:
    desk = Desk()
    desk.answer(await desk.pick(), status)
    assert desk.counted("outcome") == {}


async def test_a_client_that_leaves_before_the_answer_has_missed_nothing_until_its_time_was_up() -> None:
    desk = Desk()
    (await desk.pick()).finish()
    assert desk.counted("outcome") == {}
    exchange = await desk.pick()
    desk.now += 2.1
    exchange.finish()
    assert desk.counted("target", "outcome") == {("ttft", "late"): 1, ("all", "late"): 1}


async def test_a_request_that_is_refused_for_want_of_a_pod_is_missed() -> None:
    desk = Desk(share=0.02, ready=False)
    with pytest.raises(NoReadyEndpointError):
        await desk.pick()
    assert desk.counted("role", "target", "outcome") == {("none", "all", "refused"): 1}


@pytest.mark.parametrize(
    ("error", "is_missed"),
    [
        (RequestShedError("no room", http_status=429), True),
        (PromptLimitError("too long under load"), True),
        (InternalPickError("a defect"), True),
        (QuotaExceededError("used up"), False),  # its tenant's own
        (MalformedRequestError("not JSON"), False),
    ],
    ids=["shed", "prompt-limited", "defect", "quota", "malformed"],
)
async def test_refusals_break_a_promise_unless_they_are_the_clients_own_doing(
    error: PickError, is_missed: bool
) -> None:
    desk = Desk()
    draft = desk.pool.begin(facts())
    await prepare(STREAM, draft, desk.pool)
    desk.pool.without_decision(draft, error)
    assert desk.counted("target", "outcome") == ({("all", "refused"): 1} if is_missed else {})


@pytest.mark.parametrize(("waited", "late"), [(2.0, False), (2.1, True)])
async def test_a_client_that_leaves_before_its_request_is_sent_has_waited_too_long_or_not(
    waited: float, late: bool
) -> None:
    desk = Desk()
    draft = desk.pool.begin(facts())
    await prepare(STREAM, draft, desk.pool)
    desk.now += waited
    desk.pool.without_decision(draft, asyncio.CancelledError())
    assert desk.counted("role", "target", "outcome") == (
        {("none", "ttft", "late"): 1, ("none", "all", "late"): 1} if late else {}
    )
    promised = desk.counted("class", name="kvmesh_slo_promised_requests_total")
    assert promised == ({("standard",): 1} if late else {})


async def test_a_request_that_is_wrong_is_not() -> None:
    desk = Desk()
    with pytest.raises(PickError):
        await desk.pick(b"{", path="/v1/chat/completions")
    assert desk.counted("outcome") == {}

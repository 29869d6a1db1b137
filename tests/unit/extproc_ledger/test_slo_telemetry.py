"""Promises in the metrics: kept or missed by whom, weighed by the sample, and what the pods have measured beside it."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.answers.attainment import Attainment
from extproc.answers.judgement import NOT_MEASURED, Judgement, Outcome
from extproc.answers.promise import AnswerPromise, IgnoredTarget, OpenPromise, Promise, TokenTargets
from extproc.ledger.endpoint_telemetry import LatencyTelemetry
from extproc.ledger.facts import Arrival, Ended, Judged
from extproc.ledger.feature_telemetry import TenantTelemetry
from extproc.ledger.slo_telemetry import MOST_MODELS, SloTelemetry
from extproc.policy.priority import PriorityClass, Quota
from extproc.policy.request_class import RequestClass
from kvmesh.metrics.registry import Registry
from tests.unit.extproc_ledger.told_facts import routed

CHAT = PriorityClass(ttft_seconds=0.75, inter_token_seconds=0.025)
MET, LATE = Judgement(ttft=True, inter_token=True, whole=True), Judgement(ttft=False, inter_token=True, whole=False)
ASKED = TokenTargets(ttft_seconds=0.1, inter_token_seconds=0.025)


def judged(
    promise: Promise,
    judgement: Judgement,
    asked: Judgement | None = None,
    *,
    weight: float = 1.0,
    has_come: bool = True,
) -> Judged:
    answer = AnswerPromise(promise=promise, arrived_at=0.0, endpoint="a:1", weight=weight)
    return Judged(
        answer=answer,
        judgement=judgement,
        asked=asked,
        served_by="a:1",
        has_come=has_come,
        measured=NOT_MEASURED,
    )


class World:
    def __init__(self) -> None:
        self.registry = Registry()
        self.latencies = LatencyTelemetry(self.registry)
        self.tenants = TenantTelemetry(self.registry)
        self.tenants.know((Quota(tenant="acme", requests_per_minute=1.0),))
        self.latencies.role_of = lambda endpoint: {"a:1": "decode"}.get(endpoint, "both")
        self.now = 0.0
        self.slo = SloTelemetry(self.registry, tenants=self.tenants, latencies=self.latencies, clock=lambda: self.now)
        self.slo.know({"chat": CHAT})

    def promised(self, tenant: str = "", model: str = "m") -> Promise:
        request_class = RequestClass(class_name="chat", priority_class=CHAT, tenant=tenant)
        promise = self.slo.promise_of(request_class, model)
        self.slo.promised(promise)
        return promise

    def judged(
        self, promise: Promise, judgement: Judgement, asked: Judgement | None = None, weight: float = 1.0
    ) -> None:
        self.slo.judged(judged(promise, judgement, asked, weight=weight))

    def shown(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of a metric by these labels."""
        page = text_string_to_metric_families(self.registry.text().decode())
        found: dict[tuple[str, ...], float] = {}
        for sample in (sample for family in page for sample in family.samples if sample.name == name):
            key = tuple(sample.labels[label] for label in labels)
            found[key] = found.get(key, 0.0) + sample.value
        return found

    def requests(self, *labels: str) -> Any:
        return self.shown("kvmesh_slo_requests_total", *labels)


def test_an_answer_of_the_sample_counts_for_all_that_it_stands_for() -> None:
    world = World()
    world.judged(world.promised(), LATE, weight=50.0)
    assert world.requests("class", "tenant", "model", "role", "target", "promise", "outcome") == {
        ("chat", "none", "m", "decode", "ttft", "class", "late"): 50,
        ("chat", "none", "m", "decode", "inter-token", "class", "met"): 50,
        ("chat", "none", "m", "decode", "all", "class", "late"): 50,
    }
    assert world.shown("kvmesh_slo_judged_requests_total", "class") == {("chat",): 1}
    assert world.shown("kvmesh_slo_promised_requests_total", "class") == {("chat",): 1}


def test_what_a_request_asks_for_itself_changes_no_figure_of_its_class() -> None:
    world = World()
    world.judged(world.promised(), MET, LATE)
    assert world.requests("target", "promise", "outcome") == {
        ("ttft", "class", "met"): 1,
        ("inter-token", "class", "met"): 1,
        ("all", "class", "met"): 1,
        ("ttft", "request", "late"): 1,
        ("inter-token", "request", "met"): 1,
        ("all", "request", "late"): 1,
    }
    assert world.shown("kvmesh_slo_judged_requests_total", "class") == {("chat",): 1}
    assert world.slo.attainment("chat") == Attainment(share=1.0, judged=1)


def test_refused_requests_are_missed_for_a_reason_of_their_own_and_counted_one_by_one() -> None:
    world = World()
    promise = OpenPromise(promise=world.promised(), asked=ASKED, arrived_at=0.0, is_stream=True)
    world.slo.missed(promise, Outcome.REFUSED)
    assert world.requests("role", "target", "promise", "outcome") == {
        ("none", "all", "class", "refused"): 1,
        ("none", "all", "request", "refused"): 1,
    }


def test_a_stream_that_is_too_late_before_its_first_token_has_missed_that_target() -> None:
    world = World()
    world.slo.missed(OpenPromise(promise=world.promised(), arrived_at=0.0, is_stream=True), Outcome.LATE, role="both")
    assert world.requests("role", "target", "outcome") == {("both", "ttft", "late"): 1, ("both", "all", "late"): 1}


def test_of_what_never_came_nothing_is_counted_until_an_answer_has_been_read() -> None:
    world = World()
    promise = world.promised()
    unseen = judged(promise, Judgement(ttft=False, whole=False), has_come=False)
    world.slo.judged(unseen)
    assert world.requests("outcome") == {}
    world.judged(promise, MET)
    world.slo.judged(unseen)
    assert world.requests("target", "outcome")["all", "late"] == 1


def test_tenants_are_named_where_the_policy_names_them() -> None:
    world = World()
    for tenant in ("acme", "", *(f"stranger-{number}" for number in range(5))):
        world.judged(world.promised(tenant), MET)
    assert world.requests("tenant", "target")["other", "all"] == 5
    assert {tenant for tenant, _ in world.requests("tenant", "target")} == {"acme", "none", "other"}


def test_models_with_series_of_their_own_are_bounded() -> None:
    world = World()
    for number in range(MOST_MODELS + 5):
        world.judged(world.promised(model=f"m{number}"), MET)
    found = world.requests("model", "target")
    assert found["other", "all"] == 5
    assert len({model for model, _ in found}) == MOST_MODELS + 1


def test_another_policy_judges_from_now_on() -> None:
    world = World()
    before = world.promised()
    world.slo.know({"chat": PriorityClass(ttft_seconds=9.0)})
    assert (before.targets.ttft_seconds, world.promised().targets.ttft_seconds) == (0.75, 9.0)
    assert world.shown("kvmesh_slo_objective_ratio", "class") == {("chat",): 0.99}


def test_the_attainment_of_a_class_is_that_of_the_last_minutes() -> None:
    world = World()
    world.judged(world.promised(), MET, weight=3.0)
    world.judged(world.promised(), LATE)
    assert world.slo.attainment("chat") == Attainment(share=0.75, judged=2)
    world.now = 1000.0
    assert world.slo.attainment("chat") is None


def test_what_pods_have_measured_is_shown_by_each_class_target_with_its_bounds() -> None:
    world = World()
    ttft = world.latencies.ttft.of("tiny", "both")
    for seconds in (0.3, 0.6, 0.9):
        ttft.observe(seconds)
    world.latencies.inter_token.of("tiny", "both").observe(0.02)
    labels = ("class", "model", "role", "target")
    assert world.shown("kvmesh_slo_pod_observations_total", *labels) == {
        ("chat", "tiny", "both", "ttft"): 3,
        ("chat", "tiny", "both", "inter-token"): 1,
    }
    within = world.shown("kvmesh_slo_pod_observations_within_total", "target", "bound")
    assert within["ttft", "least"] == within["ttft", "estimate"] == within["ttft", "most"] == 2  # 0.75 is a bound
    world.slo.know({"chat": PriorityClass(ttft_seconds=0.875, inter_token_seconds=0.025)})
    ttft.observe(0.9)
    within = world.shown("kvmesh_slo_pod_observations_within_total", "target", "bound")
    assert [within["ttft", bound] for bound in ("least", "estimate", "most")] == [2, 2.5, 3]


def test_ignored_headers_are_counted_by_why() -> None:
    world = World()
    world.slo.decided(routed("a", ignored_targets=(IgnoredTarget.LOOSER,)))
    assert world.shown("kvmesh_ignored_slo_headers_total", "why") == {("looser",): 1}


@pytest.mark.parametrize(
    ("status", "outcome"), [(0, "late"), (200, None), (404, None), (500, "failed"), (501, None), (503, "failed")]
)
def test_an_exchange_without_an_answer_has_missed_its_targets(status: int, outcome: str | None) -> None:
    world = World()
    promise = OpenPromise(promise=world.promised(), arrived_at=0.0, is_stream=True)
    world.slo.ended(Ended(arrival=Arrival(), endpoint="a", booked_on="a", status=status, at=9.0, promise=promise))
    outcomes = {key for (key,) in world.shown("kvmesh_slo_requests_total", "outcome")}
    assert outcomes == ({outcome} if outcome else set())

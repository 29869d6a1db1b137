"""What is counted of models, arms and tenants, and that no name that a client writes becomes a series."""

import asyncio
import time
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from extproc.admission.admission_queue import Outcome
from extproc.answers.realised import Comparison
from extproc.ledger.facts import Arrival, Ended
from extproc.ledger.feature_telemetry import MOST_TENANTS, OverloadTelemetry, TenantTelemetry
from extproc.ledger.picker_telemetry import ModelTelemetry, PickerTelemetry
from extproc.policy.priority import DEFAULT_CLASSES, Quota
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import ObservabilityPolicy, PickPolicy
from kvmesh.metrics.registry import Registry
from tests.unit.extproc_ledger import told_facts

COMPARISON = Comparison(
    model="base",
    arm="base-v2",
    endpoint="e",
    prompt_tokens=100,
    predicted_tokens=64,
    realised_tokens=48,
    error_tokens=-16,
    regret_tokens=0,
    prompt_error_tokens=0,
    requested="chat",
    generated_tokens=7,
    first_token_seconds=0.2,
)


def samples(registry: Registry, *, but: tuple[str, ...] = ("_bucket", "_created", "_sum")) -> dict[str, float]:
    """Return all series that are not 0 by what Prometheus calls them."""
    lines = [line for line in registry.text().decode().splitlines() if not line.startswith("#")]
    found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    return {name: value for name, value in found.items() if value and not name.partition("{")[0].endswith(but)}


def routed(models: ModelTelemetry, *, cached: int = 50, **changes: Any) -> None:
    values: dict[str, Any] = {"served": "base", "prompt": 100, "seconds_a_token": 0.001} | changes
    models.routed("chat", "base-v2", cached=cached, **values)


def test_saved_seconds_are_the_cached_tokens_at_the_endpoints_pace_and_money_is_theirs_by_the_hour() -> None:
    registry = Registry()
    models = ModelTelemetry(registry)
    routed(models)
    models.reconfigure(ObservabilityPolicy(pod_hour_price=3.6, currency="EUR"))
    routed(models, seconds_a_token=0.002)
    routed(models, cached=0)
    models.realised(COMPARISON, seconds_a_token=0.002)
    found = samples(registry)
    assert {name: round(value, 9) for name, value in found.items() if "saved" in name} == {
        'kvmesh_saved_prefill_seconds_total{model="base"}': 0.15,
        'kvmesh_saved_money_total{currency="EUR",model="base"}': 0.0001,
        'kvmesh_realised_saved_prefill_seconds_total{model="base"}': 0.096,
    }


def test_without_a_price_no_money_is_shown_and_what_was_counted_stays() -> None:
    registry = Registry()
    models = ModelTelemetry(registry)
    routed(models)
    assert not [name for name in samples(registry) if "money" in name]
    models.reconfigure(ObservabilityPolicy(pod_hour_price=3.6))
    routed(models)
    models.reconfigure(ObservabilityPolicy())
    routed(models)
    assert [name for name in samples(registry) if "money" in name] == [
        'kvmesh_saved_money_total{currency="USD",model="base"}'
    ]


def test_an_arm_has_its_requests_times_and_tokens() -> None:
    registry = Registry()
    models = ModelTelemetry(registry)
    routed(models, promised_seconds=0.3)
    models.ended("chat", "base-v2", seconds=2.0)
    models.realised(COMPARISON, seconds_a_token=0.0)
    assert samples(registry, but=("_created", "_bucket")) == {
        'kvmesh_model_prompt_tokens_total{arm="base-v2",model="chat"}': 100.0,
        'kvmesh_model_predicted_cached_tokens_total{arm="base-v2",model="chat"}': 50.0,
        'kvmesh_model_generated_tokens_total{arm="base-v2",model="chat"}': 7.0,
        'kvmesh_model_usages_total{arm="base-v2",model="chat"}': 1.0,
        'kvmesh_model_request_seconds_count{arm="base-v2",model="chat"}': 1.0,
        'kvmesh_model_request_seconds_sum{arm="base-v2",model="chat"}': 2.0,
        'kvmesh_model_first_token_seconds_count{arm="base-v2",model="chat"}': 1.0,
        'kvmesh_model_first_token_seconds_sum{arm="base-v2",model="chat"}': 0.2,
        'kvmesh_expected_ttft_seconds_count{model="base"}': 1.0,
        'kvmesh_expected_ttft_seconds_sum{model="base"}': 0.3,
        'kvmesh_saved_prefill_seconds_total{model="base"}': 0.05,
    }


def test_tenants_have_series_of_their_own_only_where_a_quota_names_them() -> None:
    registry = Registry()
    tenants = TenantTelemetry(registry)
    tenants.know((Quota(tenant="acme"), Quota(tenant="*"), Quota(tenant="other"), Quota(tenant="acme", model="m")))
    for tenant in ("acme", "", "acme-2", "other", "none", "x" * 1000):
        tenants.routed(tenant, "standard", prompt=10, cached=4)
        tenants.waited(tenant, seconds=0.5)
    tenants.shed("acme", "sheddable")
    assert samples(registry) == {
        'kvmesh_tenant_requests_total{class="standard",outcome="admitted",tenant="none"}': 1.0,
        'kvmesh_tenant_requests_total{class="standard",outcome="admitted",tenant="other"}': 4.0,
        'kvmesh_tenant_requests_total{class="standard",outcome="admitted",tenant="acme"}': 1.0,
        'kvmesh_tenant_requests_total{class="sheddable",outcome="shed",tenant="acme"}': 1.0,
        'kvmesh_tenant_prompt_tokens_total{tenant="none"}': 10.0,
        'kvmesh_tenant_prompt_tokens_total{tenant="other"}': 40.0,
        'kvmesh_tenant_prompt_tokens_total{tenant="acme"}': 10.0,
        'kvmesh_tenant_predicted_cached_tokens_total{tenant="none"}': 4.0,
        'kvmesh_tenant_predicted_cached_tokens_total{tenant="other"}': 16.0,
        'kvmesh_tenant_predicted_cached_tokens_total{tenant="acme"}': 4.0,
        'kvmesh_tenant_queue_seconds_total{tenant="none"}': 0.5,
        'kvmesh_tenant_queue_seconds_total{tenant="other"}': 2.0,
        'kvmesh_tenant_queue_seconds_total{tenant="acme"}': 0.5,
    }


def test_a_tenant_that_the_policy_names_no_more_keeps_what_it_had_and_counts_as_other() -> None:
    registry = Registry()
    tenants = TenantTelemetry(registry)
    tenants.know((Quota(tenant="acme"),))
    tenants.routed("acme", "standard", prompt=10, cached=0)
    tenants.know(())
    tenants.routed("acme", "standard", prompt=1, cached=0)
    assert samples(registry) == {
        'kvmesh_tenant_prompt_tokens_total{tenant="other"}': 1.0,
        'kvmesh_tenant_prompt_tokens_total{tenant="acme"}': 10.0,
        'kvmesh_tenant_requests_total{class="standard",outcome="admitted",tenant="acme"}': 1.0,
        'kvmesh_tenant_requests_total{class="standard",outcome="admitted",tenant="other"}': 1.0,
    }


def test_a_flood_of_names_adds_no_series_beyond_the_bounds() -> None:
    telemetry = PickerTelemetry()
    many = tuple(Quota(tenant=f"t{i}") for i in range(5 * MOST_TENANTS))
    telemetry.reconfigure(PickPolicy(priorities=PriorityPolicy(quotas=many)))
    overload = OverloadTelemetry(
        telemetry.registry, classes=DEFAULT_CLASSES, tenants=telemetry.tenants, queued=telemetry.queued
    )
    before = None
    for round_ in range(2):  # the second one finds all bounds reached
        for i in range(2000):
            name = f"name-{round_}-{i}"
            decided = told_facts.routed(
                "e",
                tokens=1,
                matched=1,
                arm=name,
                tenant=name,
                label=name,
                served=name,
                seconds_a_token=1.0,
                expected_ttft_seconds=0.1,
            )
            telemetry.decided(decided)
            overload.decided(decided)
            telemetry.ended(Ended(arrival=Arrival(), endpoint="e", booked_on="e", status=200))
            overload.shed("standard", reason="overloaded", tenant=name)
            overload.left_queue("standard", outcome=Outcome.DISPATCHED, seconds=1.0, tenant=name)
        text = asyncio.run(telemetry.page()).decode()
        lines = text.count("\n")
        assert before is None or lines == before
        before = lines
    assert before is not None
    assert before < 12_000
    assert "name-1-" not in text


@pytest.mark.parametrize("ready", [True, False])
def test_the_page_says_whether_the_process_is_ready_and_which_it_is(ready: bool) -> None:
    text = asyncio.run(PickerTelemetry().page(ready=ready)).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in families["kvmesh_ready"].samples] == [float(ready)]
    (build,) = (
        families["kvmesh_build_info"].samples if "kvmesh_build_info" in families else families["kvmesh_build"].samples
    )
    assert build.labels["process"] == "picker"
    assert families["process_cpu_seconds"].samples[0].value > 0
    assert abs(families["process_start_time_seconds"].samples[0].value - time.time()) < 86_400

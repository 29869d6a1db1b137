"""Several pools' metrics on one page, and endpoints that go."""

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from extproc.adapters.overload_telemetry import OverloadTelemetry
from extproc.adapters.pool_metrics import PoolsExposition
from extproc.adapters.telemetry import PickerTelemetry


def routed(telemetry: PickerTelemetry, endpoint: str) -> None:
    telemetry.routed(endpoint=endpoint, prompt_tokens=1, matched_tokens=0, degraded=())


def test_each_name_is_there_once_and_every_series_says_whose_it_is() -> None:
    one, other, own = PickerTelemetry(), PickerTelemetry(), CollectorRegistry()
    routed(one, "a")
    routed(other, "a")
    Counter("own", "Of no pool.", registry=own).inc()
    page = PoolsExposition()
    page.add("llm/one", one.registry)
    page.add("llm/other", other.registry)
    text = page.text(own=own).decode()
    lines = text.splitlines()
    names = [family.name for family in text_string_to_metric_families(text)]
    assert len(names) == len(set(names))
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert 'kvmesh_picks_total{pool="llm/one",endpoint="a"} 1.0' in lines
    assert 'kvmesh_picks_total{pool="llm/other",endpoint="a"} 1.0' in lines
    assert 'kvmesh_prompt_tokens_total{pool="llm/one"} 1.0' in lines
    assert "own_total 1.0" in lines
    assert all("pool=" in line for line in lines if line.startswith("kvmesh_"))


def test_an_endpoint_that_is_gone_leaves_no_series_and_may_come_back() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=("standard",))
    for endpoint in ("a", "b"):
        routed(telemetry, endpoint)
        telemetry.exchange_ended(endpoint=endpoint, status=200)
        telemetry.endpoint_failed(endpoint)
        telemetry.rerouted(picked=endpoint, served_by=endpoint)
        telemetry.finding(endpoint=endpoint, reason="never-matches", stands=True)
        overload.endpoint_full(endpoint)
    telemetry.forget("a")
    overload.forget("a")
    page = telemetry.exposition().decode()
    assert 'endpoint="a"' not in page
    assert page.count('endpoint="b"') > 6
    routed(telemetry, "a")
    assert 'kvmesh_picks_total{endpoint="a"} 1.0' in telemetry.exposition().decode()
    telemetry.forget("never seen")
    overload.forget("never seen")


def test_classes_that_a_policy_adds_are_counted() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=("standard",))
    overload.know(("gold",))
    overload.admitted("gold")
    assert 'kvmesh_admitted_requests_total{class="gold"} 1.0' in telemetry.exposition().decode()


def test_no_name_of_a_tenants_model_or_pool_breaks_the_page_of_all() -> None:
    registry = CollectorRegistry()
    strange = 'a\u2028b\x0cc\x85d"e\\f\ng'
    Counter("kvmesh_named", "By model.", ["model"], registry=registry).labels(strange).inc()
    page = PoolsExposition()
    page.add(strange, registry)
    text = page.text(own=CollectorRegistry()).decode()
    (family,) = text_string_to_metric_families(text)
    assert [sample.labels for sample in family.samples] == [{"pool": strange, "model": strange}]

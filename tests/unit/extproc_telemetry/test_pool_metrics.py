"""Several pools' metrics on one page, and endpoints that go."""

import asyncio
from itertools import count

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from extproc.policy.priority import DEFAULT_CLASSES, PriorityClass
from extproc.telemetry.metrics_text import SERIES_AT_ONCE, metric_lines
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from extproc.telemetry.pool_metrics import PoolsExposition


def routed(telemetry: PickerTelemetry, endpoint: str) -> None:
    telemetry.routed(endpoint=endpoint, prompt_tokens=1, matched_tokens=0, degraded=())


async def test_each_name_is_there_once_and_every_series_says_whose_it_is() -> None:
    one, other, own = PickerTelemetry(), PickerTelemetry(), CollectorRegistry()
    routed(one, "a")
    routed(other, "a")
    Counter("own", "Of no pool.", registry=own).inc()
    page = PoolsExposition()
    await page.add("llm/one", one.registry)
    await page.add("llm/other", other.registry)
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
    assert all("pool=" in line for line in lines if line.startswith("kvmesh_") and "build_info" not in line)


def test_an_endpoint_that_is_gone_leaves_no_series_and_may_come_back() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    for endpoint in ("a", "b"):
        routed(telemetry, endpoint)
        telemetry.exchange_ended(endpoint=endpoint, status=200)
        telemetry.endpoint_failed(endpoint)
        telemetry.rerouted(picked=endpoint, served_by=endpoint)
        telemetry.finding(endpoint=endpoint, reason="never-matches", stands=True)
        overload.endpoint_full(endpoint)
    telemetry.forget("a")
    overload.forget("a")
    page = asyncio.run(telemetry.page()).decode()
    assert 'endpoint="a"' not in page
    assert page.count('endpoint="b"') > 6
    routed(telemetry, "a")
    assert 'kvmesh_picks_total{endpoint="a"} 1.0' in asyncio.run(telemetry.page()).decode()
    telemetry.forget("never seen")
    overload.forget("never seen")


def test_classes_that_a_policy_adds_are_counted() -> None:
    telemetry = PickerTelemetry()
    overload = OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES)
    overload.know({"gold": PriorityClass()})
    overload.admitted("gold")
    assert 'kvmesh_admitted_requests_total{class="gold"} 1.0' in asyncio.run(telemetry.page()).decode()


async def test_no_name_of_a_tenants_model_or_pool_breaks_the_page_of_all() -> None:
    registry = CollectorRegistry()
    strange = 'a\u2028b\x0cc\x85d"e\\f\ng'
    Counter("kvmesh_named", "By model.", ["model"], registry=registry).labels(strange).inc()
    page = PoolsExposition()
    await page.add(strange, registry)
    text = page.text(own=CollectorRegistry()).decode()
    (family,) = [family for family in text_string_to_metric_families(text) if family.name == "kvmesh_named"]
    assert [sample.labels for sample in family.samples] == [{"pool": strange, "model": strange}]


async def test_the_page_says_what_the_librarys_own_says_but_for_when_series_began() -> None:
    telemetry = PickerTelemetry()
    OverloadTelemetry(telemetry.registry, classes=DEFAULT_CLASSES).admitted("standard")
    for name in ("a", 'b"\\\n'):
        telemetry.routed(endpoint=name, prompt_tokens=1, matched_tokens=1, degraded=("late",), model="m", arm=name)
        telemetry.exchange_ended(endpoint=name, status=200, model="m", arm=name, seconds=0.3)

    def series(text: str) -> dict[str, set[str]]:
        families = text_string_to_metric_families(text)
        return {
            f"{family.name} {family.type} {family.documentation}": {str(sample) for sample in family.samples}
            for family in families
            if not family.name.endswith("_created")
        }

    wanted = series(generate_latest(telemetry.registry).decode())
    page = (await telemetry.page()).decode()
    shown = series(page)
    assert {name: shown.get(name) for name in wanted} == wanted
    assert page.count("# TYPE kvmesh_picks_total counter") == 1


async def test_a_family_with_many_endpoints_is_written_in_turns_of_the_loop() -> None:
    telemetry = PickerTelemetry()
    for i in range(1000):
        routed(telemetry, f"10.0.0.{i}:8000")
    turns, seconds = 0, count()

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    pieces = [
        lines.count(b"\n")
        async for comment, lines in metric_lines(telemetry.registry, clock=lambda: float(next(seconds)))
        if b"kvmesh_picks_total" in comment
    ]
    turning.cancel()
    assert pieces == [SERIES_AT_ONCE] * (1000 // SERIES_AT_ONCE)
    assert turns > len(pieces)

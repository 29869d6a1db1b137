"""The OpenMetrics form of a page, read by Prometheus' own parser of it, and who gets which form."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text_format

from kvmesh.metrics.exposition import Form, form_for
from kvmesh.metrics.metric import counter, gauge, histogram
from kvmesh.metrics.process_metrics import show_process
from kvmesh.metrics.registry import MetricsPage, Registry

COUNTED = counter("kvmesh_things_total", 'Things, by name\nand "kind" \\.', "name", "kind")
OBSERVED = histogram("kvmesh_wait_seconds", "A wait.", "name", bounds=(0.1, 0.5, 2.0))
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,/;q=0.1"
)
PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.7,*/*;q=0.1"
STRANGE = 'a\x0cc\x85d"e\\f\ng,}{='


def read(registry: Registry, *, created: bool = False) -> dict[str, Any]:
    page = registry.text(created=created, form=Form.OPENMETRICS) + Form.OPENMETRICS.end
    return {family.name: family for family in openmetrics(page.decode())}  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("accept", "form"),
    [
        (PROMETHEUS_3, Form.OPENMETRICS),
        (PROMETHEUS_2, Form.OPENMETRICS),
        ("application/openmetrics-text; version=1.0.0", Form.OPENMETRICS),
        ('Application/OpenMetrics-Text; Version="1.0.0"', Form.OPENMETRICS),
        ("application/openmetrics-text", Form.OPENMETRICS),
        ("application/openmetrics-text;q=0.5, text/plain;q=0.9", Form.TEXT),
        ("application/openmetrics-text;q=0", Form.TEXT),
        ("application/openmetrics-text;q=much", Form.TEXT),
        ("application/openmetrics-text; version=2.0.0", Form.TEXT),
        ("text/plain; version=0.0.4", Form.TEXT),
        ("*/*", Form.TEXT),
        ("", Form.TEXT),
        (",;=;q=,", Form.TEXT),
    ],
)
def test_openmetrics_is_for_those_that_ask_for_it(accept: str, form: Form) -> None:
    assert form_for(accept) is form


@given(st.text())
def test_no_accept_header_is_too_strange(accept: str) -> None:
    assert form_for(accept) in Form


def test_a_counters_family_has_no_total_and_its_samples_have_it() -> None:
    registry = Registry()
    registry.values(COUNTED).of(STRANGE, "b").value = 2
    [family] = read(registry).values()
    assert (family.name, family.type, family.documentation) == ("kvmesh_things", "counter", COUNTED.text)
    assert [(each.name, each.labels, each.value) for each in family.samples] == [
        ("kvmesh_things_total", {"name": STRANGE, "kind": "b"}, 2.0)
    ]


def test_a_bucket_has_the_trace_of_the_last_traced_request_that_fell_into_it() -> None:
    registry = Registry()
    series = registry.histograms(OBSERVED).of("a")
    series.observe(0.05)
    series.observe(0.3, "0af7651916cd43dd8448eb211c80319c")
    series.observe(0.4, "1af7651916cd43dd8448eb211c80319c")
    series.observe(0.45)
    series.observe(9.0, "2af7651916cd43dd8448eb211c80319c")
    samples = {each.labels.get("le"): each for each in read(registry)["kvmesh_wait_seconds"].samples}
    assert {le: each.exemplar and (each.exemplar.labels, each.exemplar.value) for le, each in samples.items()} == {
        "0.1": None,
        "0.5": ({"trace_id": "1af7651916cd43dd8448eb211c80319c"}, 0.4),
        "2.0": None,
        "+Inf": ({"trace_id": "2af7651916cd43dd8448eb211c80319c"}, 9.0),
        None: None,
    }
    assert float(samples["0.5"].exemplar.timestamp) >= series.created_at - 1
    assert b"trace_id" not in registry.text()  # the text format has no place for it
    assert len(list(text_format(registry.text().decode()))) == 1


def test_times_of_creation_are_part_of_their_metric() -> None:
    registry = Registry()
    registry.histograms(OBSERVED).of("a").observe(0.3)
    counts = registry.values(COUNTED)
    counts.of("a", "x").value = 1
    counts.of("b", "x").value = 2
    registry.values(gauge("kvmesh_level", "A level.")).of().value = 1
    families = read(registry, created=True)
    assert set(families) == {"kvmesh_things", "kvmesh_wait_seconds", "kvmesh_level"}
    names = [each.name for each in families["kvmesh_things"].samples]
    assert names == ["kvmesh_things_total", "kvmesh_things_created"] * 2
    assert families["kvmesh_wait_seconds"].samples[-1].name == "kvmesh_wait_seconds_created"


def test_what_may_be_negative_has_buckets_alone() -> None:
    registry = Registry()
    errors = histogram("kvmesh_error_tokens", "An error.", bounds=(-1.0, 0.0, 1.0))
    registry.histograms(errors).of().observe(-5.0, "0af7651916cd43dd8448eb211c80319c")
    [family] = read(registry).values()
    assert [(each.name, each.labels["le"]) for each in family.samples] == [
        ("kvmesh_error_tokens_bucket", le) for le in ("-1.0", "0.0", "1.0", "+Inf")
    ]
    assert b"kvmesh_error_tokens_count 1.0\n" in registry.text()
    assert b"kvmesh_error_tokens_sum" not in registry.text()


async def test_the_two_forms_show_the_same_series() -> None:
    registry = Registry()
    registry.values(COUNTED).of("a", "x").value = 1
    registry.histograms(OBSERVED).of("a").observe(0.3, "0af7651916cd43dd8448eb211c80319c")
    show_process(registry, process="picker")
    pages = []
    for form in Form:
        page = MetricsPage(form)
        await page.add(registry, pool="llm/a")
        pages.append(page.text().decode() + form.end.decode())
    text, other = pages
    shown = [
        {re.sub(r" [^ ]+$", "", re.sub(r" # .*", "", line)) for line in page.splitlines() if not line.startswith("#")}
        for page in (text, other)
    ]
    assert shown[0] == shown[1]
    assert other.endswith("\n# EOF\n")
    assert "# EOF" not in text
    assert list(openmetrics(other))  # type: ignore[no-untyped-call]

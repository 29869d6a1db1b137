"""What a registry shows is what Prometheus' own library would show, and its parser reads it."""

import asyncio
import re
from itertools import count
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvmesh.metrics.metric import counter, gauge, histogram
from kvmesh.metrics.registry import LINES_AT_ONCE, MetricsPage, Registry

COUNTED = counter("kvmesh_things_total", 'Things, by name\nand "kind" \\.', "name", "kind")
GAUGED = gauge("kvmesh_level", "A level.")
OBSERVED = histogram("kvmesh_wait_seconds", "A wait.", "name", bounds=(0.1, 0.5, 2.0))
STRANGE = 'a\u2028b\x0cc\x85d"e\\f\ng,}{='
NAMES = st.sampled_from(["a", "b", STRANGE, ""])
NUMBERS = st.floats(0, 1e15) | st.sampled_from([0.1, 0.5, 2.0, 1e7, 1.0, 1e16, 1e-7])


def families(text: bytes) -> dict[str, tuple[Any, ...]]:
    """Return name -> type, help, samples but for the values of `_created`."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        samples = {
            (sample.name, *sorted(sample.labels.items())): 0 if sample.name.endswith("_created") else sample.value
            for sample in family.samples
        }
        found[family.name] = (family.type, family.documentation, samples)
    return found


@given(
    counted=st.lists(st.tuples(NAMES, NAMES, NUMBERS), max_size=10),
    level=st.floats(allow_nan=False),
    lowest=st.sampled_from([-1.0, 0.0, 0.1]),
    observed=st.lists(st.tuples(NAMES, NUMBERS), max_size=10),
)
def test_a_page_says_what_the_library_would_say(
    counted: list[tuple[str, str, float]], level: float, lowest: float, observed: list[tuple[str, float]]
) -> None:
    ours, theirs = Registry(), prometheus_client.CollectorRegistry()
    wait_seconds = histogram("kvmesh_wait_seconds", "A wait.", "name", bounds=(lowest, 0.5, 2.0, 4096.0))
    things, wait = ours.values(COUNTED), ours.histograms(wait_seconds)
    their_things = prometheus_client.Counter("kvmesh_things", COUNTED.text, COUNTED.labels, registry=theirs)
    their_wait = prometheus_client.Histogram(
        wait_seconds.name, wait_seconds.text, wait_seconds.labels, buckets=wait_seconds.bounds, registry=theirs
    )
    for name, kind, number in counted:
        things.of(name, kind).value += number
        their_things.labels(name, kind).inc(number)
    for name, number in observed:
        wait.of(name).observe(number)
        their_wait.labels(name).observe(number)
    ours.values(GAUGED).of().value = level
    prometheus_client.Gauge(GAUGED.name, GAUGED.text, registry=theirs).set(level)
    assert families(ours.text(created=True)) == families(prometheus_client.generate_latest(theirs))
    assert not re.search(rb"^kvmesh_\w*_created", ours.text(), re.MULTILINE)


@pytest.mark.parametrize(
    ("number", "shown"), [(float("nan"), b"NaN"), (float("inf"), b"+Inf"), (float("-inf"), b"-Inf"), (True, b"1.0")]
)
def test_every_number_is_written_as_prometheus_reads_it(number: float, shown: bytes) -> None:
    registry = Registry()
    registry.values(GAUGED).of().value = number
    assert registry.text().endswith(b"kvmesh_level %s\n" % shown)


def test_a_metric_without_series_is_shown_by_its_name_and_one_without_labels_from_the_start() -> None:
    registry = Registry()
    registry.values(COUNTED)
    registry.values(GAUGED).of()
    assert b"# TYPE kvmesh_things_total counter\n# HELP kvmesh_level A level.\n" in registry.text()
    assert registry.text().endswith(b"kvmesh_level 0.0\n")


def test_what_is_read_is_read_at_each_page() -> None:
    registry, numbers = Registry(), count()
    registry.read(lambda: [(GAUGED, [((), next(numbers))]), (COUNTED, [(("a", "b"), 7)])])
    assert b"kvmesh_level 0.0\n" in registry.text()
    text = registry.text(created=True)
    assert b'kvmesh_level 1.0\n# HELP kvmesh_things_total Things, by name\\nand "kind" \\\\.\n' in text
    assert text.endswith(b'kvmesh_things_total{kind="b",name="a"} 7.0\n')


def test_series_can_be_dropped_one_by_one_and_by_a_label() -> None:
    registry = Registry()
    things = registry.values(COUNTED)
    for name, kind in (("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")):
        things.of(name, kind)
    things.remove("c", "x")
    things.remove("never", "seen")
    level = registry.values(GAUGED)
    level.of()
    registry.drop("name", {"a", "never seen"})
    assert (list(things.series), list(level.series)) == ([("b", "x")], [()])


def test_a_metric_is_in_a_registry_once_and_has_all_of_its_labels() -> None:
    registry = Registry()
    things = registry.values(COUNTED)
    with pytest.raises(ValueError, match="already"):
        registry.values(COUNTED)
    with pytest.raises(ValueError, match="shorter"):
        things.of("a")


async def test_a_page_of_several_registries_has_each_name_once_and_says_whose_each_series_is() -> None:
    page = MetricsPage()
    for pool in ("llm/one", STRANGE):
        registry = Registry()
        registry.values(COUNTED).of(STRANGE, "k").value = 1
        registry.values(GAUGED).of()
        registry.histograms(OBSERVED).of("a").observe(0.3)
        await page.add(registry, pool=pool)
    text = page.text()
    assert text.count(b"# TYPE") == 3
    shown = families(text)
    assert set(shown["kvmesh_things"][2]) == {
        ("kvmesh_things_total", ("kind", "k"), ("name", STRANGE), ("pool", pool)) for pool in ("llm/one", STRANGE)
    }
    assert b'kvmesh_level{pool="llm/one"} 0.0\n' in text
    assert b'kvmesh_wait_seconds_bucket{pool="llm/one",name="a",le="0.5"} 1.0\n' in text


async def test_a_family_with_many_series_is_written_in_turns_of_the_loop() -> None:
    registry, seconds, turns = Registry(), count(), 0
    things = registry.values(COUNTED)
    for i in range(1000):
        things.of(str(i), "k")

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    page = MetricsPage(clock=lambda: float(next(seconds)))
    await page.add(registry)
    turning.cancel()
    assert [lines.count(b"\n") for _, lines in registry.pieces()] == [LINES_AT_ONCE] * (1000 // LINES_AT_ONCE)
    assert turns >= 1000 // LINES_AT_ONCE

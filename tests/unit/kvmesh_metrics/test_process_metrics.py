"""A process shows of itself what Prometheus' own library would show."""

import pytest
from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvmesh import __version__
from kvmesh.metrics.process_metrics import show_process
from kvmesh.metrics.registry import Registry


def shown(text: bytes) -> dict[str, tuple[str, str, list[tuple[dict[str, str], float]]]]:
    return {
        family.name: (family.type, family.documentation, [(each.labels, each.value) for each in family.samples])
        for family in text_string_to_metric_families(text.decode())
    }


def test_the_process_is_shown_as_by_the_library() -> None:
    theirs = CollectorRegistry()
    ProcessCollector(registry=theirs)
    GCCollector(registry=theirs)
    registry = Registry()
    show_process(registry, process="picker")
    ours, expected = shown(registry.text()), shown(generate_latest(theirs))
    (build,) = ours.pop("kvmesh_build_info")[2]
    assert (build[0]["process"], build[0]["version"], build[1]) == ("picker", __version__, 1.0)
    assert {name: family[:2] for name, family in ours.items()} == {
        name: family[:2] for name, family in expected.items()
    }
    for name, (_, _, samples) in ours.items():
        wanted = expected[name][2]
        assert [labels for labels, _ in samples] == [labels for labels, _ in wanted]
        close = [value for _, value in wanted]
        assert [value for _, value in samples] == pytest.approx(close, rel=0.3, abs=5000)

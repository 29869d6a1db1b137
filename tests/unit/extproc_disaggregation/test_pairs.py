"""Pairs of a prefill and a decode pod: which go together, and what links them."""

from extproc.disaggregation.prefill_plan import link_bytes_per_second, partners
from extproc.pods.endpoint import Candidate
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.disaggregation import Disaggregation, Link
from tests.unit.extproc_choosing.pick_candidates import candidate, load

ZONE, HOST, REVISION = "topology.kubernetes.io/zone", "kubernetes.io/hostname", "revision"


def names(found: list[Candidate]) -> list[str]:
    return [each.address for each in found]


def test_a_prefill_pod_of_another_revision_computes_nothing_for_it() -> None:
    policy = Disaggregation(same_labels=(REVISION,))
    labels = {"d": {REVISION: "2"}, "p1": {REVISION: "1"}, "p2": {REVISION: "2"}, "p3": {}}
    prefillers = [candidate(name) for name in ("p1", "p2", "p3")]
    assert names(list(partners("d", prefillers, labels, policy))) == ["p2"]
    assert names(list(partners("old", prefillers, labels, policy))) == ["p3"]  # neither says
    assert partners("d", prefillers, labels, Disaggregation()) is prefillers


def test_the_first_link_whose_label_both_have_alike_counts() -> None:
    policy = Disaggregation(
        links=(Link(label=HOST, bytes_per_second=300.0), Link(label=ZONE, bytes_per_second=50.0)),
        link_bytes_per_second=5.0,
    )
    labels = {
        "d": {HOST: "h1", ZONE: "a"},
        "same-host": {HOST: "h1", ZONE: "a"},
        "same-zone": {HOST: "h2", ZONE: "a"},
        "far": {HOST: "h3", ZONE: "b"},
    }
    links = LinkEstimates()

    def rate(prefill: str) -> float:
        return link_bytes_per_second(prefill, "d", labels, policy=policy, links=links)

    assert [rate(name) for name in ("same-host", "same-zone", "far", "unknown")] == [300.0, 50.0, 5.0, 5.0]
    links.report("d", load(fetched_bytes=1.0))
    links.report("d", load(fetched_bytes=101.0, fetched_tokens=9, fetch_seconds_sum=10.0, reported_at=1.0))
    assert [rate(name) for name in ("same-host", "far")] == [300.0, 10.0]  # what is declared of a pair stays

"""One pool's pages: what is shown of small pools."""

import time
from bisect import bisect_left
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from extproc.admission.degradation import StepInForce
from extproc.answers.attainment import Attainment
from extproc.answers.realised import DriftFinding
from extproc.choosing.endpoint_health import EndpointHealth
from extproc.errors import NoReadyEndpointError
from extproc.ledger import metrics
from extproc.pages.findings import Finding, Severity
from extproc.pages.picker_state import FindingState, MissingInput, ScaleState, StepState
from extproc.pages.pool_pages import PoolPages
from extproc.pods.endpoint import EndpointStatus, EndpointTrouble, Reachability, Role
from extproc.pods.latency_estimate import EstimateError
from extproc.policy.priority import DegradationStep, Quota, StepKind
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from extproc.pools.pool import Pool
from extproc.pools.pool_tokens import TEXT_ONLY, TokenFinding
from extproc.prompts.folder_checks import TokenState, TokenVerdict
from extproc.scaling.seen import Signal
from kvmesh.blocks.findings import Finding as IndexFinding
from kvmesh.blocks.source import IndexStatus, SourceState, SourceStatus
from kvmesh.metrics.registry import Histogram
from tests.unit.extproc_pages.decision_records import decision, record

POLICY = PickPolicy(
    roles={"a:1": Role.PREFILL},
    cordoned=frozenset({"b:1"}),
    priorities=PriorityPolicy(quotas=(Quota(tenant="acme", requests_per_minute=1.0),)),
)
SOURCES = (
    SourceStatus(
        endpoint="a:1", dp_rank=0, tier="GPU", slot=1, epoch=1, state=SourceState.LIVE, reason="", last_seq=5,
        last_batch_at=9.0, block_size=16, cached_blocks=10, owner="i-1", applied_at=9.5, events=6,
    ),
    SourceStatus(
        endpoint="a:1", dp_rank=1, tier="CPU", slot=2, epoch=1, state=SourceState.DEGRADED, reason="gap", last_seq=5,
        last_batch_at=9.0, block_size=32, cached_blocks=3,
    ),
)  # fmt: skip
INDEX = IndexStatus(sources=SOURCES, indexer_alive=True, unreadable=("slot 9: broken",))
KEPT = Attainment(share=0.975, judged=40)
STATUSES = [
    EndpointStatus(address="a:1", reachability=Reachability.READY, load=None),
    EndpointStatus(address="b:1", reachability=Reachability.UNREACHABLE, load=None),
]


TROUBLES: dict[str, EndpointTrouble] = {}


def pages(*, recent: Any = (), steps: Any = (), wrong: Any = None, untokenized: Any = None) -> PoolPages:
    """A pool of two pods; `wrong`, `untokenized`: model -> the finding about its predictions, its tokens."""
    books = SimpleNamespace(
        health=EndpointHealth(POLICY.health),
        bookings=SimpleNamespace(by_endpoint=lambda: {"a:1": 2}, tokens_per_second=8000.0),
        estimates=SimpleNamespace(
            errors=lambda: {"a:1": EstimateError(mean_seconds=0.0123, bias_seconds=0.0, samples=3)}
        ),
        picks={"a:1": 3, "b:1": 1},
        shared=None,
        realised_watch=SimpleNamespace(findings=wrong or {}),
    )
    pool = SimpleNamespace(
        config=SimpleNamespace(policy=POLICY),
        endpoints=SimpleNamespace(known=lambda now: STATUSES, troubles=lambda: TROUBLES),
        books=books,
        degradation=SimpleNamespace(in_force=lambda now: steps),
        first_pod=SimpleNamespace(waiting={"critical": 3}),
        runtime=SimpleNamespace(admission=SimpleNamespace(waiting={"critical": 4})),
        tokens=SimpleNamespace(
            watch=SimpleNamespace(sources={"tiny": "text"}),
            reporter=SimpleNamespace(findings=untokenized or {}),
            checks=SimpleNamespace(states={"tiny": TokenState(TokenVerdict.EXACT, "as 2 pods")}),
        ),
        quotas=SimpleNamespace(facts=lambda: {"quotas": 1}),
        telemetry=SimpleNamespace(
            recent=recent,
            slo=SimpleNamespace(attainment={"critical": KEPT}.get),
            latencies=SimpleNamespace(ttft=SimpleNamespace(series={})),
        ),
        scale=SimpleNamespace(
            signals={"both": Signal(role="both", wanted=3, told=2, ready=1, present=2, reason="so", shadow=True)},
        ),
    )
    return PoolPages(cast("Pool", pool))


def test_what_other_groups_of_a_hybrid_model_hold_is_not_counted_twice() -> None:
    window = replace(SOURCES[0], tier="GPU/sliding_window/8/128", slot=3, block_size=8, cached_blocks=7)
    first = pages().endpoints(replace(INDEX, sources=(*SOURCES, window))).pods[0]
    assert (first.cached_blocks, first.cached_tokens, first.block_tokens) == (13, 256, 16)
    assert first.tiers == {"GPU": 10, "CPU": 3, "GPU/sliding_window/8/128": 7}


def test_a_pod_has_its_load_its_cache_by_tier_and_the_worst_word_of_its_sources() -> None:
    page = pages().endpoints(INDEX)

    first, second = page.pods
    assert (first.address, first.state, first.role, first.bookings, first.picks) == ("a:1", "ready", "prefill", 2, 3)
    assert (first.share, first.cached_blocks, first.cached_tokens, first.block_tokens) == (0.75, 13, 256, 16)
    assert (first.tiers, first.index_state, first.index_reason) == ({"GPU": 10, "CPU": 3}, "degraded", "gap")
    assert first.ttft_estimate_error_ms == 12
    assert (second.state, second.avoided, second.index_state) == ("unreachable", "cordoned", None)
    assert page.totals == {
        "pods": 2, "ready": 1, "cached_blocks": 13, "cached_tokens": 256, "running": 0, "waiting": 0, "bookings": 2,
        "picks": 4,
    }  # fmt: skip


def test_a_stopped_pod_says_since_when_why_and_how_often_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    began = time.monotonic() - 90.0
    trouble = EndpointTrouble(since=began, problem="no load from /metrics: refused", asked_every_seconds=0.2)
    monkeypatch.setitem(TROUBLES, "b:1", trouble)
    monkeypatch.setitem(TROUBLES, "a:1", trouble)  # one scrape has failed, and its last report still counts
    ready, stopped = pages().endpoints(INDEX).pods
    assert (ready.since, ready.problem) == (None, None)
    assert stopped.since == pytest.approx(time.time() - 90.0, abs=2.0)
    assert (stopped.problem, stopped.asked_every_seconds) == ("no load from /metrics: refused", 0.2)


def test_a_pod_that_fails_its_requests_says_when_one_is_tried() -> None:
    page = pages()
    for _ in range(20):
        page.pool.books.health.note("a:1", failed=True, now=time.monotonic())
    avoided = page.endpoints(INDEX).pods[0]
    assert avoided.since == pytest.approx(time.time(), abs=2.0)
    assert avoided.trial_at is not None
    assert avoided.trial_at > time.time()


def test_without_an_index_pods_are_shown_all_the_same() -> None:
    assert [pod.cached_blocks for pod in pages().endpoints("connection refused").pods] == [0, 0]


def test_classes_say_what_waits_what_is_in_force_and_what_became_of_the_last_requests() -> None:
    step = StepInForce(
        class_name="sheddable",
        pool="tiny",
        step=DegradationStep(step=StepKind.REJECT, enter=2.0, leave=1.0),
        since=time.monotonic() - 2.5,
        pressure=3.14159,
    )
    recent = [record(decision("a:1")), record(NoReadyEndpointError("none")), record(NoReadyEndpointError("none"))]

    page = pages(steps=(step,), recent=recent).classes()

    assert [(line.name, line.waiting, line.waiting_for_pod, line.routed) for line in page.classes] == [
        ("critical", 4, 3, 0),
        ("standard", 0, 0, 1),
        ("sheddable", 0, 0, 0),
    ]
    assert [(line.target_ttft_ms, line.target_inter_token_ms, line.objective) for line in page.classes] == [
        (500, 50, 0.99),
        (5000, 100, 0.99),
        (60000, 500, 0.9),
    ]
    assert [(line.attainment, line.judged) for line in page.classes] == [(0.975, 40), (None, 0), (None, 0)]
    assert page.classes[2].steps == ["reject"]
    (shown,) = page.classes[2].in_force
    assert shown == StepState(step="reject", model_pool="tiny", since_seconds=shown.since_seconds, pressure=3.14)
    assert shown.since_seconds == pytest.approx(2.5, abs=0.2)
    assert (page.waiting, page.remembered, page.refusals) == (4, 3, {"no-ready-endpoint": 2})


def test_the_index_has_its_sources_and_the_findings_of_indexers_and_picker() -> None:
    found = IndexFinding(endpoint="a:1", dp_rank=1, reason="no-events", message="none come; check", since=60.0)
    index = IndexStatus(sources=SOURCES, indexer_alive=False, unreadable=("x",) * 50, findings=(found,))
    started = Finding(check="redis-memory", severity=Severity.WARNING, subject="redis", seen="full", fix="add some")
    wrong = {"m": DriftFinding(model="m", reason="cache-overpredicted", message="not there", since=1.0)}
    untokenized = {"m": TokenFinding(model="m", reason=TEXT_ONLY, message="no tokens")}
    recent = [record(decision("a:1", degraded={"load-unknown": f"word {n}"}), at=50.0 - n) for n in range(3)]

    page = pages(recent=recent, wrong=wrong, untokenized=untokenized).index(index, findings=[started])

    assert (page.state, page.problem) == ("stale", "no indexer is alive: the index stands still")
    assert page.sources == list(SOURCES)
    assert page.findings == [
        FindingState(
            check="no-events", severity="error", subject="a:1#1", seen="none come; check", since=60.0,
            found_by="indexer",
        ),
        FindingState(check="cache-overpredicted", severity="error", subject="m", seen="not there"),
        FindingState(check="text-only", severity="error", subject="m", seen="no tokens"),
        FindingState(check="redis-memory", severity="warning", subject="redis", seen="full", fix="add some"),
    ]  # fmt: skip
    assert len(page.unreadable) == 20
    assert page.degraded == [MissingInput(reason="load-unknown", words="word 0", last_at=50.0, count=3)]


def test_an_index_that_cannot_be_read_says_why() -> None:
    page = pages().index("connection refused", findings=None)

    assert (page.state, page.problem, page.sources, page.findings_state) == (
        "unavailable",
        "connection refused",
        [],
        "not-yet",
    )


def test_the_state_has_the_pods_the_classes_and_short_decisions() -> None:
    state = pages(recent=[record(decision("a:1", "b:1"))]).state(INDEX, findings=None)

    assert (state.index.state, state.index.sources, state.findings) == ("ok", 2, None)
    assert [pod.address for pod in state.endpoints] == ["a:1", "b:1"]
    assert state.token_sources == {"tiny": "text"}
    assert state.scale == [
        ScaleState(role="both", wanted=3, told=2, ready=1, present=2, state="ok", reason="so", shadow=True)
    ]
    assert state.token_states == {"tiny": ("exact", "as 2 pods")}
    (shown,) = state.decisions
    assert (shown.endpoint, shown.model, shown.reasons) == ("a:1", "tiny", ["turn 0.00 × 1"])
    assert (shown.candidates, shown.candidates_left_out) == ([], 2)


def test_a_request_with_a_prefill_leg_has_one_ttft() -> None:
    """What a prefill pod measures is of the leg; kvmesh top would count its request twice."""
    shown = pages()
    series = shown.pool.telemetry.latencies.ttft.series
    for role, seconds in (("prefill", 0.02), ("decode", 0.3), ("both", 0.3)):
        series["tiny", role] = Histogram(metrics.TTFT, ("tiny", role))
        series["tiny", role].observe(seconds)
    measured = shown.state(INDEX, findings=None).ttft
    assert measured.bounds == metrics.TTFT.bounds
    assert sum(measured.counts) == measured.counts[bisect_left(metrics.TTFT.bounds, 0.3)] == 2.0

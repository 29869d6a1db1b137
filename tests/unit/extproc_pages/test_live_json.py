"""The JSON of the live feed: whole documents of small states."""

from collections.abc import Mapping
from typing import Any

import pytest

from extproc.admission.degradation import StepInForce
from extproc.choosing.decision import Decision
from extproc.doctor.findings import Finding, Severity
from extproc.errors import NoReadyEndpointError
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.live_json import (
    PoolFacts,
    ended_json,
    live_classes_json,
    live_decision_json,
    live_index_json,
    pods_json,
    record_id,
)
from extproc.pages.live_prefixes import MOST_HOLDERS, PrefixFacts, prefix_nodes, prefixes_json, sampled_keys
from extproc.pods.endpoint import Candidate, EndpointStatus, Reachability, Role
from extproc.pods.latency_estimate import EstimateError
from extproc.policy.priority import DEFAULT_CLASSES, DegradationStep, PriorityPolicy, Quota, StepKind
from extproc.policy.request_class import RequestClass
from extproc.policy.values import PickPolicy
from extproc.prefixes.prefix_tree import Origin, TreeEdge, TreeView
from extproc.records.request_events import AskedFor, Decided, DecisionRecord, Ended, RequestOutcome
from extproc.responses.realised import Usage
from kvmesh.blocks.findings import Finding as IndexFinding
from kvmesh.blocks.source import IndexStatus, SourceState, SourceStatus

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


def request_class(tenant: str = "", class_name: str = "standard") -> RequestClass:
    return RequestClass(class_name=class_name, priority_class=DEFAULT_CLASSES[class_name], tenant=tenant)


def asked(**standing_of: Any) -> AskedFor:
    return AskedFor(
        api="completions", model="tiny", served_model="tiny", adapter=None, arm="", prompts=1, stream=False,
        max_tokens=None, block_tokens=16, request_class=request_class(**standing_of),
    )  # fmt: skip


def candidate(address: str) -> Candidate:
    return Candidate(
        address=address,
        reachability=Reachability.READY,
        load=None,
        booked_requests=0,
        matched_tokens=0,
        prompt_tokens=9,
    )


def decision(*addresses: str, degraded: Mapping[str, str] | None = None, rejected: int = 0) -> Decision:
    totals = [float(number) for number in range(len(addresses))]
    return Decision(
        endpoints=(addresses[0],),
        kept=tuple(candidate(address) for address in addresses),
        rejected={f"r:{number}": "ready: it is unreachable" for number in range(rejected)},
        scores={"turn": totals},
        totals=totals,
        weights={"turn": 1.0},
        prompt_tokens=9,
        matched_tokens=0,
        degraded=degraded or {},
    )


def record(
    outcome: Any, *, at: float = 50.0, path: str = "/v1/completions?key=secret", **standing_of: Any
) -> DecisionRecord:
    facts = RequestFacts(method="POST", path=path, objective=None, request_id="r-1")
    is_routed = isinstance(outcome, Decision)
    return DecisionRecord(
        at=at, facts=facts, model="tiny", outcome=outcome, asked=asked(**standing_of) if is_routed else None
    )


def facts(**changes: Any) -> PoolFacts:
    fields: dict[str, Any] = {
        "name": "",
        "policy": POLICY,
        "now": 100.0,
        "monotonic": 7.0,
        "statuses": [
            EndpointStatus(address="a:1", reachability=Reachability.READY, load=None),
            EndpointStatus(address="b:1", reachability=Reachability.UNREACHABLE, load=None),
        ],
        "avoided": {},
        "bookings": {"a:1": 2},
        "picks": {"a:1": 3, "b:1": 1},
        "estimate_errors": {"a:1": EstimateError(mean_seconds=0.0123, bias_seconds=0.0, samples=3)},
        "waiting": {"critical": 4},
        "steps": (),
        "quotas": {"quotas": 1},
        "replicas": None,
        "findings": None,
        "own_findings": (),
        "recent": (),
    }
    return PoolFacts(**fields | changes)


def test_a_pod_has_its_load_its_cache_by_tier_and_the_worst_word_of_its_sources() -> None:
    page = pods_json(facts(), INDEX)

    first, second = page["pods"]
    shown = ("address", "state", "role", "bookings", "picks", "share", "cached_blocks", "cached_tokens", "block_tokens")
    assert [first[name] for name in shown] == ["a:1", "ready", "prefill", 2, 3, 0.75, 13, 256, 16]
    assert (first["tiers"], first["index_state"], first["index_reason"]) == ({"GPU": 10, "CPU": 3}, "degraded", "gap")
    assert first["ttft_estimate_error_ms"] == 12
    assert (second["state"], second["avoided"], second["index_state"]) == ("unreachable", "cordoned", None)
    assert page["totals"] == {
        "pods": 2, "ready": 1, "cached_blocks": 13, "cached_tokens": 256, "running": 0, "waiting": 0, "bookings": 2,
        "picks": 4,
    }  # fmt: skip


def test_without_an_index_pods_are_shown_all_the_same() -> None:
    assert [pod["cached_blocks"] for pod in pods_json(facts(), None)["pods"]] == [0, 0]


def test_classes_say_what_waits_what_is_in_force_and_what_became_of_the_last_requests() -> None:
    step = StepInForce(
        class_name="sheddable",
        pool="tiny",
        step=DegradationStep(step=StepKind.REJECT, enter=2.0, leave=1.0),
        since=4.5,
        pressure=3.14159,
    )
    recent = [record(decision("a:1")), record(NoReadyEndpointError("none")), record(NoReadyEndpointError("none"))]

    page = live_classes_json(facts(steps=(step,), recent=recent))

    assert [(line["class"], line["waiting"], line["routed"]) for line in page["classes"]] == [
        ("critical", 4, 0),
        ("standard", 0, 1),
        ("sheddable", 0, 0),
    ]
    assert page["classes"][2]["in_force"] == [
        {"step": "reject", "model_pool": "tiny", "since_seconds": 2.5, "pressure": 3.14}
    ]
    assert (page["waiting"], page["remembered"], page["refusals"]) == (4, 3, {"no-ready-endpoint": 2})


def test_the_index_has_its_sources_and_everybodys_findings() -> None:
    found = IndexFinding(endpoint="a:1", dp_rank=1, reason="no-events", message="none come; check", since=60.0)
    index = IndexStatus(sources=SOURCES, indexer_alive=False, unreadable=("x",) * 50, findings=(found,))
    started = Finding(check="redis-memory", severity=Severity.WARNING, subject="redis", seen="full", fix="add some")
    own = Finding(check="never-matches", severity=Severity.ERROR, subject="a:1", seen="tokens differ")
    recent = [record(decision("a:1", degraded={"load-unknown": f"word {n}"}), at=50.0 - n) for n in range(3)]

    page = live_index_json(facts(findings=[started], own_findings=[own], recent=recent), index, None)

    assert (page["state"], page["problem"]) == ("stale", "no indexer is alive: the index stands still")
    assert page["sources"][0] == {
        "endpoint": "a:1", "dp_rank": 0, "tier": "GPU", "state": "live", "reason": "", "cached_blocks": 10,
        "block_tokens": 16, "last_batch_at": 9.0, "applied_at": 9.5, "events": 6, "owner": "i-1",
    }  # fmt: skip
    assert [(line["check"], line["severity"], line["subject"], line["found_by"]) for line in page["findings"]] == [
        ("no-events", "error", "a:1#1", "indexer"),
        ("never-matches", "error", "a:1", "picker"),
        ("redis-memory", "warning", "redis", "picker"),
    ]
    assert len(page["unreadable"]) == 20
    assert page["degraded"] == [{"reason": "load-unknown", "words": "word 0", "last_at": 50.0, "count": 3}]


def test_an_index_that_cannot_be_read_says_why() -> None:
    page = live_index_json(facts(), None, "connection refused")

    assert (page["state"], page["problem"], page["sources"], page["findings_state"]) == (
        "unavailable",
        "connection refused",
        [],
        "not-yet",
    )


def test_a_decision_shows_the_winner_and_the_best_of_the_others() -> None:
    many = decision(*(f"p:{number}" for number in range(20)), rejected=10)

    line = live_decision_json(record(many), policy=POLICY)

    assert [each["endpoint"] for each in line["candidates"]] == ["p:0", *(f"p:{n}" for n in range(19, 12, -1))]
    assert [each["total"] for each in line["candidates"]] == [0.0, *(float(n) for n in range(19, 12, -1))]
    assert (line["candidates_left_out"], len(line["rejected"]), line["rejected_left_out"]) == (12, 8, 2)
    assert line["path"] == "/v1/completions"
    assert line["reasons"] == ["turn 0.00 × 1"]


@pytest.mark.parametrize(("tenant", "shown"), [("", ""), ("acme", "acme"), ("planted-secret", "other"), ("*", "other")])
def test_only_tenants_that_the_policy_names_are_shown(tenant: str, shown: str) -> None:
    assert live_decision_json(record(decision("a:1"), tenant=tenant), policy=POLICY)["request"]["tenant"] == shown


def decided(kind: RequestOutcome, of: DecisionRecord, *, endpoint: str | None = None) -> Decided:
    return Decided(
        number=1, pool="", outcome_kind=kind, record=of, endpoint=endpoint, started_unix_ns=0, seconds=0.0125,
        queued_seconds=0.01, phases={"parse": 0.0001},
    )  # fmt: skip


def test_a_refusal_and_a_request_that_failed_open_say_what_they_are() -> None:
    refused = record(NoReadyEndpointError("none is ready"))
    common = {
        "id": record_id(refused), "at": 50.0, "request_id": "r-1", "path": "/v1/completions", "class": None,
        "queued_ms": 10.0, "decided_ms": 12.5, "phases_ms": {"parse": 0.1},
    }  # fmt: skip

    assert live_decision_json(refused, policy=POLICY, decided=decided(RequestOutcome.REFUSED, refused)) == common | {
        "endpoint": None,
        "status": 503,
        "reason": "no-ready-endpoint",
        "message": "none is ready",
    }
    opened = decided(RequestOutcome.FAILED_OPEN, refused, endpoint="a:1")
    assert live_decision_json(refused, policy=POLICY, decided=opened) == common | {
        "endpoint": "a:1",
        "status": 200,
        "reason": "failed-open",
    }


def test_the_end_of_an_exchange_has_its_usage_where_it_was_read() -> None:
    ended = Ended(
        number=1, pool="", request_id="r" * 500, endpoint="a:1", served_by="b:1", status=200, unserved=False,
        seconds_to_headers=0.1, seconds=2.0, usage=Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2),
    )  # fmt: skip

    assert ended_json(ended, decision_id="d", at=3.0) == {
        "at": 3.0, "decision_id": "d", "request_id": "r" * 200, "endpoint": "a:1", "served_by": "b:1", "status": 200,
        "seconds_to_headers": 0.1, "seconds": 2.0,
        "usage": {"prompt_tokens": 9, "cached_tokens": 4, "output_tokens": 2},
    }  # fmt: skip


def edge(first: int, count: int, *, parent: bytes | None = None, indexed: bool = True, **more: Any) -> TreeEdge:
    keys = b"".join(number.to_bytes(8, "little") for number in range(first, first + count))
    fields: dict[str, Any] = {
        "key": keys[-8:], "parent": parent, "origin": Origin(model="tiny", tokens_each=16, indexed=indexed),
        "depth": 0, "first": first, "keys": keys, "requests": 2.0, "hit_tokens": 8.0, "seen_at": 5.0, "head": b"",
    }  # fmt: skip
    return TreeEdge(**fields | more)


def prefix_facts(**changes: Any) -> PrefixFacts:
    fields: dict[str, Any] = {
        "name": "", "now": 100.0, "monotonic": 7.0, "since": 1.0, "half_life_seconds": 300.0, "sampled_share": 1.0,
        "shows_text": False, "cached_blocks": 200, "holders": (),
    }  # fmt: skip
    return PrefixFacts(**fields | changes)


def as_page(view: TreeView, facts: PrefixFacts) -> dict[str, Any]:
    nodes = prefix_nodes(view, facts, name_of=lambda key: f"<{key[0]}>", text_of=lambda edge: edge.head.decode())
    return prefixes_json(view, facts, list(nodes))


def test_of_a_long_edge_blocks_all_over_it_are_looked_up_and_the_last() -> None:
    found = sampled_keys(edge(0, 160))

    assert [int.from_bytes(found[at : at + 8], "little") for at in range(0, len(found), 8)] == list(range(9, 160, 10))
    assert sampled_keys(edge(0, 2)) == edge(0, 2).keys
    assert sampled_keys(edge(0, 2, indexed=False)) == b""


def test_a_prefix_has_its_shares_and_its_holders_by_what_was_looked_up() -> None:
    upper = edge(0, 32)
    lower = edge(32, 2, parent=upper.key, depth=1, requests=1.0, hit_tokens=2.0)
    view = TreeView(edges=(upper, lower), requests=4.0, hit_tokens=10.0, left_out=3)
    holders = [{"a:1": "GPU", "b:1": "GPU"}] * 8 + [{"a:1": "CPU"}] * 8 + [{"a:1": "GPU"}, {}]

    page = as_page(view, prefix_facts(holders=holders))

    first, second = page["nodes"]
    assert (first["id"], first["parent"], second["id"], second["parent"]) == ("<31>", None, "<33>", "<31>")
    assert first["holders"] == [
        {"endpoint": "a:1", "blocks": 32, "tiers": {"GPU": 16, "CPU": 16}},
        {"endpoint": "b:1", "blocks": 16, "tiers": {"GPU": 16}},
    ]
    assert second["holders"] == [{"endpoint": "a:1", "blocks": 1, "tiers": {"GPU": 1}}]
    shares = ("share_of_requests", "share_of_hits", "share_of_memory")
    assert [first[name] for name in shares] == [0.5, 0.8, 0.24]
    assert (first["from_tokens"], first["tokens"], second["from_tokens"], second["tokens"]) == (0, 512, 512, 32)
    assert (first["last_at"], first["text"], page["left_out"]) == (98.0, None, 3)


def test_without_an_index_nobody_is_said_to_hold_anything() -> None:
    view = TreeView(edges=(edge(0, 2),), requests=2.0, hit_tokens=8.0, left_out=0)

    page = as_page(view, prefix_facts(holders=None, cached_blocks=None))

    (node,) = page["nodes"]
    assert (page["index"], node["holders"], node["held_blocks"], node["share_of_memory"]) == (
        "unavailable",
        None,
        None,
        None,
    )


def test_text_chunks_have_no_holders() -> None:
    view = TreeView(edges=(edge(0, 2, indexed=False),), requests=2.0, hit_tokens=8.0, left_out=0)

    page = as_page(view, prefix_facts())

    assert (page["index"], page["nodes"][0]["holders"]) == ("no-tokens", None)


def test_text_is_in_the_page_only_where_it_is_shown() -> None:
    view = TreeView(edges=(edge(0, 2, head=b"hello"),), requests=2.0, hit_tokens=8.0, left_out=0)

    assert [as_page(view, prefix_facts(shows_text=shown))["nodes"][0]["text"] for shown in (True, False)] == [
        "hello",
        None,
    ]


def test_of_a_prefix_that_hundreds_hold_those_with_the_most_of_it_are_told_and_all_are_counted() -> None:
    view = TreeView(edges=(edge(0, 2),), requests=2.0, hit_tokens=8.0, left_out=0)
    everybody = {f"10.0.1.{i}:8000": "GPU" for i in range(MOST_HOLDERS + 9)}
    best = {"10.0.2.1:8000": "GPU"}

    (node,) = as_page(view, prefix_facts(holders=[everybody | best, best]))["nodes"]

    assert (len(node["holders"]), node["holders_left_out"]) == (MOST_HOLDERS, 10)
    assert node["holders"][0] == {"endpoint": "10.0.2.1:8000", "blocks": 2, "tiers": {"GPU": 2}}
    assert node["held_blocks"] == MOST_HOLDERS + 9 + 2

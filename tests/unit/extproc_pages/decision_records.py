"""Records of decisions, small ones."""

from collections.abc import Mapping
from typing import Any

from extproc.admission.asked_request import AskedFor
from extproc.choosing.decision import Decision
from extproc.ext_proc.exchange import RequestFacts
from extproc.ledger.facts import DecisionRecord, NoDecision
from extproc.pods.endpoint import Candidate, Reachability
from extproc.policy.priority import DEFAULT_CLASSES
from extproc.policy.request_class import RequestClass


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
        at=at,
        id="d-1",
        facts=facts,
        model="tiny",
        outcome=outcome if is_routed else NoDecision.of(outcome),
        asked=asked(**standing_of) if is_routed else None,
    )

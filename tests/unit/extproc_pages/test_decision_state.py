"""What is shown of a decision and of the end of an exchange."""

import pytest
from msgspec import structs
from msgspec.structs import replace

from extproc.answers.realised import Usage
from extproc.errors import NoReadyEndpointError
from extproc.ledger.facts import Arrival, Decided, DecisionRecord, Ended, RequestOutcome
from extproc.pages.decision_state import decision_state, ended_state
from extproc.pages.decision_words import why
from extproc.pages.picker_state import DecisionState, EndedEvent
from extproc.policy.priority import Quota
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy
from tests.unit.extproc_pages.decision_records import decision, record

POLICY = PickPolicy(priorities=PriorityPolicy(quotas=(Quota(tenant="acme", requests_per_minute=1.0),)))


def test_a_decision_shows_the_winner_and_the_best_of_the_others() -> None:
    many = decision(*(f"p:{number}" for number in range(20)), rejected=10)

    line = decision_state(record(many), policy=POLICY, most=8)

    assert [each.endpoint for each in line.candidates] == ["p:0", *(f"p:{n}" for n in range(19, 12, -1))]
    assert [each.total for each in line.candidates] == [0.0, *(float(n) for n in range(19, 12, -1))]
    assert (line.candidates_left_out, len(line.rejected), line.rejected_left_out) == (12, 8, 2)
    assert line.path == "/v1/completions"
    assert line.reasons == ["turn 0.00 × 1"]
    everything = decision_state(record(many), policy=POLICY)
    assert [each.endpoint for each in everything.candidates] == [f"p:{n}" for n in range(20)]
    assert (everything.candidates_left_out, everything.rejected_left_out) == (0, 0)


def test_as_good_as_the_winner_are_only_those_with_its_total() -> None:
    many = structs.replace(
        decision(*(f"p:{number}" for number in range(5))), totals=(3.0, 1.0, 3.0, 1.0, 3.004), scores={}
    )
    for most in (0, 2, None):
        assert decision_state(record(many), policy=POLICY, most=most).as_good == 3
    assert why(decision_state(record(many), policy=POLICY, most=2)).startswith("3 pods were as good as each other")


@pytest.mark.parametrize(("tenant", "shown"), [("", ""), ("acme", "acme"), ("planted-secret", "other"), ("*", "other")])
def test_only_tenants_that_the_policy_names_are_shown(tenant: str, shown: str) -> None:
    request = decision_state(record(decision("a:1"), tenant=tenant), policy=POLICY).request
    assert request is not None
    assert request.tenant == shown


def decided(kind: RequestOutcome, of: DecisionRecord, *, endpoint: str | None = None) -> Decided:
    return Decided(
        arrival=Arrival(number=1), outcome_kind=kind, record=of, endpoint=endpoint, at=0.0125,
        queued_seconds=0.01, phases={"parse": 0.0001},
    )  # fmt: skip


def test_a_refusal_and_a_request_that_failed_open_say_what_they_are() -> None:
    refused = record(NoReadyEndpointError("none is ready"))
    common = DecisionState(
        id=refused.id, at=50.0, request_id="r-1", path="/v1/completions", model="tiny", queued_ms=10.0,
        decided_ms=12.5, endpoint=None, phases_ms={"parse": 0.1},
    )  # fmt: skip

    assert decision_state(refused, policy=POLICY, decided=decided(RequestOutcome.REFUSED, refused)) == replace(
        common,
        status=503,
        reason="no-ready-endpoint",
        message="none is ready",
        reasons=["no-ready-endpoint: none is ready"],
    )
    opened = decided(RequestOutcome.FAILED_OPEN, refused, endpoint="a:1")
    assert decision_state(refused, policy=POLICY, decided=opened) == replace(
        common, endpoint="a:1", reason="failed-open"
    )


def test_the_end_of_an_exchange_has_its_usage_where_it_was_read() -> None:
    ended = Ended(
        arrival=Arrival(request_id="r" * 500), endpoint="a:1", served_by="b:1", status=200, headers_at=0.1, at=2.0,
        usage=Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2),
    )  # fmt: skip

    assert ended_state(ended, decision_id="d", at=3.0) == EndedEvent(
        at=3.0, decision_id="d", request_id="r" * 200, endpoint="a:1", served_by="b:1", status=200,
        seconds_to_headers=0.1, seconds=2.0, usage=Usage(prompt_tokens=9, cached_tokens=4, output_tokens=2),
    )  # fmt: skip

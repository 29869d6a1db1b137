"""Facts and who hears them at once, without an event loop."""

from typing import Any

from msgspec import structs

from extproc.ledger.facts import Arrival, Decided, RequestOutcome
from extproc.ledger.ledger import Ledger
from tests.unit.extproc_pages.decision_records import decision, record


class AtOnce(Ledger):
    """Tells facts to their listeners in the same turn of the event loop."""

    def tell(self, *facts: Any) -> None:
        self.hear(facts)


def routed(
    endpoint: str, *, tokens: int = 9, matched: int = 0, best: int = 0, tenant: str = "", arm: str = "", **fact: Any
) -> Decided:
    outcome = structs.replace(
        decision(endpoint, degraded=fact.pop("degraded", {})),
        prompt_tokens=tokens,
        matched_tokens=matched,
        best_matched_tokens=best,
    )
    made = record(outcome, tenant=tenant)
    assert made.asked is not None
    made = structs.replace(made, asked=structs.replace(made.asked, arm=arm))
    return Decided(
        **{"arrival": Arrival(), "outcome_kind": RequestOutcome.ROUTED, "record": made, "endpoint": endpoint, **fact}
    )

"""A request that was sent without a decision, because its pool says FailOpen: nothing is booked, nothing learned.

Made by `pool_picker` where a decision failed; its shape is `adapters.ext_proc_call.OpenExchange`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.core.response_plan import PASS_PLAN, ResponsePlan


@dataclass(slots=True, kw_only=True)
class UnbookedExchange:
    """Goes to an endpoint taken by chance, then to the others in the same order."""

    endpoints: Sequence[str]
    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    plan: ResponsePlan = PASS_PLAN
    response_headers: Mapping[str, str] = field(default_factory=dict)

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:
        """Take no note."""

    def response_missed(self, why: str) -> None:
        """Miss nothing."""

    def finish(self) -> None:
        """Release nothing."""

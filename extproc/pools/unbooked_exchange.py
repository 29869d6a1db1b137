"""A request that was sent without a decision, because its pool says FailOpen: nothing is booked, nothing learned.

Made by `pool_picker` where a decision failed; its shape is `ext_proc.call.OpenExchange`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from extproc.pools.booked_exchange import GATEWAY_TIMEOUT
from extproc.pools.request_watch import Story
from extproc.responses.response_plan import PASS_PLAN, ResponsePlan


@dataclass(slots=True, kw_only=True)
class UnbookedExchange:
    """Goes to an endpoint taken by chance, then to the others in the same order."""

    endpoints: Sequence[str]
    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    plan: ResponsePlan = PASS_PLAN
    response_headers: Mapping[str, str] = field(default_factory=dict)
    story: Story | None = None  # None: nobody observes
    set_headers: Mapping[str, str] = field(
        default_factory=dict
    )  # of the request that the pod gets, over what the client sent
    status: int = 0
    served_by: str | None = None
    unserved: bool = False

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:  # noqa: ARG002
        """Take note for those who observe; nothing is learned."""
        if self.story is not None:
            self.status, self.served_by = status, served_by
            self.unserved = not from_pod and status != GATEWAY_TIMEOUT
            self.story.responded()

    def response_missed(self, why: str) -> None:
        """Miss nothing."""

    def finish(self) -> None:
        """Release nothing."""
        if self.story is not None:
            self.story.end(
                endpoint=self.endpoints[0], served_by=self.served_by, status=self.status, unserved=self.unserved
            )

"""One request that waits for room at an endpoint. Made by the use case, kept by `admission.flow_queue`."""

import msgspec

from extproc.policy.priority import PriorityClass


class Ticket(msgspec.Struct, eq=False, kw_only=True):
    """Who waits, with what work; compared by identity."""

    class_name: str
    priority_class: PriorityClass
    tenant: str  # "": nobody told; all of those share as one
    uncached_tokens: int  # that the best endpoint would have to compute
    pool: str  # the model: tickets of one pool compete for the same endpoints
    # What narrows the endpoints inside the pool: adapter, subset header. Tickets of one group may use exactly the same
    # endpoints up to the ceiling that they are tried with: where one finds no room the others of its group find none.
    group: str = ""
    arrived_at: float  # monotonic seconds
    deadline: float  # monotonic seconds: arrived_at + what the class waits at most
    sequence: int = 0  # the queue's own count, set by push: breaks ties
    tried_ceiling: float = 0.0  # set by candidates: how full an endpoint may be for it this time

    @property
    def cost(self) -> int:
        """Tokens that it is charged for; a request that is cached altogether is not free."""
        return max(1, self.uncached_tokens)

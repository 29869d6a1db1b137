"""The order of waiting requests inside one band of equal priority. Pure; `admission.flow_queue` combines the bands.

Between tenants: deficit round robin in tokens (Shreedhar, Varghese 1995). The round of a tenant's next turn is
computed, not walked to, so that large requests cost no empty rounds. Within a tenant: fewest tokens first with an age
bound, or first come, first served, as the class says.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import msgspec

from extproc.policy.priority import PriorityClass


class Ticket(msgspec.Struct, eq=False, kw_only=True):
    """One request waiting for room at an endpoint; compared by identity."""

    class_name: str
    priority_class: PriorityClass
    tenant: str  # "" if unnamed; all unnamed tenants share as one
    uncached_tokens: int  # to be computed at the best endpoint
    pool: str  # the model: tickets of one pool compete for the same endpoints
    # Adapter and subset header, which narrow the endpoints inside the pool. Tickets of one group may use exactly the
    # same endpoints: if one finds no room under a ceiling, no other of its group finds any under it.
    group: str = ""
    arrived_at: float  # monotonic seconds
    deadline: float  # monotonic seconds: arrived_at + the longest wait of the class
    answer_tokens: float = 0.0  # expected length of its answers; 0 if unknown
    held_bytes: int = 0  # of the request in memory
    gives_way: bool = False  # sheddable regardless of its class: there is no pod to send it on to
    sequence: int = 0  # the queue's own count, set by push; breaks ties
    tried_ceiling: float = 0.0  # set by candidates: how full an endpoint may be at this try

    @property
    def cost(self) -> int:
        """Tokens charged for the request; a fully cached one is not free."""
        return max(1, self.uncached_tokens)


# (0, time of becoming late, sequence, ticket) for late tickets, which go first; then (1, tokens, sequence, ticket)
Rank: TypeAlias = tuple[int, float, int, Ticket]
AGE_SHARE = 0.6  # late after this share of the longest wait, if not before, so that it can still go before its deadline


class Kind(NamedTuple):
    """The facts of a ticket that decide whether there is room for it; tickets of one kind are interchangeable."""

    class_name: str
    group: str
    ceiling: float  # of the class


def kind_of(ticket: Ticket) -> Kind:
    """Return the kind of a ticket."""
    return Kind(ticket.class_name, ticket.group, ticket.priority_class.ceiling)


class Wanted:
    """A filter: the tickets still worth a try in this wake."""

    __slots__ = ("ceiling", "class_name", "failed", "group")

    def __init__(
        self,
        failed: Mapping[str, float],
        *,
        class_name: str | None = None,
        group: str | None = None,
        ceiling: float | None = None,
    ) -> None:
        """`failed` maps a group to the highest ceiling under which it found no room in this wake.

        `class_name` and `group` restrict the tickets; `ceiling` replaces their classes' own.
        """
        self.failed = failed
        self.class_name = class_name
        self.group = group
        self.ceiling = ceiling

    def takes(self, kind: Kind) -> bool:
        """Tell whether tickets of this kind are wanted."""
        return (
            self.failed.get(kind.group, -1.0) < (kind.ceiling if self.ceiling is None else self.ceiling)
            and (self.class_name is None or self.class_name == kind.class_name)
            and (self.group is None or self.group == kind.group)
        )


ANY = Wanted({})


class Line:
    """One tenant's tickets of one kind."""

    __slots__ = ("_age_seconds", "by_age", "by_work", "kind")

    def __init__(self, kind: Kind, *, age_seconds: float) -> None:
        self.kind = kind
        self._age_seconds = age_seconds
        self.by_age: list[tuple[float, int, Ticket]] = []  # sorted: (time of becoming late, sequence, ticket)
        self.by_work: list[tuple[int, int, Ticket]] = []  # sorted: (cost, sequence, ticket)

    def add(self, ticket: Ticket) -> None:
        """Add a ticket."""
        insort(self.by_age, (self._late_from(ticket), ticket.sequence, ticket))
        insort(self.by_work, (ticket.cost, ticket.sequence, ticket))

    def remove(self, ticket: Ticket) -> None:
        """Remove a ticket that waits here."""
        del self.by_age[bisect_left(self.by_age, (self._late_from(ticket), ticket.sequence))]
        del self.by_work[bisect_left(self.by_work, (ticket.cost, ticket.sequence))]

    def head(self, *, now: float) -> Rank:
        """Return the ticket that goes first; the line must not be empty."""
        late_from, sequence, ticket = self.by_age[0]
        if now >= late_from:
            return 0, late_from, sequence, ticket
        cost, sequence, ticket = self.by_work[0]
        return 1, cost, sequence, ticket

    def _late_from(self, ticket: Ticket) -> float:
        """Return the time after which the ticket goes before shorter work."""
        return ticket.arrived_at + min(self._age_seconds, AGE_SHARE * (ticket.deadline - ticket.arrived_at))


class Flow:
    """One tenant's tickets in one band, and its deficit."""

    __slots__ = ("deficit", "key", "lines", "requests", "tenant", "tokens", "visited")

    def __init__(self, tenant: str, *, visited: int) -> None:
        self.tenant = tenant
        self.lines: dict[Kind, Line] = {}
        self.tokens = 0
        self.requests = 0
        self.deficit = 0  # tokens it may still send, as of round `visited`
        self.visited = visited
        self.key: tuple[int, int, int] = (0, 0, 0)  # its place in the band's order

    def best(self, wanted: Wanted, *, now: float) -> Ticket | None:
        """Return the tenant's next wanted ticket, or None.

        With several classes in the band, each class has a head in its own order, and the head that arrived first goes.
        """
        if len(self.lines) == 1:
            ((kind, line),) = self.lines.items()
            return line.head(now=now)[3] if wanted is ANY or wanted.takes(kind) else None
        heads: dict[str, Rank] = {}
        for kind, line in self.lines.items():
            if wanted.takes(kind):
                rank = line.head(now=now)
                other = heads.get(kind.class_name)
                if other is None or rank < other:
                    heads[kind.class_name] = rank
        if not heads:
            return None
        if len(heads) == 1:
            return heads.popitem()[1][3]
        return min((rank[3] for rank in heads.values()), key=lambda ticket: (ticket.arrived_at, ticket.sequence))

    def largest(self) -> int:
        """Return the tokens of the tenant's largest ticket."""
        return max(line.by_work[-1][0] for line in self.lines.values())

    def turn(self, cost: int, *, quantum: int) -> int:
        """Return the tenant's round for sending `cost` tokens."""
        return self.visited + max(0, -(-(cost - self.deficit) // quantum))


class Band:
    """The waiting requests of one priority in one pool."""

    __slots__ = ("_age_seconds", "_flows", "_joined", "_order", "_quantum", "_round", "kinds", "requests", "tokens")

    def __init__(self, quantum_tokens: int, age_seconds: float) -> None:
        self._quantum = max(1, quantum_tokens)
        self._age_seconds = age_seconds
        self._flows: dict[str, Flow] = {}
        # Sorted by (round of the next turn, -round of joining, count of joins). A ticket that becomes late may only
        # move its tenant back, never forward, so it is enough to correct a key when it is looked at.
        self._order: list[tuple[int, int, int, Flow]] = []
        self._round = 0
        self._joined = 0
        self.kinds: dict[Kind, int] = {}
        self.tokens = 0
        self.requests = 0

    def add(self, ticket: Ticket, tenant: str, *, now: float) -> None:
        """Add a ticket; a tenant without other tickets joins at the head of the next round."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = Flow(tenant, visited=self._round)
            self._joined += 1
            flow.key = (-1, -self._round, self._joined)
            insort(self._order, (*flow.key, flow))
        kind = kind_of(ticket)
        line = flow.lines.get(kind)
        if line is None:
            line = flow.lines[kind] = Line(kind, age_seconds=self._age_seconds)
        line.add(ticket)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        for counts in (self, flow):
            counts.tokens += ticket.cost
            counts.requests += 1
        self._settle(flow, now=now)

    def remove(self, ticket: Ticket, tenant: str, *, now: float) -> None:
        """Remove a ticket that waits here; a tenant without tickets leaves and loses its deficit."""
        flow, kind = self._flows[tenant], kind_of(ticket)
        line = flow.lines[kind]
        line.remove(ticket)
        if not line.by_age:
            del flow.lines[kind]
        self.kinds[kind] -= 1
        if not self.kinds[kind]:
            del self.kinds[kind]
        for counts in (self, flow):
            counts.tokens -= ticket.cost
            counts.requests -= 1
        if flow.lines:
            self._settle(flow, now=now)
        else:
            del self._flows[tenant]
            self._leave(flow)

    def before(self, tenant: str, cost: int) -> tuple[int, int]:
        """Estimate the tokens and the requests here that go before a newcomer of this tenant with `cost` tokens.

        All of the tenant's own go first, and meanwhile each other tenant sends about as much as these and the newcomer.
        Off by up to one quantum per tenant, as turns are whole quanta. Too high by the tenant's own longer requests,
        which the newcomer overtakes.
        """
        flow = self._flows.get(tenant)
        own_tokens, own_requests = (flow.tokens, flow.requests) if flow is not None else (0, 0)
        others = len(self._flows) - (flow is not None)
        return (
            own_tokens + min(self.tokens - own_tokens, others * (own_tokens + cost)),
            own_requests + min(self.requests - own_requests, others * (own_requests + 1)),
        )

    def best(self, wanted: Wanted, *, now: float) -> Ticket | None:
        """Return the next wanted ticket, or None. O(1), plus one step for each tenant ahead without a wanted ticket."""
        if not any(wanted.takes(kind) for kind in self.kinds):
            return None
        index = 0
        while index < len(self._order):
            flow = self._order[index][3]
            if self._settle(flow, now=now):
                continue  # it moved back: another tenant is at this index now
            ticket = flow.best(wanted, now=now)
            if ticket is not None:
                return ticket
            index += 1
        return None

    def charge(self, ticket: Ticket, tenant: str) -> None:
        """Charge a tenant for a ticket that is sent; call it before `remove`.

        A tenant passed over, for lack of room or for another class's guaranteed share, saves no more than its largest
        ticket and one quantum.
        """
        flow = self._flows[tenant]
        turn = max(self._round, flow.turn(ticket.cost, quantum=self._quantum))
        bank = min(flow.deficit + (turn - flow.visited) * self._quantum, flow.largest() + self._quantum)
        flow.deficit = bank - ticket.cost
        flow.visited = turn
        self._round = turn

    def _settle(self, flow: Flow, *, now: float) -> bool:
        """Move the tenant to the round of its next ticket, and tell whether it moved."""
        head = flow.best(ANY, now=now)
        assert head is not None
        turn = flow.turn(head.cost, quantum=self._quantum)
        if turn == flow.key[0]:
            return False
        self._leave(flow)
        flow.key = (turn, flow.key[1], flow.key[2])
        insort(self._order, (*flow.key, flow))
        return True

    def _leave(self, flow: Flow) -> None:
        del self._order[bisect_left(self._order, flow.key)]


class ClassBacklog:
    """The waiting tickets of one class in all pools. Every operation is O(1)."""

    __slots__ = ("_by_size", "_tenants", "_tickets", "is_sheddable", "most", "priority", "requests")

    def __init__(self, *, priority: int, is_sheddable: bool) -> None:
        self.priority = priority
        self.is_sheddable = is_sheddable
        self.requests = 0
        self.most = 0  # the largest number of tickets that one tenant has
        self._tenants: dict[str, OrderedDict[int, Ticket]] = {}  # sequence -> ticket
        self._tickets: OrderedDict[int, Ticket] = OrderedDict()  # of all tenants: sequence -> ticket
        self._by_size: dict[int, OrderedDict[str, None]] = {}  # number of tickets -> tenants with that number

    def of(self, tenant: str) -> int:
        """Return the number of this tenant's tickets."""
        return len(self._tenants.get(tenant, ()))

    def newest_of_most(self) -> Ticket:
        """Return the newest ticket of the tenant with most tickets; the backlog must not be empty."""
        tenant = next(reversed(self._by_size[self.most]))
        tickets = self._tenants[tenant]
        return tickets[next(reversed(tickets))]

    def oldest(self) -> Ticket:
        """Return the oldest ticket; the backlog must not be empty."""
        return self._tickets[next(iter(self._tickets))]

    def add(self, ticket: Ticket, tenant: str) -> None:
        """Add a ticket."""
        tickets = self._tenants.setdefault(tenant, OrderedDict())
        self._move(tenant, len(tickets), len(tickets) + 1)
        tickets[ticket.sequence] = self._tickets[ticket.sequence] = ticket
        self.requests += 1
        self.most = max(self.most, len(tickets))

    def remove(self, ticket: Ticket, tenant: str) -> None:
        """Remove a ticket."""
        tickets = self._tenants[tenant]
        self._move(tenant, len(tickets), len(tickets) - 1)
        del tickets[ticket.sequence], self._tickets[ticket.sequence]
        self.requests -= 1
        if not tickets:
            del self._tenants[tenant]
        if self.most not in self._by_size:
            self.most -= 1

    def _move(self, tenant: str, size: int, to: int) -> None:
        if size:
            tenants = self._by_size[size]
            del tenants[tenant]
            if not tenants:
                del self._by_size[size]
        if to:
            self._by_size.setdefault(to, OrderedDict())[tenant] = None


class GuaranteedShares:
    """The savings, in tokens, of each waiting class with a reserved share.

    While a class waits, it earns its share of all tokens sent. It gets a turn once it has saved the cost of its next
    request: so it gets its share, never more at the expense of a higher class, and nothing in advance.
    """

    __slots__ = ("_most", "_saved", "_shares")

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._saved: dict[str, float] = {}
        self._most: dict[str, float] = {}  # bound on the savings of a class whose turn found no room, until it sends

    def join(self, class_name: str, share: float) -> None:
        """Let a class with a waiting ticket earn its share; a share of 0 earns nothing."""
        if share > 0.0 and class_name not in self._shares:
            self._shares[class_name] = share
            self._saved[class_name] = 0.0

    def leave(self, class_name: str) -> None:
        """Drop the savings of a class whose last ticket has left."""
        self._shares.pop(class_name, None)
        self._saved.pop(class_name, None)
        self._most.pop(class_name, None)

    def saved(self) -> Sequence[tuple[str, float]]:
        """Return the classes with savings, the largest first."""
        saved = [(name, tokens) for name, tokens in self._saved.items() if tokens > 0.0]
        if len(saved) > 1:
            saved.sort(key=itemgetter(1), reverse=True)
        return saved

    def went(self, class_name: str, tokens: int) -> None:
        """Distribute the tokens of a sent request: every waiting class earns its share, the request's class pays."""
        for name, share in self._shares.items():
            self._saved[name] = min(self._saved[name] + share * tokens, self._most.get(name, inf))
        if class_name in self._saved:
            self._saved[class_name] = max(0.0, self._saved[class_name] - tokens)
            self._most.pop(class_name, None)

    def could_not(self, class_name: str, *, most: float) -> None:
        """Bound the savings of a class whose turn found no room to `most` tokens, until it sends a request."""
        self._most[class_name] = most
        self._saved[class_name] = min(self._saved[class_name], most)

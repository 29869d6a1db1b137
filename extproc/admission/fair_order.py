"""The order of waiting requests inside one band of equal priority. Pure; `admission.flow_queue` puts bands together.

Between tenants: deficit round robin in tokens (Shreedhar, Varghese 1995), with the round in which a tenant's next
request may go computed instead of walked to, so that large requests cost no empty rounds. Within a tenant: fewest
tokens first with an age bound, or first come, as the class says.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple, TypeAlias

import msgspec

from extproc.policy.priority import Order, PriorityClass


class Ticket(msgspec.Struct, eq=False, kw_only=True):
    """One request that waits for room at an endpoint; compared by identity."""

    class_name: str
    priority_class: PriorityClass
    tenant: str  # "": not told; all of those share as one
    uncached_tokens: int  # that the best endpoint would have to compute
    pool: str  # the model: tickets of one pool compete for the same endpoints
    # What narrows the endpoints inside the pool: adapter, subset header. Tickets of one group may use exactly the same
    # endpoints up to the ceiling that they are tried with: where one finds no room the others of its group find none.
    group: str = ""
    arrived_at: float  # monotonic seconds
    deadline: float  # monotonic seconds: arrived_at + what the class waits at most
    requested_model: str | None = None  # as the client wrote it
    body_bytes: int = 0  # as it came
    gives_way: bool = False  # as one that may be refused, whatever its class: there is no pod to send it on to
    sequence: int = 0  # the queue's own count, set by push: breaks ties
    tried_ceiling: float = 0.0  # set by candidates: how full an endpoint may be for it this time

    @property
    def cost(self) -> int:
        """Tokens that it is charged for; a request that is cached altogether is not free."""
        return max(1, self.uncached_tokens)


# late ones first by when they became so, then the others by work: (0 | 1, late from | tokens, sequence, ticket)
Rank: TypeAlias = tuple[int, float, int, Ticket]
AGE_SHARE = 0.6  # of the time that a request may wait, from which on it is late: beyond it an age bound would be none


class Kind(NamedTuple):
    """Tickets of one kind are alike where room is looked for."""

    class_name: str
    group: str
    ceiling: float  # of the class


def kind_of(ticket: Ticket) -> Kind:
    """Return what decides, besides the moment, whether there is room for it."""
    return Kind(ticket.class_name, ticket.group, ticket.priority_class.ceiling)


class Wanted:
    """Which tickets are still worth a try in this wake."""

    __slots__ = ("ceiling", "class_name", "failed", "group")

    def __init__(
        self,
        failed: Mapping[str, float],
        *,
        class_name: str | None = None,
        group: str | None = None,
        ceiling: float | None = None,
    ) -> None:
        """`failed`: group -> the highest ceiling under which one of it found no room. None: any class, any group.

        `ceiling`: they are tried with this one instead of their class's.
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

    def __init__(self, kind: Kind, order: Order, *, age_seconds: float) -> None:
        self.kind = kind
        self._age_seconds = 0.0 if order is Order.FIRST_COME else age_seconds
        self.by_age: list[tuple[float, int, Ticket]] = []  # sorted: (late from, sequence, ticket)
        self.by_work: list[tuple[int, int, Ticket]] = []  # sorted: (cost, sequence, ticket)

    def add(self, ticket: Ticket) -> None:
        """Let it wait here."""
        insort(self.by_age, (self._late_from(ticket), ticket.sequence, ticket))
        insort(self.by_work, (ticket.cost, ticket.sequence, ticket))

    def remove(self, ticket: Ticket) -> None:
        """Take out one that waits here."""
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
        """Return from when on it goes before all shorter work: first come, first served is at once."""
        return ticket.arrived_at + min(self._age_seconds, AGE_SHARE * (ticket.deadline - ticket.arrived_at))


class Flow:
    """One tenant's tickets in one band, and its account."""

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
        """Return its next ticket among those wanted.

        Of several classes in one band each line keeps its class's order, and the earliest come of their heads goes.
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
        return min((rank[3] for rank in heads.values()), key=_arrival)

    def largest(self) -> int:
        """Return the tokens of its largest ticket."""
        return max(line.by_work[-1][0] for line in self.lines.values())

    def turn(self, cost: int, *, quantum: int) -> int:
        """Return the round in which it may send `cost` tokens."""
        return self.visited + max(0, -(-(cost - self.deficit) // quantum))


class Band:
    """The waiting requests of one priority in one pool."""

    __slots__ = ("_age_seconds", "_flows", "_joined", "_order", "_quantum", "_round", "kinds", "requests", "tokens")

    def __init__(self, *, quantum_tokens: int, age_seconds: float) -> None:
        self._quantum = max(1, quantum_tokens)
        self._age_seconds = age_seconds
        self._flows: dict[str, Flow] = {}
        # sorted by (round of the next turn, last joined first, count of joining); a ticket that grows late may move its
        # tenant back, never forward, so that keys are corrected when they are looked at
        self._order: list[tuple[int, int, int, Flow]] = []
        self._round = 0
        self._joined = 0
        self.kinds: dict[Kind, int] = {}
        self.tokens = 0
        self.requests = 0

    def add(self, ticket: Ticket, tenant: str, *, now: float) -> None:
        """Let a ticket wait; a tenant that has none waiting joins at the head of the next round."""
        flow = self._flows.get(tenant)
        if flow is None:
            flow = self._flows[tenant] = Flow(tenant, visited=self._round)
            self._joined += 1
            flow.key = (-1, -self._round, self._joined)
            insort(self._order, (*flow.key, flow))
        kind = kind_of(ticket)
        line = flow.lines.get(kind)
        if line is None:
            line = flow.lines[kind] = Line(kind, ticket.priority_class.order, age_seconds=self._age_seconds)
        line.add(ticket)
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        for counts in (self, flow):
            counts.tokens += ticket.cost
            counts.requests += 1
        self._settle(flow, now=now)

    def remove(self, ticket: Ticket, tenant: str, *, now: float) -> None:
        """Take out a ticket that waits here; a tenant without any leaves, and its account with it."""
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
        """Return the tokens and the requests here that go before a newcomer of this tenant with `cost` tokens.

        An estimate: while its own go and then itself, each of the others sends about as much. Turns are whole quanta,
        so it may be one quantum a tenant more; and longer ones of its own will be overtaken.
        """
        flow = self._flows.get(tenant)
        own_tokens, own_requests = (flow.tokens, flow.requests) if flow is not None else (0, 0)
        others = len(self._flows) - (flow is not None)
        return (
            own_tokens + min(self.tokens - own_tokens, others * (own_tokens + cost)),
            own_requests + min(self.requests - own_requests, others * (own_requests + 1)),
        )

    def best(self, wanted: Wanted, *, now: float) -> Ticket | None:
        """Return the next ticket among those wanted. O(1) but for tenants with none of them."""
        if not any(wanted.takes(kind) for kind in self.kinds):
            return None
        index = 0
        while index < len(self._order):
            flow = self._order[index][3]
            if self._settle(flow, now=now):
                continue  # it had to move back: another one stands here now
            ticket = flow.best(wanted, now=now)
            if ticket is not None:
                return ticket
            index += 1
        return None

    def charge(self, ticket: Ticket, tenant: str) -> None:
        """Book the turn of a ticket that goes and is still here.

        A tenant that was passed over, for lack of room or for another class's guaranteed share, has saved up no more
        than a turn of its largest ticket.
        """
        flow = self._flows[tenant]
        turn = max(self._round, flow.turn(ticket.cost, quantum=self._quantum))
        bank = min(flow.deficit + (turn - flow.visited) * self._quantum, flow.largest() + self._quantum)
        flow.deficit = bank - ticket.cost
        flow.visited = turn
        self._round = turn

    def _settle(self, flow: Flow, *, now: float) -> bool:
        """Put the tenant where its next ticket belongs, and tell whether it moved."""
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


def _arrival(ticket: Ticket) -> tuple[float, int]:
    return ticket.arrived_at, ticket.sequence


class ClassBacklog:
    """The waiting tickets of one class, of all pools. Every operation is O(1)."""

    __slots__ = ("_by_size", "_most", "_tenants", "_tickets", "is_sheddable", "priority", "requests")

    def __init__(self, *, priority: int, is_sheddable: bool) -> None:
        self.priority = priority
        self.is_sheddable = is_sheddable
        self.requests = 0
        self._tenants: dict[str, OrderedDict[int, Ticket]] = {}  # sequence -> ticket
        self._tickets: OrderedDict[int, Ticket] = OrderedDict()  # of all tenants: sequence -> ticket
        self._by_size: dict[int, OrderedDict[str, None]] = {}  # tickets -> the tenants that have so many
        self._most = 0

    @property
    def most(self) -> int:
        """Return how many the tenant with most has."""
        return self._most

    def of(self, tenant: str) -> int:
        """Return how many this tenant has."""
        return len(self._tenants.get(tenant, ()))

    def newest_of_most(self) -> Ticket:
        """Return the last that came of the tenant with most; the backlog must not be empty."""
        tenant = next(reversed(self._by_size[self._most]))
        tickets = self._tenants[tenant]
        return tickets[next(reversed(tickets))]

    def oldest(self) -> Ticket:
        """Return the first that came; the backlog must not be empty."""
        return self._tickets[next(iter(self._tickets))]

    def add(self, ticket: Ticket, tenant: str) -> None:
        """Count one more."""
        tickets = self._tenants.setdefault(tenant, OrderedDict())
        self._move(tenant, len(tickets), len(tickets) + 1)
        tickets[ticket.sequence] = self._tickets[ticket.sequence] = ticket
        self.requests += 1
        self._most = max(self._most, len(tickets))

    def remove(self, ticket: Ticket, tenant: str) -> None:
        """Count one less."""
        tickets = self._tenants[tenant]
        self._move(tenant, len(tickets), len(tickets) - 1)
        del tickets[ticket.sequence], self._tickets[ticket.sequence]
        self.requests -= 1
        if not tickets:
            del self._tenants[tenant]
        if self._most not in self._by_size:
            self._most -= 1

    def _move(self, tenant: str, size: int, to: int) -> None:
        if size:
            tenants = self._by_size[size]
            del tenants[tenant]
            if not tenants:
                del self._by_size[size]
        if to:
            self._by_size.setdefault(to, OrderedDict())[tenant] = None


class GuaranteedShares:
    """What each class with a reserved share has saved, in tokens.

    A class earns its share of all that is sent while it waits, and has a turn of its own once it has saved the tokens
    of its next request: so it gets its share, never more of it at the cost of a higher class, and nothing in advance.
    """

    __slots__ = ("_most", "_saved", "_shares")

    def __init__(self) -> None:
        self._shares: dict[str, float] = {}
        self._saved: dict[str, float] = {}
        self._most: dict[str, float] = {}  # that a class saves which found no room, until it has gone

    def join(self, class_name: str, share: float) -> None:
        """A ticket of the class waits; a class without a share earns nothing."""
        if share > 0.0 and class_name not in self._shares:
            self._shares[class_name] = share
            self._saved[class_name] = 0.0

    def leave(self, class_name: str) -> None:
        """The last ticket of the class is gone, and its savings with it."""
        self._shares.pop(class_name, None)
        self._saved.pop(class_name, None)
        self._most.pop(class_name, None)

    def saved(self) -> Sequence[tuple[str, float]]:
        """Return the classes that have saved anything, those with most first."""
        saved = [(name, tokens) for name, tokens in self._saved.items() if tokens > 0.0]
        if len(saved) > 1:
            saved.sort(key=_tokens, reverse=True)
        return saved

    def went(self, class_name: str, tokens: int) -> None:
        """Share out what was sent: every class that waits earns its part, the one that went pays."""
        for name, share in self._shares.items():
            self._saved[name] = min(self._saved[name] + share * tokens, self._most.get(name, inf))
        if class_name in self._saved:
            self._saved[class_name] = max(0.0, self._saved[class_name] - tokens)
            self._most.pop(class_name, None)

    def could_not(self, class_name: str, *, most: float) -> None:
        """It had its turn and found no room: it saves at most so many tokens until it has gone."""
        self._most[class_name] = most
        self._saved[class_name] = min(self._saved[class_name], most)


def _tokens(entry: tuple[str, float]) -> float:
    return entry[1]

"""Requests that wait for room at an endpoint: who is tried next, who gives way, whose time is over. Pure.

Knows nothing of endpoints: whether there is room is found out by trying, in the order given here.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from extproc.admission.fair_order import Band, ClassBacklog, GuaranteedShares, Ticket, Wanted, kind_of
from extproc.errors import KvmeshError
from extproc.policy.priority import OverloadPolicy, PriorityClass, PriorityPolicy

__all__ = ["FlowQueue", "QueueFullError", "Ticket"]

MOST_TENANTS = 10_000  # with requests waiting; those beyond share one turn
OTHERS = "\0others"
MOST_GROUPS = 128  # waiting in one pool; those beyond are one group: clients invent names of models
# groups that find no room before a wake ends: so many in order, and then so many in turn, so that no number of requests
# for full endpoints hides one for an idle endpoint for long
MOST_FAILED_IN_ORDER = 4
MOST_FAILED_IN_TURN = 2


class QueueFullError(KvmeshError):
    """The newcomer finds no place: no waiting request has to give way to it."""

    reason: ClassVar[str] = "queue-full"


class FlowQueue:
    """The waiting requests of one replica, bounded."""

    def __init__(self, policy: PriorityPolicy) -> None:
        self._overload = policy.overload
        self._classes = tuple(policy.classes)
        self._pools: dict[str, _Pool] = {}
        self._backlogs: dict[str, ClassBacklog] = {}  # class -> those that wait, of classes that have any
        self._tenants: dict[str, int] = {}  # -> waiting requests
        self._places: dict[Ticket, _Place] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []  # sorted
        self._sequence = 0
        self._as_now: dict[str, PriorityClass] = {}  # class -> as it is now; empty: the policy has never changed

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._places

    def __iter__(self) -> Iterator[Ticket]:
        """All that wait, in the order in which they came."""
        return iter(tuple(self._places))

    def reconfigure(self, policy: PriorityPolicy) -> None:
        """Go by another policy from now on. Nobody loses a place, also where fewer may wait now.

        Those that wait belong to their class as it is now, to one that is gone as it was; deadlines stay, and what
        tenants and classes have saved begins anew.
        """
        waiting = tuple(self._places)
        gone = {ticket.class_name: ticket.priority_class for ticket in waiting}
        self._as_now = gone | dict(policy.classes)
        self._overload = policy.overload
        self._classes = tuple(policy.classes)
        self._pools, self._backlogs, self._tenants, self._places, self._deadlines = {}, {}, {}, {}, []
        for ticket in waiting:  # in the order in which they came
            self._enter(ticket, self._counted_as(ticket.tenant))

    def push(self, ticket: Ticket) -> Sequence[Ticket]:
        """Let a request wait, and return those that gave their place up for it.

        Raise QueueFullError where the queue or the class's part of it is full and no request has to give way.
        Sheddable ones do. To a higher priority it is the newest of the tenant with most in the lowest class; to their
        own class it is the newest of a tenant that has more waiting than the newcomer's will have. Where none does, and
        the newcomer may not be refused, the oldest of its class makes room: it has waited longest, and the caller has
        to send it on.
        """
        if ticket in self._places:
            raise ValueError("this ticket waits already")
        if self._as_now:  # what was read before the policy changed belongs to the class as it is now
            self._as_now.setdefault(ticket.class_name, ticket.priority_class)
        ticket.priority_class = self._class_of(ticket)
        tenant = self._counted_as(ticket.tenant)
        victim = self._victim(ticket, tenant)
        if victim is not None:
            self.remove(victim)
        self._enter(ticket, tenant)
        return () if victim is None else (victim,)

    def _enter(self, ticket: Ticket, tenant: str) -> None:
        ticket.priority_class = self._class_of(ticket)
        self._sequence += 1
        ticket.sequence = self._sequence
        pool = self._pools.get(ticket.pool)
        if pool is None:
            pool = self._pools[ticket.pool] = _Pool(self._overload)
        ticket.group = pool.counted_as(ticket.group)
        pool.add(ticket, tenant)
        self._places[ticket] = _Place(pool, tenant)
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        backlog = self._backlogs.get(ticket.class_name)
        if backlog is None:
            backlog = self._backlogs[ticket.class_name] = ClassBacklog(
                priority=ticket.priority_class.priority, is_sheddable=ticket.priority_class.sheddable
            )
        backlog.add(ticket, tenant)
        insort(self._deadlines, (ticket.deadline, ticket.sequence, ticket))

    def _class_of(self, ticket: Ticket) -> PriorityClass:
        """Return its class as it is now, and as one whose requests may be refused where it has to give way."""
        found = self._as_now.get(ticket.class_name, ticket.priority_class)
        if ticket.gives_way and not found.sheddable:
            return msgspec.structs.replace(found, sheddable=True)
        return found

    def remove(self, ticket: Ticket) -> bool:
        """Forget a request, and tell whether it waited."""
        place = self._places.pop(ticket, None)
        if place is None:
            return False
        place.pool.remove(ticket, place.tenant)
        if not place.pool.classes:
            del self._pools[ticket.pool]
        self._tenants[place.tenant] -= 1
        if not self._tenants[place.tenant]:
            del self._tenants[place.tenant]
        backlog = self._backlogs[ticket.class_name]
        backlog.remove(ticket, place.tenant)
        if not backlog.requests:
            del self._backlogs[ticket.class_name]
        del self._deadlines[bisect_left(self._deadlines, (ticket.deadline, ticket.sequence))]
        return True

    def candidates(self, pool: str, now: float) -> Iterator[Ticket]:
        """Yield whom to try next, for one wake.

        Each is to be tried with its `tried_ceiling`: its class's, or a higher one where its class is owed its share.
        After each the caller either has called `went` or `remove` for it, or it found no room: then no ticket of its
        group with the same or a lower ceiling is tried again in this wake. Ends when none is left to try, or when
        too many groups have found no room.
        """
        failed: dict[str, float] = {}
        here = self._pools.get(pool)
        tries = 0
        while here is not None and here.classes and tries < MOST_FAILED_IN_ORDER + MOST_FAILED_IN_TURN:
            in_order = tries < MOST_FAILED_IN_ORDER
            ticket = here.following(failed, now=now) if in_order else here.in_turn(failed, now=now)
            if ticket is None:
                return
            yield ticket
            if ticket in self._places:
                tries += 1
                failed[ticket.group] = max(failed.get(ticket.group, -1.0), ticket.tried_ceiling)
                here.could_not(ticket)

    def went(self, ticket: Ticket, now: float) -> None:
        """Take out a request that is on its way, and charge its tenant and its class."""
        place = self._places[ticket]
        place.pool.charge(ticket, place.tenant, now=now)
        self.remove(ticket)

    def passed(self, pool: str, class_name: str, ceiling: float, cost: int) -> None:
        """Take a request that was sent without waiting, or was sent on: those that wait here earn of it."""
        here = self._pools.get(pool)
        if here is not None:
            here.passed(class_name, ceiling, cost)

    def expired(self, now: float) -> Sequence[Ticket]:
        """Take out and return the tickets whose time is over."""
        over = []
        while self._deadlines and self._deadlines[0][0] <= now:
            over.append(self._deadlines[0][2])
            self.remove(over[-1])
        return over

    def next_deadline(self) -> float | None:
        """Return when the first one's time is over."""
        return self._deadlines[0][0] if self._deadlines else None

    def ahead(self, pool: str, priority: int, tenant: str | None = None, cost: int = 0) -> tuple[int, int]:
        """Return the tokens and the requests that wait in this pool with this priority or a higher one.

        With a tenant: about those of them that go before a newcomer of that tenant with `cost` uncached tokens.
        """
        here = self._pools.get(pool)
        tokens = requests = 0
        if here is not None:
            for at, band in here.bands:
                if -at < priority:
                    break
                of_band = (band.tokens, band.requests)
                if -at == priority and tenant is not None:
                    of_band = band.before(self._counted_as(tenant), cost)
                tokens += of_band[0]
                requests += of_band[1]
        return tokens, requests

    def is_ahead(self, pool: str, priority: int, group: str | None = "") -> bool:
        """Tell whether a ticket of this group (None: any) waits that a newcomer of this priority must not overtake."""
        here = self._pools.get(pool)
        if here is None:
            return False
        if group is None:
            return -here.bands[0][0] >= priority
        return any(kind.group == group for at, band in here.bands if -at >= priority for kind in band.kinds)

    def is_alone(self, ticket: Ticket) -> bool:
        """Tell whether no other ticket waits whose try would show that there is no room for this one."""
        here = self._pools.get(ticket.pool)
        own = kind_of(ticket)
        return here is None or not any(
            kind.group == own.group and kind.ceiling >= own.ceiling and (count > 1 or kind != own)
            for _, band in here.bands
            for kind, count in band.kinds.items()
        )

    def highest(self, pool: str) -> int | None:
        """Return the highest priority that waits in this pool, None if none does."""
        here = self._pools.get(pool)
        return None if here is None else -here.bands[0][0]

    def waits_in(self, pool: str) -> bool:
        """Tell whether any ticket waits in this pool."""
        return pool in self._pools

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return how many wait of each class; all classes of the policy are there."""
        return dict.fromkeys(self._classes, 0) | {name: backlog.requests for name, backlog in self._backlogs.items()}

    def _counted_as(self, tenant: str) -> str:
        return tenant if tenant in self._tenants or len(self._tenants) < MOST_TENANTS else OTHERS

    def _victim(self, ticket: Ticket, tenant: str) -> Ticket | None:
        """Return the ticket that has to give way, None while there is room. Raise QueueFullError if none has to."""
        asked = ticket.priority_class
        backlog = self._backlogs.get(ticket.class_name)
        mine = 0 if backlog is None else backlog.of(tenant)
        if (0 if backlog is None else backlog.requests) >= asked.queue_requests:
            if backlog is not None and not asked.sheddable:
                return backlog.oldest()
            if backlog is not None and backlog.most > mine + 1:
                return backlog.newest_of_most()
            raise QueueFullError(f"{asked.queue_requests} requests of class {ticket.class_name} wait already")
        if len(self._places) < self._overload.queue_requests:
            return None
        may_give_way = [
            other
            for other in self._backlogs.values()
            if other.is_sheddable
            and (
                other.priority < asked.priority
                or (other.priority == asked.priority and asked.sheddable and other.most > mine + 1)
            )
        ]
        if not may_give_way:
            if backlog is not None and not asked.sheddable:
                return backlog.oldest()
            raise QueueFullError(f"{self._overload.queue_requests} requests wait already")
        return min(may_give_way, key=_least_important).newest_of_most()


class _Here:
    """Those of one class in one pool."""

    __slots__ = ("band", "ceiling", "requests")

    def __init__(self, band: Band, *, ceiling: float) -> None:
        self.band = band
        self.ceiling = ceiling
        self.requests = 0


class _Pool:
    """The bands of one pool."""

    __slots__ = ("_ceiling_passed", "_floor_turn", "_groups", "_guaranteed", "_now", "_overload", "bands", "classes")

    def __init__(self, overload: OverloadPolicy) -> None:
        self._overload = overload
        self._guaranteed = GuaranteedShares()
        self._ceiling_passed = 0.0  # the highest of those that were sent without waiting meanwhile
        self._floor_turn: Ticket | None = None  # the last one tried before its band's turn
        self._groups: OrderedDict[str, int] = OrderedDict()  # -> waiting requests; those tried in turn go to the end
        self._now = float("-inf")
        self.bands: list[tuple[int, Band]] = []  # sorted: (-priority, band)
        self.classes: dict[str, _Here] = {}

    def counted_as(self, group: str) -> str:
        """Return the group under which one of this group waits."""
        return group if group in self._groups or len(self._groups) < MOST_GROUPS else OTHERS

    def add(self, ticket: Ticket, tenant: str) -> None:
        """Let it wait in its band."""
        asked = ticket.priority_class
        band = self._band(asked.priority)
        self._now = max(self._now, ticket.arrived_at)
        band.add(ticket, tenant, now=self._now)
        here = self.classes.get(ticket.class_name)
        if here is None:
            here = self.classes[ticket.class_name] = _Here(band, ceiling=asked.ceiling)
        here.requests += 1
        self._guaranteed.join(ticket.class_name, asked.reserved_share)
        self._groups[ticket.group] = self._groups.get(ticket.group, 0) + 1

    def remove(self, ticket: Ticket, tenant: str) -> None:
        """Take it out of its band."""
        here = self.classes[ticket.class_name]
        here.band.remove(ticket, tenant, now=self._now)
        here.requests -= 1
        if not here.requests:
            del self.classes[ticket.class_name]
            self._guaranteed.leave(ticket.class_name)
        if not here.band.requests:
            self.bands = [(at, band) for at, band in self.bands if band is not here.band]
        self._groups[ticket.group] -= 1
        if not self._groups[ticket.group]:
            del self._groups[ticket.group]

    def following(self, failed: Mapping[str, float], *, now: float) -> Ticket | None:
        """Return the next to try: classes below their guaranteed share, then the bands from the highest on.

        A guaranteed share would be void under the class's own ceiling: those above it hold every endpoint above that,
        always. What it has saved bounds what it takes of theirs.
        """
        self._now = max(self._now, now)
        self._floor_turn = None
        for name, saved in self._guaranteed.saved():
            ceiling = max(self._ceiling_passed, *[here.ceiling for here in self.classes.values()])
            ticket = self.classes[name].band.best(Wanted(failed, class_name=name, ceiling=ceiling), now=self._now)
            if ticket is not None and ticket.cost <= saved:
                self._floor_turn = ticket
                ticket.tried_ceiling = ceiling
                return ticket
        return self._highest(Wanted(failed))

    def in_turn(self, failed: Mapping[str, float], *, now: float) -> Ticket | None:
        """Return the next to try of the group that has not been tried for longest."""
        self._now = max(self._now, now)
        for group in tuple(self._groups):
            ticket = self._highest(Wanted(failed, group=group))
            if ticket is not None:
                self._groups.move_to_end(group)
                return ticket
        return None

    def could_not(self, ticket: Ticket) -> None:
        """The last one returned found no room."""
        if ticket is self._floor_turn:
            self._guaranteed.could_not(ticket.class_name, most=max(ticket.cost, self._overload.quantum_tokens))

    def charge(self, ticket: Ticket, tenant: str, *, now: float) -> None:
        """Book a ticket that goes and still waits here."""
        self._now = max(self._now, now)
        band = self.classes[ticket.class_name].band
        band.charge(ticket, tenant)
        self._guaranteed.went(ticket.class_name, ticket.cost)

    def passed(self, class_name: str, ceiling: float, cost: int) -> None:
        """Book a request that goes and has not waited here."""
        self._ceiling_passed = max(self._ceiling_passed, ceiling)
        self._guaranteed.went(class_name, cost)

    def _highest(self, wanted: Wanted) -> Ticket | None:
        for _, band in self.bands:
            ticket = band.best(wanted, now=self._now)
            if ticket is not None:
                ticket.tried_ceiling = ticket.priority_class.ceiling
                return ticket
        return None

    def _band(self, priority: int) -> Band:
        for at, band in self.bands:
            if at == -priority:
                return band
        band = Band(quantum_tokens=self._overload.quantum_tokens, age_seconds=self._overload.age_seconds)
        self.bands.append((-priority, band))
        self.bands.sort(key=_place_of_band)
        return band


class _Place(NamedTuple):
    """Where a ticket waits, under the name of which tenant."""

    pool: _Pool
    tenant: str


def _place_of_band(entry: tuple[int, Band]) -> int:
    return entry[0]


def _least_important(backlog: ClassBacklog) -> tuple[int, int]:
    return backlog.priority, -backlog.most

"""The order of requests that wait for room at an endpoint: next to try, next to displace, next to expire. Pure.

Knows nothing of endpoints: its caller tries the requests in this order and finds out whether there is room.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from extproc.admission.fair_order import Band, ClassBacklog, GuaranteedShares, Ticket, Wanted, kind_of
from extproc.errors import KvmeshError
from extproc.policy.priority import PriorityClass
from extproc.policy.request_class import PriorityPolicy

__all__ = ["FlowQueue", "QueueFullError", "Ticket"]

MOST_TENANTS = 10_000  # with waiting requests; further tenants share one turn
OTHERS = "\0others"
MOST_GROUPS = 128  # waiting in one pool; further groups count as one: clients invent names of models
# Tries without room before a wake ends: first in order of priority, then by the group untried for longest, so that many
# requests for full endpoints cannot hide one for an idle endpoint for long.
MOST_FAILED_IN_ORDER = 4
MOST_FAILED_IN_TURN = 2


class QueueFullError(KvmeshError):
    """The queue is full, and no waiting request has to give way to the newcomer."""

    reason: ClassVar[str] = "queue-full"


class FlowQueue:
    """The waiting requests of one replica, bounded."""

    def __init__(self, policy: PriorityPolicy, *, quantum_tokens: int = 2048, age_seconds: float = 15.0) -> None:
        """A tenant's turn has so many uncached tokens; after so long, a request precedes its tenant's shorter work."""
        self._overload, self._turns = policy.overload, (quantum_tokens, age_seconds)
        self._classes = tuple(policy.classes)
        self._pools: dict[str, _Pool] = {}
        # (class, whether sheddable) -> its waiting tickets; no entry without any. A class has both kinds if some of its
        # requests wait for room and others for a first pod.
        self._backlogs: dict[tuple[str, bool], ClassBacklog] = {}
        self._tenants: dict[str, int] = {}  # -> waiting requests
        self._places: dict[Ticket, _Place] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []  # sorted
        self._sequence = 0
        self._as_now: dict[str, PriorityClass] = {}  # classes as of the last policy change; empty before the first one

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, ticket: object) -> bool:
        return ticket in self._places

    def __iter__(self) -> Iterator[Ticket]:
        """Iterate over a copy of all waiting tickets in order of arrival."""
        return iter(tuple(self._places))

    def reconfigure(self, policy: PriorityPolicy) -> None:
        """Replace the policy. No waiting request loses its place, even above a lowered bound.

        Waiting requests get the new version of their class, or keep a class that was removed. Deadlines stay; tenants'
        deficits and classes' savings restart at zero.
        """
        waiting = tuple(self._places)
        gone = {ticket.class_name: ticket.priority_class for ticket in waiting}
        self._as_now = gone | dict(policy.classes)
        self._overload = policy.overload
        self._classes = tuple(policy.classes)
        self._pools, self._backlogs, self._tenants, self._places, self._deadlines = {}, {}, {}, {}, []
        for ticket in waiting:  # in order of arrival
            self._enter(ticket, self._counted_as(ticket.tenant))

    def push(self, ticket: Ticket) -> Sequence[Ticket]:
        """Add a request, and return the requests displaced for it.

        Raise QueueFullError if the queue, or the class's part of it, is full and no request has to give way. Only
        sheddable requests have to. For a higher priority it is the newest request of the tenant with most requests in
        the lowest class. For the same priority it is the newest request of a tenant that has more waiting than the
        newcomer's tenant will have. If there is none and the newcomer may not be refused, the oldest request of its
        class makes room: it has waited longest, and the caller has to send it on.
        """
        if ticket in self._places:
            raise ValueError("this ticket waits already")
        if self._as_now:  # a request classified before the policy change gets the new version of its class
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
            pool = self._pools[ticket.pool] = _Pool(self._turns)
        ticket.group = pool.counted_as(ticket.group)
        pool.add(ticket, tenant)
        self._places[ticket] = _Place(pool, tenant)
        self._tenants[tenant] = self._tenants.get(tenant, 0) + 1
        part = _part(ticket)
        backlog = self._backlogs.get(part)
        if backlog is None:
            backlog = self._backlogs[part] = ClassBacklog(priority=ticket.priority_class.priority, is_sheddable=part[1])
        backlog.add(ticket, tenant)
        insort(self._deadlines, (ticket.deadline, ticket.sequence, ticket))

    def _class_of(self, ticket: Ticket) -> PriorityClass:
        found = self._as_now.get(ticket.class_name, ticket.priority_class)
        if ticket.gives_way and not found.sheddable:
            return msgspec.structs.replace(found, sheddable=True)
        return found

    def remove(self, ticket: Ticket) -> bool:
        """Remove a request, and tell whether it was waiting."""
        place = self._places.pop(ticket, None)
        if place is None:
            return False
        place.pool.remove(ticket, place.tenant)
        if not place.pool.classes:
            del self._pools[ticket.pool]
        self._tenants[place.tenant] -= 1
        if not self._tenants[place.tenant]:
            del self._tenants[place.tenant]
        backlog = self._backlogs[_part(ticket)]
        backlog.remove(ticket, place.tenant)
        if not backlog.requests:
            del self._backlogs[_part(ticket)]
        del self._deadlines[bisect_left(self._deadlines, (ticket.deadline, ticket.sequence))]
        return True

    def candidates(self, pool: str, now: float) -> Iterator[Ticket]:
        """Yield the tickets to try in one wake, in order.

        Try each with its `tried_ceiling`: its class's, or a higher one if its class is owed its reserved share. Call
        `went` or `remove` for a ticket that leaves, before asking for the next one. A ticket that stays found no room:
        then no ticket of its group with the same or a lower ceiling is tried again in this wake. Ends when no ticket is
        left to try, or when too many tries have found no room.
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
        """Remove a request that was sent, and charge its tenant and its class."""
        place = self._places[ticket]
        place.pool.charge(ticket, place.tenant, now=now)
        self.remove(ticket)

    def passed(self, pool: str, class_name: str, ceiling: float, cost: int) -> None:
        """Count a request sent without waiting, or sent on: the waiting classes earn their reserved shares of it."""
        here = self._pools.get(pool)
        if here is not None:
            here.passed(class_name, ceiling, cost)

    def expired(self, now: float) -> Sequence[Ticket]:
        """Remove and return the tickets past their deadline."""
        over = []
        while self._deadlines and self._deadlines[0][0] <= now:
            over.append(self._deadlines[0][2])
            self.remove(over[-1])
        return over

    def next_deadline(self) -> float | None:
        """Return the earliest deadline, or None if no ticket waits."""
        return self._deadlines[0][0] if self._deadlines else None

    def ahead(self, pool: str, priority: int, tenant: str | None = None, cost: int = 0) -> tuple[int, int]:
        """Return the tokens and the number of requests that wait in this pool with this priority or a higher one.

        With a tenant, estimate only the part before its newcomer with `cost` uncached tokens.
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
        """Tell whether a newcomer of this priority must wait behind a ticket of this group, or of any if None."""
        here = self._pools.get(pool)
        if here is None:
            return False
        if group is None:
            return -here.bands[0][0] >= priority
        return any(kind.group == group for at, band in here.bands if -at >= priority for kind in band.kinds)

    def is_alone(self, ticket: Ticket) -> bool:
        """Tell whether no other waiting ticket's failed try would imply that there is no room for this one."""
        here = self._pools.get(ticket.pool)
        own = kind_of(ticket)
        return here is None or not any(
            kind.group == own.group and kind.ceiling >= own.ceiling and (count > 1 or kind != own)
            for _, band in here.bands
            for kind, count in band.kinds.items()
        )

    def highest(self, pool: str) -> int | None:
        """Return the highest waiting priority in this pool, or None if no ticket waits."""
        here = self._pools.get(pool)
        return None if here is None else -here.bands[0][0]

    def waits_in(self, pool: str) -> bool:
        """Tell whether any ticket waits in this pool."""
        return pool in self._pools

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the number of waiting requests by class, including classes of the policy without any."""
        sizes = dict.fromkeys(self._classes, 0)
        for (name, _), backlog in self._backlogs.items():
            sizes[name] = sizes.get(name, 0) + backlog.requests
        return sizes

    def _counted_as(self, tenant: str) -> str:
        return tenant if tenant in self._tenants or len(self._tenants) < MOST_TENANTS else OTHERS

    def _victim(self, ticket: Ticket, tenant: str) -> Ticket | None:
        """Return the ticket to displace, or None while there is room. Raise QueueFullError if none has to give way."""
        asked = ticket.priority_class
        backlog = self._backlogs.get(_part(ticket))
        rest = self._backlogs.get((ticket.class_name, not asked.sheddable))
        mine = 0 if backlog is None else backlog.of(tenant)
        if sum(part.requests for part in (backlog, rest) if part is not None) >= asked.queue_requests:
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
        least_important = min(may_give_way, key=lambda backlog: (backlog.priority, -backlog.most))
        return least_important.newest_of_most()


class _Here:
    __slots__ = ("band", "ceiling", "requests")

    def __init__(self, band: Band, *, ceiling: float) -> None:
        self.band = band
        self.ceiling = ceiling
        self.requests = 0


class _Pool:
    __slots__ = ("_ceiling_passed", "_floor_turn", "_groups", "_guaranteed", "_now", "_turns", "bands", "classes")

    def __init__(self, turns: tuple[int, float]) -> None:
        self._turns = turns  # as the arguments of a Band
        self._guaranteed = GuaranteedShares()
        self._ceiling_passed = 0.0  # the highest ceiling of requests sent without waiting meanwhile
        self._floor_turn: Ticket | None = None  # set if the last try was a turn on a guaranteed share
        self._groups: OrderedDict[str, int] = OrderedDict()  # -> waiting requests; untried for longest first
        self._now = float("-inf")
        self.bands: list[tuple[int, Band]] = []  # sorted: (-priority, band)
        self.classes: dict[str, _Here] = {}

    def counted_as(self, group: str) -> str:
        return group if group in self._groups or len(self._groups) < MOST_GROUPS else OTHERS

    def add(self, ticket: Ticket, tenant: str) -> None:
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
        """Return the next ticket to try: of classes owed their guaranteed share, then by priority.

        A class owed its share is tried with the highest ceiling in the pool. Under its own, the share would be void:
        higher classes always keep every endpoint fuller than that. Its savings bound how much of their room it takes.
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
        self._now = max(self._now, now)
        for group in tuple(self._groups):
            ticket = self._highest(Wanted(failed, group=group))
            if ticket is not None:
                self._groups.move_to_end(group)
                return ticket
        return None

    def could_not(self, ticket: Ticket) -> None:
        if ticket is self._floor_turn:
            self._guaranteed.could_not(ticket.class_name, most=max(ticket.cost, self._turns[0]))

    def charge(self, ticket: Ticket, tenant: str, *, now: float) -> None:
        """Charge tenant and class for a ticket that is sent; call it before `remove`."""
        self._now = max(self._now, now)
        band = self.classes[ticket.class_name].band
        band.charge(ticket, tenant)
        self._guaranteed.went(ticket.class_name, ticket.cost)

    def passed(self, class_name: str, ceiling: float, cost: int) -> None:
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
        band = Band(*self._turns)
        self.bands.append((-priority, band))
        self.bands.sort(key=lambda entry: entry[0])
        return band


class _Place(NamedTuple):
    """A waiting ticket's pool, and the tenant that it is counted as."""

    pool: _Pool
    tenant: str


def _part(ticket: Ticket) -> tuple[str, bool]:
    return ticket.class_name, ticket.priority_class.sheddable

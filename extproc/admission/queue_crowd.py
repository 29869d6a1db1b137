"""How many of one class wait for whom: which tenant has most, and which of its requests came last. Pure."""

from collections import OrderedDict

from extproc.admission.ticket import Ticket


class Crowd:
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
        """Return the last that came of the tenant with most; the crowd must not be empty."""
        tenant = next(reversed(self._by_size[self._most]))
        tickets = self._tenants[tenant]
        return tickets[next(reversed(tickets))]

    def oldest(self) -> Ticket:
        """Return the first that came; the crowd must not be empty."""
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

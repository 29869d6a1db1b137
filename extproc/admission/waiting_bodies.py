"""The memory held by waiting requests, bounded over all pools of a picker. Pure.

Beyond the bound, or a priority's share of it, the largest body of the lowest priority gives way; among bodies of about
this size, the newest one of the tenant with the most bytes. Small requests keep their places.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from extproc.admission.flow_queue import QueueFullError

MOST_SHARE = 0.75  # of the memory, for the requests of one priority


class BodiesFullError(QueueFullError):
    """The memory is full, and the newcomer is the first to give way."""


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBody:
    """The memory of one waiting request."""

    priority: int
    tenant: str
    size: int
    give_way: Callable[[], None]  # ends the request's wait


@dataclass(slots=True)
class _OfTenant:
    bodies: dict[HeldBody, None] = field(default_factory=dict)
    size: int = 0


@dataclass(slots=True)
class _OfPriority:
    alike: dict[int, dict[str, _OfTenant]] = field(default_factory=dict)  # size class, in powers of two -> tenant
    size: int = 0


class WaitingBodies:
    """All bodies of waiting requests."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.gave_way = 0  # total of requests, including newcomers refused at once
        self._bands: dict[int, _OfPriority] = {}

    @contextmanager
    def held(self, body: HeldBody) -> Iterator[None]:
        """Hold a body while its request waits. Raise BodiesFullError if it has to give way at once."""
        self.hold(body)
        try:
            yield
        finally:
            self.release(body)

    def hold(self, body: HeldBody) -> None:
        """Add a body, and displace others if necessary. Raise BodiesFullError if it has to give way itself."""
        band = self._bands.setdefault(body.priority, _OfPriority())
        mine = band.alike.setdefault(body.size.bit_length(), {}).setdefault(body.tenant, _OfTenant())
        mine.bodies[body] = None
        mine.size += body.size
        band.size += body.size
        self.held_bytes += body.size
        while (victim := self._victim(body.priority)) is not None:
            self.release(victim)
            self.gave_way += 1
            if victim is body:
                raise BodiesFullError("the waiting requests hold as much memory as they may")
            victim.give_way()

    def release(self, body: HeldBody) -> None:
        """Remove a body, if present."""
        band = self._bands.get(body.priority)
        tenants = band.alike.get(body.size.bit_length(), {}) if band is not None else {}
        mine = tenants.get(body.tenant)
        if band is None or mine is None or body not in mine.bodies:
            return
        del mine.bodies[body]
        mine.size -= body.size
        band.size -= body.size
        self.held_bytes -= body.size
        if not mine.bodies:
            del tenants[body.tenant]
        if not tenants:
            del band.alike[body.size.bit_length()]
        if not band.alike:
            del self._bands[body.priority]

    def _victim(self, newcomer: int) -> HeldBody | None:
        """Return the body that gives way after a newcomer of this priority, or None if all bodies may stay."""
        own = self._bands.get(newcomer)
        if own is not None and own.size > MOST_SHARE * self.most_bytes:
            band = own
        elif self.held_bytes > self.most_bytes:
            band = self._bands[min(self._bands)]
        else:
            return None
        most = max(band.alike[max(band.alike)].values(), key=lambda each: each.size)
        return next(reversed(most.bodies))

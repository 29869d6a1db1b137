"""The memory held by requests that wait for a pool's first pod, bounded over all pools of a picker. Pure.

A pod takes minutes to start, and meanwhile every client may send a long body. Beyond the bound, the least important
request gives way: in the lowest priority present, the newest request of the tenant that holds most bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


class BodiesFullError(Exception):
    """The memory is full, and the newcomer is the least important request."""


@dataclass(slots=True, kw_only=True, eq=False)
class HeldBody:
    """The memory of one waiting request."""

    priority: int
    tenant: str
    size: int
    give_way: Callable[[], None]  # ends the request for the sake of more important ones


@dataclass(slots=True)
class _OfTenant:
    bodies: dict[HeldBody, None] = field(default_factory=dict)
    size: int = 0


class WaitingBodies:
    """All bodies of requests that wait for a first pod."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.gave_way = 0  # total of requests, including newcomers refused at once
        self._bands: dict[int, dict[str, _OfTenant]] = {}  # priority -> tenant

    def hold(self, body: HeldBody) -> None:
        """Add a body, and displace less important ones if necessary. Raise BodiesFullError if it has to give way."""
        if body.size > self.most_bytes:  # it would not fit even if all others gave way
            self.gave_way += 1
            raise BodiesFullError
        tenants = self._bands.setdefault(body.priority, {})
        mine = tenants.setdefault(body.tenant, _OfTenant())
        mine.bodies[body] = None
        mine.size += body.size
        self.held_bytes += body.size
        while self.held_bytes > self.most_bytes:
            victim = self._victim()
            self.release(victim)
            self.gave_way += 1
            if victim is body:
                raise BodiesFullError
            victim.give_way()

    def release(self, body: HeldBody) -> None:
        """Remove a body, if present."""
        tenants = self._bands.get(body.priority, {})
        mine = tenants.get(body.tenant)
        if mine is None or body not in mine.bodies:
            return
        del mine.bodies[body]
        mine.size -= body.size
        self.held_bytes -= body.size
        if not mine.bodies:
            del tenants[body.tenant]
            if not tenants:
                del self._bands[body.priority]

    def _victim(self) -> HeldBody:
        tenants = self._bands[min(self._bands)]
        most = max(tenants.values(), key=lambda each: each.size)
        return next(reversed(most.bodies))

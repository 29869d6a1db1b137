"""What requests hold in memory that wait for a pool's first pod: bounded over all pools of a picker. Pure.

A pod takes minutes to start, and meanwhile every client may send a long body. Beyond the bound the least important give
way: of the lowest priority that holds anything, the newest request of the tenant that holds most.
"""

from collections.abc import Callable


class BodiesFullError(Exception):
    """All that waits holds as much as it may, and the newcomer is the least important."""


class HeldBody:
    """What one request holds."""

    __slots__ = ("give_way", "priority", "size", "tenant")

    def __init__(self, *, priority: int, tenant: str, size: int, give_way: Callable[[], None]) -> None:
        """`give_way` ends the request for the sake of more important ones."""
        self.priority = priority
        self.tenant = tenant
        self.size = size
        self.give_way = give_way


class _OfTenant:
    """Those of one tenant with one priority, in the order in which they came."""

    __slots__ = ("bodies", "size")

    def __init__(self) -> None:
        self.bodies: dict[HeldBody, None] = {}
        self.size = 0


class WaitingBodies:
    """All bodies of requests that wait for a first pod."""

    def __init__(self, *, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.held_bytes = 0
        self.gave_way = 0  # requests ever, also those that never were held
        self._bands: dict[int, dict[str, _OfTenant]] = {}  # priority -> tenant

    def hold(self, body: HeldBody) -> None:
        """Take note of a body; less important ones give way. Raise BodiesFullError where it is this one that has to."""
        if body.size > self.most_bytes:  # whoever gave way to it would do so in vain
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
        """Forget a body. Nothing happens where it is not held."""
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

"""The rules of the queue written down as naively as can be: one list, everything looked for each time it is asked."""

from dataclasses import dataclass, field

from extproc.admission.fair_order import Ticket
from extproc.policy.request_class import PriorityPolicy

IN_ORDER, IN_TURN = 4, 2  # groups that may find no room in one wake


@dataclass(eq=False)
class Account:
    """A tenant's, in one band; gone when nothing of it waits there."""

    visited: int
    joined: tuple[int, int]
    deficit: int = 0


@dataclass
class BandState:
    round: int = 0
    joined: int = 0
    accounts: dict[str, Account] = field(default_factory=dict)


@dataclass
class PoolState:
    bands: dict[int, BandState] = field(default_factory=dict)
    saved: dict[str, float] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)  # that may be saved, after a turn that found no room
    ceiling_passed: float = 0.0
    groups: list[str] = field(default_factory=list)
    now: float = float("-inf")


class Model:
    def __init__(self, policy: PriorityPolicy, *, quantum_tokens: int, age_seconds: float) -> None:
        self.overload = policy.overload
        self.quantum_tokens = quantum_tokens
        self.age_seconds = age_seconds
        self.waiting: list[Ticket] = []
        self.pools: dict[str, PoolState] = {}

    # what waits

    def here(self, pool: str, *, priority: int | None = None, tenant: str | None = None) -> list[Ticket]:
        return [
            each
            for each in self.waiting
            if each.pool == pool
            and (priority is None or each.priority_class.priority == priority)
            and (tenant is None or each.tenant == tenant)
        ]

    def victim(self, new: Ticket) -> Ticket | str | None:
        """Who gives way: a ticket, None for nobody, "full" where the newcomer finds no place."""
        own = self.alike(new)
        mine = self.of_tenant(own, new.tenant)
        if sum(each.class_name == new.class_name for each in self.waiting) >= new.priority_class.queue_requests:
            most = max((self.of_tenant(own, each.tenant) for each in own), default=0)
            if not new.priority_class.sheddable:
                return "oldest" if own else "full"
            return "full" if most <= mine + 1 else "class"
        if len(self.waiting) < self.overload.queue_requests:
            return None
        if not self.can_displace(new) and not new.priority_class.sheddable and own:
            return "oldest"
        return "total"

    def alike(self, one: Ticket) -> list[Ticket]:
        """Those of its class that are as sheddable."""
        sheddable = one.priority_class.sheddable
        return [
            each
            for each in self.waiting
            if each.class_name == one.class_name and each.priority_class.sheddable == sheddable
        ]

    def of_tenant(self, tickets: list[Ticket], tenant: str) -> int:
        return sum(1 for each in tickets if each.tenant == tenant)

    def may_give_way(self, victim: Ticket, new: Ticket, *, why: str) -> bool:
        """Whether this is one whom the rules let give way (several tenants may have equally many)."""
        if why == "oldest":
            return victim is self.alike(new)[0]
        asked, given = new.priority_class, victim.priority_class
        own, most = self.alike(victim), self.most(victim)
        is_newest = max(e.sequence for e in own if e.tenant == victim.tenant) == victim.sequence
        has_most = self.of_tenant(own, victim.tenant) == most
        mine = self.of_tenant(self.alike(new), new.tenant)
        allowed = given.sheddable and (
            (why == "total" and given.priority < asked.priority)
            or (given.priority == asked.priority and asked.sheddable and most > mine + 1)
        )
        if why == "class":
            return is_newest and has_most and allowed and victim.class_name == new.class_name
        lowest = min(each.priority_class.priority for each in self.waiting if each.priority_class.sheddable)
        return is_newest and has_most and allowed and given.priority == lowest

    def can_displace(self, new: Ticket) -> bool:
        mine = self.of_tenant(self.alike(new), new.tenant)
        return any(
            each.priority_class.sheddable
            and (
                each.priority_class.priority < new.priority_class.priority
                or (
                    each.priority_class.priority == new.priority_class.priority
                    and new.priority_class.sheddable
                    and self.most(each) > mine + 1
                )
            )
            for each in self.waiting
        )

    def most(self, one: Ticket) -> int:
        own = self.alike(one)
        return max((self.of_tenant(own, each.tenant) for each in own), default=0)

    # coming and leaving

    def push(self, new: Ticket) -> None:
        pool = self.pools.setdefault(new.pool, PoolState())
        pool.now = max(pool.now, new.arrived_at)
        band = pool.bands.setdefault(new.priority_class.priority, BandState())
        if new.tenant not in band.accounts:
            band.joined += 1
            band.accounts[new.tenant] = Account(visited=band.round, joined=(-band.round, band.joined))
        if new.group not in pool.groups:
            pool.groups.append(new.group)
        if new.priority_class.reserved_share > 0:
            pool.saved.setdefault(new.class_name, 0.0)
        self.waiting.append(new)

    def remove(self, gone: Ticket) -> None:
        self.waiting.remove(gone)
        pool, priority = self.pools[gone.pool], gone.priority_class.priority
        if not self.here(gone.pool):
            del self.pools[gone.pool]
            return
        if not self.here(gone.pool, priority=priority):
            del pool.bands[priority]
        elif not self.here(gone.pool, priority=priority, tenant=gone.tenant):
            del pool.bands[priority].accounts[gone.tenant]
        if not any(each.class_name == gone.class_name for each in self.here(gone.pool)):
            pool.saved.pop(gone.class_name, None)
            pool.most.pop(gone.class_name, None)
        if not any(each.group == gone.group for each in self.here(gone.pool)):
            pool.groups.remove(gone.group)

    def expired(self, now: float) -> list[Ticket]:
        over = sorted((e for e in self.waiting if e.deadline <= now), key=lambda e: (e.deadline, e.sequence))
        for each in over:
            self.remove(each)
        return over

    # the order

    def first(self, tickets: list[Ticket], now: float) -> Ticket:
        """Of one tenant's in one band."""
        firsts = []
        for name in {each.class_name for each in tickets}:
            own = [each for each in tickets if each.class_name == name]
            late_from = {e: e.arrived_at + min(self.age_seconds, 0.6 * (e.deadline - e.arrived_at)) for e in own}
            late = [e for e in own if now >= late_from[e]]
            if late:
                firsts.append(min(late, key=lambda e: (late_from[e], e.sequence)))
            else:
                firsts.append(min(own, key=lambda e: (e.cost, e.sequence)))
        return min(firsts, key=lambda e: (e.arrived_at, e.sequence))

    def turn(self, account: Account, cost: int) -> int:
        """The first round, one quantum each, in which it can afford this."""
        turn, deficit = account.visited, account.deficit
        while deficit < cost:
            turn, deficit = turn + 1, deficit + self.quantum_tokens
        return turn

    def best(
        self,
        pool: str,
        priority: int,
        failed: dict[str, float],
        class_name: str | None,
        group: str | None,
        now: float,
        ceiling: float = 0.0,
    ) -> Ticket | None:
        band = self.pools[pool].bands.get(priority)
        if band is None:
            return None
        turns = []
        for tenant, account in band.accounts.items():
            head = self.first(self.here(pool, priority=priority, tenant=tenant), now)
            turns.append((self.turn(account, head.cost), account.joined, tenant))
        for _, _, tenant in sorted(turns):
            wanted = [
                e
                for e in self.here(pool, priority=priority, tenant=tenant)
                if failed.get(e.group, -1.0) < (ceiling or e.priority_class.ceiling)
                and class_name in (None, e.class_name)
                and group in (None, e.group)
            ]
            if wanted:
                return self.first(wanted, now)
        return None

    def following(self, name: str, failed: dict[str, float], now: float) -> tuple[Ticket | None, bool]:
        pool = self.pools[name]
        for class_name, saved in sorted(pool.saved.items(), key=lambda entry: -entry[1]):
            priority = next(e for e in self.here(name) if e.class_name == class_name).priority_class.priority
            found = self.best(name, priority, failed, class_name, None, now, self.floor_ceiling(name))
            if found is not None and found.cost <= saved:
                return found, True
        return self.highest(name, failed, None, now), False

    def floor_ceiling(self, name: str) -> float:
        return max(self.pools[name].ceiling_passed, *(each.priority_class.ceiling for each in self.here(name)))

    def highest(self, name: str, failed: dict[str, float], group: str | None, now: float) -> Ticket | None:
        for priority in sorted(self.pools[name].bands, reverse=True):
            found = self.best(name, priority, failed, None, group, now)
            if found is not None:
                return found
        return None

    def wake(
        self, name: str, now: float, room: dict[str, int], ceiling_now: float, *, given_up_at: int = 0
    ) -> list[tuple[Ticket, bool]]:
        """Everybody tried, with whether they went: so many of each group, and only ceilings above `ceiling_now`."""
        tried: list[tuple[Ticket, bool]] = []
        failed: dict[str, float] = {}
        failures = 0
        while name in self.pools and failures < IN_ORDER + IN_TURN:
            pool = self.pools[name]
            pool.now = now = max(pool.now, now)
            found, by_floor = None, False
            if failures < IN_ORDER:
                found, by_floor = self.following(name, failed, now)
            else:
                for group in list(pool.groups):
                    found = self.highest(name, failed, group, now)
                    if found is not None:
                        pool.groups.remove(group)
                        pool.groups.append(group)
                        break
            if found is None:
                break
            ceiling = self.floor_ceiling(name) if by_floor else found.priority_class.ceiling
            goes = room.get(found.group, 0) > 0 and ceiling > ceiling_now
            tried.append((found, goes))
            if len(tried) == given_up_at:
                break
            if goes:
                room[found.group] -= 1
                self.charge(found)
            else:
                failures += 1
                failed[found.group] = max(failed.get(found.group, -1.0), ceiling)
                if by_floor:
                    most = max(found.cost, self.quantum_tokens)
                    pool.most[found.class_name] = most
                    pool.saved[found.class_name] = min(pool.saved[found.class_name], most)
        return tried

    def charge(self, gone: Ticket) -> None:
        pool, priority, quantum = self.pools[gone.pool], gone.priority_class.priority, self.quantum_tokens
        band = pool.bands[priority]
        account = band.accounts[gone.tenant]
        turn = max(band.round, self.turn(account, gone.cost))
        largest = max(e.cost for e in self.here(gone.pool, priority=priority, tenant=gone.tenant))
        bank = min(account.deficit + (turn - account.visited) * quantum, largest + quantum)
        account.deficit, account.visited = bank - gone.cost, turn
        band.round = turn
        self.share(gone.pool, gone.class_name, gone.cost)
        self.remove(gone)

    def passed(self, name: str, class_name: str, ceiling: float, cost: int) -> None:
        if name in self.pools:
            self.pools[name].ceiling_passed = max(self.pools[name].ceiling_passed, ceiling)
            self.share(name, class_name, cost)

    def share(self, name: str, sent: str, cost: int) -> None:
        pool = self.pools[name]
        shares = {e.class_name: e.priority_class.reserved_share for e in self.here(name)}
        for class_name in pool.saved:
            earned = pool.saved[class_name] + shares[class_name] * cost
            pool.saved[class_name] = min(earned, pool.most.get(class_name, earned))
        pool.most.pop(sent, None)
        if sent in pool.saved:
            pool.saved[sent] = max(0.0, pool.saved[sent] - cost)

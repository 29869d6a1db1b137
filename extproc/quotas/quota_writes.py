"""What Redis has still to be told of quotas: what was used and not yet taken, who has ended, who is still open.

Kept by `quotas.shared_quotas`, which writes it. Pure; time is an argument, monotonic seconds.
"""

from collections.abc import Iterable, Sequence

import msgspec

from extproc.quotas.quota import NOTHING, Amounts, QuotaAsk, QuotaKey

MOST_KEYS = 10_000  # of which writes wait: Redis is away, and nobody is helped by more


class QuotaWrite(msgspec.Struct, eq=False):
    """One key's part, written by one command."""

    key: QuotaKey
    amounts: Amounts = NOTHING  # to be taken; negative: to be given back
    ended: list[bytes] = []
    renewed: list[bytes] = []


class QuotaWrites:
    """Collects per key, so that a thousand ends of one tenant are one write."""

    def __init__(self) -> None:
        self.dropped = 0  # keys whose writes found no place
        self._due: dict[QuotaKey, QuotaWrite] = {}
        self._open: dict[bytes, tuple[QuotaKey, float]] = {}  # member -> its key, when Redis heard of it last

    def __len__(self) -> int:
        return len(self._due)

    @property
    def open_members(self) -> int:
        """Return how many open requests have a lease."""
        return len(self._open)

    def opened(self, ask: QuotaAsk, *, told_at: float) -> None:
        """Keep a request's lease from now on."""
        self._open[ask.member] = (ask.key, told_at)

    def ended(self, ask: QuotaAsk, amounts: Amounts, *, has_lease: bool) -> None:
        """Note what is left to be taken or given back, and end the lease."""
        if has_lease:
            self._open.pop(ask.member, None)
            self._add(ask.key, amounts, (ask.member,))
        else:
            self.charge(ask.key, amounts)

    def charge(self, key: QuotaKey, amounts: Amounts) -> None:
        """Note what is left to be taken, or given back."""
        if amounts != NOTHING:
            self._add(key, amounts, ())

    def take(self, *, renew_before: float, most_members: int) -> list[QuotaWrite]:
        """Return all that is due, with the leases that were told before `renew_before`; nothing is due any more."""
        writes: list[QuotaWrite] = []
        for write in self._due.values():
            first, *rest = _portions(write.ended, most_members) or [[]]
            writes.append(QuotaWrite(write.key, write.amounts, ended=first))
            writes += [QuotaWrite(write.key, ended=part) for part in rest]
        self._due = {}
        for key, members in self._to_renew(renew_before).items():
            writes += [QuotaWrite(key, renewed=part) for part in _portions(members, most_members)]
        return writes

    def put_back(self, writes: Iterable[QuotaWrite], *, soon: bool) -> None:
        """They were not written. Unless they will be soon, who has ended is forgotten: leases end by themselves."""
        for write in writes:
            ended = write.ended if soon else []
            if ended or write.amounts != NOTHING:
                self._add(write.key, write.amounts, ended)

    def written(self, writes: Iterable[QuotaWrite], *, now: float) -> None:
        """They were written."""
        for write in writes:
            for member in write.renewed:
                if member in self._open:  # it may have ended meanwhile
                    self._open[member] = (write.key, now)

    def _add(self, key: QuotaKey, amounts: Amounts, ended: Sequence[bytes]) -> None:
        write = self._due.get(key)
        if write is None:
            if len(self._due) >= MOST_KEYS:
                self.dropped += 1
                return
            write = self._due[key] = QuotaWrite(key)
        (one, two, three), (more_one, more_two, more_three) = write.amounts, amounts
        write.amounts = (one + more_one, two + more_two, three + more_three)
        write.ended.extend(ended)

    def _to_renew(self, before: float) -> dict[QuotaKey, list[bytes]]:
        found: dict[QuotaKey, list[bytes]] = {}
        for member, (key, told_at) in self._open.items():
            if told_at < before:
                found.setdefault(key, []).append(member)
        return found


def _portions(members: list[bytes], most: int) -> list[list[bytes]]:
    return [members[at : at + most] for at in range(0, len(members), most)]

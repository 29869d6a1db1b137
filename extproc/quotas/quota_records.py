"""Quotas in Redis: names, the script's commands, and how its replies read. `docs/guides/quotas.md` lists the keys.

Names are keyed hashes: no client's text is in Redis, and none can be guessed without the seed. What is not ours to read
is told as such and never raises.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from extproc.quotas.quota import LIMITS, NOTHING, Amounts, QuotaAsk, QuotaKey
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import pack

DIGEST_BYTES = 12
THOUSANDTHS = 1000.0
NOT_OURS = "Redis answers something else than was asked"
TAKEN_PARTS, FAULT_PARTS = 5, 2  # of the script's replies
TAKE_PARTS = 18  # of the whole command
MOST_MEMBERS = 500  # in one command: Lua's stack is finite, and others want to be served, too


class QuotaNames:
    """The names of quotas; those of different deployments on one Redis (`hash_seed`) differ."""

    def __init__(self, *, hash_seed: str) -> None:
        self._key = hashlib.blake2b(b"quota" + hash_seed.encode(), digest_size=32).digest()

    def name(self, *, tenant: str, model: str) -> bytes:
        """Return the name under which one tenant's use of one model is kept."""
        # a header may hold what is no UTF-8; the length keeps ("a", "bc") and ("ab", "c") apart
        text = f"{len(tenant)}:{tenant}{model}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._key, digest_size=DIGEST_BYTES).hexdigest().encode()


class QuotaScript:
    """The script as commands: by its text until a server has it, by its name from then on."""

    def __init__(self, source: str) -> None:
        # Redis names scripts by SHA-1; nothing secret depends on it
        name = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
        self._by_name, self._by_text = ("EVALSHA", name), ("EVAL", source)

    def take(self, ask: QuotaAsk, *, lease_ms: int, is_known: bool) -> bytes:
        """Return the command that takes what a request asks for; one reply, for `read_taken`."""
        key = ask.key
        if not is_known:
            amounts = (1, ask.prompt_tokens, ask.reserved_tokens)
            return pack(*self._by_text, *_fixed(key, lease_ms), b"take", *amounts, ask.member)
        if not key.packed_take:
            key.packed_take = _head(TAKE_PARTS, *self._by_name, *_fixed(key, lease_ms), b"take", 1)
        prompt, reserved, member = b"%d" % ask.prompt_tokens, b"%d" % ask.reserved_tokens, ask.member
        # https://redis.io/docs/latest/develop/reference/protocol-spec/: `pack` takes thrice as long
        return b"%b$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (
            key.packed_take,
            len(prompt),
            prompt,
            len(reserved),
            reserved,
            len(member),
            member,
        )

    def settle(
        self,
        key: QuotaKey,
        amounts: Amounts,
        *,
        ended: Sequence[bytes],
        renewed: Sequence[bytes],
        lease_ms: int,
        is_known: bool,
    ) -> bytes:
        """Return the command that changes what was taken and who is open; one reply, for `read_taken`."""
        return pack(
            *(self._by_name if is_known else self._by_text),
            *_fixed(key, lease_ms),
            b"settle",
            *amounts,
            len(ended),
            *ended,
            *renewed,
        )


class Taken(msgspec.Struct, frozen=True):
    """The script's answer."""

    refused: int  # 0: not refused; else the number of the limit, from 1
    wait_seconds: float
    levels: tuple[float, float, float]


def read_taken(reply: Any) -> Taken | str:
    """Return the script's answer, or why it is none."""
    if type(reply) is list and len(reply) == TAKEN_PARTS:
        refused, wait_ms, requests, prompt, generated = reply
        try:
            levels = (requests / THOUSANDTHS, prompt / THOUSANDTHS, generated / THOUSANDTHS)
            if 0 <= refused <= len(LIMITS):
                return Taken(refused, wait_ms / THOUSANDTHS, levels)
        except TypeError:
            return NOT_OURS
    if isinstance(reply, Exception):
        return str(reply)
    if isinstance(reply, list) and len(reply) == FAULT_PARTS and isinstance(reply[1], bytes):
        return reply[1].decode("utf-8", "replace")
    return NOT_OURS


def _head(parts: int, *arguments: bytes | str | int) -> bytes:
    """Return the beginning of a command of so many parts."""
    packed = pack(*arguments)
    return b"*%d\r\n" % parts + packed[packed.index(b"\n") + 1 :]


def _fixed(key: QuotaKey, lease_ms: int) -> tuple[bytes, ...]:
    """Return keys and terms, made once a key."""
    if not key.fixed:
        most_open = key.quota.concurrent_requests
        terms = [number for each in key.terms for number in (each.per_second, each.capacity)]
        numbers = (lease_ms, -1 if most_open is None else most_open, *terms)
        levels, members = PICKERS + b"quota:" + key.name, PICKERS + b"quota:open:" + key.name
        key.fixed = (b"2", levels, members, *(repr(number).encode() for number in numbers))
    return key.fixed


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

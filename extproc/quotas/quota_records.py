"""Quotas in Redis: names, the script's commands and its replies, and the writes that wait.

Names are keyed hashes: no client's text is in Redis, and none can be guessed without the seed. An unreadable reply
never raises.
"""

import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from extproc.quotas.quota import LIMITS, NOTHING, Amounts, QuotaAsk, QuotaKey
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import Script, pack

SCRIPT = Script(files("extproc.quotas").joinpath("quota.lua").read_text(encoding="utf-8"))
BY_NAME, BY_TEXT = ("EVALSHA", SCRIPT.sha), ("EVAL", SCRIPT.source)
DIGEST_BYTES = 12
THOUSANDTHS = 1000.0
NOT_OURS = "Redis answers something else than was asked"
TAKEN_PARTS, FAULT_PARTS = 5, 2  # of the script's replies
TAKE_PARTS = 18  # of the whole command
MOST_MEMBERS = 500  # in one command: Lua's stack is finite, and other clients wait meanwhile


def quota_name(hash_seed: str, *, tenant: str, model: str) -> bytes:
    """Return the name under which one tenant's use of one model is kept; it differs by deployment (`hash_seed`)."""
    key = hashlib.blake2b(b"quota" + hash_seed.encode(), digest_size=32).digest()
    # a header may hold what is no UTF-8; the length keeps ("a", "bc") and ("ab", "c") apart
    text = f"{len(tenant)}:{tenant}{model}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, key=key, digest_size=DIGEST_BYTES).hexdigest().encode()


def pack_take(ask: QuotaAsk, *, lease_ms: int, is_known: bool) -> bytes:
    """Return the command that takes what a request asks for; one reply, for `read_taken`.

    `is_known`: the server has the script, which is then called by its name instead of its text.
    """
    key = ask.key
    if not is_known:
        amounts = (1, ask.prompt_tokens, ask.reserved_tokens)
        return pack(*BY_TEXT, *_fixed(key, lease_ms), b"take", *amounts, ask.member)
    if not key.packed_take:
        key.packed_take = _head(TAKE_PARTS, *BY_NAME, *_fixed(key, lease_ms), b"take", 1)
    # https://redis.io/docs/latest/develop/reference/protocol-spec/: `pack` takes thrice as long
    arguments = (b"%d" % ask.prompt_tokens, b"%d" % ask.reserved_tokens, ask.member)
    return key.packed_take + b"".join([b"$%d\r\n%b\r\n" % (len(each), each) for each in arguments])


def pack_settle(
    key: QuotaKey,
    amounts: Amounts,
    *,
    ended: Sequence[bytes],
    renewed: Sequence[bytes],
    lease_ms: int,
    is_known: bool,
) -> bytes:
    """Return the command that changes what was taken and which requests are open; one reply, for `read_taken`."""
    script = BY_NAME if is_known else BY_TEXT
    return pack(*script, *_fixed(key, lease_ms), b"settle", *amounts, len(ended), *ended, *renewed)


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


MOST_KEYS = 10_000  # of which writes wait while Redis is away


class QuotaWrite(msgspec.Struct, eq=False):
    """What one command writes of one key."""

    key: QuotaKey
    amounts: Amounts = NOTHING  # to be taken; negative: to be given back
    ended: list[bytes] = []
    renewed: list[bytes] = []


class QuotaWrites:
    """Collects per key, so that a thousand ends of one tenant are one write."""

    def __init__(self) -> None:
        self.dropped = 0  # keys whose writes found no place
        self._due: dict[QuotaKey, QuotaWrite] = {}
        self._open: dict[bytes, tuple[QuotaKey, float]] = {}  # member -> its key, when it was renewed last
        # ends that Redis may have got before what they end, and of these the ones that have waited for long enough
        self._doubtful: list[tuple[QuotaKey, bytes]] = []
        self._doubtful_for_long: list[tuple[QuotaKey, bytes]] = []

    def __len__(self) -> int:
        return len(self._due)

    @property
    def open_members(self) -> int:
        """Return how many open requests have a lease."""
        return len(self._open)

    def opened(self, ask: QuotaAsk, *, renewed_at: float) -> None:
        """Keep a request's lease from now on."""
        self._open[ask.member] = (ask.key, renewed_at)

    @property
    def has_doubtful_ends(self) -> bool:
        """Whether ends are still to be written once more."""
        return bool(self._doubtful or self._doubtful_for_long)

    def ended(self, ask: QuotaAsk, amounts: Amounts, *, has_lease: bool) -> None:
        """Note what is left to be taken or given back, and end the lease."""
        if has_lease:
            self._open.pop(ask.member, None)
            self._add(ask.key, amounts, (ask.member,))
            if not ask.is_answered:
                self._doubtful.append((ask.key, ask.member))
        else:
            self.charge(ask.key, amounts)

    def end_again(self) -> None:
        """Note once more the ends that were doubtful at the last call, too; an end may be written twice."""
        for key, member in self._doubtful_for_long:
            self._add(key, NOTHING, (member,))
        self._doubtful_for_long, self._doubtful = self._doubtful, []

    def charge(self, key: QuotaKey, amounts: Amounts) -> None:
        """Note what is left to be taken, or given back."""
        if amounts != NOTHING:
            self._add(key, amounts, ())

    def take(self, *, renew_before: float, most_members: int) -> list[QuotaWrite]:
        """Return all that is due, and the leases last renewed before `renew_before`; nothing is due any more."""
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
        """Take back what was not written. Unless it will be `soon`, ends are dropped: leases expire by themselves."""
        for write in writes:
            ended = write.ended if soon else []
            if ended or write.amounts != NOTHING:
                self._add(write.key, write.amounts, ended)

    def written(self, writes: Iterable[QuotaWrite], *, now: float) -> None:
        """Note that they were written: their leases are renewed."""
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
        for member, (key, renewed_at) in self._open.items():
            if renewed_at < before:
                found.setdefault(key, []).append(member)
        return found


def _portions(members: list[bytes], most: int) -> list[list[bytes]]:
    return [members[at : at + most] for at in range(0, len(members), most)]

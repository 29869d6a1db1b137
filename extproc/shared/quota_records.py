"""Quotas in Redis: names, the script's commands and replies, and the pending writes.

Names are keyed hashes: Redis holds no client text, and a name cannot be guessed without the seed. An unreadable reply
never raises.
"""

import hashlib
from collections.abc import Iterable, Sequence
from importlib.resources import files
from typing import Any

import msgspec

from extproc.shared.quota import LIMITS, NOTHING, Amounts, QuotaAsk, QuotaKey
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import Script, pack

SCRIPT = Script(files("extproc.shared").joinpath("quota.lua").read_text(encoding="utf-8"))
BY_NAME, BY_TEXT = ("EVALSHA", SCRIPT.sha), ("EVAL", SCRIPT.source)
DIGEST_BYTES = 12
THOUSANDTHS = 1000.0
NOT_OURS = "Redis answers something else than was asked"
TAKEN_PARTS, FAULT_PARTS = 5, 2  # elements of the script's replies
TAKE_PARTS = 18  # RESP elements of the whole `take` command
MOST_MEMBERS = 500  # in one command: Lua's stack is finite, and other clients wait meanwhile


def quota_name(hash_seed: str, *, tenant: str, model: str) -> bytes:
    """Return the name for one tenant's use of one model; it differs by deployment (`hash_seed`)."""
    key = hashlib.blake2b(b"quota" + hash_seed.encode(), digest_size=32).digest()
    # a header need not be UTF-8; the length keeps ("a", "bc") and ("ab", "c") apart
    text = f"{len(tenant)}:{tenant}{model}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, key=key, digest_size=DIGEST_BYTES).hexdigest().encode()


def pack_take(ask: QuotaAsk, *, lease_ms: int, is_known: bool) -> bytes:
    """Return the command that takes a request's amounts; one reply, for `read_taken`.

    `is_known`: the server has the script cached, so that its hash replaces its text.
    """
    key = ask.key
    if not is_known:
        amounts = (1, ask.prompt_tokens, ask.reserved_tokens)
        return pack(*BY_TEXT, *_fixed(key, lease_ms), b"take", *amounts, ask.member)
    if not key.packed_take:
        key.packed_take = _head(TAKE_PARTS, *BY_NAME, *_fixed(key, lease_ms), b"take", 1)
    # RESP by hand (https://redis.io/docs/latest/develop/reference/protocol-spec/): `pack` takes three times as long
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
    """Return the command that corrects the taken amounts and the open requests; one reply, for `read_taken`."""
    script = BY_NAME if is_known else BY_TEXT
    return pack(*script, *_fixed(key, lease_ms), b"settle", *amounts, len(ended), *ended, *renewed)


class Taken(msgspec.Struct, frozen=True):
    """The script's answer."""

    refused: int  # 0: not refused; otherwise the number of the limit, from 1
    wait_seconds: float
    levels: tuple[float, float, float]


def read_taken(reply: Any) -> Taken | str:
    """Return the script's answer, or why the reply is not one."""
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
    packed = pack(*arguments)
    return b"*%d\r\n" % parts + packed[packed.index(b"\n") + 1 :]


def _fixed(key: QuotaKey, lease_ms: int) -> tuple[bytes, ...]:
    if not key.fixed:
        most_open = key.quota.concurrent_requests
        terms = [number for each in key.terms for number in (each.per_second, each.capacity)]
        numbers = (lease_ms, -1 if most_open is None else most_open, *terms)
        levels, members = PICKERS + b"quota:" + key.name, PICKERS + b"quota:open:" + key.name
        key.fixed = (b"2", levels, members, *(repr(number).encode() for number in numbers))
    return key.fixed


# with pending writes while Redis is down
MOST_KEYS = 10_000
MOST_ENDS = 20_000  # requests; leases of further ones expire


class QuotaWrite(msgspec.Struct, eq=False):
    """One write command's content, for one key."""

    key: QuotaKey
    amounts: Amounts = NOTHING  # to take; negative: to give back
    ended: list[bytes] = []
    renewed: list[bytes] = []


class QuotaWrites:
    """Collects writes by key, so that a thousand ended requests of one tenant are one write."""

    def __init__(self) -> None:
        self.dropped = 0  # writes dropped because too many keys were pending
        self._due: dict[QuotaKey, QuotaWrite] = {}
        self._open: dict[bytes, tuple[QuotaKey, float]] = {}  # member -> its key, time of its last renewal
        # ends that may have overtaken their asks on the way to Redis; and older ones, now safe to write again
        self._doubtful: dict[QuotaKey, list[bytes]] = {}
        self._doubtful_for_long: dict[QuotaKey, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._due)

    @property
    def open_members(self) -> int:
        """Return the number of open requests with a lease."""
        return len(self._open)

    def opened(self, ask: QuotaAsk, *, renewed_at: float) -> None:
        """Renew a request's lease from now on."""
        self._open[ask.member] = (ask.key, renewed_at)

    def doubts(self, key: QuotaKey) -> bool:
        """Tell whether Redis may still count a request of this key that has ended."""
        return key in self._doubtful or key in self._doubtful_for_long

    @property
    def has_doubtful_ends(self) -> bool:
        """Whether some ends must be written a second time."""
        return bool(self._doubtful or self._doubtful_for_long)

    def ended(self, ask: QuotaAsk, amounts: Amounts, *, has_lease: bool) -> None:
        """Note the remaining correction of the amounts, and end the lease."""
        if has_lease:
            self._open.pop(ask.member, None)
            self._add(ask.key, amounts, (ask.member,))
            if not ask.is_answered:
                self._doubtful.setdefault(ask.key, []).append(ask.member)
        else:
            self.charge(ask.key, amounts)

    def end_again(self) -> None:
        """Note again the ends that were already doubtful at the last call; writing an end twice is harmless."""
        for key, members in self._doubtful_for_long.items():
            self._add(key, NOTHING, members)
        self._doubtful_for_long, self._doubtful = self._doubtful, {}

    def charge(self, key: QuotaKey, amounts: Amounts) -> None:
        """Note amounts to take, or to give back if negative."""
        if amounts != NOTHING:
            self._add(key, amounts, ())

    def take(self, *, renew_before: float, most_members: int) -> list[QuotaWrite]:
        """Remove and return all due writes, and the renewals of leases last renewed before `renew_before`."""
        writes: list[QuotaWrite] = []
        for write in self._due.values():
            first, *rest = _portions(write.ended, most_members) or [[]]
            writes.append(QuotaWrite(write.key, write.amounts, ended=first))
            writes += [QuotaWrite(write.key, ended=part) for part in rest]
        self._due = {}
        for key, members in self._to_renew(renew_before).items():
            writes += [QuotaWrite(key, renewed=part) for part in _portions(members, most_members)]
        return writes

    def put_back(self, writes: Iterable[QuotaWrite], *, may_be_done: bool = False) -> None:
        """Take back failed writes. If they `may_be_done`, only the ends: writing an end twice is harmless."""
        ends = sum(len(write.ended) for write in self._due.values())
        for write in writes:
            ended, amounts = write.ended[: MOST_ENDS - ends], NOTHING if may_be_done else write.amounts
            ends += len(ended)
            if ended or amounts != NOTHING:
                self._add(write.key, amounts, ended)

    def written(self, writes: Iterable[QuotaWrite], *, now: float) -> None:
        """Note that these writes succeeded: their leases are renewed."""
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

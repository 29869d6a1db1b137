"""Quotas in Redis: names, the script's commands, and how its replies read. `docs/quotas.md` lists the keys.

Used by `shared_quotas`, which loads the script. Names are keyed hashes: no client's text is in Redis, and none can be
guessed without the seed. What is not ours to read is told as such and never raises.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from extproc.quotas.quota import LIMITS, Amounts, QuotaAsk, QuotaKey
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

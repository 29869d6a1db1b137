"""Quotas shared by all replicas: asked in the lookup's round trip, settled at the end, decided locally without Redis.

A pick makes an ask, `prefixes.prefix_index` sends it, and the request's end settles or cancels it; `run` writes. No
request ever waits for a write.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from extproc.policy.priority import Quota
from extproc.shared.quota import (
    LIMITS,
    NOTHING,
    Amounts,
    Limit,
    QuotaAsk,
    QuotaKey,
    QuotaNote,
    QuotaVerdict,
    matching_quota,
    quota_key,
)
from extproc.shared.quota_records import (
    MOST_MEMBERS,
    QuotaWrite,
    QuotaWrites,
    Taken,
    pack_settle,
    pack_take,
    quota_name,
    read_taken,
)
from extproc.shared.shared_state import write_on_beats
from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.keys import PICKERS
from kvmesh.redis.link import RedisLink, pack

log = logging.getLogger(__name__)

MOST_GENERATED = 1 << 40  # a client's max_tokens may be arbitrarily large
MOST_KEYS = 10_000  # cached pairs (tenant, model): clients may choose them
WRITES_AT_ONCE = 100  # commands in one request to Redis
CLOSE_SECONDS = 0.5
AGAIN_SECONDS = 1.0  # longer than any lookup
ELSEWHERE_SECONDS = 10.0  # asks do not travel with lookups for this long after a lookup has reached a Redis replica
# shows whether Redis accepts writes, which a PING does not
PROBE = pack("SET", PICKERS + b"quota:probe", 1, "PX", 1000)
ALLOWED, SHARED, LOCAL = "allowed", "shared", "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaSettings:
    """Intervals and deadlines of the shared quotas."""

    lease_seconds: float = 4.0  # an open request counts as ended this long after the last renewal of its lease
    write_delay_seconds: float = 0.005  # batches requests that end together
    timeout_seconds: float = 0.02  # for `read`, which holds up a request

    @property
    def beat_seconds(self) -> float:
        """Return the time between two renewals of the leases."""
        return self.lease_seconds / 4

    @property
    def lease_ms(self) -> int:
        """Return the lease in milliseconds, for Redis."""
        return int(self.lease_seconds * 1000)


class Quotas:
    """One replica's part of the quotas."""

    def __init__(
        self,
        link: RedisLink,
        *,
        hash_seed: str,
        quotas: Sequence[Quota],
        others: Callable[[], int] = lambda: 0,
        settings: QuotaSettings = QuotaSettings(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`others` returns the number of other live replicas: they use the same quotas.

        `link` leads to Redis' master; it may be shared, and is not closed here.
        """
        self._link = link
        self._not_asked: str | None = None  # why this replica's share decides
        self._not_written: str | None = None
        self._quotas = tuple(quotas)
        self._others = others
        self._settings = settings
        self._clock = clock
        self._hash_seed = hash_seed
        self._known_to_lookups = False  # whether the lookups' server has the script
        self._known_to_own = False  # whether the server of our own link has it
        self._elsewhere_until = 0.0  # until then lookups are taken to reach a read-only server
        self._keys: dict[tuple[str, str], QuotaKey | None] = {}
        self._unique = secrets.token_hex(4)
        self._asked = 0
        # (ALLOWED or the limit, SHARED or LOCAL) -> requests
        self.decisions = {(outcome, source): 0 for outcome in (ALLOWED, *LIMITS) for source in (SHARED, LOCAL)}
        # (tenant as in the quota, "*" included; ALLOWED or the limit) -> requests
        self.decisions_by_tenant: dict[tuple[str, str], int] = {}
        self.is_shadow = False  # callers treat every verdict as allowed
        self.shadow_refusals: dict[tuple[str, str], int] = {}  # (tenant as in the quota, limit) -> requests
        self._writes = QuotaWrites()
        self._wake = asyncio.Event()

    def reconfigure(self, quotas: Sequence[Quota]) -> None:
        """Use other quotas from now on. Open requests stay counted, and Redis keeps the levels.

        A key with an unchanged quota keeps its share; a changed key keeps only the open requests and the means.
        """
        self._quotas = tuple(quotas)
        for (tenant, model), key in tuple(self._keys.items()):
            quota = matching_quota(self._quotas, tenant=tenant, model=model)
            if key is None or quota is None:
                del self._keys[tenant, model]
            elif quota != key.quota:
                changed = quota_key(quota, name=key.name, tenant=tenant, model=model)
                key.share.buckets = ()  # they were made with the old terms
                changed.share = key.share
                self._keys[tenant, model] = changed

    @property
    def is_used(self) -> bool:
        """Whether there are quotas, or remains of former ones: only then does `run` have work."""
        writes = self._writes
        return bool(self._quotas or len(writes) or writes.open_members or writes.has_doubtful_ends)

    def match(self, tenant: str, model: str | None) -> QuotaKey | None:
        """Return the request's quota key, or None without a quota."""
        if not self._quotas:
            return None
        names = (tenant, model or "")
        try:
            return self._keys[names]
        except KeyError:
            return self._new_key(*names)

    def ask(self, key: QuotaKey, *, prompt_tokens: int, most_generated: int | None, sequences: int = 1) -> QuotaAsk:
        """Return the request's ask, which must be settled or cancelled in the end.

        `most_generated` is the client's max_tokens for all `sequences`, or None without one: then the mean is reserved
        for each.
        """
        self._asked += 1
        reserved = 0.0
        if key.counts_generated:
            most = key.share.mean_generated * min(sequences, MOST_GENERATED)
            if most_generated is not None:
                most = float(min(most_generated, MOST_GENERATED))
            reserved = min(max(most, 1.0), key.terms[2].capacity)
        return QuotaAsk(
            key=key,
            prompt_tokens=prompt_tokens,
            reserved_tokens=ceil(reserved),
            member=b"%s.%x" % (self._unique.encode(), self._asked),
            asked_at=self._clock(),
        )

    @property
    def problem(self) -> str | None:
        """Return why this replica's share decides, or why usage is not written."""
        return self._not_asked or self._not_written

    @property
    def goes_with_lookups(self) -> bool:
        """Whether asks may travel with a lookup: not while lookups reach a Redis replica."""
        return self._clock() >= self._elsewhere_until

    def command(self, ask: QuotaAsk) -> bytes:
        """Return the command that travels with a lookup; one reply, for `take`."""
        ask.is_sent = True
        return pack_take(ask, lease_ms=self._settings.lease_ms, is_known=self._known_to_lookups)

    def take(self, ask: QuotaAsk, replies: Sequence[Any]) -> QuotaVerdict:
        """Read the replies to `command`."""
        taken = read_taken(replies[0]) if replies else "nothing was asked"
        if isinstance(taken, str):
            if "NOSCRIPT" in taken:
                self._known_to_lookups = False
            elif "READONLY" in taken or "MASTERDOWN" in taken:
                self._elsewhere_until = self._clock() + ELSEWHERE_SECONDS
            return self.alone(ask, taken, was_done=False)
        self._known_to_lookups = True
        return self._decided(ask, taken)

    def alone(self, ask: QuotaAsk, why: str, *, was_done: bool) -> QuotaVerdict:
        """Decide by this replica's share. `was_done`: Redis has probably taken the amounts, only the answer is lost."""
        self._not_asked = why
        ask.is_answered = not was_done
        key, share, now = ask.key, ask.key.share, self._clock()
        replicas = self._others() + 1
        buckets = share.local(key.terms, replicas=replicas, now=now)
        amounts = _amounts(ask)
        limit, wait = None, 0.0
        for which, bucket, amount in zip(LIMITS, buckets, amounts, strict=False):
            if bucket.terms.per_second >= 0 and (seconds := bucket.wait(amount, now=now)) > wait:
                limit, wait = which, seconds
        most_open = key.quota.concurrent_requests
        if limit is None and most_open is not None and share.is_crowded(most_open, replicas=replicas):
            limit, wait = Limit.CONCURRENT_REQUESTS, share.wait_for_an_end()
        if limit is None:
            for bucket, amount in zip(buckets, amounts, strict=True):
                bucket.change(amount, now=now)
            ask.is_local = True
            self._admit(ask, taken=amounts if was_done else NOTHING, renewed_at=now if was_done else 0.0)
        self._count(key, limit or ALLOWED, LOCAL)
        return QuotaVerdict(
            key=key,
            limit=limit,
            wait_seconds=wait,
            levels=tuple(bucket.level for bucket in buckets),
            terms=tuple(bucket.terms for bucket in buckets),
            degraded=f"a share of 1/{replicas} of the quota, decided here: {why}",
        )

    async def read(self, ask: QuotaAsk) -> QuotaVerdict:
        """Ask Redis in a separate round trip, for a request without a lookup; never raises."""
        ask.is_sent = True
        command = pack_take(ask, lease_ms=self._settings.lease_ms, is_known=self._known_to_own)
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                (reply,) = await self._link.request(command, replies=1)
        except IndexUnavailableError as error:
            return self.alone(ask, str(error), was_done=False)
        except TimeoutError:
            why = f"no answer within {self._settings.timeout_seconds * 1000:g} ms"
            return self.alone(ask, why, was_done=True)
        taken = read_taken(reply)
        self._known_to_own = isinstance(taken, Taken)
        return self.alone(ask, taken, was_done=False) if isinstance(taken, str) else self._decided(ask, taken)

    def settle(self, ask: QuotaAsk, *, generated_tokens: int | None = None, prompt_tokens: int | None = None) -> None:
        """Replace the taken amounts by an ended request's real use; None if unknown, which leaves the asked amount.

        Only the first call of `settle` or `cancel` counts.
        """
        used = (
            1.0,
            float(ask.prompt_tokens if prompt_tokens is None else prompt_tokens),
            float(ask.reserved_tokens if generated_tokens is None else generated_tokens),
        )
        if ask.admitted and not ask.is_over:
            ask.key.share.took(self._clock() - ask.asked_at)
            if generated_tokens is not None:
                ask.key.share.generated(generated_tokens)
        self._end(ask, used)

    def generated(self, note: QuotaNote, tokens: int) -> None:
        """Replace the reserved tokens by a response's generated tokens, whichever picker reserved them.

        Called by the reader of the response; the request's picker then settles without `generated_tokens`.
        """
        key = self.match(note.tenant, note.model)
        if key is None or not key.counts_generated:  # the request's picker may have had another policy
            return
        key.share.generated(tokens)
        more = float(tokens - note.reserved_tokens)
        if key.share.buckets:
            key.share.buckets[2].change(more, now=self._clock())
        self._writes.charge(key, (0.0, 0.0, more))
        if len(self._writes):
            self._wake.set()

    def cancel(self, ask: QuotaAsk) -> None:
        """Give everything back: the request was refused for another reason, was never sent, or its client has left."""
        self._end(ask, NOTHING)

    async def run(self) -> None:
        """Write ended requests, and renew leases once a beat, until cancelled."""
        settings = self._settings
        write = write_on_beats(
            self._flush, self._wake, beat_seconds=settings.beat_seconds, delay_seconds=settings.write_delay_seconds
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write, name="quotas written")
            tasks.create_task(self._end_again(), name="quotas ended again")

    async def close(self) -> None:
        """Flush the pending writes; call it when `run` has ended and all asks are over."""
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._flush(False)
        except TimeoutError:
            log.debug("could not settle the last requests: their leases will end")

    def facts(self) -> dict[str, Any]:
        """Return counts of keys, open requests and leases, and the problem, for pages and metrics."""
        used = [key for key in self._keys.values() if key is not None]
        return {
            "quotas": len(self._quotas),
            "keys": len(used),
            "open_requests": sum(key.share.open_requests for key in used),
            "leases": self._writes.open_members,
            "unwritten_keys": len(self._writes),
            "writes_failing": self._not_written is not None,
            "problem": self.problem,
        }

    def _new_key(self, tenant: str, model: str) -> QuotaKey | None:
        quota = matching_quota(self._quotas, tenant=tenant, model=model)
        key = None
        if quota is not None:
            name = quota_name(self._hash_seed, tenant=tenant, model=model)
            key = quota_key(quota, name=name, tenant=tenant, model=model)
        if len(self._keys) >= MOST_KEYS:
            del self._keys[next(iter(self._keys))]
        self._keys[tenant, model] = key
        return key

    def _decided(self, ask: QuotaAsk, taken: Taken) -> QuotaVerdict:
        key, now = ask.key, self._clock()
        limit = LIMITS[taken.refused - 1] if taken.refused else None
        if limit is Limit.CONCURRENT_REQUESTS and (self._not_written is not None or self._writes.doubts(key)):
            return self.alone(ask, "Redis may count requests that have ended", was_done=False)
        self._not_asked = None
        ask.is_answered = True
        key.share.note(taken.levels, key.terms, now=now)
        wait = key.share.wait_for_an_end() if limit is Limit.CONCURRENT_REQUESTS else taken.wait_seconds
        if limit is None:
            self._admit(ask, taken=_amounts(ask), renewed_at=now)
        self._count(key, limit or ALLOWED, SHARED)
        return QuotaVerdict(key=key, limit=limit, wait_seconds=wait, levels=taken.levels, terms=key.terms)

    def _count(self, key: QuotaKey, outcome: str, source: str) -> None:
        if self.is_shadow and outcome != ALLOWED:
            refused = (key.quota.tenant, outcome)
            self.shadow_refusals[refused] = self.shadow_refusals.get(refused, 0) + 1
            outcome = ALLOWED  # shadow mode lets the request pass
        self.decisions[outcome, source] += 1
        of_tenant = (key.quota.tenant, outcome)
        self.decisions_by_tenant[of_tenant] = self.decisions_by_tenant.get(of_tenant, 0) + 1

    def _admit(self, ask: QuotaAsk, *, taken: Amounts, renewed_at: float) -> None:
        ask.admitted, ask.taken = True, taken
        ask.key.share.open_requests += 1
        if ask.key.quota.concurrent_requests is not None:
            self._writes.opened(ask, renewed_at=renewed_at)

    def _end(self, ask: QuotaAsk, used: Amounts) -> None:
        if ask.is_over:
            return
        ask.is_over = True
        may_be_open = ask.admitted or (ask.is_sent and not ask.is_answered)
        has_lease = may_be_open and ask.key.quota.concurrent_requests is not None
        if not ask.admitted:
            # refused, or unknown: amounts that Redis took nevertheless stay taken, which errs on the safe side
            used = NOTHING
        else:
            ask.key.share.open_requests -= 1
        if ask.is_local:
            now = self._clock()
            for bucket, amount in zip(ask.key.share.buckets, _less(used, _amounts(ask)), strict=False):
                bucket.change(amount, now=now)
        self._writes.ended(ask, _less(used, ask.taken), has_lease=has_lease)
        if len(self._writes):
            self._wake.set()

    async def _end_again(self) -> None:
        """Write the ends of unanswered asks a second time.

        Lookups use another connection: if a request is cancelled right after its ask, Redis may get the end before the
        ask, and would then keep the request open for a whole lease.
        """
        while True:
            await asyncio.sleep(AGAIN_SECONDS)
            self._writes.end_again()
            if len(self._writes):
                self._wake.set()

    async def _flush(self, beat: bool) -> bool:
        self._wake.clear()
        renew_before = self._clock() - self._settings.lease_seconds / 2 if beat else 0.0
        writes = self._writes.take(renew_before=renew_before, most_members=MOST_MEMBERS)
        while writes:
            portion, writes = writes[:WRITES_AT_ONCE], writes[WRITES_AT_ONCE:]
            if not await self._write(portion):
                self._writes.put_back(writes)
                return False
        if beat and self.problem is not None:
            return await self._is_back()
        return True

    async def _write(self, writes: Sequence[QuotaWrite]) -> bool:
        lease_ms, is_known = self._settings.lease_ms, self._known_to_own
        commands = [
            pack_settle(
                each.key, each.amounts, ended=each.ended, renewed=each.renewed, lease_ms=lease_ms, is_known=is_known
            )
            for each in writes
        ]
        try:
            async with asyncio.timeout(self._settings.beat_seconds):
                replies = await self._link.request(b"".join(commands), replies=len(commands))
        except IndexUnavailableError as error:
            self._known_to_own = False  # after a failover the server may lack the script
            self._writes.put_back(writes)
            return self._judge(str(error))
        except TimeoutError:
            self._writes.put_back(writes, may_be_done=True)
            return self._judge(f"no answer within {self._settings.beat_seconds:g} s")
        answers = [read_taken(reply) for reply in replies]
        refused = [(each, answer) for each, answer in zip(writes, answers, strict=True) if isinstance(answer, str)]
        is_forgotten = any("NOSCRIPT" in answer for _, answer in refused)
        self._writes.put_back(each for each, _ in refused)
        ok = [each for each, answer in zip(writes, answers, strict=True) if isinstance(answer, Taken)]
        self._writes.written(ok, now=self._clock())
        self._known_to_own = not refused
        if not refused:
            return self._judge(None)
        if is_forgotten:  # the next attempt sends the script's text
            self._wake.set()
            return True
        return self._judge(refused[0][1])

    async def _is_back(self) -> bool:
        """Probe whether writes work, while no request asks."""
        try:
            async with asyncio.timeout(self._settings.beat_seconds):
                (reply,) = await self._link.request(PROBE, replies=1)
        except (IndexUnavailableError, TimeoutError):
            return False
        if isinstance(reply, Exception):
            return False
        self._not_asked = None
        return self._judge(None)

    def _judge(self, problem: str | None) -> bool:
        if problem is not None and self._not_written is None:
            log.error("what requests have used of their quotas is not written: %s", problem)
        elif problem is None and self._not_written is not None:
            log.info("what requests use of their quotas is written again")
        self._not_written = problem
        return problem is None


def _amounts(ask: QuotaAsk) -> Amounts:
    return (1.0, float(ask.prompt_tokens), float(ask.reserved_tokens))


def _less(one: Amounts, other: Amounts) -> Amounts:
    return (one[0] - other[0], one[1] - other[1], one[2] - other[2])

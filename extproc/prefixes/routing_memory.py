"""What this replica remembers of its own picks: where prompts went lately, and sessions and adapters.

A prompt is expected to be cached where it was routed until the index has it. It is keyed by packed chained 8-byte keys
(block keys, or keys of text chunks under a root of their own), so that one key stands for the whole prompt before it.
Bounded; time is an argument.
"""

import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from types import MappingProxyType

from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, PromptKeys

KEY_BYTES = 8
GENERATIONS = 4
WIDEST_STEP = 16  # keys between two checkpoints of a long prompt
MAX_CHECKPOINTS = 1_024  # of one prompt: 15,900 keys; what is beyond is not distinguished


def _checkpoints() -> Iterator[int]:
    """Yield the numbers of leading keys that are remembered: all of the first 8, then coarser up to every 16th."""
    at = 0
    while True:
        at += min(max(1, 1 << at.bit_length() >> 3), WIDEST_STEP)
        yield at


POSITIONS = tuple(islice(_checkpoints(), MAX_CHECKPOINTS))
FIRST_KEY = struct.Struct("<Q")
NOTHING_HELD: Mapping[str, int] = MappingProxyType({})

Checkpoints = tuple[tuple[int, ...], int]  # the keys at POSITIONS, the last key


@cache
def _layout(count: int) -> struct.Struct:
    """Return what cuts the keys at the first `count` of POSITIONS out of the packed keys in one C call."""
    form, end = "<", 0
    for position in POSITIONS[:count]:
        form += f"{(position - 1 - end) * KEY_BYTES}xQ" if position - 1 > end else "Q"
        end = position
    return struct.Struct(form)


class RecentRoutes:
    """Endpoints by leading keys. What was noted is gone after `ttl_seconds`, and kept for three quarters of it.

    `limit` bounds the checkpoints remembered: about 50 for 500 keys, 100 bytes of memory each. Where more are noted,
    the oldest go first. The caller takes the larger of the index's match and this one. Once the index has known as
    much, the expectation is over, so that what is evicted then counts no longer.
    """

    def __init__(self, *, ttl_seconds: float, limit: int) -> None:
        self._turn_seconds = ttl_seconds / GENERATIONS
        self._turn_size = max(1, limit // GENERATIONS)
        # newest first: checkpoint key -> bits of the endpoints that got it
        self._tables: tuple[dict[int, int], ...] = tuple({} for _ in range(GENERATIONS))
        # as old: key -> bits of the endpoints that hold all up to it according to the index. Not taken out of the
        # tables above: an endpoint with a checkpoint there has all before it, and another prompt may go on from here
        self._confirmed: tuple[dict[int, int], ...] = tuple({} for _ in range(GENERATIONS))
        self._turned_at = float("-inf")
        self._turns = 0
        self._bits: dict[str, int] = {}
        self._endpoints: dict[int, str] = {}  # bit number -> endpoint
        self._retired: dict[int, int] = {}  # bit number -> the turn after which no table has it any more

    def reconfigure(self, *, ttl_seconds: float, limit: int) -> None:
        """Set the time and the limit from now on; what is remembered stays until its generation ends."""
        self._turn_seconds = ttl_seconds / GENERATIONS
        self._turn_size = max(1, limit // GENERATIONS)

    def note(self, keys: bytes, *, endpoint: str, now: float, cut: Checkpoints | None = None) -> None:
        """Remember that a prompt with these keys was sent to `endpoint` at `now` (monotonic seconds).

        `cut`: the result of `checkpoints` for the keys, if they are noted in several places.
        """
        count = len(keys) // KEY_BYTES
        if not count:
            return
        if now - self._turned_at >= self._turn_seconds:
            self._turn(now)
        table, bit = self._tables[0], self._bits.get(endpoint) or self._new_bit(endpoint)
        marks, last = cut or checkpoints(keys)
        # an endpoint with a checkpoint has all before it: only the rest is new, and often new to all endpoints
        known, end = 0, len(marks)
        while known < end:
            middle = (known + end) >> 1
            if table.get(marks[middle], 0) & bit:
                known = middle + 1
            else:
                end = middle
        rest = marks[known:]
        if rest and rest[0] in table:
            table.update(zip(rest, [table.get(key, 0) | bit for key in rest], strict=True))
        else:
            table.update(dict.fromkeys(rest, bit))
        table[last] = table.get(last, 0) | bit
        for confirmed in self._confirmed:
            if confirmed:
                for key in confirmed.keys() & (*marks, last):
                    confirmed[key] &= ~bit  # it is expected anew
        self._keep_small(now)

    def match(self, keys: bytes, *, now: float, held: Mapping[str, int] = NOTHING_HELD) -> Mapping[str, int]:
        """Return endpoint -> leading keys of these that it was sent lately: a checkpoint, or all of them.

        Never too many, up to a fifth too few for a prompt that goes on differently (15 keys where it is long).
        `held`: endpoint -> leading keys that the index knows there now. Where these are as many, the expectation has
        come true and is not returned again, until it is noted again; one of other keys after these stands.

        Written as loops in one place, because calling something for each table and checkpoint cost twice as much.
        """
        count = len(keys) // KEY_BYTES
        if not count:
            return {}
        if now - self._turned_at >= self._turn_seconds:
            self._turn(now)
        tables = self._tables
        found: dict[str, int] = {}
        last, first = FIRST_KEY.unpack_from(keys, (count - 1) * KEY_BYTES)[0], FIRST_KEY.unpack_from(keys)[0]
        seen = all_bits = 0
        for table in tables:
            if table:
                seen |= table.get(last, 0)
                all_bits |= table.get(first, 0)
        if seen:
            self._collect(seen, last, count, found, held)
        if all_bits != seen:  # mostly not: no endpoint was sent any of it, or all that were have all of it
            marks = _cut(keys, count)
            depth = _noted(marks, tables)
            while seen != all_bits and depth:
                depth -= 1
                key, bits = marks[depth], 0
                for table in tables:
                    bits |= table.get(key, 0)
                bits &= ~seen
                if bits:
                    seen |= bits
                    self._collect(bits, key, POSITIONS[depth], found, held)
        self._keep_small(now)
        return found

    def forget(self, endpoint: str) -> None:
        """Drop what was sent to a pod that restarted, cleared its cache or is gone."""
        bit = self._bits.pop(endpoint, 0)
        if bit:
            number = bit.bit_length() - 1
            del self._endpoints[number]
            self._retired[number] = self._turns + GENERATIONS

    def __len__(self) -> int:
        """Return the checkpoints remembered, and those confirmed."""
        return sum(map(len, self._tables)) + sum(map(len, self._confirmed))

    def _collect(self, bits: int, key: int, keys: int, found: dict[str, int], held: Mapping[str, int]) -> None:
        """Enter the endpoints that have this key, the last of so many, if they are still to be confirmed."""
        for confirmed in self._confirmed:
            if confirmed:
                bits &= ~confirmed.get(key, 0)
        while bits:
            number = bits.bit_length() - 1
            bits ^= 1 << number
            endpoint = self._endpoints.get(number)
            if endpoint is None:
                continue
            if held.get(endpoint, 0) >= keys:
                newest = self._confirmed[0]
                newest[key] = newest.get(key, 0) | 1 << number
            else:
                found[endpoint] = keys

    def _keep_small(self, now: float) -> None:
        if len(self._tables[0]) + len(self._confirmed[0]) >= self._turn_size:
            self._push(now)

    def _new_bit(self, endpoint: str) -> int:
        free = next((number for number, turn in self._retired.items() if turn <= self._turns), None)
        if free is None:
            number = len(self._endpoints) + len(self._retired)
        else:
            number = free
            del self._retired[free]
        bit = self._bits[endpoint] = 1 << number
        self._endpoints[number] = endpoint
        return bit

    def _turn(self, now: float) -> None:
        """Drop the tables whose time is over; a quiet hour drops all of them at once."""
        passed = now - self._turned_at
        if passed < self._turn_seconds:
            return
        if passed >= GENERATIONS * self._turn_seconds:  # with a TTL of 0 always: nothing is remembered
            for _ in range(GENERATIONS):
                self._push(now)
            return
        for _ in range(int(passed / self._turn_seconds)):
            self._push(self._turned_at + self._turn_seconds)

    def _push(self, now: float) -> None:
        self._tables = ({}, *self._tables[:-1])
        self._confirmed = ({}, *self._confirmed[:-1])
        self._turned_at = now
        self._turns += 1


def _noted(marks: tuple[int, ...], tables: tuple[dict[int, int], ...]) -> int:
    """Return how many of these checkpoints any endpoint has."""
    # a prompt is noted with every checkpoint before its end, so those in a table come first
    noted, end = 0, len(marks)
    while noted < end:
        middle = (noted + end) >> 1
        key = marks[middle]
        for table in tables:
            if key in table:
                noted = middle + 1
                break
        else:
            end = middle
    return noted


def checkpoints(keys: bytes) -> Checkpoints:
    """Return what a prompt of at least one key is remembered by: its keys at checkpoints, and its last one."""
    count = len(keys) // KEY_BYTES
    return _cut(keys, count), FIRST_KEY.unpack_from(keys, (count - 1) * KEY_BYTES)[0]


def _cut(keys: bytes, count: int) -> tuple[int, ...]:
    return _layout(bisect_left(POSITIONS, count + 1)).unpack_from(keys)


class LastPlaces:
    """Name -> endpoint, for `ttl_seconds` after its last request; at most `limit` names."""

    def __init__(self, *, ttl_seconds: float, limit: int = 65536) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def reconfigure(self, *, ttl_seconds: float) -> None:
        """Set the time from now on."""
        self._ttl_seconds = ttl_seconds

    def note(self, name: str, *, endpoint: str, now: float) -> None:
        """Remember that a request of this name was sent to the endpoint."""
        self._places[name] = endpoint, now
        self._places.move_to_end(name)
        if len(self._places) > self._limit:
            self._places.popitem(last=False)

    def get(self, name: str, *, now: float) -> str | None:
        """Return where its last request was sent, or None if that is too long ago."""
        place = self._places.get(name)
        return place[0] if place is not None and now - place[1] <= self._ttl_seconds else None


# checkpoints of prompts: a long prompt has about 50 of them, each takes some 100 bytes
FOLLOWED_LIMIT = 100_000
UNFOLLOWED_LIMIT = 400_000
ADAPTER_SECONDS = 30.0  # a pod's own metrics show its adapters well within

RecentHits = tuple[Mapping[str, int], int]  # endpoint -> leading keys, tokens a key


class RoutingMemory:
    """All that is remembered between requests to route the next one."""

    def __init__(self, policy: PickPolicy) -> None:
        self._followed = RecentRoutes(ttl_seconds=policy.recent_prefix_seconds, limit=FOLLOWED_LIMIT)
        # of a pod without events only what was sent there is known
        self._unfollowed = RecentRoutes(ttl_seconds=policy.unfollowed_prefix_seconds, limit=UNFOLLOWED_LIMIT)
        self._sessions = LastPlaces(ttl_seconds=policy.session_seconds)
        self._adapters = LastPlaces(ttl_seconds=ADAPTER_SECONDS)

    def reconfigure(self, policy: PickPolicy, *, share: float = 1.0) -> None:
        """Remember as another policy says from now on. `share`: of the memory that all pools of a picker have."""
        self._followed.reconfigure(ttl_seconds=policy.recent_prefix_seconds, limit=int(FOLLOWED_LIMIT * share))
        self._unfollowed.reconfigure(ttl_seconds=policy.unfollowed_prefix_seconds, limit=int(UNFOLLOWED_LIMIT * share))
        self._sessions.reconfigure(ttl_seconds=policy.session_seconds)

    def note(
        self,
        endpoint: str,
        *,
        prompts: Sequence[PromptKeys],
        session: str | None,
        adapter: str | None,
        now: float,
        indexed: bool = False,
    ) -> None:
        """Remember one routed request; `indexed`: the index knows all of its keys there, nothing has to be expected."""
        for prompt in prompts:
            keys = prompt.keys
            if len(keys) >= KEY_BYTES:
                cut = checkpoints(keys)  # once for both
                if not indexed:
                    self._followed.note(keys, endpoint=endpoint, now=now, cut=cut)
                # also what is indexed: the index may fail, or the endpoint's events end
                self._unfollowed.note(keys, endpoint=endpoint, now=now, cut=cut)
        if session is not None:
            self._sessions.note(session, endpoint=endpoint, now=now)
        if adapter is not None:
            self._adapters.note(f"{adapter}\0{endpoint}", endpoint=endpoint, now=now)

    def matches(
        self,
        prompts: Sequence[PromptKeys],
        *,
        states: Mapping[str, str],
        endpoints: Iterable[str],
        now: float,
        indexed: Mapping[str, int] = NOTHING_HELD,
    ) -> list[RecentHits]:
        """Return for each prompt the endpoints that got its beginning: lately, or long ago if they have no events.

        `indexed`: endpoint -> tokens of the one prompt that the index knows there. Where its events are followed, what
        was sent lately is expected only until it has been among these once.
        """
        unfollowed = [endpoint for endpoint in endpoints if states.get(endpoint) != LIVE]
        hits: list[RecentHits] = []
        for prompt in prompts:
            held = NOTHING_HELD
            if indexed:
                held = {
                    endpoint: tokens // prompt.tokens_each
                    for endpoint, tokens in indexed.items()
                    if states.get(endpoint) == LIVE
                }
            recent = self._followed.match(prompt.keys, now=now, held=held)
            if unfollowed:
                older = self._unfollowed.match(prompt.keys, now=now)
                recent = {**recent, **{endpoint: older[endpoint] for endpoint in unfollowed if endpoint in older}}
            hits.append((recent, prompt.tokens_each))
        return hits

    def session_place(self, session: str, *, now: float) -> str | None:
        """Return where the session's last request went."""
        return self._sessions.get(session, now=now)

    def has_adapter(self, adapter: str, endpoint: str, *, now: float) -> bool:
        """Tell whether a request for the adapter was sent there lately: it is loaded or being loaded."""
        return self._adapters.get(f"{adapter}\0{endpoint}", now=now) is not None

    def forget(self, endpoint: str) -> None:
        """Drop what was expected in the cache of a pod that is another process now."""
        self._followed.forget(endpoint)
        self._unfollowed.forget(endpoint)

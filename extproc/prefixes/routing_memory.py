"""This replica's memory of its own picks: the recent endpoints of prompts, sessions and adapters.

Until the index has a prompt, it is expected in its pod's cache. Its packed 8-byte keys are chained (block keys, or keys
of text chunks under a separate root), so that one key identifies the whole prefix up to it. Bounded; time is an
argument.
"""

import struct
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from types import MappingProxyType

from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import LIVE, PromptKeys

KEY_BYTES = 8
GENERATIONS = 4
WIDEST_STEP = 16  # keys between two checkpoints of a long prompt
MAX_CHECKPOINTS = 1_024  # per prompt: 15,900 keys; the rest is ignored


def _checkpoints() -> Iterator[int]:
    """Yield the remembered prefix lengths in keys: each of the first 8, then coarser, up to every 16th."""
    at = 0
    while True:
        at += min(max(1, 1 << at.bit_length() >> 3), WIDEST_STEP)
        yield at


POSITIONS = tuple(islice(_checkpoints(), MAX_CHECKPOINTS))
FIRST_KEY = struct.Struct("<Q")
NOTHING_HELD: Mapping[str, int] = MappingProxyType({})


@cache
def _layout(count: int) -> struct.Struct:
    """Return a struct that unpacks the keys at the first `count` of POSITIONS in one C call."""
    form, end = "<", 0
    for position in POSITIONS[:count]:
        form += f"{(position - 1 - end) * KEY_BYTES}xQ" if position - 1 > end else "Q"
        end = position
    return struct.Struct(form)


class RecentRoutes:
    """Endpoints by leading keys. An entry lives for at least three quarters of `ttl_seconds`, and at most all of it.

    `limit` bounds the checkpoints: about 50 for 500 keys, 100 bytes of memory each; beyond it the oldest go first.
    """

    def __init__(self, *, ttl_seconds: float, limit: int) -> None:
        self._turn_seconds = ttl_seconds / GENERATIONS
        self._turn_size = max(1, limit // GENERATIONS)
        # newest generation first: checkpoint key -> bit set of the endpoints that got it
        self._tables: tuple[dict[int, int], ...] = tuple({} for _ in range(GENERATIONS))
        self._turned_at = float("-inf")
        self._turns = 0
        self._bits: dict[str, int] = {}
        self._endpoints: dict[int, str] = {}  # bit number -> endpoint
        self._retired: dict[int, int] = {}  # bit number -> the turn at which it is in no table any more

    def reconfigure(self, *, ttl_seconds: float, limit: int) -> None:
        """Set a new TTL and limit; existing entries stay until their generation ends."""
        self._turn_seconds = ttl_seconds / GENERATIONS
        self._turn_size = max(1, limit // GENERATIONS)

    def note(self, keys: bytes, *, endpoint: str, now: float) -> None:
        """Remember that a prompt with these keys was sent to `endpoint` at `now` (monotonic seconds)."""
        count = len(keys) // KEY_BYTES
        if not count:
            return
        if now - self._turned_at >= self._turn_seconds:
            self._turn(now)
        table, bit = self._tables[0], self._bits.get(endpoint) or self._new_bit(endpoint)
        marks, last = _cut(keys, count), FIRST_KEY.unpack_from(keys, (count - 1) * KEY_BYTES)[0]
        # an endpoint with a checkpoint has all earlier ones: only the rest is new, often to all endpoints
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
        if len(table) >= self._turn_size:
            self._push(now)

    def match(self, keys: bytes, *, now: float, held: Mapping[str, int] = NOTHING_HELD) -> Mapping[str, int]:
        """Return endpoint -> number of leading keys recently sent there: up to a checkpoint, or all of them.

        Never too many. After a prompt diverges, up to a fifth too few, at most 15 keys for long prompts. `held`:
        endpoint -> leading keys in the index now; a match that it covers is not returned.

        Loops are inlined: a call per table and checkpoint cost twice as much.
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
            self._collect(seen, count, found, held)
        if all_bits != seen:  # mostly equal: no endpoint got any of it, or each got all of it
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
                    self._collect(bits, POSITIONS[depth], found, held)
        return found

    def forget(self, endpoint: str) -> None:
        """Drop the entries of a pod that restarted, cleared its cache or is gone."""
        bit = self._bits.pop(endpoint, 0)
        if bit:
            number = bit.bit_length() - 1
            del self._endpoints[number]
            self._retired[number] = self._turns + GENERATIONS

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def _collect(self, bits: int, keys: int, found: dict[str, int], held: Mapping[str, int]) -> None:
        """Add these endpoints at depth `keys` to `found`, unless `held` covers it."""
        while bits:
            number = bits.bit_length() - 1
            bits ^= 1 << number
            endpoint = self._endpoints.get(number)
            if endpoint is not None and held.get(endpoint, 0) < keys:
                found[endpoint] = keys

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
        """Drop expired tables; after a quiet hour, all of them at once."""
        passed = now - self._turned_at
        if passed < self._turn_seconds:
            return
        if passed >= GENERATIONS * self._turn_seconds:  # always with a TTL of 0: nothing is remembered
            for _ in range(GENERATIONS):
                self._push(now)
            return
        for _ in range(int(passed / self._turn_seconds)):
            self._push(self._turned_at + self._turn_seconds)

    def _push(self, now: float) -> None:
        self._tables = ({}, *self._tables[:-1])
        self._turned_at = now
        self._turns += 1


def _noted(marks: tuple[int, ...], tables: tuple[dict[int, int], ...]) -> int:
    """Return how many of these checkpoints are in any table."""
    # a prompt is noted with all its checkpoints, so the ones in a table come first
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


def _cut(keys: bytes, count: int) -> tuple[int, ...]:
    """Return a prompt's keys at POSITIONS."""
    return _layout(bisect_left(POSITIONS, count + 1)).unpack_from(keys)


class LastPlaces:
    """Name -> endpoint, for `ttl_seconds` after its last request; at most `limit` names."""

    def __init__(self, *, ttl_seconds: float, limit: int = 65536) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def reconfigure(self, *, ttl_seconds: float) -> None:
        """Set a new TTL."""
        self._ttl_seconds = ttl_seconds

    def note(self, name: str, *, endpoint: str, now: float) -> None:
        """Remember the endpoint of this name's last request."""
        self._places[name] = endpoint, now
        self._places.move_to_end(name)
        if len(self._places) > self._limit:
            self._places.popitem(last=False)

    def get(self, name: str, *, now: float) -> str | None:
        """Return the endpoint of its last request, or None if that is too long ago."""
        place = self._places.get(name)
        return place[0] if place is not None and now - place[1] <= self._ttl_seconds else None


ROUTES_LIMIT = 400_000  # checkpoints: a long prompt has about 50 of them, each takes some 100 bytes
UNFOLLOWED_SECONDS = 180.0  # for endpoints whose events are not followed
ADAPTER_SECONDS = 30.0  # the pod's metrics show its adapters much sooner
SETTLE_SECONDS = 0.5  # after an answer's end, until the index has its events: some 10 ms, and a busy indexer's delay

RecentHits = tuple[Mapping[str, int], int]  # endpoint -> leading keys, tokens per key


class RoutingMemory:
    """All routing state kept between requests."""

    def __init__(self, policy: PickPolicy) -> None:
        # for pods without events this is the only knowledge of their cache
        self._routes = RecentRoutes(ttl_seconds=UNFOLLOWED_SECONDS, limit=ROUTES_LIMIT)
        self._recent_seconds = policy.recent_prefix_seconds
        self._sessions = LastPlaces(ttl_seconds=policy.session_seconds)
        self._adapters = LastPlaces(ttl_seconds=ADAPTER_SECONDS)
        # endpoint -> id of prompts -> when they were sent there; they are under way, or have just ended
        self._open: dict[str, dict[int, tuple[float, Sequence[PromptKeys]]]] = {}
        self._ended: deque[tuple[float, str, Sequence[PromptKeys]]] = deque()  # by the time to leave `_open`

    def reconfigure(self, policy: PickPolicy, *, share: float = 1.0) -> None:
        """Apply a new policy. `share`: this pool's share of the picker's memory."""
        self._routes.reconfigure(ttl_seconds=UNFOLLOWED_SECONDS, limit=int(ROUTES_LIMIT * share))
        self._recent_seconds = policy.recent_prefix_seconds
        self._sessions.reconfigure(ttl_seconds=policy.session_seconds)

    def note(
        self, endpoint: str, *, prompts: Sequence[PromptKeys], session: str | None, adapter: str | None, now: float
    ) -> None:
        """Remember one routed request."""
        for prompt in prompts:
            self._routes.note(prompt.keys, endpoint=endpoint, now=now)
        if session is not None:
            self._sessions.note(session, endpoint=endpoint, now=now)
        if adapter is not None:
            self._adapters.note(f"{adapter}\0{endpoint}", endpoint=endpoint, now=now)

    def began(self, endpoint: str, prompts: Sequence[PromptKeys], *, now: float) -> None:
        """Expect the prompts of a request in the pod's cache until `ended`, once `note` has them."""
        self._open.setdefault(endpoint, {})[id(prompts)] = now, prompts

    def ended(self, endpoint: str, prompts: Sequence[PromptKeys], *, computed: bool, now: float) -> None:
        """End the expectation of a request: soon if the pod has `computed` its prompts, else at once."""
        if computed:
            self._ended.append((now + SETTLE_SECONDS, endpoint, prompts))
        else:
            self._close(endpoint, prompts)

    def _close(self, endpoint: str, prompts: Sequence[PromptKeys]) -> None:
        if (there := self._open.get(endpoint)) is not None:
            there.pop(id(prompts), None)

    def matches(
        self,
        prompts: Sequence[PromptKeys],
        *,
        states: Mapping[str, str],
        endpoints: Iterable[str],
        now: float,
        indexed: Mapping[str, int] = NOTHING_HELD,
    ) -> list[RecentHits]:
        """Return for each prompt the endpoints that got its prefix: recently, or longer ago if they have no events.

        `indexed`: endpoint -> tokens of the single prompt in the index. If the endpoint's events are live, an entry
        counts only if the index does not cover it, and while a request with it is under way or has just ended.
        """
        while self._ended and self._ended[0][0] <= now:
            _, endpoint, ended = self._ended.popleft()
            self._close(endpoint, ended)
        followed = {endpoint for endpoint in endpoints if states.get(endpoint) == LIVE}
        hits: list[RecentHits] = []
        for prompt in prompts:
            held = {at: tokens // prompt.tokens_each for at, tokens in indexed.items() if at in followed}
            recent = self._routes.match(prompt.keys, now=now, held=held)
            if not followed.isdisjoint(recent):
                recent = {
                    endpoint: count
                    for endpoint, count in recent.items()
                    if endpoint not in followed or self._is_open(endpoint, prompt, count, now=now)
                }
            hits.append((recent, prompt.tokens_each))
        return hits

    def _is_open(self, endpoint: str, prompt: PromptKeys, count: int, *, now: float) -> bool:
        """Tell whether a recent prompt with the same first `count` keys is under way, or has just ended."""
        key = slice((count - 1) * KEY_BYTES, count * KEY_BYTES)
        wanted, since = prompt.keys[key], now - self._recent_seconds
        # the newest first: the ones that share its beginning are often there
        for sent_at, prompts in reversed(self._open.get(endpoint, {}).values()):
            if sent_at <= since:
                return False
            if any(each.keys[key] == wanted for each in prompts):
                return True
        return False

    def session_place(self, session: str, *, now: float) -> str | None:
        """Return the endpoint of the session's last request."""
        return self._sessions.get(session, now=now)

    def has_adapter(self, adapter: str, endpoint: str, *, now: float) -> bool:
        """Tell whether a request for the adapter was sent there recently: it is loaded or loading."""
        return self._adapters.get(f"{adapter}\0{endpoint}", now=now) is not None

    def forget(self, endpoint: str) -> None:
        """Drop the expectations for a restarted pod's cache."""
        self._open.pop(endpoint, None)
        self._routes.forget(endpoint)

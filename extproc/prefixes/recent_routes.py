"""What this replica routed where a short while ago: expected to be cached there until the index says so itself.

Keyed by packed chained 8-byte keys (block keys, or keys of text chunks under a root of their own), so that one key
stands for the whole prompt before it.
"""

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from types import MappingProxyType

KEY_BYTES = 8
GENERATIONS = 4
WIDEST_STEP = 16  # keys between two checkpoints of a long prompt
MAX_CHECKPOINTS = 1_024  # of one prompt: 15,900 keys; what is beyond is not told apart


def _checkpoints() -> Iterator[int]:
    """Yield the numbers of leading keys that are remembered: all of the first 8, then coarser up to every 16th."""
    at = 0
    while True:
        at += min(max(1, 1 << at.bit_length() >> 3), WIDEST_STEP)
        yield at


def _positions() -> tuple[int, ...]:
    source = _checkpoints()
    return tuple(next(source) for _ in range(MAX_CHECKPOINTS))


POSITIONS = _positions()
FIRST_KEY = struct.Struct("<Q")
NOTHING_HELD: Mapping[str, int] = MappingProxyType({})

Checkpoints = tuple[tuple[int, ...], int]  # the keys at POSITIONS, the last key


def _layouts() -> tuple[struct.Struct, ...]:
    """Return, by number of checkpoints, what cuts just these out of the packed keys in one C call."""
    layouts, form, end = [struct.Struct("<")], "<", 0
    for position in POSITIONS:
        form += f"{(position - 1 - end) * KEY_BYTES}xQ" if position - 1 > end else "Q"
        end = position
        layouts.append(struct.Struct(form))
    return tuple(layouts)


LAYOUTS = _layouts()


class RecentRoutes:
    """Endpoints by leading keys. What was noted is gone after `ttl_seconds`, and kept for three quarters of it.

    `limit` bounds the checkpoints remembered: about 50 for 500 keys, 100 bytes of memory each. Where more are noted,
    the oldest go first. The index overrides it by knowing more: the caller takes the larger of the two. Once it has
    known as much, the expectation is over, so that what is evicted then counts no longer.
    """

    def __init__(self, *, ttl_seconds: float, limit: int) -> None:
        self._turn_seconds = ttl_seconds / GENERATIONS
        self._turn_size = max(1, limit // GENERATIONS)
        # newest first: checkpoint key -> bits of the endpoints that got it
        self._tables: tuple[dict[int, int], ...] = tuple({} for _ in range(GENERATIONS))
        # as old: key -> bits of the endpoints of which the index has said that they hold all up to it. Not taken out of
        # the tables above: whoever has a checkpoint there has all before it, and another prompt may go on from here
        self._confirmed: tuple[dict[int, int], ...] = tuple({} for _ in range(GENERATIONS))
        self._turned_at = float("-inf")
        self._turns = 0
        self._bits: dict[str, int] = {}
        self._endpoints: dict[int, str] = {}  # bit number -> who has it
        self._retired: dict[int, int] = {}  # bit number -> the turn after which no table has it any more

    def reconfigure(self, *, ttl_seconds: float, limit: int) -> None:
        """Remember for another time, and so much, from now on; what is remembered stays until its turn."""
        self._turn_seconds = ttl_seconds / GENERATIONS
        self._turn_size = max(1, limit // GENERATIONS)

    def note(self, keys: bytes, *, endpoint: str, now: float, cut: Checkpoints | None = None) -> None:
        """Remember that a prompt with these keys was sent to `endpoint` at `now` (monotonic seconds).

        `cut`: what `checkpoints` makes of the keys, for a caller who notes them in several places.
        """
        count = len(keys) // KEY_BYTES
        if not count:
            return
        if now - self._turned_at >= self._turn_seconds:
            self._turn(now)
        table, bit = self._tables[0], self._bits.get(endpoint) or self._new_bit(endpoint)
        marks, last = cut or checkpoints(keys)
        # whoever has a checkpoint has all before it: only the rest is new, and often it is new to everybody
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
        if all_bits != seen:  # else, mostly: nobody was sent any of it, or all who were have all of it
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
    """Return how many of these checkpoints somebody has."""
    # a prompt is noted with every checkpoint before its end, so those that somebody has come first
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
    return LAYOUTS[bisect_left(POSITIONS, count + 1)].unpack_from(keys)

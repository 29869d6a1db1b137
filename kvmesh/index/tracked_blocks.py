"""Who holds the prefixes that come again and again, kept here while Redis tells what changes: they need no asking.

Filled by `index.tracking_link`, used by the reader. A stretch is 64 blocks of a prompt that end at a multiple of 64
from its beginning; block keys are chained, so the last one names it. Pure; not for several threads at a time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.index.prefix_match import Run, runs_of

STRETCH_BLOCKS = 64
STRETCH_BYTES = STRETCH_BLOCKS * KEY_BYTES
LIMIT = 1_024  # stretches: a million tokens at 16 a block, some 8 MB here and 9 MB of Redis (docs/redis.md)
SEEN_LIMIT = 16_384  # stretches that were held once
NEW_AT_ONCE = 16  # stretches of a lookup that are begun with: each of them costs 20 us
MOST_RUNS = 256  # of a prompt that are kept together; values that alternate would take memory by the square
SECOND_CHANCES = 16  # stretches that one new one looks past for one that was not used
NOTHING_KNOWN: tuple[Sequence[Run], int] = ((), 0)


class TrackedStretch:
    """64 blocks, and what Redis has of them."""

    __slots__ = ("as_of", "keys", "runs", "so_far", "was_used")

    def __init__(self, keys: bytes) -> None:
        self.keys = keys  # packed
        self.runs: Sequence[Run] | None = None  # None: not answered yet
        self.was_used = False  # since it was last up to be dropped
        self.so_far: Sequence[Run] = ()  # of the prompt from its beginning to here
        self.as_of = -1  # how many had been dropped when this was put together

    def blocks(self) -> list[bytes]:
        """Return the keys one by one."""
        return [self.keys[at : at + KEY_BYTES] for at in range(0, STRETCH_BYTES, KEY_BYTES)]


class TrackedBlocks:
    """Stretches that somebody held twice when they were looked up. Forgotten with the connection that tells of them."""

    def __init__(self, *, limit: int = LIMIT) -> None:
        self._limit = limit
        self._stretches: OrderedDict[bytes, TrackedStretch] = OrderedDict()  # by their last keys, as they came
        # prompts that part within a stretch have blocks in common; mostly a block is of one stretch, and a set is large
        self._of_block: dict[bytes, TrackedStretch | set[TrackedStretch]] = {}
        self._seen: dict[bytes, None] = {}  # last keys of stretches that were held once, the oldest first
        self._wanted: dict[bytes, TrackedStretch] = {}  # by their last keys: not asked for yet
        self._dropped = 0

    def __len__(self) -> int:
        """Return how many blocks are known or about to be."""
        return len(self._of_block)

    def leading(self, keys: bytes) -> tuple[Sequence[Run], int]:
        """Return the values of a prompt's first blocks, as far as they are known, and how many blocks that are.

        `keys`: packed, those of the prompt or of its beginning.
        """
        stretches, dropped = self._stretches, self._dropped
        whole = len(keys) // STRETCH_BYTES * STRETCH_BYTES
        for end in range(whole, 0, -STRETCH_BYTES):  # the deepest first: nearly always it was the last time's
            stretch = stretches.get(keys[end - KEY_BYTES : end])
            if stretch is not None and stretch.runs is not None:
                if stretch.as_of == dropped:
                    return stretch.so_far, end // KEY_BYTES
                break
        return self._put_together(keys, whole)

    def note(self, keys: bytes, *, held: int) -> bool:
        """Take note that somebody holds the first `held` of these blocks; tell whether any are to be asked for now."""
        new = 0
        for end in range(STRETCH_BYTES, held * KEY_BYTES + 1, STRETCH_BYTES):
            last = keys[end - KEY_BYTES : end]
            stretch = self._stretches.get(last)
            if stretch is not None:
                stretch.was_used = True
            elif last not in self._seen:
                self._seen[last] = None
            elif new < NEW_AT_ONCE:
                new += 1
                del self._seen[last]
                self._want(TrackedStretch(keys[end - STRETCH_BYTES : end]), last)
        while len(self._seen) > SEEN_LIMIT:
            del self._seen[next(iter(self._seen))]
        return bool(self._wanted)

    def take_wanted(self, most: int) -> Sequence[TrackedStretch]:
        """Return stretches to be asked for now; whatever Redis tells from here on counts against them."""
        return [self._wanted.pop(last) for last in list(islice(self._wanted, most))]

    def fill(self, stretch: TrackedStretch, values: Sequence[bytes | None]) -> None:
        """Take Redis' answer. Of a stretch that has changed meanwhile nobody will learn it: it is dropped."""
        stretch.runs = runs_of(values)

    def changed(self, keys: Iterable[bytes]) -> None:
        """Forget the stretches of these blocks: others hold them now."""
        for key in keys:
            there = self._of_block.get(key)
            if there is not None:
                for stretch in (there,) if isinstance(there, TrackedStretch) else tuple(there):
                    last = stretch.keys[-KEY_BYTES:]
                    del self._stretches[last]
                    self._drop(stretch, last)

    def clear(self) -> None:
        """Forget everything: nobody tells of changes any more, or all has changed."""
        self._stretches.clear()
        self._of_block.clear()
        self._wanted.clear()

    def _put_together(self, keys: bytes, whole: int) -> tuple[Sequence[Run], int]:
        """Return what `leading` does, and keep it with the last stretch of it."""
        runs: list[Run] = []
        deepest = None
        known = 0
        for end in range(STRETCH_BYTES, whole + 1, STRETCH_BYTES):
            stretch = self._stretches.get(keys[end - KEY_BYTES : end])
            if stretch is None or stretch.runs is None:
                break
            for value, count in stretch.runs:
                if runs and runs[-1][0] == value:
                    runs[-1] = value, runs[-1][1] + count
                else:
                    runs.append((value, count))
            deepest, known = stretch, end // KEY_BYTES
        if deepest is None:
            return NOTHING_KNOWN
        if len(runs) <= MOST_RUNS:
            deepest.so_far, deepest.as_of = runs, self._dropped
        return runs, known

    def _want(self, stretch: TrackedStretch, last: bytes) -> None:
        self._stretches[last] = self._wanted[last] = stretch
        for key in stretch.blocks():
            there = self._of_block.setdefault(key, stretch)
            if isinstance(there, set):
                there.add(stretch)
            elif there is not stretch:
                self._of_block[key] = {there, stretch}
        chances = SECOND_CHANCES
        while len(self._stretches) > self._limit:
            name, oldest = self._stretches.popitem(last=False)
            if oldest.was_used and chances:
                chances -= 1
                oldest.was_used = False
                self._stretches[name] = oldest
            else:
                self._drop(oldest, name)

    def _drop(self, stretch: TrackedStretch, last: bytes) -> None:
        self._wanted.pop(last, None)
        for key in stretch.blocks():
            there = self._of_block[key]
            if isinstance(there, set):
                there.discard(stretch)
            if not there or there is stretch:
                del self._of_block[key]
        self._dropped += 1

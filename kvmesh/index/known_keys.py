"""Remembers prompts seen before: their block keys, and how many of their blocks to ask Redis for.

A known prefix costs a comparison and not a hash a block. Answers are exactly those of `block_keys`: what is remembered
counts only after its tokens were compared byte by byte. Not for several threads at a time.

A cold prompt should cost a few misses, a warm one a single round trip. Block keys are chained, so a key at a checkpoint
(block 0, 32, 64, 128, …) stands for the whole prefix up to there: a reader that has seen it knows how deep to ask.
"""

from collections import OrderedDict
from functools import lru_cache

import xxhash

from kvmesh.blocks.block_keys import KEY_BYTES, TOKEN_BYTES, block_keys

CHUNK_BLOCKS = 64  # shorter ones: more comparisons; longer ones: more blocks behind the last whole one
LIMIT_BYTES = 32 << 20  # tokens and keys: some 7 million tokens at 16 a block
ENTRY_BYTES = 400  # what Python needs for an entry besides
SECOND_CHANCES = 64  # used chunks that are passed over to make room for a new one: a pause of 20 us at most
FIRST_BATCH = 32  # blocks asked for of a prompt that we know nothing of
GROWTH = 16  # each further batch is so many times as long
LARGEST_BATCH = 2048  # Redis serves no other client meanwhile: some 0.7 ms
REMEMBERED = 16_384  # checkpoints, a few a prompt: some 3 MB
_CHECKPOINTS = (0, *(FIRST_BATCH << power for power in range(13)))


class _Chunk:
    """A chunk, its keys, and the chunk that followed it last: nearly always the next prompt's, too."""

    __slots__ = ("following", "keys", "tokens", "was_used")

    def __init__(self, tokens: bytes, keys: bytes) -> None:
        self.tokens = tokens  # empty once it is forgotten
        self.keys = keys
        self.following: _Chunk | None = None
        self.was_used = False  # since it was last considered for eviction

    def forget(self) -> None:
        """Let go of everything: another chunk may still name this one as the next."""
        self.tokens = self.keys = b""
        self.following = None


class KnownBlockKeys:
    """The chunks used lately, by the key before them and a digest of their tokens."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0  # about how much memory is in use; never more than the limit
        # in order of arrival; a chunk that was used since is kept for another round, so that a use costs only a mark
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()

    def keys(self, tokens: bytes, *, block_size: int, parent: bytes) -> bytes:
        """Return `block_keys(tokens, block_size=block_size, parent=parent)`."""
        prompt = PromptKeys(self, tokens, block_size=block_size, parent=parent)
        return prompt.reach(prompt.blocks)

    def find(self, tokens: bytes, *, parent: bytes) -> _Chunk | None:
        """Return what is remembered of these tokens after this key."""
        found = self._chunks.get(parent + xxhash.xxh3_64_digest(tokens))
        # equal tokens of equal length are equally many blocks, hence blocks of one size
        return found if found is not None and found.tokens == tokens else None

    def remember(self, tokens: bytes, keys: bytes, *, parent: bytes) -> _Chunk:
        """Keep a chunk that `find` does not know; it may be forgotten at once where there is no room."""
        name = parent + xxhash.xxh3_64_digest(tokens)
        replaced = self._chunks.pop(name, None)
        if replaced is not None:
            self._drop(replaced)
        chunk = self._chunks[name] = _Chunk(tokens, keys)
        self.held_bytes += _size(chunk)
        chances = SECOND_CHANCES
        while self.held_bytes > self._limit_bytes:
            name, oldest = self._chunks.popitem(last=False)
            if oldest.was_used and chances:
                chances -= 1
                oldest.was_used = False
                self._chunks[name] = oldest
            else:
                self._drop(oldest)
        return chunk

    def _drop(self, chunk: _Chunk) -> None:
        self.held_bytes -= _size(chunk)
        chunk.forget()


class PromptKeys:
    """The keys of one prompt, computed no further than asked for. Raise ValueError for a block size below 1.

    `blocks`: how many of the tokens' leading blocks to use, so that the tokens need not be cut; all by default.
    """

    __slots__ = ("_block_size", "_known", "_last", "_packed", "_parent", "_pieces", "_reached", "_tokens", "blocks")

    def __init__(
        self, known: KnownBlockKeys, tokens: bytes, *, block_size: int, parent: bytes, blocks: int | None = None
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self.blocks = len(tokens) // (block_size * TOKEN_BYTES) if blocks is None else blocks
        self._known = known
        self._tokens = tokens
        self._block_size = block_size
        self._parent = parent  # of the next block
        self._last: _Chunk | None = None  # the one before the next block
        self._packed = b""
        self._pieces: list[bytes] = []  # that are not in `_packed` yet
        self._reached = 0  # blocks

    def reach(self, blocks: int) -> bytes:
        """Return the packed keys of at least so many first blocks, or of all there are."""
        least = min(blocks, self.blocks)
        while self._reached < least:
            self._pass_known()
            if self._reached < least:
                self._compute()
        return self._join() if self._pieces else self._packed

    def reach_unknown(self) -> bytes:
        """Return the packed keys of what was seen before, and of one chunk more."""
        self._pass_known()
        if self._reached < self.blocks:
            self._compute()
        return self._join() if self._pieces else self._packed

    def _join(self) -> bytes:
        self._packed = b"".join((self._packed, *self._pieces))
        self._pieces.clear()
        return self._packed

    def _pass_known(self) -> None:
        """Go on over the chunks that are remembered.

        Nearly always each is the one that followed the last time: comparing in place costs a third of cutting, hashing
        and looking it up (8,000 tokens, caches cold).
        """
        tokens, known, last = self._tokens, self._known, self._last
        width = self._block_size * TOKEN_BYTES
        length = CHUNK_BLOCKS * width
        at = self._reached * width
        end = self.blocks * width - length
        while at <= end:
            chunk = last.following if last is not None else None
            if chunk is None or not chunk.tokens or not tokens.startswith(chunk.tokens, at):
                chunk = known.find(tokens[at : at + length], parent=self._parent)
                if chunk is None:
                    break
                if last is not None and last.tokens:
                    last.following = chunk
            chunk.was_used = True
            self._pieces.append(chunk.keys)
            self._parent = chunk.keys[-KEY_BYTES:]
            last = chunk
            at += length
        self._last = last
        self._reached = at // width

    def _compute(self) -> None:
        """Add the keys of one chunk that is not remembered."""
        width = self._block_size * TOKEN_BYTES
        at = self._reached * width
        count = min(CHUNK_BLOCKS, self.blocks - self._reached)
        tokens = self._tokens[at : at + count * width]
        keys = block_keys(tokens, block_size=self._block_size, parent=self._parent)
        if count == CHUNK_BLOCKS:  # else the end, where a longer prompt with this beginning goes on
            before, self._last = self._last, self._known.remember(tokens, keys, parent=self._parent)
            if before is not None and before.tokens:
                before.following = self._last
        self._pieces.append(keys)
        self._parent = keys[-KEY_BYTES:]
        self._reached += count


def _size(chunk: _Chunk) -> int:
    return len(chunk.tokens) + len(chunk.keys) + ENTRY_BYTES


class DepthHints:
    """How long the prompts through each checkpoint were; the oldest are forgotten first."""

    def __init__(self, *, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._depths: dict[bytes, int] = {}  # block key at a checkpoint -> blocks of the last prompt through it

    def first_batch(self, keys: bytes, *, blocks: int) -> int:
        """Return how many of a prompt's blocks to ask for first; `keys` may end before the prompt does."""
        beyond = _CHECKPOINTS[-1]
        for checkpoint in _within(blocks):
            depth = self._depths.get(keys[checkpoint * KEY_BYTES : (checkpoint + 1) * KEY_BYTES])
            if depth is not None:
                # prompts that went on alike would be known at the next checkpoint too
                return min(max(min(depth, beyond) + FIRST_BATCH, FIRST_BATCH), LARGEST_BATCH)
            beyond = checkpoint
        return FIRST_BATCH

    def learn(self, keys: bytes, *, matched: int) -> None:
        """Take note of a looked-up prompt; if its beginning is held, the pod that gets it will hold all of it soon."""
        if not matched:
            return
        blocks = len(keys) // KEY_BYTES
        for checkpoint in _within(blocks):
            key = keys[checkpoint * KEY_BYTES : (checkpoint + 1) * KEY_BYTES]
            self._depths.pop(key, None)  # the latest goes last
            self._depths[key] = blocks
        while len(self._depths) > self._limit:
            del self._depths[next(iter(self._depths))]


def next_batch(asked: int) -> int:
    """Return how many blocks to ask for after a batch of `asked` that was held as a whole."""
    return min(max(asked, FIRST_BATCH) * GROWTH, LARGEST_BATCH)


@lru_cache(maxsize=4_096)  # prompts' lengths, which come again
def _within(blocks: int) -> tuple[int, ...]:
    """Return the checkpoints of a prompt, the deepest first."""
    return tuple([checkpoint for checkpoint in reversed(_CHECKPOINTS) if checkpoint < blocks])

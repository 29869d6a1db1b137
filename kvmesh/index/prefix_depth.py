"""How many leading blocks of a prompt to ask for at a time. Pure; used by the reader.

A cold prompt should cost a few misses, a warm one a single round trip. Block keys are chained, so a key at a checkpoint
(block 0, 32, 64, 128, …) stands for the whole prefix up to there: whoever has seen it before knows how deep to ask.
"""

from functools import lru_cache

from kvmesh.blocks.block_keys import KEY_BYTES

FIRST_CHUNK = 32  # blocks asked for of a prompt that we know nothing of
GROWTH = 16  # each further chunk is so many times as long
LARGEST_CHUNK = 2048  # Redis serves nobody else meanwhile: some 0.7 ms
REMEMBERED = 16_384  # checkpoints, a few a prompt: some 3 MB
_CHECKPOINTS = (0, *(FIRST_CHUNK << power for power in range(13)))


class DepthHints:
    """How long the prompts through each checkpoint were; the oldest are forgotten first."""

    def __init__(self, *, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._depths: dict[bytes, int] = {}  # block key at a checkpoint -> blocks of the last prompt through it

    def first_chunk(self, keys: bytes, *, blocks: int) -> int:
        """Return how many of a prompt's blocks to ask for first; `keys` may end before the prompt does."""
        beyond = _CHECKPOINTS[-1]
        for checkpoint in _within(blocks):
            depth = self._depths.get(keys[checkpoint * KEY_BYTES : (checkpoint + 1) * KEY_BYTES])
            if depth is not None:
                # prompts that went on alike would be known at the next checkpoint too
                return min(max(min(depth, beyond) + FIRST_CHUNK, FIRST_CHUNK), LARGEST_CHUNK)
            beyond = checkpoint
        return FIRST_CHUNK

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


def next_chunk(asked: int) -> int:
    """Return how many blocks to ask for after a chunk of `asked` that was held as a whole."""
    return min(max(asked, FIRST_CHUNK) * GROWTH, LARGEST_CHUNK)


@lru_cache(maxsize=4_096)  # prompts' lengths, which come again
def _within(blocks: int) -> tuple[int, ...]:
    """Return the checkpoints of a prompt, the deepest first."""
    return tuple([checkpoint for checkpoint in reversed(_CHECKPOINTS) if checkpoint < blocks])

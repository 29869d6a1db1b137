"""Remembers the block keys of prompts seen before, so that a known prefix costs a comparison and not a hash a block.

Used by the index reader for every prompt. Answers are exactly those of `block_keys`: what is remembered counts only
after its tokens were compared byte by byte. Not for several threads at a time.
"""

from collections import OrderedDict

import xxhash

from kv_indexer.core.block_keys import KEY_BYTES, TOKEN_BYTES, block_keys

STRETCH_BLOCKS = 64  # shorter ones: more comparisons; longer ones: more blocks behind the last whole one
LIMIT_BYTES = 32 << 20  # tokens and keys: some 7 million tokens at 16 a block
ENTRY_BYTES = 400  # what Python needs for an entry besides

_Entry = tuple[bytes, bytes]  # (tokens of a stretch, their keys)


class KnownBlockKeys:
    """The stretches used last, by the key before them and a digest of their tokens."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the one that was not used for longest comes first

    @property
    def held_bytes(self) -> int:
        """Return about how much memory is in use; never more than the limit."""
        return self._held_bytes

    def keys(self, tokens: bytes, *, block_size: int, parent: bytes) -> bytes:
        """Return `block_keys(tokens, block_size=block_size, parent=parent)`."""
        step = STRETCH_BLOCKS * block_size * TOKEN_BYTES
        if step < 1:
            return block_keys(tokens, block_size=block_size, parent=parent)  # which says what is wrong
        whole = len(tokens) - len(tokens) % step
        pieces = []
        for at in range(0, whole, step):
            keys = self._stretch(tokens[at : at + step], block_size, parent)
            pieces.append(keys)
            parent = keys[-KEY_BYTES:]
        pieces.append(block_keys(tokens[whole:], block_size=block_size, parent=parent))
        return b"".join(pieces)

    def _stretch(self, tokens: bytes, block_size: int, parent: bytes) -> bytes:
        name = parent + xxhash.xxh3_64_digest(tokens)
        entry = self._entries.get(name)
        # equal tokens of equal length are equally many blocks, hence blocks of one size
        if entry is not None and entry[0] == tokens:
            self._entries.move_to_end(name)
            return entry[1]
        keys = block_keys(tokens, block_size=block_size, parent=parent)
        self._remember(name, (tokens, keys))
        return keys

    def _remember(self, name: bytes, entry: _Entry) -> None:
        replaced = self._entries.pop(name, None)
        if replaced is not None:
            self._held_bytes -= _size(replaced)
        self._entries[name] = entry
        self._held_bytes += _size(entry)
        while self._held_bytes > self._limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._held_bytes -= _size(oldest)


def _size(entry: _Entry) -> int:
    return len(entry[0]) + len(entry[1]) + ENTRY_BYTES

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
        prompt = PromptKeys(self, tokens, block_size=block_size, parent=parent)
        return prompt.reach(prompt.blocks)

    def stretch(self, tokens: bytes, *, block_size: int, parent: bytes) -> tuple[bytes, bool]:
        """Return the keys of a stretch, and whether they were remembered; they are from now on."""
        name = parent + xxhash.xxh3_64_digest(tokens)
        entry = self._entries.get(name)
        # equal tokens of equal length are equally many blocks, hence blocks of one size
        if entry is not None and entry[0] == tokens:
            self._entries.move_to_end(name)
            return entry[1], True
        keys = block_keys(tokens, block_size=block_size, parent=parent)
        self._remember(name, (tokens, keys))
        return keys, False

    def _remember(self, name: bytes, entry: _Entry) -> None:
        replaced = self._entries.pop(name, None)
        if replaced is not None:
            self._held_bytes -= _size(replaced)
        self._entries[name] = entry
        self._held_bytes += _size(entry)
        while self._held_bytes > self._limit_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._held_bytes -= _size(oldest)


class PromptKeys:
    """The keys of one prompt, computed no further than asked for. Raise ValueError for a block size below 1."""

    def __init__(self, known: KnownBlockKeys, tokens: bytes, *, block_size: int, parent: bytes) -> None:
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1 token, not {block_size}")
        self.blocks = len(tokens) // (block_size * TOKEN_BYTES)
        self._known = known
        self._tokens = tokens
        self._block_size = block_size
        self._parent = parent  # of the next block
        self._pieces: list[bytes] = []
        self._reached = 0  # blocks

    def reach(self, blocks: int) -> bytes:
        """Return the packed keys of at least so many first blocks, or of all there are."""
        while self._reached < min(blocks, self.blocks):
            self._go_on()
        return self._packed()

    def reach_unknown(self) -> bytes:
        """Return the packed keys of what was seen before, and of one stretch more."""
        while self._reached < self.blocks and self._go_on():
            pass
        return self._packed()

    def _packed(self) -> bytes:
        if len(self._pieces) > 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0] if self._pieces else b""

    def _go_on(self) -> bool:
        """Add the keys of one stretch; tell whether they were remembered."""
        width = self._block_size * TOKEN_BYTES
        at = self._reached * width
        tokens = self._tokens[at : at + STRETCH_BLOCKS * width]
        if len(tokens) == STRETCH_BLOCKS * width:
            keys, remembered = self._known.stretch(tokens, block_size=self._block_size, parent=self._parent)
        else:  # the end, where a longer prompt with this beginning goes on
            keys, remembered = block_keys(tokens, block_size=self._block_size, parent=self._parent), False
        self._pieces.append(keys)
        self._parent = keys[-KEY_BYTES:]
        self._reached += len(keys) // KEY_BYTES
        return remembered


def _size(entry: _Entry) -> int:
    return len(entry[0]) + len(entry[1]) + ENTRY_BYTES

"""A bounded cache of tokens by text: every new turn of a conversation repeats the old ones."""

import hashlib
import threading
from collections import OrderedDict

MOST_BYTES = 32 << 20  # of tokens


class TokenMemory:
    """An LRU cache of tokens by text, thread-safe."""

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self.held_bytes = 0  # the size of all cached tokens
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()  # large prompts are tokenized in a thread

    def get(self, key: bytes) -> bytes | None:
        """Return the cached tokens, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, tokens: bytes) -> None:
        """Cache the tokens, and evict the least recently used beyond the limit."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = tokens
                self.held_bytes += len(tokens)
            while self.held_bytes > self._most_bytes:
                _, dropped = self._kept.popitem(last=False)
                self.held_bytes -= len(dropped)


def key_of(text: str, *, kind: bytes) -> bytes:
    """Return the cache key of a text; `kind` keeps ways of tokenizing apart."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=kind).digest()

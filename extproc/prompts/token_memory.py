"""What was tokenized before, up to so many bytes: old turns of conversations come again with every new one."""

import hashlib
import threading
from collections import OrderedDict

MOST_BYTES = 32 << 20  # of tokens


class TokenMemory:
    """Tokens by text; those that were not asked for the longest go first. Several threads may use it."""

    def __init__(self, *, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # large prompts are tokenized in a thread

    def get(self, key: bytes) -> bytes | None:
        """Return the tokens that were put under a key, or None."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: bytes, tokens: bytes) -> None:
        """Remember the tokens."""
        with self._lock:
            if key not in self._kept:
                self._kept[key] = tokens
                self._bytes += len(tokens)
            while self._bytes > self._most_bytes:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= len(dropped)

    @property
    def held_bytes(self) -> int:
        """The bytes of all tokens that are remembered."""
        return self._bytes


def key_of(text: str, *, kind: bytes) -> bytes:
    """Return the key of a text that is tokenized in a way of that kind."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=kind).digest()

"""The audit chain: each line carries its number, the hash of the line before and its own, over the bytes as written.

    {…the record…,"chain":"<id>","seq":7,"prev":"<hash of line 6>","hash":"<hash of all before this comma>"}

A chain belongs to one process and one target. It begins with `head` (seq 0), goes on over rotated files with
`continued`, has a heartbeat `alive` every `heartbeat_seconds`, reports what was dropped with `gap`, and ends with
`close`. With a key the hash is keyed (BLAKE2b's own key, RFC 7693): without the key no writer of the file can rebuild
it. Pure; `records.record_targets` writes chains, `records.audit_verify` reads them.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from extproc.errors import ConfigError

FORMAT = 1
HASH_BYTES = 32
LEAST_KEY_BYTES, MOST_KEY_BYTES = 16, 1024
FIRST_PREV = "0" * (2 * HASH_BYTES)  # before seq 0
_CHAIN_USE, _NAMES_USE = b"kvmesh-chain", b"kvmesh-names"  # one key, two uses that reveal nothing of each other
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

HEAD, CONTINUED, DECISION, GAP, ALIVE, CLOSE = "head", "continued", "decision", "gap", "alive", "close"


class AuditKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key of hashes; `id` is written in the head, so that keys can change."""

    id: str
    secret: bytes

    @property
    def for_chain(self) -> bytes:
        """Return the key of the chain's hashes."""
        return blake2b(self.secret, digest_size=64, person=_CHAIN_USE).digest()

    @property
    def for_names(self) -> bytes:
        """Return the key by which tenants and prompts are hashed."""
        return blake2b(self.secret, digest_size=64, person=_NAMES_USE).digest()

    def __repr__(self) -> str:
        """Never show the secret."""
        return f"AuditKey(id={self.id!r})"


class ChainEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a chain."""

    chain: str
    seq: int
    hash: str


class AuditChain:
    """Writes one chain: numbers the lines and links them."""

    def __init__(self, chain: str, *, key: AuditKey | None) -> None:
        """`chain` is new for every process and target; key None: any writer of the file can rebuild it."""
        self.chain = chain
        self.seq = -1  # of the last line
        self._hash = FIRST_PREV.encode()
        self._hasher = blake2b(digest_size=HASH_BYTES, key=key.for_chain if key is not None else b"")
        self._name = b',"chain":"' + chain.encode() + b'","seq":'

    def line(self, record: bytes) -> bytes:
        """Return the next line, newline included, for a record that is a JSON object on one line."""
        self.seq = seq = self.seq + 1
        linked = b'%b%b%d,"prev":"%b"' % (record[:-1], self._name, seq, self._hash)
        hasher = self._hasher.copy()
        hasher.update(linked)
        self._hash = own = hasher.hexdigest().encode()
        return b'%b,"hash":"%b"}\n' % (linked, own)

    @property
    def end(self) -> ChainEnd:
        """Return its last line."""
        return ChainEnd(chain=self.chain, seq=self.seq, hash=self._hash.decode())


def line_hash(linked: bytes, key: AuditKey | None) -> str:
    """Return the hash of a line, given its bytes before `,"hash":`."""
    return blake2b(linked, digest_size=HASH_BYTES, key=key.for_chain if key is not None else b"").hexdigest()


def parse_keys(text: str, *, where: str) -> Mapping[str, AuditKey]:
    """Read a key file: lines `id:key`, or one line with a key alone, which gets the id "1"; the last one is in use.

    Empty lines and those that begin with "#" are skipped. Raise ConfigError, which never shows a key.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise ConfigError(f"{where}: there is no key in it")
    keys: dict[str, AuditKey] = {}
    for number, line in enumerate(lines, start=1):
        key_id, colon, secret = line.partition(":")
        if not colon:
            key_id, secret = "1", line
            if len(lines) > 1:
                raise ConfigError(f"{where}: key {number} has no id: write `id:key`")
        if not _KEY_ID.fullmatch(key_id):
            raise ConfigError(f"{where}: the id of key {number} is not of letters, digits, `.`, `_`, `-`")
        size = len(secret.encode())
        if not LEAST_KEY_BYTES <= size <= MOST_KEY_BYTES:
            raise ConfigError(
                f"{where}: key {key_id!r} has {size} bytes; it needs {LEAST_KEY_BYTES} to {MOST_KEY_BYTES}"
            )
        if key_id in keys:
            raise ConfigError(f"{where}: the id {key_id!r} is there twice")
        keys[key_id] = AuditKey(id=key_id, secret=secret.encode())
    return keys

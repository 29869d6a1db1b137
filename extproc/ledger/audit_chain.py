"""The audit chain: each line has its number, the hash of the previous line, and its own hash over the written bytes.

    {…the record…,"chain":"<id>","seq":7,"prev":"<hash of line 6>","hash":"<hash of all before this comma>"}

A chain belongs to one process and one target. It begins with `head` (seq 0), continues in each rotated file with
`continued`, has a heartbeat `alive` every `heartbeat_seconds`, reports dropped records with `gap`, and ends with
`close`. With a key the hash is keyed (BLAKE2b's key parameter, RFC 7693): without the key, writers of the file cannot
forge a chain. Pure; `records.record_targets` writes chains, `operate.audit.verify` checks them.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from extproc.errors import ConfigError

FORMAT = 1
HASH_BYTES = 32
LEAST_KEY_BYTES, MOST_KEY_BYTES = 16, 1024
FIRST_PREV = "0" * (2 * HASH_BYTES)  # `prev` of seq 0
_CHAIN_USE, _NAMES_USE = b"kvmesh-chain", b"kvmesh-names"  # derive two independent keys from one secret
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)

HEAD, CONTINUED, DECISION, GAP, ALIVE, CLOSE = "head", "continued", "decision", "gap", "alive", "close"


class AuditKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key for hashes; the head of a chain names its `id`, so that keys can be rotated."""

    id: str
    secret: bytes

    @property
    def for_chain(self) -> bytes:
        """Return the derived key for the hashes of chains."""
        return blake2b(self.secret, digest_size=64, person=_CHAIN_USE).digest()

    @property
    def for_names(self) -> bytes:
        """Return the derived key for the hashes of tenants and prompts."""
        return blake2b(self.secret, digest_size=64, person=_NAMES_USE).digest()

    def __repr__(self) -> str:
        """Leave the secret out."""
        return f"AuditKey(id={self.id!r})"


class ChainEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The last line of a chain."""

    chain: str
    seq: int
    hash: str


class AuditChain:
    """Writes one chain: numbers the lines and links them."""

    def __init__(self, chain: str, *, key: AuditKey | None) -> None:
        """`chain` is a new id for every process and target; without a key any writer of the file can forge it."""
        self.chain = chain
        self.seq = -1  # of the last line
        self._hash = FIRST_PREV.encode()
        self._hasher = blake2b(digest_size=HASH_BYTES, key=key.for_chain if key is not None else b"")
        self._name = b',"chain":"' + chain.encode() + b'","seq":'

    def line(self, record: bytes) -> bytes:
        """Return the next line, newline included, for a record as a one-line JSON object."""
        self.seq = seq = self.seq + 1
        linked = b'%b%b%d,"prev":"%b"' % (record[:-1], self._name, seq, self._hash)
        hasher = self._hasher.copy()
        hasher.update(linked)
        self._hash = own = hasher.hexdigest().encode()
        return b'%b,"hash":"%b"}\n' % (linked, own)

    @property
    def end(self) -> ChainEnd:
        """The last line so far."""
        return ChainEnd(chain=self.chain, seq=self.seq, hash=self._hash.decode())


def line_hash(linked: bytes, key: AuditKey | None) -> str:
    """Return the hash of a line from its bytes before `,"hash":`."""
    return blake2b(linked, digest_size=HASH_BYTES, key=key.for_chain if key is not None else b"").hexdigest()


def parse_keys(text: str, *, where: str) -> Mapping[str, AuditKey]:
    """Read a key file: lines `id:key`, or a single line `key` with the id "1"; the last key is in use.

    Empty lines and comments ("#") are skipped. Raise ConfigError, whose message never shows a key.
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

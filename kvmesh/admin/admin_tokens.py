"""Reads token files: the server's, anew whenever it changes, and the client's. Used by the admin gate and login.

A token is never part of a message, a log line or a repr.
"""

import hmac
import logging
import stat
from hashlib import sha256
from pathlib import Path

from kvmesh.errors import SettingError

log = logging.getLogger(__name__)

MIN_BYTES = 16
MAX_TOKENS = 16
MAX_FILE_BYTES = 65536


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return the tokens of a file, one a line. Raise SettingError saying what is wrong with it, but not what it says.

    Several are let in at once while a token is replaced by another one.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe waits for who writes, and all else would wait, too
            raise SettingError(f"{path} is no file with a token: pipes and folders cannot be read again and again")
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingError(f"the token file {path} cannot be read: {error.strerror}") from None
    if len(content) > MAX_FILE_BYTES:
        raise SettingError(f"the token file {path} is longer than {MAX_FILE_BYTES} bytes")
    lines = [line.strip() for line in content.splitlines() if line.strip()]
    if not lines:
        raise SettingError(f"the token file {path} is empty: it needs a token of at least {MIN_BYTES} bytes")
    if len(lines) > MAX_TOKENS:
        raise SettingError(f"the token file {path} has more than {MAX_TOKENS} tokens (one a line)")
    for number, line in enumerate(lines, start=1):
        if len(line) < MIN_BYTES:
            raise SettingError(f"the token file {path}, line {number}: a token has at least {MIN_BYTES} bytes")
        if any(not 0x21 <= byte <= 0x7E for byte in line):
            raise SettingError(f"the token file {path}, line {number}: only visible ASCII fits into a header")
    return tuple(line.decode("ascii") for line in lines)


def token_digest(token: str) -> bytes:
    """Return what stands for a token in memory."""
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


class TokenFile:
    """The tokens that are let in, as the file says now. One that cannot be used lets nobody in."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._digests: tuple[bytes, ...] = ()
        self.problem = "not read yet"  # "": none
        self.refresh()

    def lets_in(self, digest: bytes) -> bool:
        """Compare with every token in constant time; `refresh` first."""
        found = False
        for each in self._digests:
            found |= hmac.compare_digest(each, digest)
        return found

    def refresh(self) -> None:
        """Read the file where it is another one than before; where it is not as it must be, say so once."""
        try:
            now = self._path.stat()
            seen: tuple[int, ...] = (now.st_mtime_ns, now.st_ctime_ns, now.st_size, now.st_ino, now.st_dev)
        except OSError:
            seen = ()
        if seen == self._seen:
            return
        is_first, self._seen = self._seen is None, seen
        try:
            self._digests = tuple(token_digest(token) for token in read_tokens(self._path))
        except SettingError as error:
            self._digests, self.problem = (), str(error)
            log.error("the admin pages let nobody in by token: %s", error)
            return
        self.problem = ""
        if not is_first:
            log.info("the admin pages' token file was read anew", extra={"tokens": len(self._digests)})

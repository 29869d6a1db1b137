"""Files with tokens and certificates, for servers and clients of the admin pages. They may change at any time.

A token is never part of a message, a log line or a repr. TLS is 1.3 without resumption: every connection is judged by
the current files when it begins.
"""

import hmac
import logging
import ssl
from collections.abc import Callable, Iterable
from hashlib import sha256
from pathlib import Path

from kvmesh.admin.admin_access import AdminAccess
from kvmesh.errors import SettingError
from kvmesh.secret_file import read_secret, stamp_of

log = logging.getLogger(__name__)

MIN_BYTES = 16
MAX_TOKENS = 16


class FileTls:
    """Gives each new connection a context of the current files. Unusable files leave the old context in place."""

    def __init__(self, files: Iterable[Path | None], make: Callable[[], ssl.SSLContext], *, port: str) -> None:
        """`make` reads the files; its SettingError reaches the caller here, later the log, which names the `port`."""
        self._files = [path for path in files if path is not None]
        self._make, self._port = make, port
        self._stamp = self._look()
        self.context = self._current = make()
        self.context.sni_callback = self._begin

    def _begin(self, connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        """Give a connection the context of the current files; OpenSSL calls this for every hello."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = self._make()
                log.info("%s has read its certificate anew", self._port)
            except SettingError as error:
                log.error("%s keeps its old certificate: %s", self._port, error)
        connection.context = self._current

    def _look(self) -> tuple[tuple[int, ...], ...]:
        return tuple(map(stamp_of, self._files))


def admin_tls(access: AdminAccess) -> ssl.SSLContext:
    """Return the context of the admin pages' connections. Raise SettingError if the files cannot be used."""
    files = (*certificate_files(access.tls or ""), access.client_ca)
    return FileTls(files, lambda: _admin_context(access), port="the admin port").context


def _admin_context(access: AdminAccess) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a resumed session would present a certificate that may no longer be accepted
    if access.tls is not None:
        load_own(context, *certificate_files(access.tls), flag="--admin-tls")
    if access.client_ca is not None:
        load_authorities(context, access.client_ca, flag="--admin-client-ca")
        context.verify_mode = ssl.CERT_OPTIONAL  # probes have none; a wrong one ends the connection
    return context


def certificate_files(text: str) -> tuple[Path, Path | None]:
    """Split `CERT` or `CERT,KEY`; without a key it is in the certificate's file."""
    cert, _, key = text.partition(",")
    return Path(cert), Path(key) if key else None


def load_own(context: ssl.SSLContext, cert: Path, key: Path | None, *, flag: str) -> None:
    """Load our own certificate and key. Raise SettingError naming the flag."""
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # an encrypted key must not ask at the terminal
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = f"{cert},{key}" if key is not None else f"{cert}"
        raise SettingError(f"{flag} {files}: no certificate with its key: {_fault(error)}") from None


def load_authorities(context: ssl.SSLContext, path: Path, *, flag: str) -> None:
    """Load the authorities that sign the other side's certificates. Raise SettingError naming the flag."""
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise SettingError(f"{flag} {path}: no certificates of authorities: {_fault(error)}") from None


def _fault(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unreadable").lower().replace("_", " ")
    return str(getattr(error, "strerror", None) or error)


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return the tokens of a file, one per line. Raise SettingError with the fault of the file, but not its content.

    Several are accepted at once, so that a token can be replaced by another.
    """
    content = read_secret(path, what="token")
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
    """Return the digest of a token, which alone is kept in memory."""
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


class TokenFile:
    """The accepted tokens, by the current file. An unusable file opens nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, ...] | None = None
        self._digests: tuple[bytes, ...] = ()
        self.problem = "not read yet"  # "" if the file is usable
        self.refresh()

    def lets_in(self, digest: bytes) -> bool:
        """Compare with every token in constant time; `refresh` first."""
        found = False
        for each in self._digests:
            found |= hmac.compare_digest(each, digest)
        return found

    def refresh(self) -> None:
        """Read the file if it has changed; log once if it is unusable."""
        seen = stamp_of(self._path)
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

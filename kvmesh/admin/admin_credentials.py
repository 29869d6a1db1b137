"""Files with tokens and certificates, for servers and clients of the admin pages. They may change at any time.

A token is never part of a message, a log line or a repr. TLS is 1.3 without resumption: every connection is judged by
the files as they are when it begins.
"""

import hmac
import logging
import ssl
from hashlib import sha256
from pathlib import Path

from kvmesh.admin.admin_access import AdminAccess
from kvmesh.errors import SettingError
from kvmesh.secret_file import read_secret, stamp_of

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, ...], ...]
MIN_BYTES = 16
MAX_TOKENS = 16


class AdminTls:
    """The context that connections begin with: `context`. Files that cannot be used leave what was before."""

    def __init__(self, access: AdminAccess) -> None:
        """Raise SettingError where the files cannot be used."""
        self._access = access
        self._stamp = self._look()
        self.context = _server_context(access)
        self._current = self.context
        self.context.sni_callback = self._begin

    def _begin(self, connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        """Give a connection the context of the files as they are now; OpenSSL calls this for every hello."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = _server_context(self._access)
                log.info("the admin pages' certificates were read anew")
            except SettingError as error:
                log.error("the admin pages keep their old certificates: %s", error)
        connection.context = self._current

    def _look(self) -> Stamp:
        files = (self._access.tls_cert, self._access.tls_key, self._access.client_ca)
        return tuple(stamp_of(path) for path in files if path is not None)


def _server_context(access: AdminAccess) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a session that is resumed would bring a certificate that is no longer let in
    load_own(context, access.tls_cert, access.tls_key, flags=("--admin-tls-cert", "--admin-tls-key"))
    if access.client_ca is not None:
        load_authorities(context, access.client_ca, flag="--admin-client-ca")
        context.verify_mode = ssl.CERT_OPTIONAL  # probes have none; a wrong one ends the connection
    return context


def load_own(context: ssl.SSLContext, cert: Path | None, key: Path | None, *, flags: tuple[str, str]) -> None:
    """Load what is shown to the other side. Raise SettingError naming the flag."""
    if cert is None:
        return
    try:
        context.load_cert_chain(cert, key, password=lambda: b"")  # an encrypted key must not ask at the terminal
    except (OSError, ValueError) as error:  # an SSLError is an OSError
        files = f"{flags[0]} {cert}" + (f", {flags[1]} {key}" if key is not None else "")
        raise SettingError(f"{files}: no certificate with its key: {_fault(error)}") from None


def load_authorities(context: ssl.SSLContext, path: Path, *, flag: str) -> None:
    """Load who signs the other side's certificates. Raise SettingError naming the flag."""
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise SettingError(f"{flag} {path}: no certificates of authorities: {_fault(error)}") from None


def _fault(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unreadable").lower().replace("_", " ")
    return str(getattr(error, "strerror", None) or error)


def read_tokens(path: Path) -> tuple[str, ...]:
    """Return the tokens of a file, one a line. Raise SettingError saying what is wrong with it, but not what it says.

    Several are let in at once while a token is replaced by another one.
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
    """Return the digest that is kept in memory for a token."""
    return sha256(token.encode("utf-8", "surrogateescape")).digest()


class TokenFile:
    """The tokens that are let in, as the file says now. A file that cannot be used opens nothing."""

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

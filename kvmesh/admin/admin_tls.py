"""TLS of the admin pages, with certificates that may be renewed at any time. Used by the admin gate.

TLS 1.3 without resumption: every connection is judged by the files as they are when it begins.
"""

import logging
import ssl
from pathlib import Path

from kvmesh.admin.admin_access import AdminAccess
from kvmesh.errors import SettingError

log = logging.getLogger(__name__)

Stamp = tuple[tuple[int, ...], ...]


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
        """Give a connection what the files say now; OpenSSL asks for every hello, with a name or without."""
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
        return tuple(_stamp(path) for path in files if path is not None)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino)


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
        raise SettingError(f"{files}: no certificate with its key: {_words(error)}") from None


def load_authorities(context: ssl.SSLContext, path: Path, *, flag: str) -> None:
    """Load who signs the other side's certificates. Raise SettingError naming the flag."""
    try:
        context.load_verify_locations(path)
    except (OSError, ValueError) as error:
        raise SettingError(f"{flag} {path}: no certificates of authorities: {_words(error)}") from None


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "unreadable").lower().replace("_", " ")
    return str(getattr(error, "strerror", None) or error)

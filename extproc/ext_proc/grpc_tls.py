"""TLS of the gRPC port: its certificate from files that may change at any time, or made at the start."""

import logging
import ssl
from pathlib import Path
from tempfile import TemporaryDirectory

from extproc.errors import ConfigError
from extproc.ext_proc.grpc_tls_settings import GrpcTlsSettings
from kvmesh.admin.admin_credentials import load_own
from kvmesh.errors import SettingError
from kvmesh.secret_file import stamp_of
from kvmesh.self_signed import make_self_signed

log = logging.getLogger(__name__)

FLAGS = ("--grpc-tls-cert", "--grpc-tls-key")


def server_context(settings: GrpcTlsSettings) -> ssl.SSLContext | None:
    """Return the context that connections begin with, None for clear text. Raise ConfigError."""
    if settings.self_signed:
        return _self_signed()
    return _FileTls(settings.cert, settings.key).context if settings.cert is not None else None


class _FileTls:
    """The files' pair as it is when a connection begins. A pair that cannot be used leaves what was before."""

    def __init__(self, cert: Path, key: Path | None) -> None:
        self._cert, self._key = cert, key
        self._stamp = self._look()
        self.context = self._current = _context(cert, key)
        self.context.sni_callback = self._begin

    def _begin(self, connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        """Give a connection the context of the files as they are now; OpenSSL calls this for every hello."""
        stamp = self._look()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._current = _context(self._cert, self._key)
                log.info("the certificate of the gRPC port was read anew")
            except ConfigError as error:
                log.error("the gRPC port keeps its old certificate: %s", error)
        connection.context = self._current

    def _look(self) -> tuple[tuple[int, ...], ...]:
        return tuple(stamp_of(path) for path in (self._cert, self._key) if path is not None)


def _context(cert: Path, key: Path | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # Envoy's own upstream default ends there
    context.set_alpn_protocols(["h2"])
    try:
        load_own(context, cert, key, flags=FLAGS)
    except SettingError as error:
        raise ConfigError(str(error)) from None
    return context


def _self_signed() -> ssl.SSLContext:
    """Make a pair, which is in files for as long as it takes to read them."""
    try:
        made = make_self_signed("kvmesh-picker", flag="--grpc-tls-self-signed", instead="--grpc-tls-cert and its key")
    except SettingError as error:
        raise ConfigError(str(error)) from None
    with TemporaryDirectory(prefix="kvmesh-tls-") as folder:
        cert, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
        cert.write_bytes(made.cert)
        key.write_bytes(made.key)
        return _context(cert, key)

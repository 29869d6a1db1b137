"""TLS of the gRPC port: its certificate is read from files that may change at any time, or made by openssl at start."""

import logging
import ssl
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from extproc.errors import ConfigError
from kvmesh.admin.admin_credentials import certificate_files, load_own
from kvmesh.errors import SettingError
from kvmesh.secret_file import stamp_of

log = logging.getLogger(__name__)

FLAG = "--grpc-tls"
SELF_SIGNED = "self-signed"
SECONDS = 30.0
DAYS = 3650
MAKE = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
    *("-days", str(DAYS)),
)


class SelfSigned(NamedTuple):
    """A certificate and its key, in PEM."""

    cert: bytes
    key: bytes


def make_self_signed(common_name: str, *, names: Sequence[str] = (), flag: str, instead: str) -> SelfSigned:
    """Make a certificate for these DNS names, in a private folder that is deleted afterwards.

    Raise SettingError naming the flag that asks for it, and the alternative.
    """
    alternatives = ["-addext", f"subjectAltName={','.join(f'DNS:{name}' for name in names)}"] if names else []
    with TemporaryDirectory(prefix="kvmesh-tls-") as folder:
        cert, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
        try:
            subprocess.run(
                [*MAKE, "-subj", f"/CN={common_name}", *alternatives, "-keyout", str(key), "-out", str(cert)],
                check=True,
                capture_output=True,
                timeout=SECONDS,
            )
        except FileNotFoundError:
            raise SettingError(f"{flag} needs the program openssl: install it, or give {instead}") from None
        except (OSError, subprocess.SubprocessError) as error:
            told = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
            raise SettingError(f"{flag}: openssl failed: {told[-1] if told else error}") from None
        return SelfSigned(cert=cert.read_bytes(), key=key.read_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A usable certificate and its key: as a context, and in PEM (each may hold both)."""

    context: ssl.SSLContext
    cert: bytes
    key: bytes


def server_tls(files: str | None) -> "ServerTls | None":
    """Return the source of pairs, or None for clear text. Raise ConfigError.

    `files` is `CERT`, `CERT,KEY` or `self-signed`.
    """
    return ServerTls(files) if files else None


class ServerTls:
    """Gives each new connection the current certificate and key files. An unusable pair leaves the last good one."""

    def __init__(self, files: str) -> None:
        self._files = None if files == SELF_SIGNED else certificate_files(files)
        self._stamp = self._look()
        self._latest = _self_signed() if self._files is None else _read(*self._files)
        self.context = self._latest.context
        self.context.sni_callback = self._begin

    def latest(self) -> Pair:
        """Return the pair for a new connection; the same object while the files stay the same."""
        stamp = self._look()
        if self._files is not None and stamp != self._stamp:
            self._stamp = stamp
            try:
                self._latest = _read(*self._files)
                log.info("the certificate of the gRPC port was read anew")
            except ConfigError as error:
                log.error("the gRPC port keeps its old certificate: %s", error)
        return self._latest

    def _begin(self, connection: ssl.SSLObject | ssl.SSLSocket, _: str | None, __: ssl.SSLContext) -> None:
        """Give a connection the context of the current files; OpenSSL calls this at every ClientHello."""
        connection.context = self.latest().context

    def _look(self) -> tuple[tuple[int, ...], ...]:
        return tuple(stamp_of(path) for path in self._files or () if path is not None)


def _read(cert: Path, key: Path | None) -> Pair:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2  # the maximum that Envoy offers upstream by default
    context.set_alpn_protocols(["h2"])
    try:
        load_own(context, cert, key, flag=FLAG)
        return Pair(context=context, cert=cert.read_bytes(), key=(key or cert).read_bytes())
    except SettingError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:  # removed in the meantime
        raise ConfigError(f"{FLAG} {error.filename}: {error.strerror}") from None


def _self_signed() -> Pair:
    """Make a certificate and a key; they are in files only while they are read."""
    try:
        made = make_self_signed("kvmesh-picker", flag=f"{FLAG} {SELF_SIGNED}", instead=f"{FLAG} CERT,KEY")
    except SettingError as error:
        raise ConfigError(str(error)) from None
    with TemporaryDirectory(prefix="kvmesh-tls-") as folder:
        cert, key = Path(folder, "cert.pem"), Path(folder, "key.pem")
        cert.write_bytes(made.cert)
        key.write_bytes(made.key)
        return _read(cert, key)

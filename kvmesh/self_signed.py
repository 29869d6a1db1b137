"""Certificates that sign themselves, made by the program openssl: whoever is to trust one is given the certificate."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from kvmesh.errors import SettingError

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
    """Make a certificate for these DNS names, in a private folder that is gone afterwards.

    Raise SettingError naming the flag that asks for it, and what to give instead.
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

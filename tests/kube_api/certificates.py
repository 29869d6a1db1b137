"""A certificate authority and what it signs, made with openssl for one test or one session of tests."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

SERVER_NAMES = "IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc"
CURVE = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCertificate:
    """PEM files: whom to trust, and what the server (or a client) shows."""

    authority: Path
    cert: Path
    key: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """A certificate authority; `folder` has all that it made."""

    folder: Path

    @property
    def cert(self) -> Path:
        return self.folder / "ca.crt"

    @property
    def _key(self) -> Path:
        return self.folder / "ca.key"

    def issue(self, name: str, *, subject: str, names: str = "") -> ServerCertificate:
        """Sign a certificate; `names` are its alternative names as openssl writes them."""
        made = ServerCertificate(authority=self.cert, cert=self.folder / f"{name}.crt", key=self.folder / f"{name}.key")
        request, extensions = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n" if names else "", encoding="utf-8")
        _openssl("req", "-newkey", *CURVE, "-nodes", "-subj", subject, "-keyout", str(made.key), "-out", str(request))
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.cert), "-CAkey", str(self._key)),
            *("-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(made.cert)),
        )
        return made


def make_authority(folder: Path) -> Authority:
    made = Authority(folder=folder)
    usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    _openssl(
        *("req", "-x509", "-newkey", *CURVE, "-nodes", "-days", "2", "-subj", "/CN=kubernetes", *usage),
        *("-keyout", str(folder / "ca.key"), "-out", str(made.cert)),
    )
    return made


def make_server_certificate(folder: Path) -> ServerCertificate:
    return make_authority(folder).issue("server", subject="/CN=kube-apiserver", names=SERVER_NAMES)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)

"""A certificate authority and a certificate for 127.0.0.1, made with openssl for one test."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCertificate:
    """PEM files: whom to trust, and what the server shows."""

    authority: Path
    cert: Path
    key: Path


def make_server_certificate(folder: Path) -> ServerCertificate:
    made = ServerCertificate(authority=folder / "ca.crt", cert=folder / "server.crt", key=folder / "server.key")
    authority_key, request, extensions = folder / "ca.key", folder / "server.csr", folder / "server.ext"
    extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost,DNS:kubernetes.default.svc\n")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl(
        *(
            "req",
            "-x509",
            *curve,
            "-days",
            "2",
            "-subj",
            "/CN=kubernetes",
            "-addext",
            "keyUsage=critical,keyCertSign,cRLSign",
        ),
        *("-keyout", str(authority_key), "-out", str(made.authority)),
    )
    _openssl("req", *curve, "-subj", "/CN=kube-apiserver", "-keyout", str(made.key), "-out", str(request))
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(made.authority), "-CAkey", str(authority_key)),
        *("-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(made.cert)),
    )
    return made


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)

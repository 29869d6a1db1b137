"""Certificates made for a test, and a TLS front for a server that speaks none (the redis-server of the wheel)."""

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path

    @property
    def files(self) -> str:
        """Both as an option names them."""
        return f"{self.cert},{self.key}"


def make_authority(folder: Path, name: str = "authority") -> Certificate:
    made = Certificate(cert=folder / f"{name}.pem", key=folder / f"{name}.key")
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"),
        *("-subj", f"/CN={name}", "-keyout", str(made.key), "-out", str(made.cert)),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    return made


def make_certificate(folder: Path, name: str, *, authority: Certificate) -> Certificate:
    """One that is valid for `name` (DNS) only, and for clients."""
    made = Certificate(cert=folder / f"{name}.pem", key=folder / f"{name}.key")
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName=DNS:{name}\nkeyUsage=digitalSignature\n")
    _openssl(
        *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}"),
        *("-keyout", str(made.key), "-out", str(request)),
    )
    _openssl(
        *("x509", "-req", "-in", str(request), "-CA", str(authority.cert), "-CAkey", str(authority.key)),
        *("-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(made.cert)),
    )
    return made


@asynccontextmanager
async def tls_front(port: int, *, certificate: Certificate, clients: Certificate | None = None) -> AsyncIterator[int]:
    """Serve TLS for the plain `port`; with `clients`, only those whom that authority has signed. Yields the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients.cert)

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(CONNECT_SECONDS):
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_copy(reader, behind_writer), _copy(behind_reader, writer))

    server = await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
    except (ConnectionError, ssl.SSLError):
        pass
    finally:
        writer.close()


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)

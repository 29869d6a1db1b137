"""The gRPC port with TLS: Envoys and others speak HTTP/2 there, by the pair that the files hold when they connect."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copyfile

import pytest

from extproc.errors import ConfigError
from extproc.ext_proc.grpc_server import ExtProcServer
from extproc.ext_proc.grpc_tls import MAKE, server_context
from extproc.ext_proc.grpc_tls_settings import GrpcTlsSettings
from tests.integration.extproc_ext_proc.test_envoy_responses import Books

HOST = "127.0.0.1"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with empty SETTINGS


async def pair(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    process = await asyncio.create_subprocess_exec(
        *MAKE, "-keyout", str(key), "-out", str(cert), stderr=asyncio.subprocess.DEVNULL
    )
    assert await process.wait() == 0
    return cert, key


@asynccontextmanager
async def serving(settings: GrpcTlsSettings) -> AsyncIterator[int]:
    server = ExtProcServer(picks=Books(), max_body_bytes=1000)
    try:
        yield await server.start(host=HOST, port=0, tls=server_context(settings))
    finally:
        await server.stop(grace_seconds=0)


async def shown(port: int) -> bytes:
    """Return the certificate of a connection that speaks HTTP/2."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(HOST, port, ssl=context)
        connection = writer.get_extra_info("ssl_object")
        assert connection.selected_alpn_protocol() == "h2"
        writer.write(PREFACE)
        assert (await reader.readexactly(9))[3] == 4  # the server's SETTINGS
        found: bytes = connection.getpeercert(binary_form=True)
        writer.close()
    return found


async def test_a_pair_made_at_the_start_serves() -> None:
    async with serving(GrpcTlsSettings(self_signed=True)) as port:
        assert await shown(port)


async def test_files_are_read_anew_and_a_broken_pair_leaves_the_old_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cert, key), (new_cert, new_key) = await pair(tmp_path, "old"), await pair(tmp_path, "new")
    async with serving(GrpcTlsSettings(cert=cert, key=key)) as port:
        old = await shown(port)
        copyfile(new_cert, cert)  # its key is not there yet
        assert await shown(port) == old
        assert "keeps its old certificate" in caplog.text
        copyfile(new_key, key)
        assert await shown(port) not in (b"", old)


def test_what_cannot_be_used_is_refused_by_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--grpc-tls-cert"):
        server_context(GrpcTlsSettings(cert=tmp_path / "none.pem"))
    with pytest.raises(ConfigError, match="give the one or the other"):
        GrpcTlsSettings(cert=tmp_path / "none.pem", self_signed=True)
    with pytest.raises(ConfigError, match="without --grpc-tls-cert"):
        GrpcTlsSettings(key=tmp_path / "none.key")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the program openssl"):
        server_context(GrpcTlsSettings(self_signed=True))
    assert server_context(GrpcTlsSettings()) is None

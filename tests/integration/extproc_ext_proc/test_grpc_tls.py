"""The gRPC port with TLS: Envoys and others speak HTTP/2 there, by the pair that the files hold when they connect."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from aiohttp import web

from extproc.errors import ConfigError
from extproc.ext_proc.grpc_server import ExtProcServer, Transport
from extproc.ext_proc.grpc_tls import make_self_signed, server_tls
from operate.local.envoy_config import PICKER_CLUSTER, named
from tests.integration.grpc_servers import on_both_servers
from tests.integration.scripted_picker import (
    BOTH,
    DOCUMENT,
    DUPLEX,
    EVENTS,
    REWRITE,
    Books,
    as_the_pod_has_it,
    document,
    mesh,
    rewritten,
)

HOST = "127.0.0.1"
TYPES = "type.googleapis.com/envoy"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)  # with empty SETTINGS


async def pair(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    made = await asyncio.to_thread(make_self_signed, name, flag="--a", instead="--b")
    cert.write_bytes(made.cert)
    key.write_bytes(made.key)
    return cert, key


@asynccontextmanager
async def serving(settings: str, transport: type[Transport]) -> AsyncIterator[int]:
    server = ExtProcServer(picks=Books(), max_body_bytes=1000, transport=transport)
    try:
        yield await server.start(host=HOST, port=0, tls=server_tls(settings))
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


@on_both_servers
async def test_a_pair_made_at_the_start_serves(transport: type[Transport]) -> None:
    async with serving("self-signed", transport) as port:
        assert await shown(port)


@on_both_servers
async def test_files_are_read_anew_and_a_broken_pair_leaves_the_old_one(
    transport: type[Transport], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cert, key), (new_cert, new_key) = await pair(tmp_path, "old"), await pair(tmp_path, "new")
    async with serving(f"{cert},{key}", transport) as port:
        old = await shown(port)
        copyfile(new_cert, cert)  # its key is not there yet
        assert await shown(port) == old
        assert "keeps its old certificate" in caplog.text
        copyfile(new_key, key)
        assert await shown(port) not in (b"", old)


def asking_by_tls(*trusted: Path, into: Path) -> Callable[[list[dict[str, Any]]], None]:
    """Have Envoy ask the picker with TLS, each time by a new connection; it trusts these certificates, none: any."""
    common: dict[str, Any] = {"alpn_protocols": ["h2"]}
    if trusted:
        into.write_bytes(b"".join(path.read_bytes() for path in trusted))
        common["validation_context"] = {"trusted_ca": {"filename": str(into)}}
    context = {
        "@type": f"{TYPES}.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "common_tls_context": common,
        "max_session_keys": 0,  # a session that goes on shows no certificate
    }

    def edit(clusters: list[dict[str, Any]]) -> None:
        picker = named(clusters, PICKER_CLUSTER)
        picker["transport_socket"] = {"name": "envoy.transport_sockets.tls", "typed_config": context}
        [options] = picker["typed_extension_protocol_options"].values()
        options.setdefault("common_http_protocol_options", {})["max_requests_per_connection"] = 1

    return edit


@pytest.mark.parametrize("file", BOTH)
async def test_a_real_envoy_asks_by_tls_what_a_pair_made_at_the_start_serves(file: str, tmp_path: Path) -> None:
    tls = server_tls("self-signed")
    edit = asking_by_tls(into=tmp_path / "trusted.pem")
    async with mesh(file, tmp_path, document, tls=tls, edit_clusters=edit) as running:
        running.books.plan, running.books.change = REWRITE, as_the_pod_has_it
        prompt = json.dumps({"model": "gpt-x", "prompt": "x" * 300_000}).encode()
        async with running.post(prompt) as response:
            assert (response.status, await response.read()) == (200, rewritten(DOCUMENT))
        await running.all_released()
        assert running.books.misses == []


@on_both_servers
async def test_files_change_under_a_real_envoy_and_the_streams_that_are_open(
    transport: type[Transport], tmp_path: Path
) -> None:
    pairs = {name: await pair(tmp_path, name) for name in ("old", "stranger", "new")}
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    first, rest = EVENTS.split(b"\n\n", 1)
    goes_on = asyncio.Event()

    def show(name: str) -> None:
        for path, source in zip((key, cert), reversed(pairs[name]), strict=True):
            copyfile(source, path)

    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        if body != b'{"stream":true}':
            return await document(request, body)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first + b"\n\n")
        await goes_on.wait()
        await response.write(rest)
        return response

    show("old")
    tls = server_tls(f"{cert},{key}")
    edit = asking_by_tls(pairs["old"][0], pairs["new"][0], into=tmp_path / "trusted.pem")
    async with mesh(DUPLEX, tmp_path, answer, tls=tls, transport=transport, edit_clusters=edit) as running:
        running.books.plan = REWRITE
        async with running.post(b'{"stream":true}') as stream:
            assert await stream.content.readuntil(b"\n\n") == rewritten(first) + b"\n\n"
            for name, status in (("stranger", 503), ("new", 200)):
                show(name)
                async with running.post() as response:
                    assert (name, response.status) == (name, status)
            goes_on.set()
            assert await stream.content.read() == rewritten(rest)
        await running.all_released()


def test_what_cannot_be_used_is_refused_by_its_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--grpc-tls .*none\.pem"):
        server_tls(str(tmp_path / "none.pem"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the program openssl"):
        server_tls("self-signed")
    assert server_tls(None) is None

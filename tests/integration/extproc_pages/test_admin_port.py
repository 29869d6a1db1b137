"""The admin port is open before anything else, and what asks early waits for the pages."""

import asyncio
import socket
from pathlib import Path

import pytest

from extproc.errors import ConfigError
from extproc.pages.admin_port import listen, open_admin_port
from kvmesh.admin.admin_access import AdminAccess

HOST = "127.0.0.1"


async def test_who_connects_before_the_pages_are_there_is_served_when_they_are() -> None:
    (listening,) = open_admin_port(host=HOST, port=0, access=AdminAccess())
    reader, writer = await asyncio.open_connection(HOST, listening.getsockname()[1])
    writer.write(b"early\n")
    served = asyncio.Event()

    async def serve(_: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        answer.write(b"served\n")
        answer.close()
        served.set()

    async with await asyncio.start_server(serve, sock=listening):
        async with asyncio.timeout(10):
            assert await reader.readline() == b"served\n"
        await served.wait()
    writer.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port} \(--admin-port\): Address already"):
            listen(host=HOST, port=port)


def test_every_address_of_a_name_is_listened_on() -> None:
    wanted = {address[0] for *_, address in socket.getaddrinfo("localhost", 0, type=socket.SOCK_STREAM)}
    opened = listen(host="localhost", port=0)
    try:
        assert {each.getsockname()[0] for each in opened} == wanted
    finally:
        for each in opened:
            each.close()


def test_a_certificate_that_cannot_be_used_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    access = AdminAccess(tls=str(tmp_path / "cert.pem"))
    with pytest.raises(ConfigError, match=r"cert\.pem"):
        open_admin_port(host=HOST, port=0, access=access)

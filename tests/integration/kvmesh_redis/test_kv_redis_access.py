"""TLS, users and passwords, and what a real Redis refuses and then allows again."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.link import RedisLink, Script
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_redis_groups import RIGHTS
from tests.integration.kv_tls import Certificate, make_authority, make_certificate, tls_front

COUNT = Script("return redis.call('INCR', KEYS[1])")
KEY = b"{kv2}test"


@pytest.fixture
def authority(tmp_path: Path) -> Certificate:
    return make_authority(tmp_path)


@pytest.fixture
def certificate(tmp_path: Path, authority: Certificate) -> Certificate:
    return make_certificate(tmp_path, "redis.test", authority=authority)


async def ping(url: str) -> object:
    link = RedisLink(url)
    try:
        return await link.call("PING")
    finally:
        await link.close()


async def test_tls_with_an_authority_and_a_server_name(
    redis_server: RedisServer, authority: Certificate, certificate: Certificate
) -> None:
    async with tls_front(redis_server.port, certificate=certificate) as port:
        url = f"rediss://127.0.0.1:{port}?ca_file={authority.cert}&server_name=redis.test"

        assert await ping(url) == b"PONG"


async def test_a_certificate_for_another_name_is_refused(
    redis_server: RedisServer, authority: Certificate, certificate: Certificate
) -> None:
    async with tls_front(redis_server.port, certificate=certificate) as port:
        url = f"rediss://127.0.0.1:{port}?ca_file={authority.cert}"

        with pytest.raises(IndexUnavailableError, match=r"certificate is not accepted: .*mismatch.*server_name"):
            await ping(url)


async def test_a_certificate_of_an_unknown_authority_is_refused(
    redis_server: RedisServer, certificate: Certificate, tmp_path: Path
) -> None:
    stranger = make_authority(tmp_path, "stranger")
    async with tls_front(redis_server.port, certificate=certificate) as port:
        for ca_file in (f"&ca_file={stranger.cert}", ""):
            url = f"rediss://127.0.0.1:{port}?server_name=redis.test{ca_file}"
            with pytest.raises(IndexUnavailableError, match=r"certificate is not accepted: .*ca_file"):
                await ping(url)


async def test_a_client_certificate_is_shown_and_a_new_one_is_read_at_the_next_connection(
    redis_server: RedisServer, authority: Certificate, certificate: Certificate, tmp_path: Path
) -> None:
    (tmp_path / "old").mkdir()
    unknown = make_certificate(tmp_path / "old", "me", authority=make_authority(tmp_path / "old"))
    known = make_certificate(tmp_path, "me", authority=authority)
    shown = Certificate(cert=tmp_path / "shown.pem", key=tmp_path / "shown.key")
    shown.cert.write_bytes(unknown.cert.read_bytes())
    shown.key.write_bytes(unknown.key.read_bytes())
    async with tls_front(redis_server.port, certificate=certificate, clients=authority) as port:
        link = RedisLink(
            f"rediss://127.0.0.1:{port}?ca_file={authority.cert}&cert_file={shown.cert}&key_file={shown.key}"
            "&server_name=redis.test"
        )
        with pytest.raises(IndexUnavailableError):
            await link.call("PING")
        shown.cert.write_bytes(known.cert.read_bytes())
        shown.key.write_bytes(known.key.read_bytes())

        assert await link.call("PING") == b"PONG"
        await link.close()


async def test_tls_to_a_server_without_it_and_the_other_way_round_end_in_time(
    redis_server: RedisServer, certificate: Certificate
) -> None:
    async with tls_front(redis_server.port, certificate=certificate) as port, asyncio.timeout(5.0):
        with pytest.raises(IndexUnavailableError, match=r"no TLS connection|no answer"):
            await ping(f"rediss://127.0.0.1:{redis_server.port}")
        with pytest.raises(IndexUnavailableError, match=f"127.0.0.1:{port}: Redis closed .*perhaps it wants TLS"):
            await ping(f"redis://127.0.0.1:{port}")


async def test_tls_passes_lookups_of_any_size(
    redis_server: RedisServer, authority: Certificate, certificate: Certificate
) -> None:
    async with tls_front(redis_server.port, certificate=certificate) as port:
        link = RedisLink(f"rediss://127.0.0.1:{port}?ca_file={authority.cert}&server_name=redis.test")
        big = b"x" * 3_000_000

        assert await asyncio.gather(*(link.call("ECHO", big) for _ in range(3))) == [big] * 3
        await link.close()


def test_the_documented_rights_are_these() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guides" / "redis-connection.md").read_text(encoding="utf-8")

    assert f"ACL SETUSER kvmesh on >PASSWORD {' '.join(RIGHTS)}\n" in page


async def test_the_documented_rights_suffice_and_a_wrong_password_is_named(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    client: Any = redis_server.client()
    client.execute_command("ACL", "SETUSER", "kvmesh", "on", ">s3cret", *RIGHTS)
    client.execute_command("ACL", "SETUSER", "default", "off")
    password = tmp_path / "password"
    password.write_text("wrong\n")
    link = RedisLink(f"{redis_server.url}?username=kvmesh&password_file={password}")
    with pytest.raises(IndexUnavailableError, match=r"WRONGPASS .*password_file"):
        await link.run(COUNT, keys=[KEY], arguments=[])
    password.write_text("s3cret\n")

    assert await link.run(COUNT, keys=[KEY], arguments=[]) == 1
    with pytest.raises(IndexUnavailableError, match="NOPERM"):
        await link.call("GET", "somebody-elses")
    await link.close()


async def test_a_master_that_becomes_a_replica_gets_no_more_writes_and_is_used_again_as_a_master(
    redis_server: RedisServer,
) -> None:
    link = RedisLink(redis_server.url)
    assert await link.run(COUNT, keys=[KEY], arguments=[]) == 1
    redis_server.client().config_set("replica-read-only", "no")
    redis_server.client().replicaof("127.0.0.1", "1")
    redis_server.client().client_kill_filter(_type="normal")

    async with asyncio.timeout(10.0):
        with pytest.raises(IndexUnavailableError):
            while True:  # the one under way when the connection ends says only that
                await link.run(COUNT, keys=[KEY], arguments=[])
        said = ""
        while "is a replica of" not in said:
            with pytest.raises(IndexUnavailableError) as raised:
                await link.run(COUNT, keys=[KEY], arguments=[])
            said = str(raised.value)
            await asyncio.sleep(0)
        redis_server.client().replicaof("NO", "ONE")
        while True:
            try:
                assert await link.run(COUNT, keys=[KEY], arguments=[]) == 2
                break
            except IndexUnavailableError:
                await asyncio.sleep(0.01)
    await link.close()


async def test_a_script_on_a_replica_is_recognised_although_redis_wraps_the_word(redis_server: RedisServer) -> None:
    link = RedisLink(redis_server.url, reads_only=True)
    redis_server.client().replicaof("127.0.0.1", "1")
    with pytest.raises(IndexUnavailableError, match=r"READONLY .*it is a replica"):
        await link.run(COUNT, keys=[KEY], arguments=[])
    await link.close()


async def test_a_server_without_room_for_clients_is_named_and_used_as_soon_as_there_is(
    redis_server: RedisServer,
) -> None:
    client = redis_server.client()
    client.config_set("maxclients", 1)
    link = RedisLink(redis_server.url)
    with pytest.raises(IndexUnavailableError, match="raise maxclients there"):
        await link.call("PING")
    client.config_set("maxclients", 100)

    assert await link.call("PING") == b"PONG"
    await link.close()


async def test_a_database_that_does_not_exist_is_named(redis_server: RedisServer) -> None:
    link = RedisLink(f"redis://127.0.0.1:{redis_server.port}/99")
    with pytest.raises(IndexUnavailableError, match=r"DB index is out of range \(it has fewer databases\)"):
        await link.call("PING")
    await link.close()


async def test_a_socket_file_works_like_an_address(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--unixsocket", str(tmp_path / "redis.sock"))
    server.start()
    try:
        link = RedisLink(f"unix://{tmp_path}/redis.sock?db=2")
        await link.call("SET", "x", "1")
        assert server.client().info("keyspace").keys() == {"db2"}
        await link.close()
    finally:
        server.kill()

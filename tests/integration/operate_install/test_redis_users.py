"""The users of the bundled Redis, on a real server with the rendered arguments: their rights suffice, and no more."""

import re
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kv_indexer.apply.redis_writer import RedisIndexWriter
from kvmesh.blocks.index_changes import Clear
from kvmesh.index.redis_reader import PrefixIndexReader
from operate.install.redis_access import DASHBOARDS_USER, INDEXER_USER, PICKER_USER, USERS, users_secret
from operate.install.render import render
from tests.integration.kv_index import A, Index, blocks
from tests.integration.kv_redis import RedisServer, redis_7_program
from tests.unit.operate_install.sample_plans import one, plan

PASSWORDS = {user: f"password-of-{user}" for user in USERS}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    """A server as it is installed, but for its port and disk; its URL is the indexer's."""
    [secret] = users_secret(plan(), passwords=PASSWORDS)
    [container] = one(render(plan()), "StatefulSet", "kvmesh-redis")["spec"]["template"]["spec"]["containers"]
    environment = {
        each["name"]: b64decode(secret["data"][each["valueFrom"]["secretKeyRef"]["key"]]).decode()
        for each in container["env"]
    }
    arguments = container["args"][container["args"].index("--user") :]
    expanded = [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], each) for each in arguments]
    server = RedisServer(tmp_path, *expanded, program=redis_7_program())
    server.url = url_of(server, INDEXER_USER)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def url_of(server: RedisServer, user: str) -> str:
    return f"redis://{user}:{PASSWORDS[user]}@127.0.0.1:{server.port}/0"


def client(server: RedisServer, user: str) -> Any:
    return redis.Redis.from_url(url_of(server, user))


async def test_what_the_indexer_writes_the_picker_reads(server: RedisServer) -> None:
    writer = RedisIndexWriter(url=url_of(server, INDEXER_USER))
    reader = PrefixIndexReader(url=url_of(server, PICKER_USER), hash_seed="kvmesh", tracks=True)
    index = Index(writer=writer, reader=reader, redis=server)
    try:
        await index.apply(A, blocks(1, 3))
        assert await index.matched() == {A.endpoint: 3}
        await index.apply(A, Clear())
        assert await index.sweep() > 0
        assert await index.matched() == {}
        await index.drop(A)
    finally:
        await writer.close()
        await reader.close()


@pytest.mark.parametrize(
    ("user", "command"),
    [
        (PICKER_USER, ("HSET", "{kv2}slots", "0", "x")),
        (PICKER_USER, ("DEL", "{kv2}registry")),
        (INDEXER_USER, ("SET", "another", "1")),
        (DASHBOARDS_USER, ("GET", "{kv2}picker:key")),
        (DASHBOARDS_USER, ("HSET", "{kv2}slots", "0", "x")),
        *((user, command) for user in USERS for command in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("ACL", "LIST"))),
        *((user, ("FUNCTION", "LOAD", "#!lua name=a\nredis.register_function('a', print)")) for user in USERS),
    ],
)
def test_a_user_may_do_no_more_than_its_work(user: str, command: tuple[str, ...], server: RedisServer) -> None:
    with pytest.raises(redis.exceptions.NoPermissionError):
        client(server, user).execute_command(*command)


def test_dashboards_see_what_their_panels_ask_for(server: RedisServer) -> None:
    dashboards = client(server, DASHBOARDS_USER)
    assert dashboards.get("{kv2}heartbeat") is None
    assert [dashboards.hgetall(f"{{kv2}}{name}") for name in ("slots", "indexers", "registry")] == [{}, {}, {}]
    assert dashboards.info("commandstats")
    assert dashboards.dbsize() == 0


def test_without_a_password_nothing_is_answered_but_the_probe(server: RedisServer) -> None:
    with pytest.raises(redis.exceptions.AuthenticationError):
        redis.Redis(port=server.port).ping()
    probe: Any = redis.Redis(port=server.port, username="probe", password="none")
    assert probe.ping()
    with pytest.raises(redis.exceptions.NoPermissionError):
        probe.get("{kv2}heartbeat")

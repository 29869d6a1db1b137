"""Fixtures that integration tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kv_redis import RedisServer, redis_7_program


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A running, empty redis-server of one's own."""
    server = RedisServer(tmp_path)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def redis_7_server(tmp_path: Path) -> Iterator[RedisServer]:
    """The same, of version 7 or newer."""
    server = RedisServer(tmp_path, program=redis_7_program())
    try:
        server.start()
        yield server
    finally:
        server.kill()

"""What counts as a Redis address, and what is said of one that is none."""

import pytest
from redis.asyncio.connection import SSLConnection, UnixDomainSocketConnection

from kv_indexer.adapters.redis_link import redis_target
from kv_indexer.api import PrefixIndexReader, RedisUrlError

EXAMPLE = "a valid one is e.g. redis://:PASSWORD@10.0.0.5:6379/0"
SCHEME = "it must begin with redis://, rediss:// or unix://"
PORT = "its port is not a number from 1 to 65535"


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("redis://10.0.0.5", {"host": "10.0.0.5"}),
        ("redis://h:1/2", {"host": "h", "port": 1, "db": 2}),
        ("redis://[::1]:7000/", {"host": "::1", "port": 7000}),
        ("redis://me:p%40ss@h:1", {"host": "h", "port": 1, "username": "me", "password": "p@ss"}),
        ("rediss://h", {"host": "h", "connection_class": SSLConnection}),
        (
            "unix:///run/redis.sock?db=3",
            {"path": "/run/redis.sock", "db": 3, "connection_class": UnixDomainSocketConnection},
        ),
    ],
)
def test_an_address_becomes_connection_arguments(url: str, target: dict[str, object]) -> None:
    assert redis_target(url) == target


@pytest.mark.parametrize(
    ("url", "shown", "why"),
    [
        ("foo", "foo", SCHEME),
        ("", "", SCHEME),
        ("http://x", "http://x", SCHEME),
        ("localhost:6379", "localhost:6379", SCHEME),
        ("redis:foo", "redis:***", "it names no host"),
        ("redis://", "redis://", "it names no host"),
        ("redis://:s3cret@", "redis://***@", "it names no host"),
        ("redis://:s3cret@h:port", "redis://***@h:port", PORT),
        ("redis://h:99999", "redis://h:***", PORT),
        ("redis://h:0", "redis://h:***", PORT),
        ("redis://user:s3cret", "redis://user:***", PORT),
        ("redis://h:" + "9" * 5000, "redis://h:***", PORT),
        ("redis://h/db", "redis://h/db", "its database is not a number"),
        ("redis://h?db=x&password=s3cret", "redis://h?***", "it cannot be read"),
        ("redis://:s3cret?x@h:port", "redis://***", "it names no host"),
        ("redis://u:s3://cret@h:port/0", "redis://***@h:port/0", PORT),
        ("redis://[::1", "redis://[::1", "it cannot be read"),
        ("redis://:s3cret\u2100@h", "redis://***@h", "it cannot be read"),
        ("unix://", "unix://", "it names no socket file"),
    ],
)
def test_a_malformed_address_is_named_without_its_password(url: str, shown: str, why: str) -> None:
    with pytest.raises(RedisUrlError) as raised:
        PrefixIndexReader(url=url, hash_seed="kvmesh")

    assert str(raised.value) == f"Redis address {shown!r}: {why}; {EXAMPLE}"
    assert isinstance(raised.value, ValueError)

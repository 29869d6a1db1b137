"""What counts as a Redis address, its parameters, and the message for an invalid one."""

from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import RedisUrlError
from kvmesh.redis.address import KNOWN_SCHEMES, RedisAccess, RedisKind, RedisNode, read_address
from kvmesh.redis.link import RedisLink

EXAMPLE = "a valid one is e.g. redis://:PASSWORD@10.0.0.5:6379/0"
SENTINEL_EXAMPLE = "a valid one is e.g. redis+sentinel://10.0.0.5:26379,10.0.0.6:26379/mymaster/0"
SCHEME = f"it must begin with {KNOWN_SCHEMES}"
PORT = "its port is not a number from 1 to 65535"
PARAMETERS = (
    "behind '?' it takes db, username, password, password_file, sentinel_password_file, ca_file, cert_file, key_file, "
    "server_name only"
)
ESCAPE = "in a password, write / as %2F, # as %23 and @ as %40"


def meaning(**what: Any) -> dict[str, Any]:
    plain = {"kind": RedisKind.STANDALONE, "secure": False, "database": 0, "user": ("", ""), "path": "", "master": ""}
    return plain | what


def nodes(*pairs: tuple[str, int]) -> tuple[RedisNode, ...]:
    return tuple(RedisNode(host=host, port=port) for host, port in pairs)


@pytest.mark.parametrize(
    ("url", "label", "expected"),
    [
        ("redis://10.0.0.5", "redis://10.0.0.5", meaning(nodes=nodes(("10.0.0.5", 6379)))),
        ("redis://h:1/2", "redis://h:1/2", meaning(nodes=nodes(("h", 1)), database=2)),
        ("redis://[::1]:7000/", "redis://[::1]:7000/", meaning(nodes=nodes(("::1", 7000)))),
        ("redis://me:p%40ss@h:1", "redis://h:1", meaning(nodes=nodes(("h", 1)), user=("me", "p@ss"))),
        ("redis://h?db=3&password=p", "redis://h", meaning(nodes=nodes(("h", 6379)), database=3, user=("", "p"))),
        ("rediss://h", "rediss://h", meaning(nodes=nodes(("h", 6379)), secure=True)),
        (
            "unix://:pw@/run/redis.sock?db=3",
            "unix:///run/redis.sock",
            meaning(nodes=(), path="/run/redis.sock", database=3, user=("", "pw")),
        ),
        (
            "redis+sentinel://:pw@a,b:1,[::2]/the%20master/4",
            "redis+sentinel://a,b:1,[::2]/the%20master/4",
            meaning(
                kind=RedisKind.SENTINEL,
                nodes=nodes(("a", 26379), ("b", 1), ("::2", 26379)),
                master="the master",
                database=4,
                user=("", "pw"),
            ),
        ),
        (
            "rediss+sentinel://a/m",
            "rediss+sentinel://a/m",
            meaning(kind=RedisKind.SENTINEL, nodes=nodes(("a", 26379)), master="m", secure=True),
        ),
        (
            "redis+cluster://me:pw@a:1,b/0",
            "redis+cluster://a:1,b/0",
            meaning(kind=RedisKind.CLUSTER, nodes=nodes(("a", 1), ("b", 6379)), user=("me", "pw")),
        ),
        (
            "rediss+cluster://a",
            "rediss+cluster://a",
            meaning(kind=RedisKind.CLUSTER, nodes=nodes(("a", 6379)), secure=True),
        ),
    ],
)
def test_an_address_says_where_and_how_and_its_label_names_no_password(
    url: str, label: str, expected: dict[str, Any]
) -> None:
    address = read_address(url)

    assert address.label == label
    assert {
        "kind": address.kind,
        "nodes": address.nodes,
        "secure": address.secure,
        "database": address.database,
        "user": (address.username, address.password),
        "path": address.socket_path,
        "master": address.master_name,
    } == expected


@pytest.mark.parametrize(
    ("url", "shown", "why"),
    [
        ("foo", "foo", SCHEME),
        ("", "", SCHEME),
        ("http://x", "http://x", SCHEME),
        ("redis+foo://x", "redis+foo://x", SCHEME),
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
        ("redis://h/1/2", "redis://h/1/2", "it has too many parts"),
        ("redis://h?db=x&password=s3cret", "redis://h?***", "its database is not a number"),
        ("redis://h?socket_timeout=s3cret", "redis://h?***", PARAMETERS),
        ("redis://:s3cret?x@h:port", "redis://***", "it names no host"),
        ("redis://u:s3://cret@h:port/0", "redis://***@h:port/0", ESCAPE),
        ("redis://u:12/s3cret@h", "redis://***@h", ESCAPE),
        ("redis://u:12#s3cret@h", "redis://***@h", ESCAPE),
        ("redis://[::1", "redis://[::1", "it cannot be read"),
        ("redis://:s3cret\u2100@h", "redis://***@h", "it cannot be read"),
        (
            "redis://a:1,b:2",
            "redis://a:1,b:2",
            "it names several hosts: use redis+sentinel:// or redis+cluster://",
        ),
    ],
)
def test_a_malformed_address_is_named_without_its_password(url: str, shown: str, why: str) -> None:
    with pytest.raises(RedisUrlError) as raised:
        RedisLink(url)

    assert str(raised.value) == f"Redis address {shown!r}: {why}; {EXAMPLE}"
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("url", "shown", "why"),
    [
        ("redis+sentinel://a", "redis+sentinel://a", "it does not say what the Sentinels call the master"),
        ("redis+sentinel://a,,b/m", "redis+sentinel://a,,b/m", "one of its hosts is empty"),
        ("redis+sentinel://a/m/x", "redis+sentinel://a/m/x", "its database is not a number"),
        ("redis+sentinel://u:12/s3cret@a:1", "redis+sentinel://***@a:1", ESCAPE),
        ("redis+sentinel://u:s3c,ret/m", "redis+sentinel://***", PORT),
    ],
)
def test_a_malformed_sentinel_address_gets_an_example_of_its_own(url: str, shown: str, why: str) -> None:
    with pytest.raises(RedisUrlError) as raised:
        RedisLink(url)

    assert str(raised.value) == f"Redis address {shown!r}: {why}; {SENTINEL_EXAMPLE}"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("unix://", "it names no socket file"),
        ("unix://run/redis.sock", "it names no socket file"),
        ("redis+cluster://a/3", "a Redis Cluster has database 0 only"),
    ],
)
def test_other_kinds_have_faults_of_their_own(url: str, why: str) -> None:
    with pytest.raises(RedisUrlError, match=f"{why}; a valid one is e.g. {url.partition('://')[0].replace('+', '.')}"):
        read_address(url)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://:s3cret@h?password_file=/f", "it has both a password and a password_file"),
        ("redis://h?username=me", "user 'me' without a password: add the parameter password_file"),
        ("redis://h?sentinel_password_file=/f", "sentinel_password_file is for redis+sentinel://"),
        ("redis://h?ca_file=/f", "ca_file, cert_file, key_file and server_name need TLS: rediss://"),
        ("redis://h?server_name=x", "ca_file, cert_file, key_file and server_name need TLS: rediss://"),
        ("rediss://h?key_file=/f", "key_file without cert_file"),
        ("rediss://h?ca_file=f.pem", "ca_file needs an absolute path"),
    ],
)
def test_parameters_that_contradict_each_other_are_refused(url: str, why: str) -> None:
    with pytest.raises(RedisUrlError) as raised:
        read_address(url)

    assert str(raised.value) == f"Redis at {read_address(url.partition('?')[0]).label}: {why}"


def test_a_file_that_is_not_there_is_a_mistake_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(RedisUrlError) as raised:
        RedisLink(f"redis://h?password_file={tmp_path / 'none'}")

    assert str(raised.value) == f"password_file {tmp_path / 'none'}: No such file or directory"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:s3cret@h:1/2", "redis://h:1/2"),
        ("redis://h/2?username=me&password_file=/f", "redis://h/2?username=me&password_file=/f"),
        ("unix:///run/redis.sock?db=3&password=s3cret", "unix:///run/redis.sock?db=3"),
        ("rediss://h?ca_file=/a%20b&server_name=x", "rediss://h?server_name=x&ca_file=/a+b"),
    ],
)
def test_the_shown_address_has_all_but_the_password(url: str, shown: str) -> None:
    address = read_address(url)

    assert address.shown == shown
    assert "s3cret" not in f"{RedisAccess(url=url)!r} {address!r}"
    assert read_address(shown).files == address.files

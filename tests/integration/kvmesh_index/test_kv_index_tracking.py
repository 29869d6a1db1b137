"""Prefixes that come again are known without asking, and what Redis tells of them is heard: a real Redis."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from kvmesh.blocks.index_changes import Clear
from kvmesh.errors import IndexUnavailableError
from kvmesh.index import tracking_link
from kvmesh.index.redis_reader import PrefixIndexReader
from kvmesh.index.tracking_link import TrackingLink
from tests.integration.kv_fake_redis import array, error, fake_redis
from tests.integration.kv_index import ROOT, A, B, Index, blocks, redis_index, without
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_redis_groups import RIGHTS
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, prompt

DEADLINE_SECONDS = 20.0
LONG = 200  # blocks: three chunks and some


@pytest.fixture
async def index(redis_server: RedisServer) -> AsyncIterator[Index]:
    async with redis_index(redis_server) as one:
        yield one


@pytest.fixture
async def tracking(redis_server: RedisServer) -> AsyncIterator[PrefixIndexReader]:
    reader = PrefixIndexReader(url=redis_server.url, hash_seed="kvmesh", tracks=True)
    yield reader
    await reader.close()


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.005)


async def look(reader: PrefixIndexReader, tokens: bytes = prompt(LONG)) -> tuple[dict[str, int], int, int]:
    """Return who holds how much, and how many blocks were known and asked for."""
    known, asked = reader.known_blocks, reader.asked_blocks
    lookup = await reader.lookup(tokens, root=ROOT)
    return dict(lookup.matched_blocks), reader.known_blocks - known, reader.asked_blocks - asked


async def until_known(reader: PrefixIndexReader, blocks_: int, tokens: bytes = prompt(LONG)) -> None:
    async def is_known() -> bool:
        return (await look(reader, tokens))[1] >= blocks_

    await eventually(is_known, f"{blocks_} blocks are never known")


async def until_same(reader: PrefixIndexReader, plain: PrefixIndexReader, tokens: bytes = prompt(LONG)) -> None:
    async def is_same() -> bool:
        return (await look(reader, tokens))[0] == (await look(plain, tokens))[0]

    await eventually(is_same, "the answers stay different")


def trackers(server: RedisServer) -> list[dict[str, Any]]:
    """The connections that Redis tells of changes."""
    client: Any = server.client()
    return [each for each in client.client_list() if "t" in each["flags"]]


async def test_what_is_held_and_comes_again_is_not_asked_for(index: Index, tracking: PrefixIndexReader) -> None:
    await index.apply(A, blocks(1, LONG))
    await until_known(tracking, 192)

    assert await look(tracking) == ({A.endpoint: LONG}, 192, LONG - 192)
    assert tracking.tracked_blocks == 192
    # another prompt that goes on differently after 64 blocks
    other = prompt(64)[:-4] + b"\7" * 400
    assert await look(tracking, other) == ({A.endpoint: 64}, 64, (len(other) // 4 - 1) // BLOCK - 64)


async def test_a_prompt_that_nobody_holds_is_not_tracked(index: Index, tracking: PrefixIndexReader) -> None:
    await index.apply(A, blocks(1, 70))
    await until_known(tracking, 64)
    for _ in range(5):
        assert (await look(tracking))[:2] == ({A.endpoint: 70}, 64)
    assert tracking.tracked_blocks == 64


async def test_every_kind_of_change_is_heard(index: Index, tracking: PrefixIndexReader) -> None:
    await index.apply(A, blocks(1, LONG))
    await until_known(tracking, 192)

    await index.apply(B, blocks(1, 150))  # a second holder
    await until_same(tracking, index.reader)
    await until_known(tracking, 192)
    await index.apply(A, without(100))  # in the middle
    await until_same(tracking, index.reader)
    assert (await look(tracking))[0] == {A.endpoint: 99, B.endpoint: 150}
    await until_known(tracking, 128)
    await index.apply(B, Clear())
    await until_same(tracking, index.reader)
    await index.sweep()
    await until_same(tracking, index.reader)
    await index.drop(A)
    assert (await look(tracking))[0] == {}


async def test_an_emptied_redis_is_heard(index: Index, tracking: PrefixIndexReader, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, LONG))
    await until_known(tracking, 192)

    redis_server.client().flushall()

    await eventually(lambda: _is(lambda: tracking.tracked_blocks == 0), "an emptied Redis is not heard of")
    assert (await look(tracking))[0] == {}


@pytest.mark.parametrize("seed", range(5))
async def test_random_histories_end_with_the_answer_of_a_reader_that_asks(
    index: Index, tracking: PrefixIndexReader, seed: int
) -> None:
    chance = random.Random(seed)
    known = 0
    for _ in range(40):
        stream = chance.choice((A, B))
        first = chance.randrange(1, LONG)
        match chance.randrange(8):
            case 0 | 1 | 2:
                await index.apply(stream, blocks(first, chance.randrange(first, LONG + 1)))
            case 3 | 4:
                await index.apply(stream, blocks(1, first))
            case 5 | 6:
                await index.apply(stream, without(*chance.sample(range(1, LONG + 1), 3)))
            case 7:
                await index.apply(stream, Clear())
                await index.sweep()
        for _ in range(3):
            known += (await look(tracking))[1]
            await asyncio.sleep(0)
        await until_same(tracking, index.reader)
    assert known, "nothing was known at any time, so nothing was tried"


async def test_a_lost_connection_forgets_and_another_one_begins_anew(
    index: Index, tracking: PrefixIndexReader, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_link, "ASK_SECONDS", 60.0)
    await index.apply(A, blocks(1, LONG))
    await until_known(tracking, 192)
    (before,) = trackers(redis_server)

    redis_server.client().client_kill_filter(_id=before["id"])
    await index.apply(A, without(100))  # nobody tells of it

    await until_same(tracking, index.reader)
    assert (await look(tracking))[0] == {A.endpoint: 99}
    await until_known(tracking, 64)
    assert [each["id"] for each in trackers(redis_server)] != [before["id"]]


async def test_where_lookups_go_elsewhere_so_do_the_changes(
    index: Index, tracking: PrefixIndexReader, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, LONG))
    await until_known(tracking, 192)
    (before,) = trackers(redis_server)
    client: Any = redis_server.client()
    for each in client.client_list():  # lookups' connection, and the other reader's
        if each["cmd"].lower() == "hmget" and each["id"] != before["id"]:
            client.client_kill_filter(_id=each["id"])

    async def is_another() -> bool:
        try:
            await look(tracking)
        except IndexUnavailableError:
            return False
        return [each["id"] for each in trackers(redis_server)] not in ([], [before["id"]])

    await eventually(is_another, "the changes still come from the connection of before")
    await until_known(tracking, 192)


async def test_a_redis_that_does_no_tracking_is_asked_for_everything(
    index: Index,
    tracking: PrefixIndexReader,
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(tracking_link, "RETRY_SECONDS", 0.01)
    client: Any = redis_server.client()
    client.acl_setuser("default", enabled=True, nopass=True, commands=["+@all", "-client"], keys=["*"])
    try:
        await index.apply(A, blocks(1, LONG))
        for _ in range(4):
            assert await look(tracking) == ({A.endpoint: LONG}, 0, LONG)
        await eventually(lambda: _is(lambda: "known prefixes" in caplog.text), "nobody is told")
        for _ in range(4):
            assert await look(tracking) == ({A.endpoint: LONG}, 0, LONG)
        assert caplog.text.count("known prefixes are asked for with every request") == 1
        assert "client" in caplog.text
        assert tracking.tracked_blocks == 0
        tried = client.info("stats")["total_connections_received"]
        connections = client.info("clients")["connected_clients"]
        await eventually(
            lambda: _is(lambda: client.info("stats")["total_connections_received"] >= tried + 3), "it gives up"
        )
        assert client.info("clients")["connected_clients"] <= connections + 1
    finally:
        client.acl_setuser("default", commands=["+@all"])


async def test_the_rights_that_the_docs_grant_are_enough(
    index: Index, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    client: Any = redis_server.client()
    client.execute_command("ACL", "SETUSER", "picker", "on", ">secret", *RIGHTS)
    reader = PrefixIndexReader(
        url=f"redis://picker:secret@127.0.0.1:{redis_server.port}/0", hash_seed="kvmesh", tracks=True
    )
    try:
        await index.apply(A, blocks(1, LONG))
        await until_known(reader, 192)
        assert "known prefixes" not in caplog.text
    finally:
        await reader.close()
        client.acl_deluser("picker")


async def test_closing_right_after_a_lookup_leaves_nothing(
    index: Index, tracking: PrefixIndexReader, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, LONG))
    for _ in range(2):
        await look(tracking)
    await tracking.close()  # before the second one was taken note of
    await eventually(lambda: _is(lambda: not trackers(redis_server)), "a connection is left")
    for _ in range(10):
        await asyncio.sleep(0)
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "redis-tracking"]
    assert not trackers(redis_server)


# --- what no real server does: the link alone ---------------------------------------------------------------------

KEYS = b"".join(number.to_bytes(8, "big") for number in range(64))
SERVER, VERSION = b"f00d", b"n.7"
HELLO = b"%1\r\n$5\r\nproto\r\n:3\r\n"


class Tracked:
    """A link to a fake server that a test can make say anything."""

    def __init__(self) -> None:
        self.answers: dict[bytes, bytes | None] = {}  # in place of the usual ones, by command
        self.values = b"3"

    def answer(self, command: list[bytes]) -> bytes | None:
        usual = {
            b"INFO": b"$%d\r\n%s\r\n" % (len(SERVER) + 9, b"run_id:" + SERVER + b"\r\n"),
            b"HELLO": HELLO,
            b"HMGET": array(*VERSION.split(b".")),
            b"MGET": array(*[self.values] * (len(command) - 1)),
        }
        return self.answers.get(command[0], usual.get(command[0], b""))

    def is_known(self, link: TrackingLink, *, version: bytes = VERSION, now: float | None = None) -> bool:
        now = asyncio.get_running_loop().time() if now is None else now
        return link.leading(KEYS, version=version, now=now) == ([(self.values, 64)], 64)

    async def comes_again(self, link: TrackingLink) -> bool:
        link.note(KEYS, held=64)
        return self.is_known(link)


@pytest.fixture
def fake() -> Tracked:
    return Tracked()


@pytest.fixture
async def link(fake: Tracked, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TrackingLink]:
    monkeypatch.setattr(tracking_link, "RETRY_SECONDS", 0.01)
    async with fake_redis(fake.answer) as server:
        one = TrackingLink(server.url)
        one.begin_anew(SERVER)
        yield one
        await one.close()


async def test_a_connection_that_says_nothing_is_not_believed(
    fake: Tracked, link: TrackingLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_link, "BELIEVED_SECONDS", 0.5)  # it is given up after 2 s
    await eventually(lambda: fake.comes_again(link), "nothing is known")
    fake.answers = dict.fromkeys((b"HMGET", b"MGET"), None)
    await eventually(lambda: _is(lambda: not fake.is_known(link)), "silence is believed")
    assert link.tracked_blocks == 64  # the connection is still there


async def test_a_connection_without_news_stays_believed(fake: Tracked, link: TrackingLink) -> None:
    await eventually(lambda: fake.comes_again(link), "nothing is known")
    later = asyncio.get_running_loop().time() + tracking_link.BELIEVED_SECONDS
    await eventually(lambda: _is(lambda: fake.is_known(link, now=later)), "nobody asks whether it is there")


async def test_a_new_connection_of_lookups_makes_it_forget_at_once(fake: Tracked, link: TrackingLink) -> None:
    await eventually(lambda: fake.comes_again(link), "nothing is known")
    link.begin_anew(SERVER)
    assert not fake.is_known(link)
    await eventually(lambda: fake.comes_again(link), "it does not recover")


async def test_what_was_read_by_another_version_of_the_registry_is_not_used(
    fake: Tracked, link: TrackingLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_link, "ASK_SECONDS", 60.0)
    await eventually(lambda: fake.comes_again(link), "nothing is known")
    fake.answers[b"HMGET"] = array(b"n", b"8")
    assert not fake.is_known(link, version=b"n.8")
    assert fake.is_known(link)
    await eventually(lambda: _is(lambda: fake.is_known(link, version=b"n.8")), "a new version is not asked for")
    assert not fake.is_known(link)


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (b"MGET", error("LOADING Redis is loading the dataset in memory")),
        (b"MGET", b":1\r\n"),
        (b"MGET", array(b"3", b"3")),
        (b"HMGET", array(b"n")),
        (b"HELLO", b"+OK\r\n"),  # a proxy: nothing would ever be told
        (b"HELLO", error("ERR unknown command `HELLO`")),
        (b"CLIENT", error("NOPERM this user has no permissions")),
        (b"INFO", b"$2\r\nno\r\n"),
        (b"INFO", b"$13\r\nrun_id:beef\r\n\r\n"),  # not the server of the lookups
    ],
)
async def test_after_a_wrong_answer_nothing_is_known_until_there_are_right_ones(
    fake: Tracked, link: TrackingLink, caplog: pytest.LogCaptureFixture, command: bytes, wrong: bytes
) -> None:
    fake.answers[command] = wrong

    async def is_told() -> bool:
        assert not await fake.comes_again(link)
        return "known prefixes are asked for" in caplog.text

    await eventually(is_told, "nobody is told")
    del fake.answers[command]
    await eventually(lambda: fake.comes_again(link), "it does not recover")


async def test_a_defect_is_logged_and_ends_nothing(
    fake: Tracked, link: TrackingLink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(tracking_link, "parse_version", lambda _: 1 / 0)
        link.note(KEYS, held=64)
        link.note(KEYS, held=64)
        await eventually(lambda: _is(lambda: "ZeroDivisionError" in caplog.text), "nobody is told")
    await eventually(lambda: fake.comes_again(link), "it does not recover")


async def _is(condition: Callable[[], bool]) -> bool:
    return condition()

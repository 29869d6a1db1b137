"""How a link behaves towards servers that refuse, lie, or send it elsewhere: a fake says what real ones rarely do."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.keys import KEY_SLOT
from kvmesh.redis.link import RedisLink, pack
from tests.integration.kv_fake_redis import FakeRedis, array, error, fake_redis, replica_of

ASK_MASTER = b"SENTINEL"


def master_at(fake: FakeRedis) -> bytes:
    return array(b"127.0.0.1", b"%d" % fake.port)


def slots_at(fake: FakeRedis) -> bytes:
    node = b"*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % fake.port
    return b"*1\r\n*3\r\n:0\r\n:16383\r\n" + node


async def soon(link: RedisLink, *command: bytes | str) -> object:
    """Repeat the command until it is not refused."""
    async with asyncio.timeout(5.0):
        while True:
            try:
                return await link.call(*command)
            except IndexUnavailableError:
                await asyncio.sleep(0.01)


async def test_a_server_that_loads_is_waited_for_on_the_same_connection() -> None:
    async with fake_redis() as fake:
        link = RedisLink(fake.url)
        fake.answer = lambda command: error("LOADING Redis is loading") if command[0] == b"GET" else b""
        with pytest.raises(IndexUnavailableError, match=r"LOADING .*\(it reads its data from disk"):
            await link.call("GET", "x")
        fake.answer = lambda command: b""

        assert await link.call("GET", "x") == b"OK"
        assert fake.connections == 1
        await link.close()


async def test_what_turns_read_only_is_left_for_the_new_master_and_gets_no_write_any_more() -> None:
    async with AsyncExitStack() as stack:
        old, new, sentinel = [await stack.enter_async_context(fake_redis()) for _ in range(3)]
        sentinel.answer = lambda command: master_at(old) if command[0] == ASK_MASTER else b""
        link = RedisLink(f"redis+sentinel://127.0.0.1:{sentinel.port}/m")
        await link.call("SET", "x", "1")
        old.answer = lambda command: {b"ROLE": replica_of(new.port), b"SET": error("READONLY You can't write")}.get(
            command[0], b""
        )
        with pytest.raises(IndexUnavailableError, match="READONLY"):
            await link.call("SET", "x", "2")
        # the Sentinel has not noticed yet; what it names says itself that it is a replica
        with pytest.raises(IndexUnavailableError):
            await link.call("SET", "x", "3")
        sentinel.answer = lambda command: master_at(new) if command[0] == ASK_MASTER else b""
        await soon(link, "SET", "x", "4")

        assert [command[2] for command in old.asked(b"SET")] == [b"1", b"2"]
        assert [command[2] for command in new.asked(b"SET")] == [b"4"]
        await link.close()


async def test_a_single_sentinel_that_lives_in_the_past_is_outvoted_although_it_is_the_first() -> None:
    async with AsyncExitStack() as stack:
        old, new, *sentinels = [await stack.enter_async_context(fake_redis()) for _ in range(5)]
        for sentinel, master in zip(sentinels, (old, new, new), strict=True):
            sentinel.answer = lambda command, at=master: master_at(at) if command[0] == ASK_MASTER else b""  # type: ignore[misc]
        told = asyncio.Event()

        def tell_first(command: list[bytes]) -> bytes:
            asyncio.get_running_loop().call_later(0.02, told.set)  # the link has read this answer by then
            return master_at(old)

        sentinels[0].answer = tell_first
        sentinels[1].gate = sentinels[2].gate = told
        link = RedisLink(f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in sentinels)}/m")
        await link.call("SET", "x", "1")

        assert (old.commands, len(new.asked(b"SET"))) == ([], 1)
        await link.close()


async def test_silent_and_unreachable_sentinels_cost_a_quarter_of_a_second_at_most() -> None:
    async with AsyncExitStack() as stack:
        master, sentinel, silent, gone = [await stack.enter_async_context(fake_redis()) for _ in range(4)]
        sentinel.answer = lambda command: master_at(master) if command[0] == ASK_MASTER else b""
        silent.answer = lambda command: None
        gone.greeting = error("ERR max number of clients reached")
        ports = (silent.port, gone.port, sentinel.port)
        link = RedisLink(f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in ports)}/m")

        async with asyncio.timeout(0.9):  # with room for a busy machine
            assert await link.call("PING") == b"PONG"
        await link.close()


async def test_sentinels_that_know_no_such_master_say_so() -> None:
    async with fake_redis(lambda command: b"*-1\r\n" if command[0] == ASK_MASTER else b"") as sentinel:
        link = RedisLink(f"redis+sentinel://127.0.0.1:{sentinel.port}/other")
        with pytest.raises(IndexUnavailableError, match=f"127.0.0.1:{sentinel.port} knows no master called 'other'"):
            await link.call("PING")
        await link.close()


async def test_a_link_moves_when_most_sentinels_name_another_master(caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        old, new, sentinel = [await stack.enter_async_context(fake_redis()) for _ in range(3)]
        sentinel.answer = lambda command: master_at(old) if command[0] == ASK_MASTER else b""
        link = RedisLink(f"redis+sentinel://127.0.0.1:{sentinel.port}/m", recheck_seconds=0.01)
        await link.call("SET", "x", "1")
        sentinel.answer = lambda command: master_at(new) if command[0] == ASK_MASTER else b""

        async with asyncio.timeout(5.0):
            while not new.asked(b"SET"):
                await link.call("SET", "x", "2")
        await link.close()

    said = f"the index is now on the Redis at 127.0.0.1:{new.port}; it was on 127.0.0.1:{old.port}"
    assert [record.getMessage() for record in caplog.records] == [said]


async def test_moved_is_followed_within_the_request() -> None:
    async with fake_redis() as old, fake_redis() as new:
        old.answer = lambda command: {
            b"CLUSTER": slots_at(old),
            b"GET": error(f"MOVED {KEY_SLOT} 127.0.0.1:{new.port}"),
        }.get(command[0], b"")
        link = RedisLink(f"redis+cluster://127.0.0.1:{old.port}")

        assert await link.call("GET", "x") == b"OK"
        assert await asyncio.gather(*(link.call("GET", "x") for _ in range(5))) == [b"OK"] * 5
        assert (len(old.asked(b"GET")), len(new.asked(b"GET"))) == (1, 6)
        await link.close()


async def test_requests_under_way_when_the_slot_moves_all_arrive() -> None:
    async with fake_redis() as old, fake_redis() as new:
        old.answer = lambda command: slots_at(old) if command[0] == b"CLUSTER" else b""
        link = RedisLink(f"redis+cluster://127.0.0.1:{old.port}")
        await link.call("GET", "x")
        old.answer = lambda command: error(f"MOVED {KEY_SLOT} 127.0.0.1:{new.port}") if command[0] == b"GET" else b""

        pair = pack("GET", "x") * 2
        assert await asyncio.gather(*(link.request(pair, replies=2) for _ in range(50))) == [[b"OK", b"OK"]] * 50
        assert len(new.asked(b"GET")) == 100
        await link.close()


async def test_nodes_that_send_a_request_round_in_circles_end_it() -> None:
    async with fake_redis() as one, fake_redis() as two:
        for fake, other in ((one, two), (two, one)):
            fake.answer = lambda command, me=fake, to=other: (  # type: ignore[misc]
                {b"CLUSTER": slots_at(me), b"GET": error(f"MOVED {KEY_SLOT} 127.0.0.1:{to.port}")}.get(command[0], b"")
            )
        link = RedisLink(f"redis+cluster://127.0.0.1:{one.port}")

        async with asyncio.timeout(2.0):
            with pytest.raises(IndexUnavailableError, match="round in circles"):
                await link.call("GET", "x")
        assert len(one.asked(b"GET")) + len(two.asked(b"GET")) == 5
        two.answer = lambda command: b""
        assert await soon(link, "GET", "x") == b"OK"
        await link.close()


@pytest.mark.parametrize("refusal", ["TRYAGAIN Multiple keys", f"ASK {KEY_SLOT} 127.0.0.1:1"])
async def test_a_slot_that_is_being_moved_is_waited_for_where_it_is(refusal: str) -> None:
    async with fake_redis() as fake:
        fake.answer = lambda command: {b"CLUSTER": slots_at(fake), b"GET": error(refusal)}.get(command[0], b"")
        link = RedisLink(f"redis+cluster://127.0.0.1:{fake.port}")
        with pytest.raises(IndexUnavailableError, match="is moving the index's slot"):
            await link.call("GET", "x")
        fake.answer = lambda command: b""

        assert await link.call("GET", "x") == b"OK"
        assert fake.connections == 2  # one asked for the slots
        await link.close()


async def test_a_cluster_that_is_down_is_asked_anew_who_has_the_index() -> None:
    async with fake_redis() as old, fake_redis() as new:
        old.answer = lambda command: {b"CLUSTER": slots_at(old), b"GET": error("CLUSTERDOWN The cluster is down")}.get(
            command[0], b""
        )
        link = RedisLink(f"redis+cluster://127.0.0.1:{old.port}")
        with pytest.raises(IndexUnavailableError, match="CLUSTERDOWN"):
            await link.call("GET", "x")
        old.answer = lambda command: slots_at(new) if command[0] == b"CLUSTER" else error("CLUSTERDOWN")

        assert await soon(link, "GET", "x") == b"OK"
        assert len(new.asked(b"GET")) == 1
        await link.close()


async def test_a_cluster_behind_a_plain_address_is_named() -> None:
    async with fake_redis(lambda command: error(f"MOVED {KEY_SLOT} h:1") if command[0] == b"GET" else b"") as fake:
        link = RedisLink(fake.url)
        with pytest.raises(IndexUnavailableError, match=r"MOVED .*redis\+cluster://"):
            await link.call("GET", "x")
        await link.close()


async def test_a_replica_behind_a_plain_address_is_read_and_not_written() -> None:
    async with fake_redis(lambda command: replica_of(7) if command[0] == b"ROLE" else b"") as fake:
        writer, reader = RedisLink(fake.url), RedisLink(fake.url, reads_only=True)
        with pytest.raises(IndexUnavailableError, match=r"is a replica of 127\.0\.0\.1:7"):
            await writer.call("SET", "x", "1")

        assert await reader.call("GET", "x") == b"OK"
        assert fake.asked(b"SET") == []
        await writer.close()
        await reader.close()


async def test_a_server_that_turns_clients_away_says_why() -> None:
    async with fake_redis() as fake:
        fake.greeting = error("ERR max number of clients reached")
        link = RedisLink(fake.url)
        with pytest.raises(IndexUnavailableError, match=r"max number of clients reached \(raise maxclients"):
            await link.call("PING")
        await link.close()


async def test_a_server_that_never_answers_ends_the_attempt() -> None:
    async with fake_redis(lambda command: None) as fake:
        link = RedisLink(fake.url, connect_timeout_seconds=0.1)
        async with asyncio.timeout(2.0):
            with pytest.raises(IndexUnavailableError, match=r"cannot connect to Redis: no answer within 0\.1 s"):
                await link.call("PING")
        await link.close()


async def test_a_request_without_a_deadline_ends_when_the_server_answers_nobody() -> None:
    async with fake_redis() as fake:
        link = RedisLink(fake.url, stall_seconds=0.1)
        await link.call("PING")
        fake.answer = lambda command: None if command[0] == b"GET" else b""
        async with asyncio.timeout(2.0):
            with pytest.raises(IndexUnavailableError, match=r"no answer for 0\.1 s"):
                await link.call("GET", "x")

        assert await soon(link, "PING") == b"PONG"
        await link.close()


async def test_a_crowd_of_callers_does_not_storm_a_server_that_refuses() -> None:
    async with fake_redis() as fake:
        fake.greeting = error("ERR max number of clients reached")
        link = RedisLink(fake.url)
        for _ in range(2000):
            with pytest.raises(IndexUnavailableError, match="max number of clients"):
                await link.call("PING")
        refused = fake.connections
        fake.greeting = b""

        assert await soon(link, "PING") == b"PONG"
        assert refused <= 20
        await link.close()


async def test_a_server_that_ends_every_connection_is_not_stormed_either() -> None:
    async with fake_redis() as fake:
        fake.answer = lambda command: error("ERR going away") + b"!" if command[0] == b"GET" else b""
        link = RedisLink(fake.url)
        for _ in range(2000):
            with pytest.raises(IndexUnavailableError):
                await link.call("GET", "x")
                await link.call("GET", "x")  # the first may get its answer before the connection ends
        assert fake.connections <= 20
        await link.close()


async def test_a_server_that_speaks_another_language_is_reported() -> None:
    async with fake_redis(lambda command: b"*1\r\n:7\r\n") as fake:
        for url in (fake.url, f"redis+sentinel://127.0.0.1:{fake.port}/m", f"redis+cluster://127.0.0.1:{fake.port}"):
            link = RedisLink(url)
            with pytest.raises(IndexUnavailableError, match="cannot connect to Redis"):
                await link.call("PING")
            await link.close()


async def test_passwords_are_read_anew_at_every_connection(tmp_path: Path) -> None:
    passwords = [tmp_path / "redis", tmp_path / "sentinel"]
    for path in passwords:
        path.write_text(f"first-{path.name}\n")
    async with fake_redis() as master, fake_redis() as sentinel:
        sentinel.answer = lambda command: master_at(master) if command[0] == ASK_MASTER else b""
        files = f"password_file={passwords[0]}&sentinel_password_file={passwords[1]}"
        link = RedisLink(f"redis+sentinel://127.0.0.1:{sentinel.port}/m/3?username=me&{files}")
        await link.call("PING")
        for path in passwords:
            path.write_text(f"second-{path.name}\n")
        master.answer = lambda command: error("NOAUTH") if command[0] == b"GET" else b""
        with pytest.raises(IndexUnavailableError, match="NOAUTH"):
            await link.call("GET", "x")
        await soon(link, "PING")
        await link.close()

    assert [command[1:] for command in master.asked(b"AUTH")] == [[b"me", b"first-redis"], [b"me", b"second-redis"]]
    assert [command[1:] for command in sentinel.asked(b"AUTH")] == [[b"first-sentinel"], [b"second-sentinel"]]
    assert [command[1:] for command in master.asked(b"SELECT")] == [[b"3"], [b"3"]]


async def test_a_password_file_that_vanishes_is_an_outage_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text("s3cret")
    async with fake_redis() as fake:
        link = RedisLink(f"{fake.url}?password_file={path}")
        path.unlink()
        with pytest.raises(IndexUnavailableError, match=r"password_file .*No such file"):
            await link.call("PING")
        path.write_text("s3cret")

        assert await soon(link, "PING") == b"PONG"
        await link.close()


async def test_no_refusal_repeats_a_password() -> None:
    echo = "ERR unknown command `AUTH`, with args beginning with: `s3cret`, "
    async with fake_redis(lambda command: error(echo)) as fake:
        link = RedisLink(fake.url.replace("redis://", "redis://:s3cret@"))
        with pytest.raises(IndexUnavailableError) as raised:
            await link.call("PING")
        await link.close()

    assert "s3cret" not in str(raised.value)
    assert "unknown command `AUTH`" in str(raised.value)

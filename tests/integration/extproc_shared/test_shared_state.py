"""Several replicas over one real Redis: what each reads of the others, and what remains when one is gone."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from extproc.errors import ConfigError
from extproc.shared.shared_load import EndpointBookings, SharedView
from extproc.shared.shared_records import PlacementNames
from extproc.shared.shared_state import PoolShare, SharedState, SharedStateSettings
from kvmesh.blocks.block_keys import root_key
from kvmesh.index.redis_reader import PrefixIndexReader
from operate.install.redis_access import PICKER_USER, USER_RIGHTS
from tests.integration.kv_fake_redis import array, error, fake_redis, replica_of
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_redis_groups import RIGHTS, ClusterGroup

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
ROOT = root_key(hash_seed="seed", model="tiny")
DEADLINE_SECONDS = 10.0
QUICK = SharedStateSettings(lease_seconds=0.4, timeout_seconds=1.0)


@dataclass
class Replica:
    """A picker, as far as the others notice: its bookings, and a task that may be killed."""

    state: SharedState
    pool: PoolShare
    bookings: dict[str, EndpointBookings]
    running: "asyncio.Task[None]"
    reader: PrefixIndexReader

    def book(self, **requests: EndpointBookings) -> None:
        self.bookings.clear()
        self.bookings.update({{"a": A, "b": B}[name]: bookings for name, bookings in requests.items()})
        self.state.changed()

    async def kill(self) -> None:
        """End it without a goodbye."""
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.running

    async def look(self, session: str | None = None, adapter: str | None = None) -> SharedView:
        """What a request with a lookup learns."""
        also, replies = self.pool.command(session, adapter)
        lookup = await self.reader.lookup(bytes(400), root=ROOT, also=also, also_replies=replies)
        return self.pool.take(lookup.also)

    async def sees(self, holds: Callable[[SharedView], bool]) -> SharedView:
        return await eventually(self.look, holds)


@dataclass
class Replicas:
    """All that a test has started."""

    url: str
    started: list[Replica] = field(default_factory=list)

    def start(
        self, *, settings: SharedStateSettings = QUICK, hash_seed: str = "seed", session_ttl_seconds: float = 1800.0
    ) -> Replica:
        bookings: dict[str, EndpointBookings] = {}
        state = SharedState(url=self.url, bookings=lambda: bookings, settings=settings)
        pool = PoolShare(state, hash_seed=hash_seed, session_ttl_seconds=session_ttl_seconds)
        running = asyncio.create_task(state.run(), name="share")
        reader = PrefixIndexReader(url=self.url, hash_seed=hash_seed)
        replica = Replica(state=state, pool=pool, bookings=bookings, running=running, reader=reader)
        self.started.append(replica)
        return replica

    async def close(self) -> None:
        for replica in self.started:
            await replica.kill()
            await replica.state.close()
            await replica.reader.close()


@pytest.fixture
async def replicas(redis_server: RedisServer) -> AsyncIterator[Replicas]:
    started = Replicas(url=redis_server.url)
    yield started
    await started.close()


@asynccontextmanager
async def one_replica(url: str) -> AsyncIterator[Replica]:
    started = Replicas(url=url)
    yield started.start()
    await started.close()


async def eventually(look: Callable[[], Awaitable[SharedView]], holds: Callable[[SharedView], bool]) -> SharedView:
    """Look until it holds; fail with what was seen last."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_SECONDS
    while not holds(view := await look()):
        assert asyncio.get_running_loop().time() < deadline, f"never came true; last seen: {view}"
        await asyncio.sleep(0.005)
    return view


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def test_each_replica_hears_what_all_others_have_booked_and_never_itself(replicas: Replicas) -> None:
    one, two, three = (replicas.start() for _ in range(3))
    one.book(a=EndpointBookings(1, 10, 100))
    two.book(a=EndpointBookings(2, 20, 200), b=EndpointBookings(1, 1, 1))

    assert await one.sees(lambda view: B in view.others and view.replicas == 2) == SharedView(
        others={A: EndpointBookings(2, 20, 200), B: EndpointBookings(1, 1, 1)}, replicas=2
    )
    assert await two.sees(lambda view: A in view.others and view.replicas == 2) == SharedView(
        others={A: EndpointBookings(1, 10, 100)}, replicas=2
    )
    assert (await three.sees(lambda view: len(view.others) == 2)).others == {
        A: EndpointBookings(3, 30, 300),
        B: EndpointBookings(1, 1, 1),
    }


async def test_all_replicas_have_one_secret_also_after_redis_has_lost_it(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    first, second = replicas.start(), replicas.start()
    own = {first.state.secret, second.state.secret}
    assert len(own) == 2
    await until(lambda: first.state.secret == second.state.secret)
    assert first.state.secret in own
    redis_server.client().flushall()
    third = replicas.start()
    await until(lambda: bool(redis_server.client().exists("{kv2}picker:key")))
    await until(lambda: first.state.secret == second.state.secret == third.state.secret)


async def test_a_secret_of_another_form_is_not_taken(replicas: Replicas, redis_server: RedisServer) -> None:
    redis_server.client().set("{kv2}picker:key", "short")
    one = replicas.start()
    await is_listed(redis_server, one)
    assert len(one.state.secret) == 32


async def test_what_ends_is_heard_of_as_well(replicas: Replicas) -> None:
    one, two = replicas.start(), replicas.start()
    one.book(a=EndpointBookings(1, 10, 100))
    await two.sees(lambda view: A in view.others)
    one.book()

    assert (await two.sees(lambda view: not view.others)).replicas == 1


async def test_a_request_without_a_lookup_hears_the_same(replicas: Replicas) -> None:
    one, two = replicas.start(), replicas.start()
    one.book(a=EndpointBookings(1, 10, 100))
    await two.sees(lambda view: A in view.others)

    assert await two.pool.read() == SharedView(others={A: EndpointBookings(1, 10, 100)}, replicas=1)


async def test_a_change_is_heard_long_before_the_next_beat(replicas: Replicas, redis_server: RedisServer) -> None:
    two = replicas.start()
    await is_listed(redis_server, two)
    one = replicas.start(settings=replace(QUICK, lease_seconds=400.0))
    await one.sees(lambda view: view.replicas == 1)
    await two.sees(lambda view: view.replicas == 1)
    one.book(a=EndpointBookings(1, 10, 100))

    # beats are 100 s apart here, so only the change itself can have told
    assert (await two.sees(lambda view: A in view.others)).others == {A: EndpointBookings(1, 10, 100)}


async def test_changes_that_come_together_are_one_write(replicas: Replicas, redis_server: RedisServer) -> None:
    two = replicas.start()
    await is_listed(redis_server, two)
    one = replicas.start(settings=replace(QUICK, lease_seconds=400.0))
    await one.sees(lambda view: view.replicas == 1)
    await two.sees(lambda view: view.replicas == 1)
    await two.kill()
    writes = calls(redis_server, "set")
    for requests in range(1, 101):
        one.book(a=EndpointBookings(requests))
    await two.sees(lambda view: view.others == {A: EndpointBookings(100)})

    assert calls(redis_server, "set") == writes + 1


async def test_a_picker_that_is_alone_writes_with_its_beats_only(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start(settings=replace(QUICK, lease_seconds=400.0))
    await is_listed(redis_server, one)
    writes = calls(redis_server, "set")
    one.book(a=EndpointBookings(1))
    one.state.ended()
    await one.look()
    await one.look()
    assert calls(redis_server, "set") == writes


async def test_ends_wait_for_each_other_and_go_along_with_a_new_booking(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    two = replicas.start()
    await is_listed(redis_server, two)
    one = replicas.start(settings=replace(QUICK, lease_seconds=400.0, end_delay_seconds=0.2))
    await one.sees(lambda view: view.replicas == 1)
    one.book(a=EndpointBookings(2))
    await two.sees(lambda view: view.others == {A: EndpointBookings(2)})
    await two.kill()
    writes = calls(redis_server, "set")
    for requests in (1, 0):
        one.bookings[A] = EndpointBookings(requests)
        one.state.ended()
    await two.sees(lambda view: view.others == {A: EndpointBookings(0)})
    assert calls(redis_server, "set") == writes + 1

    one.state.ended()
    one.book(b=EndpointBookings(1))
    await two.sees(lambda view: view.others == {B: EndpointBookings(1)})
    assert calls(redis_server, "set") == writes + 2


async def test_a_dead_replica_has_no_bookings_after_its_lease(replicas: Replicas, redis_server: RedisServer) -> None:
    one, two = replicas.start(), replicas.start()
    one.book(a=EndpointBookings(1, 10, 100))
    await two.sees(lambda view: A in view.others)
    await one.kill()
    left_ms = redis_server.client().pttl(f"{{kv2}}picker:load:{one.state.replica}")

    assert 0 < left_ms <= QUICK.lease_seconds * 1000
    assert await two.sees(lambda view: not view.others) == SharedView()


async def test_a_replica_that_ends_in_order_takes_its_bookings_back_at_once(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    two = replicas.start()
    await is_listed(redis_server, two)
    one = replicas.start(settings=replace(QUICK, lease_seconds=400.0))
    await one.sees(lambda view: view.replicas == 1)
    one.book(a=EndpointBookings(1, 10, 100))
    await two.sees(lambda view: A in view.others)
    await one.kill()
    await one.state.close()

    assert (await two.look()).others == {}
    assert redis_server.client().smembers("{kv2}picker:replicas") == {two.state.replica.encode()}


async def test_a_session_is_known_to_all_replicas_where_it_was_placed_last(replicas: Replicas) -> None:
    one, two = replicas.start(), replicas.start()
    one.pool.placed(endpoint=A, session="alice")
    await two.sees(lambda view: True)
    assert (await eventually(lambda: two.look("alice"), lambda view: bool(view.session_endpoint))).session_endpoint == A

    two.pool.placed(endpoint=B, session="alice")
    assert (await eventually(lambda: one.look("alice"), lambda view: view.session_endpoint == B)).session_endpoint == B
    assert (await one.look("bob")).session_endpoint is None
    assert (await one.look()).session_endpoint is None


async def test_a_session_that_two_replicas_move_in_turn_stays_where_it_was_placed_last(replicas: Replicas) -> None:
    one, two = replicas.start(), replicas.start()

    async def place(replica: Replica, endpoint: str) -> None:
        """Place it as a pick does that has read where it was, and wait until that can be read."""
        before = await replica.look("alice")
        moved = before.session_read and before.session_endpoint != endpoint
        replica.pool.placed(endpoint=endpoint, session="alice", session_moved=moved)
        await eventually(lambda: replica.look("alice"), lambda view: view.session_endpoint == endpoint)

    for replica, endpoint in ((one, A), (two, B), (one, A), (two, B)):
        await place(replica, endpoint)


async def test_an_adapter_is_known_to_all_replicas_wherever_it_was_placed_of_late(replicas: Replicas) -> None:
    one, two, three = (replicas.start() for _ in range(3))
    one.pool.placed(endpoint=A, adapter="sql")
    two.pool.placed(endpoint=B, adapter="sql", session="alice")

    view = await eventually(
        lambda: three.look("alice", "sql"), lambda view: len(view.adapter_endpoints) == 2 and view.replicas == 2
    )
    assert view == SharedView(session_endpoint=B, session_read=True, adapter_endpoints=frozenset((A, B)), replicas=2)


async def test_a_lonely_replica_knows_its_sessions_and_adapters(replicas: Replicas) -> None:
    one = replicas.start()
    one.pool.placed(endpoint=A, session="alice", adapter="sql")

    assert await eventually(lambda: one.look("alice", "sql"), lambda view: bool(view.session_endpoint)) == SharedView(
        session_endpoint=A, session_read=True, adapter_endpoints=frozenset((A,))
    )
    assert one.pool.command() == (b"", 0)


async def test_placements_end_after_their_time(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start(settings=replace(QUICK, adapter_ttl_seconds=0.2), session_ttl_seconds=0.2)
    one.pool.placed(endpoint=A, session="alice", adapter="sql")
    await eventually(lambda: one.look("alice"), lambda view: view.session_endpoint == A)

    assert await eventually(
        lambda: one.look("alice", "sql"), lambda view: not view.session_endpoint and not view.adapter_endpoints
    ) == SharedView(session_read=True)
    await until(lambda: not redis_server.client().keys("*session*") and not redis_server.client().keys("*adapter*"))


async def test_no_word_of_a_client_is_in_redis(replicas: Replicas, redis_server: RedisServer) -> None:
    one = replicas.start()
    one.pool.placed(endpoint=A, session="alice@example.org", adapter="secret-adapter")
    await eventually(lambda: one.look("alice@example.org"), lambda view: view.session_endpoint == A)
    client: Any = redis_server.client()
    everything = b"\n".join(bytes(name) + (client.dump(name) or b"") for name in client.keys("*"))

    assert b"alice" not in everything
    assert b"secret" not in everything


async def test_a_redis_that_dies_leaves_each_its_own_view_and_is_taken_up_again(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    one, two = replicas.start(), replicas.start()
    one.book(a=EndpointBookings(1, 10, 100))
    await two.sees(lambda view: A in view.others)
    redis_server.kill()

    # within the lease the last word counts, then only one's own
    stale = two.pool.alone("no answer")
    assert (stale.others, "up to 0.4 s old: no answer" in (stale.degraded or "")) == (
        {A: EndpointBookings(1, 10, 100)},
        True,
    )
    view = await eventually(two.pool.read, lambda view: not view.others)
    assert (view.degraded or "").startswith("own bookings only: ")
    await until(lambda: two.state.problem is not None and one.state.problem is not None)

    redis_server.start()
    assert (await two.sees(lambda view: A in view.others and view.degraded is None)).replicas == 1


async def test_a_frozen_redis_delays_no_request_beyond_the_deadline(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    one = replicas.start(settings=replace(QUICK, timeout_seconds=0.02))
    two = replicas.start()
    await one.sees(lambda view: view.replicas == 1)
    redis_server.freeze()
    try:
        started = asyncio.get_running_loop().time()
        view = await one.pool.read()
        assert asyncio.get_running_loop().time() - started < 10.0
        assert "no answer within 20 ms" in (view.degraded or "")
        one.state.changed()
        await until(lambda: one.state.problem is not None)
    finally:
        redis_server.thaw()
    two.book(b=EndpointBookings(1))
    assert (await one.sees(lambda view: B in view.others and view.degraded is None)).replicas == 1


async def test_a_full_redis_is_said_with_each_decision(replicas: Replicas, redis_server: RedisServer) -> None:
    one, two = replicas.start(), replicas.start()
    await one.sees(lambda view: view.replicas == 1)
    redis_server.client().config_set("maxmemory", 1)
    view = await one.sees(lambda view: view.degraded is not None)
    assert "do not hear of ours" in (view.degraded or "")
    assert "OOM" in (view.degraded or "")

    redis_server.client().config_set("maxmemory", 0)
    assert (await one.sees(lambda view: view.degraded is None and view.replicas == 1)).others == {}
    assert two.state.replica != one.state.replica


async def test_an_emptied_redis_is_filled_again(replicas: Replicas, redis_server: RedisServer) -> None:
    one, two = replicas.start(), replicas.start()
    one.book(a=EndpointBookings(1, 10, 100))
    await two.sees(lambda view: A in view.others)
    redis_server.client().flushall()

    three = replicas.start()
    assert (await three.sees(lambda view: A in view.others and view.replicas == 2)).degraded is None


async def test_what_others_have_left_under_our_names_ends_nothing(
    replicas: Replicas, redis_server: RedisServer
) -> None:
    client = redis_server.client()
    client.sadd("{kv2}picker:replicas", "junk", "list", b"\xff\x00", "x" * 500)
    client.set("{kv2}picker:load:junk", b"\xff{")
    client.rpush("{kv2}picker:load:list", "x")
    one, two = replicas.start(), replicas.start()
    client.rpush(PlacementNames(hash_seed="seed").session("alice"), "x")
    one.book(a=EndpointBookings(1, 10, 100))

    view = await eventually(lambda: two.look("alice"), lambda view: A in view.others)
    assert view == SharedView(others={A: EndpointBookings(1, 10, 100)}, replicas=1)


async def test_pickers_of_different_deployments_share_loads_and_no_sessions(replicas: Replicas) -> None:
    one, two = replicas.start(hash_seed="one"), replicas.start(hash_seed="two")
    one.pool.placed(endpoint=A, session="alice")
    await eventually(lambda: one.look("alice"), lambda view: view.session_endpoint == A)

    assert (await two.look("alice")).session_endpoint is None


async def test_a_replica_of_redis_is_not_written_and_that_is_said() -> None:
    def answer(command: list[bytes]) -> bytes:
        return replica_of(6379) if command[0] == b"ROLE" else b""

    async with fake_redis(answer) as fake, one_replica(fake.url) as one:
        await until(lambda: one.state.problem is not None)
        assert "replica" in (one.state.problem or "")
        assert fake.asked(b"SET") == []


async def test_a_user_without_rights_is_told_which_command_is_missing() -> None:
    def answer(command: list[bytes]) -> bytes:
        if command[0] in (b"SMEMBERS", b"MGET"):
            return array()
        return error("NOPERM this user has no permissions to run the 'set' command") if command[0] == b"SET" else b""

    async with fake_redis(answer) as fake, one_replica(fake.url) as one:
        await until(lambda: one.state.problem is not None)
        assert "'set' command" in (one.pool.take(()).degraded or "")


def test_an_address_that_cannot_be_read_is_a_mistake_of_the_settings() -> None:
    async def make() -> None:
        SharedState(url="http://example", bookings=dict)

    with pytest.raises(ConfigError, match="--redis: "):
        asyncio.run(make())


async def is_listed(server: RedisServer, replica: Replica) -> None:
    """Wait until a replica has written its first beat."""
    deadline = asyncio.get_running_loop().time() + DEADLINE_SECONDS
    while replica.state.replica.encode() not in server.client().smembers("{kv2}picker:replicas"):
        assert asyncio.get_running_loop().time() < deadline, "never listed"
        await asyncio.sleep(0.005)


def calls(server: RedisServer, command: str) -> int:
    """How often Redis has run a command."""
    stats = server.client().info("commandstats")
    return int(stats.get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_a_redis_cluster_serves_all_of_it_from_the_server_that_has_the_index(tmp_path: Path) -> None:
    group = ClusterGroup(tmp_path)
    started = Replicas(url=group.url)
    try:
        await group.formed()
        one, two = started.start(), started.start()
        one.book(a=EndpointBookings(1, 10, 100))
        one.pool.placed(endpoint=A, session="alice", adapter="sql")

        view = await eventually(
            lambda: two.look("alice", "sql"), lambda view: bool(view.others and view.session_endpoint)
        )
        assert view == SharedView(
            others={A: EndpointBookings(1, 10, 100)},
            session_endpoint=A,
            session_read=True,
            adapter_endpoints=frozenset((A,)),
            replicas=1,
        )
    finally:
        await started.close()
        group.kill()


@pytest.mark.parametrize("rights", [RIGHTS, USER_RIGHTS[PICKER_USER].split()], ids=["documented", "bundled"])
async def test_the_rights_suffice(rights: Sequence[str], redis_7_server: RedisServer) -> None:
    client: Any = redis_7_server.client()
    client.execute_command("ACL", "SETUSER", "kvmesh", "on", ">secret", *rights)
    started = Replicas(url=redis_7_server.url.replace("redis://", "redis://kvmesh:secret@"))
    try:
        one, two = started.start(), started.start()
        one.book(a=EndpointBookings(1, 10, 100))
        one.pool.placed(endpoint=A, session="alice", adapter="sql")

        view = await eventually(
            lambda: two.look("alice", "sql"), lambda view: bool(view.others and view.session_endpoint)
        )
        assert (view.degraded, view.adapter_endpoints) == (None, frozenset((A,)))
    finally:
        await started.close()
    assert not client.smembers("{kv2}picker:replicas")

"""Names and records of what pickers share: nothing of a client's text, and nothing unreadable is believed."""

import hiredis
import pytest
from redis.crc import key_slot

from extproc.shared.shared_load import EndpointBookings
from extproc.shared.shared_records import (
    MAX_NAME,
    REPLICAS,
    Placement,
    PlacementNames,
    load_key,
    pack_placement,
    pack_read_loads,
    pack_set_load,
    read_adapter,
    read_load,
    read_names,
    read_session,
    replica_name,
)

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def commands(packed: bytes) -> list[list[bytes]]:
    reader = hiredis.Reader()
    reader.feed(packed)
    found = []
    while (command := reader.gets()) is not False:
        found.append(command)
    return found


def test_bookings_are_stored_for_a_lease_as_people_can_read_them() -> None:
    packed = pack_set_load(b"one", {A: EndpointBookings(2, 300, 4000, {"chat": 1})}, lease_seconds=2.0)

    record = b'{"10.0.0.1:8000":[2,300,4000,{"chat":1}]}'
    assert commands(packed) == [[b"SET", b"{kv2}picker:load:one", record, b"PX", b"2000"]]


def test_bookings_read_as_they_were_stored() -> None:
    record = {A: EndpointBookings(2, 300, 4000, {"chat": 1}), B: EndpointBookings(1, 0, 0)}
    ((_, _, value, *_),) = commands(pack_set_load(b"one", record, lease_seconds=2.0))

    assert read_load(value) == record


def test_a_later_version_may_say_more_of_an_endpoint() -> None:
    assert read_load(b'{"10.0.0.1:8000":[2,300,4000,{},"more"]}') == {A: EndpointBookings(2, 300, 4000)}
    assert read_load(b'{"10.0.0.1:8000":[2,300,4000]}') == {A: EndpointBookings(2, 300, 4000)}  # an earlier one
    assert read_load(b'{"10.0.0.1:8000":[2]}') == {A: EndpointBookings(2, 0, 0)}


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        b"",
        b"7",
        b"[]",
        b"{",
        b'{"a":3}',
        b'{"a":["1",2,3]}',
        b'{"a":[-1,2,3]}',
        b'{"a":[1,-2,3]}',
        b'{"a":[1.5,2,3]}',
        b'{"\xff":[1,2,3]}',
        b"[" * 100_000,
        b'{"a":[1,2,3]' + b" " * (1 << 20) + b"}",
    ],
)
def test_what_is_no_record_is_not_believed(value: object) -> None:
    assert read_load(value) is None


def test_the_list_of_replicas_is_read_without_ourselves_and_without_what_is_no_name() -> None:
    reply = [b"b-2", b"own-1", b"a-3", b"", b"x" * (MAX_NAME + 1), b"with space", b"\xff", 7, None]

    assert read_names(reply, own=b"own-1") == [b"a-3", b"b-2"]


def test_a_replica_is_named_so_that_the_others_can_read_it() -> None:
    assert replica_name("picker-7:41", "ab12") == "picker-7:41-ab12"
    for hint in ("", "höst name\r\n", "x" * 300):
        name = replica_name(hint, "ab12").encode()
        assert read_names([name], own=b"") == [name]
        assert name.endswith(b"-ab12")


def test_all_bookings_are_read_with_one_command() -> None:
    assert commands(pack_read_loads([b"a", b"b"])) == [[b"MGET", load_key(b"a"), load_key(b"b")]]


def test_no_text_of_a_client_is_in_a_name() -> None:
    names = PlacementNames(hash_seed="seed")
    for text in ("alice@example.org", "", "x" * 5000, "{other}tag", "\udcff"):
        for key, kind in ((names.session(text), b"session"), (names.adapter(text), b"adapter")):
            prefix = b"{kv2}picker:" + kind + b":"
            assert key.startswith(prefix)
            assert len(key) == len(prefix) + 24
            assert set(key[len(prefix) :]) <= set(b"0123456789abcdef")


def test_all_keys_are_on_the_server_that_has_the_index() -> None:
    names = PlacementNames(hash_seed="seed")
    keys = (load_key(b"one"), REPLICAS, names.session("s"), names.adapter("a"))

    assert {key_slot(key) for key in keys} == {key_slot(b"{kv2}registry")}


def test_names_are_the_same_for_all_replicas_of_a_deployment_and_for_no_others() -> None:
    assert PlacementNames(hash_seed="one").session("s") == PlacementNames(hash_seed="one").session("s")
    assert PlacementNames(hash_seed="one").session("s") != PlacementNames(hash_seed="two").session("s")
    assert PlacementNames(hash_seed="one").session("s") != PlacementNames(hash_seed="one").session("t")


def test_a_session_has_one_place_and_an_adapter_keeps_those_of_late() -> None:
    session = Placement(key=b"k", endpoint=A, placed_at=1000.0, ttl_seconds=60.0, is_one_of_several=False)
    adapter = Placement(key=b"k", endpoint=A, placed_at=1000.0, ttl_seconds=60.0, is_one_of_several=True)

    assert [(commands(packed), replies) for packed, replies in map(pack_placement, (session, adapter))] == [
        ([[b"SET", b"k", A.encode(), b"PX", b"60000"]], 1),
        (
            [
                [b"ZADD", b"k", b"1000.000", A.encode()],
                [b"ZREMRANGEBYSCORE", b"k", b"-inf", b"940.000"],
                [b"PEXPIRE", b"k", b"60000"],
            ],
            3,
        ),
    ]


def test_places_that_cannot_be_read_are_none() -> None:
    assert [read_session(reply) for reply in (A.encode(), None, 7, b"\xff")] == [A, None, None, None]
    assert read_adapter([A.encode(), b"\xff", 7, B.encode()]) == {A, B}
    assert read_adapter(None) == frozenset()
